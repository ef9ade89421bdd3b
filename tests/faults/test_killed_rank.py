"""A rank dies by SIGKILL: the others leave, nothing is lost, and a restart equals the unkilled run bit for bit."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from megatron_cp.training.checkpoint.files import TRACKER, iteration_folder, read_manifest
from tests.faults.program import Kill, Launch, Outcome, run_program
from tests.training.checkpoints import tensors_of
from tests.training.commands import DATA, MODEL

pytestmark = pytest.mark.timeout(1800)

# Two layers and two micro-batches a step: four attention backwards a step on every rank.
RUN = (
    *MODEL, *DATA, "--micro-batch-size", "1", "--global-batch-size", "2", "--train-iters", "4",
    "--lr", "1e-3", "--log-interval", "1", "--eval-iters", "0", "--no-wandb",
    "--context-parallel-size", "2", "--hidden-dropout", "0.1", "--save-interval", "2",
)  # fmt: skip
IN_TRAINING = {
    "in the backward pass of step 4": Kill(0, "megatron_cp.runtime.dist_attn", "backward_pass", 14),
    "after the update of step 4": Kill(1, "megatron_cp.training.loop", "update", 4, after=True),
}
# The save of step 4: nothing there yet, tensors without manifest, everything but the tracker.
IN_SAVE = {
    "on one rank, before the tensors": Kill(1, "megatron.core.dist_checkpointing", "save", 2),
    "between tensors and manifest": Kill(
        0, "megatron.core.dist_checkpointing", "save", 2, after=True
    ),
    "between manifest and tracker": Kill(
        0, "megatron_cp.training.checkpoint.files", "write_manifest", 2, after=True
    ),
}
RESTARTED = [
    "in the backward pass of step 4",
    "between tensors and manifest",
    "between manifest and tracker",
]


def losses_of(folder: Path) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm of each recorded step."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {r["iteration"]: (r["lm loss"], r["grad-norm"]) for r in rows if "lm loss" in r}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, dict[str, list[Outcome]]]:
    """Every run of this module: the whole one, the killed ones, and their restarts."""
    root = tmp_path_factory.mktemp("killed")

    def launch(name: str, *more: str, kill: Kill | None = None) -> Launch:
        return Launch((*RUN, "--save", str(root / name), *more), 2, kill=kill)

    kills = {**IN_TRAINING, **IN_SAVE}
    first = run_program(
        [launch("whole"), *(launch(name, kill=kill) for name, kill in kills.items())]
    )
    outcomes = dict(zip(["whole", *kills], first, strict=True))
    for name in kills:  # what the kill left, before a restart changes it
        shutil.copytree(root / name, root / "left" / name)
    restarts = run_program([launch(name, "--load", str(root / name)) for name in RESTARTED])
    outcomes |= dict(zip([f"restart: {name}" for name in RESTARTED], restarts, strict=True))
    return root, outcomes


def test_the_unkilled_run_succeeds(runs):
    root, outcomes = runs
    assert [rank.code for rank in outcomes["whole"]] == [0, 0], outcomes["whole"][0].stderr[-3000:]
    assert sorted(losses_of(root / "whole")) == [1, 2, 3, 4]


@pytest.mark.parametrize("name", [*IN_TRAINING, *IN_SAVE])
def test_the_other_rank_leaves_by_itself(runs, name: str):
    kill = {**IN_TRAINING, **IN_SAVE}[name]
    dead, other = runs[1][name][kill.rank], runs[1][name][1 - kill.rank]
    assert dead.code == -9, f"the fault did not happen: {dead.stderr[-1000:]}"
    assert other.code not in (0, None), "it was still waiting for the dead rank"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", [*IN_TRAINING, *IN_SAVE])
def test_the_last_complete_checkpoint_is_the_one_that_a_restart_takes(runs, name: str):
    root, _ = runs
    left = root / "left" / name
    assert (left / TRACKER).read_text() == "2"
    assert read_manifest(iteration_folder(left, 2)) is not None
    expected, found = (tensors_of(iteration_folder(f, 2)) for f in (root / "whole", left))
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[key], found[key]) for key in expected)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", RESTARTED)
def test_a_restart_ends_bitwise_where_the_unkilled_run_ends(runs, name: str):
    root, outcomes = runs
    restart = outcomes[f"restart: {name}"]
    assert [rank.code for rank in restart] == [0, 0], restart[0].stderr[-3000:]
    assert losses_of(root / name) == losses_of(root / "whole")
    assert (root / name / TRACKER).read_text() == "4"
    expected, found = (
        tensors_of(iteration_folder(folder, 4)) for folder in (root / "whole", root / name)
    )
    assert expected.keys() == found.keys()
    assert len(expected) > 10
    assert all(torch.equal(expected[key], found[key]) for key in expected)
