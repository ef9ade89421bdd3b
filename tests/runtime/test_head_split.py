"""Head splits on ranks: against dense attention, and message by message against what the planner counts."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import megatron_cp as mcp
from megatron_cp.plan import make_plan
from megatron_cp.plan.hardware.rows import head_split_bytes
from megatron_cp.plan.schema import OwnRows
from tests.ranks import run_on_ranks
from tests.runtime.cases import local_rows, mask_cases, tensors
from tests.runtime.handmade import random_plan
from tests.runtime.test_dist_attn import check_against_dense

# Ranks, (query heads, key/value heads): as many as ranks, fewer (copies), and more.
LAYOUTS = [
    (2, (4, 1)),
    (3, (6, 3)),
    (3, (3, 1)),
    (4, (8, 8)),
    (4, (4, 2)),
    (8, (8, 4)),
    (8, (8, 1)),
]
DIMS = (12, 6)


def config_of(heads, planner="ulysses"):
    return mcp.CPConfig(
        planner=planner,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=DIMS[0],
        value_head_dim=DIMS[1],
    )


@pytest.mark.parametrize(("cp_size", "heads"), LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_heads_split_over_all_ranks_equal_dense_attention(cp_size, heads, dtype):
    """All masks: documents, rows without keys, and one token, which leaves the other ranks empty."""
    plans = [make_plan(mask, cp_size, config_of(heads)) for mask in mask_cases().values()]
    assert all(plan.forward.head_split.degree == cp_size for plan in plans)
    inputs = [
        tensors(plan.num_tokens, dtype, seed=i, heads=heads, dims=DIMS)
        for i, plan in enumerate(plans)
    ]
    sink = torch.linspace(-1, 1, heads[0]).to(dtype)
    for options in ({}, {"sink": sink}):
        check_against_dense(cp_size, plans, inputs, {"backend": "reference", **options})


@pytest.mark.parametrize(("cp_size", "head_degree"), [(4, 2), (8, 2), (8, 4)])
def test_heads_split_inside_groups_and_keys_copied_equal_dense_attention(cp_size, head_degree):
    masks = [mask_cases()[name] for name in ("documents", "rows without keys", "one token")]
    plans = [
        random_plan(mask, cp_size, seed, config_of((4, 1)), head_degree=head_degree)
        for seed, mask in enumerate(masks)
    ]
    inputs = [
        tensors(plan.num_tokens, seed=i, heads=(4, 1), dims=DIMS) for i, plan in enumerate(plans)
    ]
    check_against_dense(cp_size, plans, inputs, {"backend": "reference"})


@pytest.mark.parametrize("forward_splits", [True, False])
def test_passes_may_differ_in_their_head_degree(forward_splits):
    heads, plans, inputs = (8, 4), [], []
    for seed, name in enumerate(("documents", "rows without keys", "one token")):
        split, whole = (
            make_plan(mask_cases()[name], 4, config_of(heads, planner))
            for planner in ("ulysses", "contiguous")
        )
        first, second = (split, whole) if forward_splits else (whole, split)
        plans.append(replace(first, backward=second.backward))
        plans[-1].validate()
        inputs.append(tensors(plans[-1].num_tokens, seed=seed, heads=heads, dims=DIMS))
    check_against_dense(4, plans, inputs, {"backend": "reference"})


@pytest.mark.parametrize("forward_splits", [True, False])
def test_heads_that_one_pass_cannot_split_are_refused_before_anything_is_sent(forward_splits):
    split, whole = (
        make_plan(mask_cases()["documents"], 4, config_of((8, 4), planner))
        for planner in ("ulysses", "contiguous")
    )
    first, second = (split, whole) if forward_splits else (whole, split)
    plan = replace(first, backward=second.backward)
    q = torch.zeros(plan.tokens_per_rank, 2, 8)
    with pytest.raises(ValueError, match="splits heads 4 ways, q has 2"):
        mcp.cp_attention(q, q, q, plan, None)


def bytes_handed_over(rank, world_size, plan, inputs):
    """Returns the bytes of each all-to-all of a forward and a backward call, of which one part stays here."""
    q, k, v, dout, _ = (local_rows(x, plan, rank) for x in inputs)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    counts = []
    send = dist.all_to_all_single

    def counting(received, sent, *splits, **options):
        counts[-1].append(sent.numel() * sent.element_size())
        return send(received, sent, *splits, **options)

    with mock.patch.object(dist, "all_to_all_single", counting):
        counts.append([])
        out, _ = mcp.cp_attention(*leaves, plan, dist.group.WORLD)
        counts.append([])
        out.backward(dout)
    return counts


@pytest.mark.parametrize(("cp_size", "heads"), LAYOUTS)
def test_a_head_split_costs_two_messages_a_pass_and_the_elements_that_the_planner_counts(
    cp_size, heads
):
    config = config_of(heads)
    plan = make_plan(mask_cases()["documents"], cp_size, config)
    inputs = tensors(plan.num_tokens, torch.bfloat16, heads=heads, dims=DIMS)
    (num_heads, kv_heads), (head_dim, value_dim) = heads, DIMS
    copies = max(kv_heads, cp_size)
    query, out = num_heads * head_dim * 2, num_heads * value_dim * 2
    keys = copies * (head_dim + value_dim) * 2
    scalar = num_heads * 4  # lse and delta are fp32
    summed = (
        keys if kv_heads < cp_size else 0
    )  # gradients of copies are added at home: fp32, not bf16
    there_and_back = [
        [query + keys, out + scalar],
        [query + keys + out + 2 * scalar, query + keys + summed],
    ]
    rows = plan.tokens_per_rank
    padding = 15 * rows * cp_size  # each member's row is a whole number of up to 16 bytes
    for counts in run_on_ranks(cp_size, bytes_handed_over, plan, inputs):
        for name, count, sizes in zip(("forward", "backward"), counts, there_and_back, strict=True):
            assert len(count) == len(sizes)
            for sent, size in zip(count, sizes, strict=True):
                assert rows * size <= sent <= rows * size + padding
            counted = sum(sizes) * rows * (cp_size - 1) / cp_size  # a rank's own part stays
            predicted = head_split_bytes(OwnRows.of_tokens(rows), cp_size, config, name)
            assert counted == pytest.approx(predicted, rel=1e-12)


def inside_and_outside_of_autocast(rank, world_size, plan, given):
    """Returns out and the gradients of a call, both passes inside of bf16 autocast, and both outside."""
    found = []
    for enabled in (True, False):
        q, k, v, dout = (local_rows(x, plan, rank) for x in given)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out, _ = mcp.cp_attention(*leaves, plan, dist.group.WORLD)
            out.backward(dout)
        found.append([out.detach(), *(x.grad for x in leaves)])
    return found


def test_the_dtype_of_q_decides_the_precision_under_an_autocast_of_another_kind():
    """Joining the heads of halves under bf16 was an error."""
    plan = make_plan(mask_cases()["documents"], 2, config_of((4, 2)))
    given = tensors(plan.num_tokens, torch.float16, heads=(4, 2), dims=DIMS)[:4]
    for inside, outside in run_on_ranks(2, inside_and_outside_of_autocast, plan, given):
        for found, expected in zip(inside, outside, strict=True):
            assert found.dtype == torch.float16 and torch.equal(found, expected)
