"""Checkpoints written in the background: the same bits, published only when complete, nothing left behind."""

import json
import signal
from pathlib import Path

import pytest
import torch

from megatron_cp.training.checkpoint.files import TRACKER, iteration_folder, read_manifest
from tests.faults.program import Kill, Launch, Outcome, run_program
from tests.faults.test_killed_rank import losses_of
from tests.training.checkpoints import tensors_of
from tests.training.commands import DATA, MODEL

pytestmark = pytest.mark.timeout(1800)

RUN = (
    *MODEL, *DATA, "--micro-batch-size", "1", "--global-batch-size", "2", "--train-iters", "5",
    "--lr", "1e-3", "--log-interval", "1", "--eval-iters", "0", "--no-wandb",
    "--hidden-dropout", "0.1", "--save-interval", "2",
)  # fmt: skip
CP2 = ("--context-parallel-size", "2")
SHARDED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
LAYOUTS = {"context": CP2, "sharded optimizer": SHARDED}
_BACKGROUND = "megatron_cp.training.checkpoint.background"
# The second save, at step 4: its files are being written, or written and not yet published.
KILLED = {
    "before the files are waited for": Kill(1, _BACKGROUND, "BackgroundWrite.finish", 2),
    "between files and manifest": Kill(0, _BACKGROUND, "BackgroundWrite.finish", 2, after=True),
}
SIGNALLED = Kill(
    1, _BACKGROUND, "BackgroundWrite.__init__", 1, after=True, signals=(signal.SIGTERM,)
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, dict[str, list[Outcome]]]:
    root = tmp_path_factory.mktemp("async")

    def launch(name: str, *flags: str, kill: Kill | None = None) -> Launch:
        return Launch((*RUN, "--save", str(root / name), *flags), 2, kill=kill)

    launches = {}
    for name, layout in LAYOUTS.items():
        launches[f"{name}, waited for"] = launch(f"{name}, waited for", *layout)
        launches[f"{name}, async"] = launch(f"{name}, async", *layout, "--async-save")
    for name, kill in KILLED.items():
        launches[name] = launch(name, *CP2, "--async-save", kill=kill)
    flags = (*CP2, "--async-save", "--exit-signal-handler")
    launches["signalled"] = launch("signalled", *flags, kill=SIGNALLED)
    # Armed before the fork: the writer kills itself. Context replicas hold the same, and rank 0 writes it.
    writer = Kill(0, _BACKGROUND, "_write", 1)
    launches["writer"] = launch("writer", *CP2, "--async-save", kill=writer)
    return root, dict(zip(launches, run_program(list(launches.values())), strict=True))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_background_save_holds_the_bits_of_one_that_training_waits_for(runs, name: str):
    root, outcomes = runs
    for kind in ("waited for", "async"):
        ranks = outcomes[f"{name}, {kind}"]
        assert [rank.code for rank in ranks] == [0, 0], ranks[0].stderr[-3000:]
        assert ranks[0].stdout.count("successfully saved checkpoint") == 3
    waited, written = root / f"{name}, waited for", root / f"{name}, async"
    assert losses_of(waited) == losses_of(written)
    for iteration in (2, 4, 5):
        expected, found = (tensors_of(iteration_folder(f, iteration)) for f in (waited, written))
        assert expected.keys() == found.keys()
        assert len(expected) > 10
        assert all(torch.equal(expected[key], found[key]) for key in expected)
        ours, theirs = (read_manifest(iteration_folder(f, iteration)) for f in (waited, written))
        assert ours is not None and theirs is not None
        assert ours["data"] == theirs["data"]
        assert ours["files"].keys() == theirs["files"].keys()
    assert (written / TRACKER).read_text() == "5"


def test_both_times_of_a_save_are_logged(runs):
    rows = [
        json.loads(line)
        for line in (runs[0] / "context, async" / "metrics.jsonl").read_text().splitlines()
    ]
    saves = [row for row in rows if "ckpt/save_s" in row]
    assert len(saves) == 3
    assert all(0 < row["ckpt/blocked_s"] <= row["ckpt/save_s"] for row in saves)


@pytest.mark.parametrize("name", KILLED)
def test_a_killed_rank_leaves_the_checkpoint_before(runs, name: str):
    root, outcomes = runs
    ranks, dead = outcomes[name], KILLED[name].rank
    assert ranks[dead].code == -signal.SIGKILL, ranks[dead].stderr[-1000:]
    assert ranks[1 - dead].code not in (0, None)
    assert (root / name / TRACKER).read_text() == "2"
    assert read_manifest(iteration_folder(root / name, 2)) is not None
    assert not iteration_folder(root / name, 4).exists()


def test_a_signal_waits_for_the_unfinished_save(runs):
    root, outcomes = runs
    ranks = outcomes["signalled"]
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].stderr[-3000:]
    assert ranks[0].stdout.count("successfully saved checkpoint") == 1
    assert (root / "signalled" / TRACKER).read_text() == "2"


def test_a_writer_that_dies_ends_the_run_and_publishes_nothing(runs):
    root, outcomes = runs
    for rank in outcomes["writer"]:
        assert rank.code not in (0, None)
        assert "could not be written" in rank.stderr
    assert not (root / "writer" / TRACKER).exists()
    assert not iteration_folder(root / "writer", 2).exists()
