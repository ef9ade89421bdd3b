"""Replicas that began with other seeds (--data-parallel-random-init) go on with their own random states."""

import contextlib
import io

import pytest
import torch

from tests.ranks import run_on_ranks
from tests.training import checkpoints as made

OWN_SEEDS = ("--data-parallel-random-init",)


def save_and_draw(rank, world_size, folder, flags):
    """What a rank draws after the checkpoint that it saved."""
    with made.run_state("--save", folder, *flags, rank=rank, world_size=world_size) as state:
        from megatron_cp.training.checkpoint.save import Saver

        made.step(state, 1)
        torch.rand(3 + rank)
        Saver(state).save()
        return torch.rand(4).tolist()


def load_and_draw(rank, world_size, folder, flags):
    """What a rank draws after the checkpoint that it loaded, and what it was told."""
    with made.run_state("--load", folder, *flags, rank=rank, world_size=world_size) as state:
        from megatron_cp.training.checkpoint.load import load_checkpoint

        torch.manual_seed(99)
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            load_checkpoint(state)
        return torch.rand(4).tolist(), said.getvalue()


@pytest.mark.parametrize("form", ["torch_dist", "torch"])
def test_each_replica_goes_on_with_its_own(tmp_path, form: str):
    flags = (*OWN_SEEDS, "--ckpt-format", form)
    saved = run_on_ranks(2, save_and_draw, str(tmp_path), flags)
    assert saved[0] != saved[1]
    assert [drawn for drawn, _ in run_on_ranks(2, load_and_draw, str(tmp_path), OWN_SEEDS)] == saved
    ((_, told),) = run_on_ranks(1, load_and_draw, str(tmp_path), OWN_SEEDS)
    assert "has those of 2 replicas, this run has 1" in told
    # One seed for all of them: the first one's, as Megatron-LM has it.
    assert [drawn for drawn, _ in run_on_ranks(2, load_and_draw, str(tmp_path), ())] == saved[
        :1
    ] * 2
