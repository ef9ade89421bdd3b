"""Cross attention on ranks equals dense attention; rows of both sides are found again."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

import megatron_cp as mcp
from megatron_cp.errors import PlanMismatchError
from megatron_cp.plan import make_plan
from tests.plan.test_cross import CASES, rectangle
from tests.ranks import run_on_ranks
from tests.runtime.cases import HEAD_DIM, HEADS, KV_HEADS, local_rows, tensors
from tests.runtime.test_dist_attn import check_against_dense

CONFIG = mcp.CPConfig(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)


def inputs_of(plans):
    """Returns q, k, v and gradients for each plan."""
    return [tensors(p.num_tokens, seed=i, num_keys=p.mask.num_keys) for i, p in enumerate(plans)]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
def test_attention_on_ranks_equals_dense_attention(cp_size, backend):
    plans = [make_plan(mask, cp_size, CONFIG) for mask in CASES.values()]
    check_against_dense(cp_size, plans, inputs_of(plans), {"backend": backend})


@pytest.mark.parametrize("cp_size", [2, 4])
def test_plans_that_move_queries_or_exchange_heads_equal_dense_attention(cp_size):
    """A machine on which bytes alone count: few queries travel, and on four ranks heads are exchanged."""
    links = mcp.Topology("links", 1e6, 1e6, cp_size, 1.0, 1.0, 0.0)
    config = dataclasses.replace(CONFIG, topology=links)
    plans = [make_plan(mask, cp_size, config) for mask in (rectangle(4, 400), rectangle(96, 90))]
    casts = {side for stage in plans[0].forward.stages for side in "qk" if stage.cast(side)}
    assert casts == {"q"}
    assert plans[1].forward.head_degree == (2 if cp_size == 4 else 1)
    check_against_dense(cp_size, plans, inputs_of(plans), {"backend": "reference"})


def test_the_placements_of_two_self_attention_plans_serve(cp_size=3):
    decoder = make_plan(mcp.mask.causal(61), cp_size, CONFIG)
    encoder = make_plan(mcp.mask.documents([20, 33], within="full"), cp_size, CONFIG)
    plan = make_plan(rectangle(61, 53), cp_size, CONFIG, queries=decoder, keys=encoder)
    sink = torch.randn(HEADS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    options = {"backend": "reference", "sink": sink.float(), "softcap": 5.0}
    check_against_dense(cp_size, [plan], inputs_of([plan]), options)


def round_trip(rank, world_size, plan, queries, keys):
    there = [
        mcp.dispatch(x, plan, dist.group.WORLD, side=side)
        for x, side in ((queries, "q"), (keys, "k"))
    ]
    back = [
        mcp.undispatch(x, plan, dist.group.WORLD, side=side)
        for x, side in zip(there, "qk", strict=True)
    ]
    return there, back


@pytest.mark.parametrize("cp_size", [1, 3])
def test_both_sides_are_dispatched_and_come_back(cp_size):
    plan = make_plan(CASES["captions"], cp_size, CONFIG)
    queries, keys = torch.randn(plan.mask.num_queries, 3), torch.randn(plan.mask.num_keys, 2)
    for rank, (there, back) in enumerate(run_on_ranks(cp_size, round_trip, plan, queries, keys)):
        assert torch.equal(there[0], local_rows(queries, plan, rank, "q"))
        assert torch.equal(there[1], local_rows(keys, plan, rank, "k"))
        assert torch.equal(back[0], queries)
        assert torch.equal(back[1], keys)
        ids = torch.from_numpy(plan.key_tokens[rank].copy())
        assert torch.equal(mcp.position_ids(plan, rank, side="k"), ids)


def gradients(rank, world_size, plan, x, weights):
    x = x.clone().requires_grad_()
    local = mcp.dispatch(x, plan, dist.group.WORLD, side="k")
    (local * local_rows(weights, plan, rank, "k")).sum().backward()
    y = local_rows(x.detach(), plan, rank, "k").requires_grad_()
    (mcp.undispatch(y, plan, dist.group.WORLD, side="k") * weights).sum().backward()
    return x.grad, y.grad


@pytest.mark.parametrize("cp_size", [1, 3])
def test_gradients_pass_through_both_sides(cp_size):
    plan = make_plan(CASES["captions"], cp_size, CONFIG)
    x, weights = torch.randn(2, plan.mask.num_keys, 2)
    for rank, (dx, dy) in enumerate(run_on_ranks(cp_size, gradients, plan, x, weights)):
        assert torch.equal(dx, weights)
        assert torch.equal(dy, local_rows(weights, plan, rank, "k"))


def test_a_side_must_be_said():
    plan = make_plan(rectangle(31, 32), 1, CONFIG)
    x = torch.zeros(31, HEADS, HEAD_DIM)
    calls = (
        lambda: mcp.dispatch(x, plan, None),
        lambda: mcp.undispatch(x, plan, None),
        lambda: mcp.position_ids(plan, 0),
        lambda: mcp.roll(x, plan, None),
    )
    for call in calls:
        with pytest.raises(ValueError, match="say side='q' or side='k'"):
            call()
    with pytest.raises(ValueError, match="side='v' must be 'q' or 'k'"):
        mcp.dispatch(x, plan, None, side="v")
    with pytest.raises(ValueError, match="relative=True needs documents"):
        mcp.position_ids(plan, 0, relative=True, side="q")
    with pytest.raises(ValueError, match="two streams of tokens"):
        mcp.cp_causal_conv1d(x.flatten(1), torch.ones(32, 4), plan, None, document_lengths=[31])
    with pytest.raises(ValueError, match="31 and 31 rows, the plan gives every rank 31 and 32"):
        mcp.cp_attention(x, x, x, plan, None)


def other_sides(rank, world_size, plan, name):
    """Each side has as many rows; rank 0 means the queries, rank 1 the keys."""
    whole = torch.ones(plan.num_tokens, 2).requires_grad_()
    with pytest.raises(PlanMismatchError, match="make another call"):
        if name == "dispatch":
            mcp.dispatch(whole, plan, dist.group.WORLD, side="qk"[rank])
        else:
            mcp.undispatch(whole[: plan.own_rows.q], plan, dist.group.WORLD, side="qk"[rank])
    return True


@pytest.mark.parametrize("name", ["dispatch", "undispatch"])
def test_ranks_that_mean_other_sides_are_told_so(name):
    """Rows of queries and of keys were put together as if they were of one tensor."""
    plan = make_plan(rectangle(32, 32), 2, CONFIG, keys=make_plan(mcp.mask.causal(32), 2, CONFIG))
    assert plan.key_tokens is not None and plan.own_rows.q == plan.own_rows.k
    assert all(run_on_ranks(2, other_sides, plan, name))


def test_self_attention_may_name_a_side():
    plan = make_plan(mcp.mask.causal(8), 1, CONFIG)
    x = torch.randn(8, 2)
    assert torch.equal(mcp.dispatch(x, plan, None, side="k"), mcp.dispatch(x, plan, None))


def other_keys(rank, world_size, plans, q, k):
    with pytest.raises(PlanMismatchError):
        mcp.cp_attention(q, k, k, plans[rank], dist.group.WORLD)
    return True


def test_ranks_that_place_keys_differently_are_told_so():
    mask = rectangle(8, 16)
    encoder = make_plan(mcp.mask.documents([1] * 16), 2, CONFIG)
    plans = [make_plan(mask, 2, CONFIG), make_plan(mask, 2, CONFIG, keys=encoder)]
    if plans[0].digest() == plans[1].digest():
        encoder = make_plan(mcp.mask.causal(16), 2, mcp.CPConfig(planner="zigzag"))
        plans[1] = make_plan(mask, 2, CONFIG, keys=encoder)
    q, k = torch.zeros(4, HEADS, HEAD_DIM), torch.zeros(8, KV_HEADS, HEAD_DIM)
    assert all(run_on_ranks(2, other_keys, plans, q, k))
