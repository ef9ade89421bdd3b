"""Tokens against heads and back, over gloo ranks, against plain indexing."""

from unittest import mock

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
    (inside,) = ours.split_heads((x,))
    joined = ours.join_heads((inside, inside * (rank + 1)), [(num_heads, dtype)] * 2)
    return inside, *joined


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
    (inside,) = ours.split_heads((x,))
    y = torch.randint(-9, 9, inside.shape, generator=generator).double()
    (joined,) = ours.join_heads((y,), [(num_heads, torch.float64)])
    return (inside * y).sum().item(), (x * joined).sum().item()


@pytest.mark.parametrize("name", sorted(GROUPS))
@pytest.mark.parametrize("num_heads", [4, 2, 1])
def test_joining_heads_is_the_adjoint_of_splitting_them(name, num_heads):
    groups = GROUPS[name]
    results = run_on_ranks(sum(len(g) for g in groups), adjoint, groups, num_heads)
    left, right = np.sum(results, axis=0)
    assert left == right


def exchange_mixed(rank, world_size, num_heads):
    """Returns three tensors of other dtypes, head counts and widths by heads, and joined to narrower dtypes."""
    ours = HeadExchange.compile(HeadSplit(((0, 1, 2, 3),)), rank, world_size, dist.group.WORLD)
    tensors = mixed(rank, num_heads)
    with mock.patch.object(dist, "all_to_all_single", side_effect=dist.all_to_all_single) as calls:
        inside = ours.split_heads(tensors)
        halves = tuple(x / 3 for x in inside)
        joined = ours.join_heads(
            halves, [(n, torch.bfloat16 if n > 1 else torch.float32) for n in num_heads]
        )
    return tensors, inside, halves, joined, calls.call_count


def mixed(rank, num_heads):
    generator = torch.Generator().manual_seed(rank)
    shapes = ((torch.float32, (3,)), (torch.float64, ()), (torch.float32, (2, 2)))
    return tuple(
        torch.randn(TOKENS, n, *shape, generator=generator, dtype=dtype)
        for n, (dtype, shape) in zip(num_heads, shapes, strict=True)
    )


def test_tensors_of_all_shapes_travel_in_one_message_each_way_and_round_once():
    num_heads = (8, 4, 1)
    answers = run_on_ranks(4, exchange_mixed, num_heads)
    for rank, (tensors, inside, _, joined, num_calls) in enumerate(answers):
        assert num_calls == 2
        for index, n in enumerate(num_heads):
            heads = heads_of(rank, 4, n)
            expected = torch.cat([answer[0][index][:, heads] for answer in answers])
            assert torch.equal(inside[index], expected)
            ours = [answer[2][index].chunk(4)[rank] for answer in answers]
            back = torch.zeros(tensors[index].shape, dtype=ours[0].dtype)
            for member, part in enumerate(ours):  # ascending, in the dtype of the parts
                back[:, heads_of(member, 4, n)] += part
            dtype = torch.bfloat16 if n > 1 else torch.float32
            assert torch.equal(joined[index], back.to(dtype))


def refuse(rank, world_size, num_heads):
    ours = HeadExchange.compile(HeadSplit(((0, 1),)), rank, world_size, dist.group.WORLD)
    with pytest.raises(ValueError, match=f"num_heads={num_heads} must divide or be a multiple"):
        ours.split_heads((torch.zeros(2, num_heads, 1),))


def test_heads_that_can_be_neither_cut_nor_repeated_are_refused_on_every_rank():
    run_on_ranks(2, refuse, 3)


def _sum_of_copies(rank, world_size, contributions):
    ours = HeadExchange.compile(HeadSplit(((0, 1),)), rank, world_size, dist.group.WORLD)
    inside = torch.full((2 * TOKENS, 1, HEAD_DIM), contributions[rank])
    (joined,) = ours.join_heads((inside,), [(1, torch.bfloat16)])
    return joined.double().unique().tolist()


def test_copies_of_a_head_are_summed_before_they_are_rounded():
    """In bfloat16 the first is 1 and the second 1 + 2^-7: rounded first, their sum would be 2."""
    contributions = [1 + 2.0**-8, 1 + 2.0**-8 + 2.0**-9]
    assert run_on_ranks(2, _sum_of_copies, contributions) == [[2 + 2.0**-6]] * 2
