"""A loaded optimizer goes on from the model's weights, or the run does not begin."""

import contextlib
import io
from unittest import mock

import pytest
import torch

from tests.ranks import run_on_ranks
from tests.training import checkpoints as made

SHARDED = ("--use-distributed-optimizer",)
BY_PARAMETER = (
    *SHARDED, "--overlap-grad-reduce", "--ddp-bucket-size", "5000", "--dist-ckpt-optim-fully-reshardable",
)  # fmt: skip
CHANGED = "embedding.word_embeddings.weight"


def save(rank, world_size, folder, flags, change):
    """A step and a checkpoint; `change` of the float copies of one weight, or of how Megatron-Core gathers them."""
    with made.run_state("--save", folder, *flags, rank=rank, world_size=world_size) as state:
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
        from megatron.core.utils import unwrap_model

        from megatron_cp.training.checkpoint.save import Saver

        made.step(state, 1)
        (chunk,) = unwrap_model(state.model)
        copy = getattr(dict(chunk.named_parameters())[CHANGED], "main_param", None)
        if change == "one value" and copy is not None:
            copy.view(-1)[-1] += 0.25
        name = "sharded_param_state_fully_reshardable"
        gathers = getattr(DistributedOptimizer, name)
        if change == "gathered without padding":
            gathers = gathers.__wrapped__  # Megatron-Core's own
        with mock.patch.object(DistributedOptimizer, name, gathers):
            Saver(state).save()


def load(rank, world_size, folder, flags):
    """Loads the checkpoint; returns what it refuses with, or nothing."""
    with made.run_state("--load", folder, *flags, rank=rank, world_size=world_size) as state:
        from megatron_cp.training.checkpoint.load import load_checkpoint

        with contextlib.redirect_stdout(io.StringIO()):
            try:
                load_checkpoint(state)
            except ValueError as refusal:
                return str(refusal)
        made.step(state, 2)
        assert all(torch.isfinite(x).all() for x in made.weights_of(state).values())
        return ""


CASES = {
    "one value": (1, ("--bf16",), "one value"),
    "one value, format torch": (1, ("--bf16", "--ckpt-format", "torch"), "one value"),
    "one value of a shard": (2, ("--bf16", *SHARDED), "one value"),
    "neighbours": (1, ("--bf16", *BY_PARAMETER), "gathered without padding"),
    "neighbours, in float32": (1, BY_PARAMETER, "gathered without padding"),
}


@pytest.mark.parametrize("case", CASES)
def test_an_optimizer_of_other_weights_is_refused_on_every_rank(tmp_path, case):
    world_size, flags, change = CASES[case]
    run_on_ranks(world_size, save, str(tmp_path), flags, change)
    said = run_on_ranks(world_size, load, str(tmp_path), flags)
    assert len(set(said)) == 1
    assert "the optimizer goes on from other weights than the model's: " in said[0]
    assert "differ; give --no-load-optim" in said[0]
    if change == "one value":
        assert ": 1 of " in said[0]
        assert f" values of {CHANGED} differ" in said[0]
    assert set(run_on_ranks(world_size, load, str(tmp_path), (*flags, "--no-load-optim"))) == {""}


@pytest.mark.parametrize("flags", [("--bf16",), ("--bf16", *BY_PARAMETER), BY_PARAMETER])
def test_an_optimizer_of_the_same_weights_is_loaded(tmp_path, flags):
    run_on_ranks(1, save, str(tmp_path), flags, "")
    assert run_on_ranks(1, load, str(tmp_path), flags) == [""]


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (("--fp16",), ("--bf16",)),
        (("--bf16",), ("--fp16",)),
        (("--fp16", *BY_PARAMETER), ("--bf16", *BY_PARAMETER)),
        (("--bf16", *BY_PARAMETER), BY_PARAMETER),
        (BY_PARAMETER, ("--bf16", *BY_PARAMETER)),
    ],
)
def test_an_optimizer_goes_on_in_another_precision(tmp_path, saved, loaded):
    run_on_ranks(1, save, str(tmp_path), saved, "")
    assert run_on_ranks(1, load, str(tmp_path), loaded) == [""]
    run_on_ranks(1, save, str(tmp_path), saved, "one value")
    (said,) = run_on_ranks(1, load, str(tmp_path), loaded)
    assert said == "" if saved == BY_PARAMETER else ": 1 of " in said  # float32 has no copies
