"""Distributed attention over the flash backend, its operators float64 formulas on CPU ranks."""

import pytest
import torch

from tests.attn.flash_on_host import on_host
from tests.ranks import run_on_ranks
from tests.runtime import test_dist_attn as dist_attn


def flash_on_ranks(rank, world_size, plans, inputs, options):
    """Returns what `attention_on_ranks` does; every attention is a call of torch's operators."""
    with on_host() as calls:
        results = dist_attn.attention_on_ranks(rank, world_size, plans, inputs, options)
        assert {name for name, *_ in calls} == {"forward", "backward"}
    return results


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("planner", ["auto", "zigzag", "magi"])
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_attention_on_ranks_equals_dense_attention(cp_size, planner, dtype, monkeypatch):
    plans, inputs = dist_attn.plans_for(planner, cp_size)
    inputs = [tuple(x.to(dtype) for x in tensors) for tensors in inputs]
    options = {"backend": "flash", "sink": torch.randn(dist_attn.HEADS, dtype=dtype)}

    def run_flash(world_size, _, *arguments):
        return run_on_ranks(world_size, flash_on_ranks, *arguments)

    monkeypatch.setattr(dist_attn, "run_on_ranks", run_flash)
    dist_attn.check_against_dense(cp_size, plans, inputs, options)
