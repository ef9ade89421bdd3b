"""What linear attention computes while states travel, forward and backward, and that nothing races with them."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

import megatron_cp as mcp
from megatron_cp import mask as masks
from megatron_cp.attn import linear, linear_fla
from megatron_cp.comm import row_exchange
from tests.attn.fla_on_host import chunk_gated_delta_rule, installed
from tests.comm.recorded_streams import recorded_streams
from tests.ranks import run_on_ranks
from tests.runtime.cases import local_rows
from tests.runtime.test_linear_attention import inputs_of, outputs_and_gradients

LENGTHS = (90, 3, 70)


def plan_of(cp_size):
    mask = masks.documents(list(LENGTHS), within="causal")
    return mcp.make_plan(mask, cp_size, mcp.CPConfig(planner="zigzag"))


def results(rank, plan, gates):
    *tensors, dout = (
        None if x is None else local_rows(x, plan, rank) for x in inputs_of(sum(LENGTHS), gates)
    )

    def attend(q, k, v, g, beta):
        return mcp.cp_linear_attention(
            q, k, v, plan, dist.group.WORLD, document_lengths=LENGTHS, g=g, beta=beta
        )

    return outputs_and_gradients(attend, tensors, dout)


def noting(told):
    """Inside, rows that are sent and waited for are told."""
    start = row_exchange.start_all_to_all

    def sending(*arguments):
        told.append("send")
        pending = start(*arguments)
        wait = pending.wait
        pending.wait = lambda: (told.append("wait"), wait())[1]
        return pending

    return mock.patch.object(row_exchange, "start_all_to_all", sending)


def told_in_order(rank, world_size, plan, gates):
    """Returns what happened, in order: rows sent and waited for, scores of chunks computed, and their gradients."""
    told, products = [], linear.decayed_products

    def scores(x, y, g):
        found = products(x, y, g)
        if x is not y:  # of queries and keys
            told.append("scores")
            found.register_hook(lambda grad: told.append("gradients of scores"))
        return found

    with noting(told), mock.patch.object(linear, "decayed_products", scores):
        results(rank, plan, gates)
    return told


def told_by_kernels(rank, world_size, plan):
    """The same of the kernels' operator: how many runs it was given, and when their gradients came."""
    told = []

    def rule(*arguments, **options):
        out, states = chunk_gated_delta_rule(*arguments, **options)
        runs = len(options["cu_seqlens"]) - 1
        told.append(f"{runs} runs")
        if options["scale"] != 1.0:  # outputs, not maps
            out.register_hook(lambda grad: told.append(f"gradients of {runs} runs"))
        return out, states

    *rows, dout = (local_rows(x, plan, rank) for x in inputs_of(sum(LENGTHS), "gated delta rule"))
    q, k, v, g, beta = (x if i == 3 else x.bfloat16() for i, x in enumerate(rows))

    def attend(q, k, v, g, beta):
        return mcp.cp_linear_attention(
            q, k, v, plan, dist.group.WORLD, document_lengths=LENGTHS, g=g, beta=beta, backend="fla"
        )

    with installed(), noting(told):
        linear_fla.why_not(k, v, g, beta)  # its trial is not of this call
        with mock.patch.object(linear_fla, "chunk_rule", lambda is_delta: rule):
            outputs_and_gradients(attend, (q, k, v, g, beta), dout.bfloat16())
    return told


def races(rank, world_size, plan, gates):
    expected = results(rank, plan, gates)
    with recorded_streams() as recorder:
        found = results(rank, plan, gates)
        torch.zeros(1).add_(1)  # frees what is left
    return recorder.faults, expected, found, len(recorder.collectives)


@pytest.mark.parametrize("gates", ["decay", "gated delta rule"])
def test_states_travel_under_the_outputs_of_chunks_and_gradients_under_theirs(gates):
    for told in run_on_ranks(2, told_in_order, plan_of(2), gates):
        assert told == ["send", "scores", "wait", "send", "gradients of scores", "wait"]


def test_segments_that_begin_their_document_are_computed_while_states_travel():
    """Zigzag, two ranks: rank 0 has the ends of the pack, rank 1 its middle; two documents are cut."""
    both = run_on_ranks(2, told_by_kernels, plan_of(2))
    for told in both:
        there, back = told.index("send"), told.index("send", told.index("wait"))
        wait, again = told.index("wait"), told.index("wait", back)
        first, later = told[there + 1 : wait], told[wait + 1 : back]
        assert len(first) == 1 and first[0].endswith("runs")
        assert later[0].endswith("runs") and later[1] == f"gradients of {later[0]}"
        assert told[back + 1 : again] == [f"gradients of {first[0]}"]


@pytest.mark.parametrize("gates", ["decay", "gated delta rule"])
def test_nothing_races_with_states_on_their_way(gates):
    for faults, expected, found, collectives in run_on_ranks(3, races, plan_of(3), gates):
        assert faults == []
        assert collectives >= 2
        for one, other in zip(expected, found, strict=True):
            assert torch.equal(one, other)
