"""Distributed attention equals dense attention, for every planner, CP size, mask and option."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

import megatron_cp as mcp
from megatron_cp.plan import PLANNERS, make_plan
from tests.closeness import assert_within_budget
from tests.oracles.attention import exact_attention, plain_attention
from tests.oracles.dropout import dropout_factors
from tests.ranks import run_on_ranks
from tests.runtime.cases import HEAD_DIM, HEADS, KV_HEADS, local_rows, mask_cases, restore, tensors
from tests.runtime.handmade import random_plan

CP_SIZES = (1, 2, 3, 4, 8)


def attention_on_ranks(rank, world_size, plans, inputs, options):
    """Returns (out, lse, dq, dk, dv, dsink) of this rank for each plan."""
    results = []
    for plan, (q, k, v, dout, dlse) in zip(plans, inputs, strict=True):
        q, k, v = (
            local_rows(x, plan, rank, side).requires_grad_()
            for x, side in ((q, "q"), (k, "k"), (v, "k"))
        )
        sink = options.get("sink")
        sink = None if sink is None else sink.clone().requires_grad_()
        out, lse = mcp.cp_attention(q, k, v, plan, dist.group.WORLD, **{**options, "sink": sink})
        grads = local_rows(dout, plan, rank), local_rows(dlse, plan, rank).to(lse.dtype)
        finite = torch.isfinite(lse)
        torch.autograd.backward(
            (out, torch.where(finite, lse, torch.zeros_like(lse))),
            (grads[0], grads[1]),
        )
        dsink = torch.zeros(1) if sink is None else sink.grad
        results.append(tuple(x.detach() for x in (out, lse, q.grad, k.grad, v.grad, dsink)))
    return results


def check_against_dense(cp_size, plans, inputs, options):
    """Runs the plans on `cp_size` ranks and holds every result against the float64 oracle."""
    per_rank = run_on_ranks(cp_size, attention_on_ranks, plans, inputs, options)
    for index, (plan, (q, k, v, dout, dlse)) in enumerate(zip(plans, inputs, strict=True)):
        allowed = torch.from_numpy(plan.mask.to_dense())
        oracle_options = {
            key: options[key] for key in ("sink", "softcap", "softmax_scale") if key in options
        }
        if "dropout_p" in options:
            rate, (seed,) = options["dropout_p"], options["dropout_seed"].tolist()
            places = np.arange(len(q)), np.arange(len(k))
            factors = dropout_factors(seed, q.shape[1], *places, rate)
            oracle_options["factors"] = factors
        gradients = {"dout": dout, "dlse": dlse}
        exact = exact_attention(q, k, v, allowed, **gradients, **oracle_options)
        plain = plain_attention(q, k, v, allowed, **gradients, **oracle_options)
        where = f"{plan.planner}, {cp_size} ranks, {plan.mask}"
        # Merging and the backward pass take exp(. - lse), which rounds relative to |lse|; narrow dtypes
        # compute it in fp32, where that does not show.
        lse_size = 1 + exact.lse[torch.isfinite(exact.lse)].abs().max().item()
        lse_size = lse_size if q.dtype in (torch.float32, torch.float64) else 1.0
        for place, field in enumerate(("out", "lse", "dq", "dk", "dv")):
            side = "k" if field in ("dk", "dv") else "q"
            actual = restore([results[index][place] for results in per_rank], plan, side)
            expected = getattr(exact, field)
            size = expected[torch.isfinite(expected)].abs().max().item()
            size *= 1.0 if field == "lse" else lse_size
            name = f"{field} of {where}"
            assert_within_budget(actual, getattr(plain, field), expected, name, size=size)
        if options.get("sink") is not None:
            actual = sum(results[index][5].double() for results in per_rank)
            assert_within_budget(actual, plain.dsink, exact.dsink, f"dsink of {where}", size=16.0)


def plans_for(planner, cp_size, config_options=None):
    """Returns the plans that `planner` makes for the mask cases, and their inputs."""
    config = mcp.CPConfig(
        planner=planner,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        **(config_options or {}),
    )
    plans = [make_plan(mask, cp_size, config) for mask in mask_cases().values()]
    return plans, [tensors(plan.num_tokens, seed=i) for i, plan in enumerate(plans)]


# The others lay out eight ranks of one node like four; in nodes of two they have tests of their own (test_schemes.py).
MANY_RANKS = ("auto", "distflashattn", "magi", "stripe")


@pytest.mark.parametrize(
    ("planner", "cp_size"),
    [
        pytest.param(planner, size, marks=[pytest.mark.slow] if size >= 8 else [])
        for planner in sorted(PLANNERS)
        for size in CP_SIZES
        if size < 8 or planner in MANY_RANKS
    ],
)
def test_attention_on_ranks_equals_dense_attention(planner, cp_size):
    if planner == "ulysses" and HEADS % cp_size:
        with pytest.raises(ValueError, match="head degree"):
            plans_for(planner, cp_size)
        return
    plans, inputs = plans_for(planner, cp_size)
    check_against_dense(cp_size, plans, inputs, {"backend": "reference"})


@pytest.mark.parametrize(
    ("cp_size", "head_degree"),
    [(2, 1), (3, 1), (4, 1), (4, 2), pytest.param(8, 2, marks=pytest.mark.slow), (4, 4)],
)
def test_random_plans_with_query_casts_relays_and_head_splits_equal_dense_attention(
    cp_size, head_degree
):
    names = ("causal 37", "documents", "window", "rows without keys")
    config = mcp.CPConfig(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    plans = [
        random_plan(mask_cases()[name], cp_size, seed, config, head_degree=head_degree)
        for seed, name in enumerate(names)
    ]
    for plan in plans:
        plan.validate()
        moves = any(stage.q_cast for stage in plan.forward.stages)
        assert moves == (head_degree < cp_size)
    inputs = [tensors(plan.num_tokens, seed=i) for i, plan in enumerate(plans)]
    check_against_dense(cp_size, plans, inputs, {"backend": "reference"})
