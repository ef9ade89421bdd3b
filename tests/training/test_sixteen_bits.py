"""Layers of every kind in bf16 and fp16: two context ranks take the steps of one.

A first step has the same weights, and attention adds what ranks found in float32: its losses are the same but for that.
Gradients are rounded to 16 bits rank by rank before they are added, and so are the weights that they change.
"""

import functools
import shlex
from pathlib import Path

import pytest

from tests.training import (
    test_hybrid_models,
    test_hybrid_predictions,
    test_layouts,
    test_linear_layers,
    test_memory_flags,
    test_sparse_layers,
)
from tests.training.commands import SMALL_RUN, TWO_STEPS, metrics, train

BF16 = ["--bf16"]
FP16 = shlex.split("--fp16 --loss-scale 256")
EXPERTS = [*test_layouts.RUN, *test_layouts.MODEL]
HYBRID = [*test_hybrid_models.RUN, *test_hybrid_models.EXPERTS]
MODELS = {  # flags of both runs
    "windows and sinks": [*SMALL_RUN, *BF16, *shlex.split("--window-size (16,0) --softmax-type learnable")],
    "experts and predictions": [*EXPERTS, *BF16],
    "experts and predictions, fp16": [*EXPERTS, *FP16],
    "gated delta nets": [*SMALL_RUN, *test_linear_layers.MODEL, *BF16],
    "Kimi delta attention": [*SMALL_RUN, *test_linear_layers.KIMI, *BF16],
    "sparse attention": [*test_sparse_layers.small_run(), *test_sparse_layers.MODEL, *BF16],
    "Mamba-2 and experts, fp16": [*HYBRID, *FP16],
    "Mamba-2 and predictions": [*test_hybrid_predictions.RUN, *BF16],
}  # fmt: skip
NEAR = [  # metric, of the first step, of the second
    ("lm loss", 1e-5, 2e-3), ("mtp_1 loss", 1e-5, 2e-3), ("mtp_2 loss", 1e-5, 2e-3),
    ("grad-norm", 1e-4, 1e-2), ("indexer loss", 1e-5, 1e-2), ("load_balancing_loss", 1e-5, 1e-2),
]  # fmt: skip


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The folder of a model's run on one rank, made when it is first asked for."""

    @functools.cache
    def run(model: str) -> Path:
        folder: Path = tmp_path_factory.mktemp("runs") / "alone"
        train(1, *MODELS[model], *TWO_STEPS, "--run-dir", str(folder))
        return folder

    return run


def check_two_ranks(folder: Path, alone: Path, *flags: str) -> None:
    """Trains on two ranks; weights of the second step differ by a bit, and so may what tokens choose."""
    train(2, *flags, *TWO_STEPS, "--context-parallel-size", "2", "--run-dir", str(folder))
    for key, first, second in NEAR:
        one, two = metrics(alone, key), metrics(folder, key)
        assert sorted(two) == sorted(one), key
        if one:
            assert two[1] == pytest.approx(one[1], rel=first), key
            assert two[2] == pytest.approx(one[2], rel=second), key


@pytest.mark.parametrize("model", MODELS)
def test_two_context_ranks_take_the_steps_of_one(alone, tmp_path: Path, model: str) -> None:
    check_two_ranks(tmp_path / "two", alone(model), *MODELS[model])


@pytest.mark.parametrize("model", ["experts and predictions", "Mamba-2 and experts, fp16"])
def test_less_memory_changes_no_step(alone, tmp_path: Path, model: str) -> None:
    saving = test_memory_flags.SAVING
    check_two_ranks(tmp_path / "two", alone(model), *MODELS[model], *saving)
