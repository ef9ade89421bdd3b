"""Tokens against heads and back, over gloo ranks, against plain indexing."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_cp.comm import HeadExchange
from megatron_cp.plan import HeadSplit
from tests.ranks import run_on_ranks

TOKENS, HEAD_DIM = 3, 2

GROUPS = {
    "all of two": ((0, 1),),
    "all of four": ((0, 1, 2, 3),),
    "neighbours": ((0, 1), (2, 3)),
    "strided": ((0, 2), (1, 3)),
}


def whole(num_ranks, num_heads):
    """Returns x `[ranks, T, N, H]` of distinct whole numbers."""
    size = num_ranks * TOKENS * num_heads * HEAD_DIM
    return torch.arange(1.0, size + 1).reshape(num_ranks, TOKENS, num_heads, HEAD_DIM)


def exchange(rank, world_size, groups, num_heads, dtype):
    """Returns (x split by heads, that joined again, a weighted copy joined)."""
    ours = HeadExchange.compile(HeadSplit(groups), rank, world_size, dist.group.WORLD)
    x = whole(world_size, num_heads)[rank].to(dtype)
    inside = ours.split_heads(x)
    weighted = inside * (rank + 1)
    return inside, ours.join_heads(inside, num_heads), ours.join_heads(weighted, num_heads)


def heads_of(position, degree, num_heads):
    """Returns the heads of one member: its share, or the one that its query heads use."""
    if num_heads >= degree:
        width = num_heads // degree
        return list(range(position * width, (position + 1) * width))
    return [position * num_heads // degree]


@pytest.mark.parametrize("name", sorted(GROUPS))
@pytest.mark.parametrize("num_heads", [8, 4, 2, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_head_exchange_gives_each_member_its_heads_of_all_tokens_and_sums_copies_back(
    name, num_heads, dtype
):
    groups = GROUPS[name]
    num_ranks = sum(len(group) for group in groups)
    results = run_on_ranks(num_ranks, exchange, groups, num_heads, dtype)
    x = whole(num_ranks, num_heads).to(dtype)
    for group in groups:
        degree = len(group)
        owners = [heads_of(j, degree, num_heads) for j in range(degree)]
        copies = np.array([sum(h in heads for heads in owners) for h in range(num_heads)])
        weights = np.array(
            [
                sum(member + 1 for member, heads in zip(group, owners, strict=True) if h in heads)
                for h in range(num_heads)
            ]
        )
        for position, member in enumerate(group):
            inside, back, weighted = results[member]
            expected = torch.cat([x[other][:, owners[position]] for other in group])
            assert torch.equal(inside, expected)
            scale = torch.from_numpy(copies).to(dtype)[None, :, None]
            assert torch.equal(back, x[member] * scale)  # exact: whole numbers
            assert torch.equal(
                weighted, x[member] * torch.from_numpy(weights).to(dtype)[None, :, None]
            )


def adjoint(rank, world_size, groups, num_heads):
    ours = HeadExchange.compile(HeadSplit(groups), rank, world_size, dist.group.WORLD)
    generator = torch.Generator().manual_seed(rank)
    x = torch.randint(-9, 9, (TOKENS, num_heads, HEAD_DIM), generator=generator).double()
    inside = ours.split_heads(x)
    y = torch.randint(-9, 9, inside.shape, generator=generator).double()
    return (inside * y).sum().item(), (x * ours.join_heads(y, num_heads)).sum().item()


@pytest.mark.parametrize("name", sorted(GROUPS))
@pytest.mark.parametrize("num_heads", [4, 2, 1])
def test_joining_heads_is_the_adjoint_of_splitting_them(name, num_heads):
    groups = GROUPS[name]
    results = run_on_ranks(sum(len(g) for g in groups), adjoint, groups, num_heads)
    left, right = np.sum(results, axis=0)
    assert left == right


def refuse(rank, world_size, num_heads):
    ours = HeadExchange.compile(HeadSplit(((0, 1),)), rank, world_size, dist.group.WORLD)
    with pytest.raises(ValueError, match=f"num_heads={num_heads} must divide or be a multiple"):
        ours.split_heads(torch.zeros(2, num_heads, 1))


def test_heads_that_can_be_neither_cut_nor_repeated_are_refused_on_every_rank():
    run_on_ranks(2, refuse, 3)
