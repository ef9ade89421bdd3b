"""Laws of the whole runtime: nothing leaks, results repeat bit for bit, bad calls fail everywhere."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

import megatron_cp as mcp
from megatron_cp.errors import PlanMismatchError
from megatron_cp.plan import PLANNERS, make_plan
from tests.ranks import run_on_ranks
from tests.runtime.cases import HEAD_DIM, HEADS, KV_HEADS, local_rows, mask_cases, restore, tensors

CONFIG = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM}


def outputs_before_and_after_a_change(rank, world_size, plans, probes):
    """Returns, per plan, this rank's out for the base input and for one input per probed token."""
    results = []
    for plan, tokens in zip(plans, probes, strict=True):
        q, k, v, _, _ = tensors(plan.num_tokens)
        outs = []
        for token in [None, *tokens]:
            changed = [x.clone() for x in (q, k, v)]
            if token is not None:
                for x in changed:
                    x[token] = x[token] * 1.5 + 3.0
            local = [local_rows(x, plan, rank) for x in changed]
            outs.append(mcp.cp_attention(*local, plan, dist.group.WORLD)[0])
        results.append(outs)
    return results


@pytest.mark.parametrize("cp_size", [1, 2, 3, 8])
def test_changing_a_token_moves_only_the_rows_that_may_see_it(cp_size):
    cases = [
        (mask, planner)
        for mask in mask_cases().values()
        for planner in ("auto", "zigzag", "allgather")
    ]
    plans = [make_plan(mask, cp_size, mcp.CPConfig(planner=name, **CONFIG)) for mask, name in cases]
    probes = [
        sorted({0, plan.num_tokens // 3, plan.num_tokens // 2, plan.num_tokens - 1})
        for plan in plans
    ]
    per_rank = run_on_ranks(cp_size, outputs_before_and_after_a_change, plans, probes)
    for index, (plan, tokens) in enumerate(zip(plans, probes, strict=True)):
        outs = [
            restore([results[index][i] for results in per_rank], plan)
            for i in range(len(tokens) + 1)
        ]
        dense = plan.mask.to_dense()
        for token, out in zip(tokens, outs[1:], strict=True):
            moved = (out != outs[0]).flatten(1).any(dim=1).numpy()
            may_move = dense[:, token].copy()
            may_move[token] = dense[token].any()
            leaked = np.flatnonzero(moved & ~may_move)
            assert not len(leaked), f"{plan}: token {token} moved rows {leaked}"
            assert (moved == may_move).all(), f"{plan}: token {token} did not reach every row"


def gradients_of(rank, world_size, plan, seed):
    q, k, v, dout, _ = tensors(plan.num_tokens, dtype=torch.bfloat16, seed=seed)
    q, k, v = (local_rows(x, plan, rank).requires_grad_() for x in (q, k, v))
    out, lse = mcp.cp_attention(q, k, v, plan, dist.group.WORLD, deterministic=True)
    out.backward(local_rows(dout, plan, rank))
    return [x.detach().view(torch.int16) for x in (out, q.grad, k.grad, v.grad)], lse.detach()


@pytest.mark.parametrize("planner", sorted(PLANNERS))
def test_results_and_gradients_repeat_bit_for_bit(planner):
    mask = mask_cases()["documents"]
    plan = make_plan(mask, 4, mcp.CPConfig(planner=planner, **CONFIG))
    first = run_on_ranks(4, gradients_of, plan, 3)
    second = run_on_ranks(4, gradients_of, plan, 3)
    for one, two in zip(first, second, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one[0], two[0], strict=True))
        assert torch.equal(one[1], two[1])


def two_micro_batches_in_flight(rank, world_size, plans):
    """Returns gradients of two calls whose backward passes run in the opposite order."""
    leaves, outs = [], []
    for plan, seed in zip(plans, (1, 2), strict=True):
        q, k, v, dout, _ = tensors(plan.num_tokens, seed=seed)
        local = [local_rows(x, plan, rank).requires_grad_() for x in (q, k, v)]
        out, _ = mcp.cp_attention(*local, plan, dist.group.WORLD)
        leaves.append(local)
        outs.append((out, local_rows(dout, plan, rank)))
    for out, dout in outs:  # first in, first out, as in a pipeline
        out.backward(dout)
    return [[x.grad for x in local] for local in leaves]


def one_micro_batch(rank, world_size, plan, seed):
    q, k, v, dout, _ = tensors(plan.num_tokens, seed=seed)
    local = [local_rows(x, plan, rank).requires_grad_() for x in (q, k, v)]
    out, _ = mcp.cp_attention(*local, plan, dist.group.WORLD)
    out.backward(local_rows(dout, plan, rank))
    return [x.grad for x in local]


def test_micro_batches_in_flight_do_not_disturb_each_other():
    config = mcp.CPConfig(**CONFIG)
    plans = [make_plan(mask_cases()[name], 3, config) for name in ("documents", "causal 37")]
    together = run_on_ranks(3, two_micro_batches_in_flight, plans)
    for index, (plan, seed) in enumerate(zip(plans, (1, 2), strict=True)):
        alone = run_on_ranks(3, one_micro_batch, plan, seed)
        for rank in range(3):
            assert all(map(torch.equal, together[rank][index], alone[rank]))


def call_with_a_plan_of_ones_own(rank, world_size, plans):
    plan = plans[rank]
    rows = torch.zeros(plan.tokens_per_rank, HEADS, HEAD_DIM)
    keys = torch.zeros(plan.tokens_per_rank, KV_HEADS, HEAD_DIM)
    try:
        mcp.cp_attention(rows, keys, keys, plan, dist.group.WORLD)
    except PlanMismatchError as error:
        return str(error)
    return None


def test_different_plans_are_an_error_on_every_rank_instead_of_a_hang():
    same = make_plan(mask_cases()["documents"], 4, mcp.CPConfig(**CONFIG))
    other = make_plan(mask_cases()["causal 37"], 4, mcp.CPConfig(**CONFIG))
    for answer in run_on_ranks(4, call_with_a_plan_of_ones_own, [same, same, other, same]):
        assert answer is not None
        assert "ranks [2] of 4" in answer


def go_on_with_an_agreed_plan(rank, world_size, old, new):
    """All agree on `old`; then rank 1 brings `new` and the others `old` again, on a group in debug mode."""
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        group = dist.new_group(list(range(world_size)))
        for plan in (old, new if rank == 1 else old):
            rows = torch.zeros(plan.tokens_per_rank, HEADS, HEAD_DIM)
            keys = rows[:, :KV_HEADS]
            mcp.cp_attention(rows, keys, keys, plan, group)
    except RuntimeError as error:
        return str(error)
    finally:
        dist.set_debug_level(level)
    return None


def test_a_rank_that_goes_on_with_an_agreed_plan_is_seen_by_every_rank_in_torchs_debug_mode():
    """Without it this ends in the group's time-out: docs/runtime.md says why."""
    plans = [
        make_plan(mask_cases()["documents"], 3, mcp.CPConfig(planner=planner, **CONFIG))
        for planner in ("zigzag", "contiguous")
    ]
    answers = run_on_ranks(3, go_on_with_an_agreed_plan, *plans)
    assert all("Detected mismatch between collectives" in str(answer) for answer in answers)
    assert any("ALLTOALL_BASE" in answer for answer in answers)


def call_with_options_of_ones_own(rank, world_size, plan):
    rows = torch.zeros(plan.tokens_per_rank, HEADS, HEAD_DIM)
    keys = torch.zeros(plan.tokens_per_rank, KV_HEADS, HEAD_DIM)
    try:
        mcp.cp_attention(rows, keys, keys, plan, dist.group.WORLD, softcap=float(rank == 1))
    except PlanMismatchError as error:
        return str(error)
    return None


def call_without_gradients_on_rank_1(rank, world_size, plan, how, call):
    rows = torch.zeros(
        plan.tokens_per_rank, HEADS, HEAD_DIM, requires_grad=rank != 1 or how == "no_grad"
    )
    keys = torch.zeros(plan.tokens_per_rank, KV_HEADS, HEAD_DIM)
    try:
        with torch.set_grad_enabled(rank != 1 or how == "leaf"):
            if call == "roll":
                mcp.roll(rows, plan, dist.group.WORLD)
            else:
                mcp.cp_attention(rows, keys, keys, plan, dist.group.WORLD)
    except PlanMismatchError as error:
        return str(error)
    return None


@pytest.mark.parametrize("call", ["cp_attention", "roll"])
@pytest.mark.parametrize("how", ["leaf", "no_grad"])
def test_a_rank_that_wants_no_gradients_is_an_error_on_every_rank_instead_of_a_hang(how, call):
    plan = make_plan(mask_cases()["documents"], 3, mcp.CPConfig(**CONFIG))
    answers = run_on_ranks(3, call_without_gradients_on_rank_1, plan, how, call)
    assert all(answer is not None and "ranks [1] of 3" in answer for answer in answers)


def test_different_options_are_an_error_on_every_rank():
    plan = make_plan(mask_cases()["documents"], 3, mcp.CPConfig(**CONFIG))
    answers = run_on_ranks(3, call_with_options_of_ones_own, plan)
    assert all(answer is not None and "ranks [1] of 3" in answer for answer in answers)


def bad_calls(rank, world_size, plan, small_plan):
    good = torch.zeros(plan.tokens_per_rank, HEADS, HEAD_DIM)
    keys = torch.zeros(plan.tokens_per_rank, KV_HEADS, HEAD_DIM)
    group = dist.group.WORLD
    calls = {
        "rows": lambda: mcp.cp_attention(good[1:], keys[1:], keys[1:], plan, group),
        "group": lambda: mcp.cp_attention(
            good[:1].expand(small_plan.tokens_per_rank, -1, -1),
            keys[:1].expand(small_plan.tokens_per_rank, -1, -1),
            keys[:1].expand(small_plan.tokens_per_rank, -1, -1),
            small_plan,
            group,
        ),
        "heads": lambda: mcp.cp_attention(good[:, :3], keys, keys, plan, group),
        "backend": lambda: mcp.cp_attention(good, keys, keys, plan, group, backend="nonsense"),
        "length": lambda: mcp.dispatch(torch.zeros(plan.num_tokens + 1), plan, group),
    }
    messages = {}
    for name, call in calls.items():
        try:
            call()
        except ValueError as error:
            messages[name] = str(error)
    return messages


def test_bad_calls_raise_the_same_line_on_every_rank_before_any_collective():
    plan = make_plan(mask_cases()["documents"], 2, mcp.CPConfig(**CONFIG))
    small = make_plan(mask_cases()["documents"], 1, mcp.CPConfig(**CONFIG))
    first, second = run_on_ranks(2, bad_calls, plan, small)
    assert first == second
    assert set(first) == {"rows", "group", "heads", "backend", "length"}
    assert "cp_size=1" in first["group"]
    assert "dispatch" in first["rows"]
