"""The norm in the log counts every parameter once, in the precision that the optimizer keeps."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

from tests.ranks import run_on_ranks
from tests.training import checkpoints as made

COPY = 1.003
"""What every parameter's fp32 copy is set to; in bf16 it would be 1."""
SHARDED = ("--use-distributed-optimizer",)
LAYER_WISE = ("--bf16", "--global-batch-size", "2")
EXPERTS = ("--num-experts", "4", "--moe-ffn-hidden-size", "64")


def norm_of(rank, world_size, flags):
    """(the norm of a model whose copies are all alike, its parameters as this rank holds them)."""
    with made.run_state(*flags, rank=rank, world_size=world_size) as state:
        from megatron_cp.training.params_norm import params_norm

        parameters = [one for chunk in state.model for one in chunk.parameters()]
        for parameter in parameters:
            parameter.data.fill_(COPY)
            if getattr(parameter, "main_param", None) is not None:
                parameter.main_param.fill_(COPY)
        runner = SimpleNamespace(config=state.config, model=state.model, device=torch.device("cpu"))
        if flags == LAYER_WISE:  # a replica has copies of its own parameters alone
            for place, parameter in enumerate(parameters):
                if place % world_size != rank:
                    del parameter.main_param
            optimizer = dataclasses.replace(state.config.optimizer, layer_wise_optimizer=True)
            runner.config = dataclasses.replace(state.config, optimizer=optimizer)
        return params_norm(runner), sum(one.numel() for one in parameters)


@pytest.fixture(scope="module")
def sizes() -> dict[bool, int]:
    """The number of parameters of the whole model, with and without experts."""
    return {
        has_experts: run_on_ranks(1, norm_of, EXPERTS if has_experts else ())[0][1]
        for has_experts in (False, True)
    }


LAYOUTS = {
    "fp32": (1, ()),
    "bf16": (1, ("--bf16",)),
    "shards": (2, ("--bf16", *SHARDED)),
    "layers of muon": (2, LAYER_WISE),
    "tensor ranks": (2, ("--bf16", "--tensor-model-parallel-size", "2")),
    "stages": (2, ("--bf16", *SHARDED, "--pipeline-model-parallel-size", "2")),
    "experts": (2, ("--bf16", *EXPERTS, *SHARDED, "--expert-model-parallel-size", "2")),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_parameter_counts_once(sizes, layout):
    ranks, flags = LAYOUTS[layout]
    expected = COPY * math.sqrt(sizes[EXPERTS[0] in flags])
    for norm, _ in run_on_ranks(ranks, norm_of, flags):
        assert norm == pytest.approx(expected, rel=1e-6)
