"""Linear attention and its convolution on fake CUDA tensors: one device, and a host that waits for nothing."""

from unittest import mock

import pytest
import torch

import megatron_cp as mcp
from tests.child import fresh_process
from tests.fake_gpu import CUDA, Meter, contiguous_copy, fake_gpus

HEADS, WIDTH = 4, 64
LENGTHS = [5000, 1, 700, 2491]


@pytest.fixture(scope="module")
def in_a_fresh_process():
    with fresh_process() as call:
        yield call


def metered(plan, rank, num_ranks, with_channels, with_beta):
    """Returns what waited, and the bytes moved, in a forward pass of one rank."""
    options = {"document_lengths": LENGTHS}
    with (
        fake_gpus(rank, num_ranks) as group,
        mock.patch.object(torch.Tensor, "contiguous", contiguous_copy),
    ):
        rows = plan.tokens_per_rank
        x = torch.empty(rows, HEADS * WIDTH, device=CUDA, dtype=torch.bfloat16)
        weight = torch.empty(HEADS * WIDTH, 4, device=CUDA)
        g = torch.empty((rows, HEADS, WIDTH)[: 3 if with_channels else 2], device=CUDA)
        beta = torch.empty(rows, HEADS, device=CUDA) if with_beta else None
        for _ in range(2):  # the second finds its layout on the device
            with Meter() as meter:
                q = mcp.cp_causal_conv1d(x, weight, plan, group, activation="silu", **options)
                q = q.view(rows, HEADS, WIDTH)
                out = mcp.cp_linear_attention(q, q, q, plan, group, g=g, beta=beta, **options)
        assert out.device == CUDA and out.shape == q.shape and out.dtype == q.dtype
    return meter.waits, meter.bytes


@pytest.mark.parametrize("with_beta", [False, True], ids=["decay", "delta rule"])
@pytest.mark.parametrize("with_channels", [False, True], ids=["by head", "by channel"])
def test_nothing_waits_for_the_gpu_and_no_two_devices_meet(
    in_a_fresh_process, with_channels, with_beta
):
    mask = mcp.mask.documents(LENGTHS, within="causal")
    plan = mcp.make_plan(mask, 4, mcp.CPConfig(planner="zigzag"))
    waits, num_bytes = in_a_fresh_process(metered, plan, 2, 4, with_channels, with_beta)
    assert waits == [] and num_bytes > 0
