"""Experts, further predictions and stages: the same losses from one checkpoint at every layout."""

import shlex
from pathlib import Path

import pytest

from tests.training.commands import SMALL_RUN, metrics, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

MODEL = shlex.split(
    "--num-layers 4 --untie-embeddings-and-output-weights --mtp-num-layers 1 "
    "--num-experts 4 --moe-ffn-hidden-size 48 --moe-aux-loss-coeff 1e-2 --moe-layer-freq ([0]*1+[1]*3) "
    "--moe-token-dispatcher-type alltoall --moe-shared-expert-intermediate-size 32 "
    "--calculate-per-token-loss --no-wandb"
)
LAYOUTS = {
    "context": "--context-parallel-size 2 --cp-planner auto",
    "stages": "--pipeline-model-parallel-size 2",
    "written-out stages": "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ett|t|t|mL",
    "uneven stages": "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1",
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "alone"
    flags = ["--save", str(folder), "--save-interval", "1", "--save-retain-interval", "1"]
    train(1, *SMALL_RUN, *MODEL, *flags)
    return folder


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_losses_go_on_as_on_one_rank(alone: Path, tmp_path: Path, layout: str):
    resumed = ["--load", str(alone), "--ckpt-step", "1", "--run-dir", str(tmp_path / "run")]
    train(2, *SMALL_RUN, *MODEL, *resumed, *LAYOUTS[layout].split())
    for key in ("lm loss", "grad-norm", "load_balancing_loss", "mtp_1 loss"):
        found, expected = metrics(tmp_path / "run", key), metrics(alone, key)
        assert sorted(found) == [2, 3, 4], key
        for iteration, value in found.items():
            assert value == pytest.approx(expected[iteration], rel=2e-6), (key, iteration)


ROUTING = {
    "sinkhorn": "--moe-router-load-balancing-type sinkhorn --moe-router-topk 1",
    "each pack by itself": "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.3 "
    "--micro-batch-size 2",
}


@pytest.mark.parametrize("routing", sorted(ROUTING))
def test_routing_does_not_depend_on_the_dispatch_of_tokens(tmp_path: Path, routing: str):
    experts = "--num-experts 4 --moe-ffn-hidden-size 48 --calculate-per-token-loss --no-wandb"
    flags = [*SMALL_RUN, *experts.split(), *ROUTING[routing].split(), "--train-iters", "3"]
    train(1, *flags, "--run-dir", str(tmp_path / "one"))
    train(2, *flags, "--context-parallel-size", "2", "--run-dir", str(tmp_path / "two"))
    for key in ("lm loss", "grad-norm"):
        found, expected = metrics(tmp_path / "two", key), metrics(tmp_path / "one", key)
        assert found == pytest.approx(expected, rel=2e-6), key
