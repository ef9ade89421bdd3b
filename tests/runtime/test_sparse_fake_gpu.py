"""Sparse attention on fake CUDA tensors: operators that are there, one device, and a host that waits for nothing."""

import contextlib
from unittest import mock

import pytest
import torch

import megatron_cp as mcp
from megatron_cp.attn.sparse import Keys, Queries, SparseRule, attend_to_picked, gradients_of_picked
from tests.child import fresh_process
from tests.fake_gpu import CUDA, Meter, contiguous_copy, fake_gpus

HEADS, WIDTH, VALUES, INDEX_HEADS, INDEX_WIDTH, TOPK = 16, 576, 512, 4, 128, 256
LENGTHS = [5000, 1, 700, 2491]


@pytest.fixture(scope="module")
def in_a_fresh_process():
    with fresh_process() as call:
        yield call


def _bmm(a, b, out_dtype):
    """Has the shapes of `bmm` with another type of result, which asks for a real device."""
    return torch.matmul(a, b).to(out_dtype)


def fakes(rank, num_ranks):
    """Returns a context of fake GPUs, whose process group it gives."""
    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(torch.Tensor, "contiguous", contiguous_copy))
    stack.enter_context(mock.patch.object(torch, "bmm", _bmm))
    return stack, stack.enter_context(fake_gpus(rank, num_ranks))


def _tensors(num_rows):
    shapes = ((HEADS, WIDTH), (WIDTH,), (INDEX_HEADS, INDEX_WIDTH), (INDEX_WIDTH,), (INDEX_HEADS,))
    return [torch.empty(num_rows, *shape, device=CUDA, dtype=torch.bfloat16) for shape in shapes]


def whole_call(plan, rank, num_ranks, loss):
    """Returns what waited, and the bytes moved, in a forward pass of one rank."""
    stack, group = fakes(rank, num_ranks)
    with stack:
        tensors = _tensors(plan.tokens_per_rank)
        for _ in range(2):  # the second finds its layout on the device
            with Meter() as meter:
                out, divergence, _ = mcp.cp_sparse_attention(
                    *tensors, plan, group, topk=TOPK, value_dim=VALUES, index_loss=loss
                )
        assert out.shape == (plan.tokens_per_rank, HEADS, VALUES)
        assert (out.device, out.dtype, divergence.dtype) == (CUDA, torch.bfloat16, torch.float32)
    return meter.waits, meter.bytes


def one_chunk(loss):
    """Returns what waited in both passes of a chunk of 32 queries that see 1,000 keys."""
    stack, _ = fakes(0, 1)
    with stack:
        q, _, index_q, _, index_weights = _tensors(32)
        queries, keys = Queries(q, index_q, index_weights), Keys(*_tensors(1000)[1:4:2])
        intervals = torch.zeros(1, 2, 32, device=CUDA, dtype=torch.int64)
        rule = SparseRule(TOPK, VALUES, 0.1, loss, True, None)
        with Meter() as meter:
            out, divergence, picked = attend_to_picked(queries, keys, intervals, rule)
            given = (out.bfloat16(), divergence)
            found = gradients_of_picked(queries, keys, intervals, picked, given, rule)
        for gradient, x in zip((*found.queries, *found.keys), (*queries, *keys), strict=True):
            assert (gradient.shape, gradient.device) == (x.shape, CUDA)
            assert gradient.dtype == torch.float32
    return meter.waits


@pytest.mark.parametrize("loss", [None, "picked", "visible"])
def test_nothing_waits_for_the_gpu_and_no_two_devices_meet(in_a_fresh_process, loss):
    mask = mcp.mask.documents(LENGTHS, within="causal")
    plan = mcp.make_plan(mask, 4, mcp.CPConfig(planner="magi"))
    waits, num_bytes = in_a_fresh_process(whole_call, plan, 2, 4, loss)
    assert waits == [] and num_bytes > 0
    assert in_a_fresh_process(one_chunk, loss) == []
