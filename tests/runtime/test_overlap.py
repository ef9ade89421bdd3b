"""Whole passes on recorded streams: what travels under which stage, and no race anywhere."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import megatron_cp as mcp
from megatron_cp.plan.hardware.makespan import transfer_shares
from megatron_cp.plan.hardware.topology import TOPOLOGIES
from megatron_cp.runtime import dist_attn
from tests.comm.recorded_streams import recorded_streams
from tests.ranks import run_on_ranks
from tests.runtime.cases import HEAD_DIM, HEADS, KV_HEADS, local_rows, mask_cases, tensors
from tests.runtime.handmade import random_plan


def results_of(rank, plan, inputs):
    q, k, v, dout, dlse = (local_rows(x, plan, rank) for x in inputs)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = mcp.cp_attention(*leaves, plan, dist.group.WORLD)
    torch.autograd.backward((out, lse), (dout, dlse))
    return [x.detach() for x in (out, lse, *(leaf.grad for leaf in leaves))]


def attention_on_streams(rank, world_size, plan, inputs):
    """Returns (results, those of a CPU, faults, collectives issued before each stage computes).

    A stage's attention that would wait for rows of a later one is among the faults.
    """
    expected = results_of(rank, plan, inputs)
    before = []
    with recorded_streams() as recorder:

        def noting(pass_name, action, stage):
            if action == "attend":
                before.append(len(recorder.collectives))
                recorder.faults += [f"stage {stage} is held up"] * recorder.held_up()
            return nullcontext()

        with mock.patch.object(dist_attn, "span", noting):
            results = results_of(rank, plan, inputs)
        torch.zeros(1).add_(1)  # frees what is left
    return results, expected, recorder.faults, before


def hops_there(pass_, index, side):
    """Returns the hops that bring a stage's rows; one in which nobody sends does not count."""
    cast = pass_.stages[index].cast(side)
    return 0 if cast is None else sum(len(hop.messages) > 0 for hop in cast.hops)


def hops_home(pass_, index, side):
    """Returns the hops by which results leave after a stage: those of all rows kept up to it."""
    if not pass_.ends_chain(index, side):
        return 0
    return sum(hops_there(pass_, i, side) for i in pass_.chain(index, side))


def collectives_before_stages(plan):
    """Returns how many hops have been started when each stage begins to compute, by the plan alone.

    The rows of all stages up to the next one, and the results of all stages before.
    """
    counts, started = [], 0
    for name, returning in (("forward", "q"), ("backward", "qk")):
        pass_ = plan.get_pass(name)
        stages = range(len(pass_.stages))
        there = [sum(hops_there(pass_, i, side) for side in "qk") for i in stages]
        home = [sum(hops_home(pass_, i, side) for side in returning) for i in stages]
        counts += [started + sum(there[: i + 2]) + sum(home[:i]) for i in stages]
        started += sum(there) + sum(home)
    return counts


@pytest.mark.parametrize("cp_size", [2, 3, 4])
@pytest.mark.parametrize("seed", [0, 1])
def test_all_hops_travel_under_the_stage_before_and_nothing_races(cp_size, seed):
    config = mcp.CPConfig(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    plan = random_plan(mask_cases()["documents"], cp_size, seed, config)
    inputs = tensors(plan.num_tokens)
    expected_counts = collectives_before_stages(plan)
    for answer in run_on_ranks(cp_size, attention_on_streams, plan, inputs):
        results, expected, faults, before = answer
        assert not faults
        assert all(map(torch.equal, results, expected))
        assert before == expected_counts


def test_nothing_races_where_heads_are_split():
    config = mcp.CPConfig(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    plan = random_plan(mask_cases()["documents"], 4, 0, config, head_degree=2)
    inputs = tensors(plan.num_tokens)
    for results, expected, faults, _ in run_on_ranks(4, attention_on_streams, plan, inputs):
        assert not faults
        assert all(map(torch.equal, results, expected))


@pytest.mark.parametrize("planner", ["auto", "ring", "zigzag", "ulysses", "magi"])
def test_a_stage_leaves_multiprocessors_to_what_travels_under_it_and_none_where_nothing_does(
    planner,
):
    config = mcp.CPConfig(planner=planner, num_heads=8, num_kv_heads=8, topology="h100")
    plan = mcp.make_plan(mcp.mask.documents([900, 100, 2500, 596], "causal"), 4, config)
    contention = TOPOLOGIES["h100"].contention
    for name, returning in (("forward", "q"), ("backward", "qk")):
        pass_ = plan.get_pass(name)
        for rank in range(4):
            shares = transfer_shares(plan, name, rank)
            for index, share in enumerate(shares):
                later = index + 1 < len(shares)
                moves = later and any(
                    _moves_rows(pass_.stages[index + 1].cast(s), rank) for s in "qk"
                )
                moves |= index > 0 and any(
                    _moves_rows(pass_.stages[i].cast(side), rank)
                    for side in returning
                    if pass_.ends_chain(index - 1, side)
                    for i in pass_.chain(index - 1, side)
                )
                if moves:
                    assert 4 / 132 <= share <= contention
                else:
                    # Others' transfers cost this rank their latency at most: a collective is for all.
                    assert share <= 4 / 132 + 1e-12


def _moves_rows(cast, rank):
    return cast is not None and any(rank in hop.messages[:, :2] for hop in cast.hops)
