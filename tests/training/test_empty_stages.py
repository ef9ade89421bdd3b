"""A layout whose stage holds no layer, "m||L" in Megatron's words, goes on from a checkpoint of one rank."""

import pytest

from tests.training.commands import SMALL_RUN, metrics, train


def test_a_rank_whose_first_stage_is_empty_goes_on_with_the_losses_of_one(tmp_path):
    run = [*SMALL_RUN, "--num-layers", "4"]
    save = ["--save", str(tmp_path / "ckpt"), "--save-interval", "2"]
    train(1, *run, *save, "--run-dir", str(tmp_path / "one"))
    layout = [
        "--pipeline-model-parallel-size",
        "2",
        "--pipeline-model-parallel-layout",
        "E||tttt|L",
    ]
    load = ["--load", str(tmp_path / "ckpt"), "--ckpt-step", "2"]
    train(2, *run, *layout, *load, "--run-dir", str(tmp_path / "two"))
    whole, staged = metrics(tmp_path / "one"), metrics(tmp_path / "two")
    assert staged == pytest.approx({step: whole[step] for step in (3, 4)}, rel=1e-6)
