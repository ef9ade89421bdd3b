"""What a run keeps beside its tensors: random states, schedule, dropout, and the place in the held-out documents.

Three runs on one rank, forks of warm processes: a whole one, one that evaluates at its end alone, and one that goes on
from a checkpoint of the first.
"""

import json
import shutil
from pathlib import Path

import pytest

from megatron_cp.training.checkpoint.files import TRACKER, iteration_folder
from tests.faults.program import Launch, run_program
from tests.training.commands import DATA, MODEL

STEPS, LR = 4, 1e-3
RUN = (
    *MODEL, *DATA, "--micro-batch-size", "1", "--global-batch-size", "2", "--train-iters", str(STEPS),
    "--lr", str(LR), "--min-lr", "0", "--lr-decay-style", "linear", "--lr-decay-iters", str(STEPS),
    "--log-interval", "1", "--eval-iters", "1", "--split", "2,1,1", "--no-wandb", "--hidden-dropout", "0.1",
)  # fmt: skip
KEYS = ("lm loss", "grad-norm", "learning-rate", "lm loss validation")


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, dict[str, dict[int, float]]]:
    """What each run recorded: values by key and iteration."""
    root: Path = tmp_path_factory.mktemp("resumed")
    often = ("--eval-interval", "1", "--save-interval", "2")
    once = ("--eval-interval", str(STEPS))
    first = [
        Launch((*RUN, *often, "--save", str(root / "whole"))),
        Launch((*RUN, *once, "--run-dir", str(root / "once"))),
    ]
    outcomes = run_program(first)
    half = iteration_folder(root / "whole", 2)
    shutil.copytree(half, root / "half" / half.name)
    (root / "half" / TRACKER).write_text("2")
    where = ("--load", str(root / "half"), "--run-dir", str(root / "resumed"))
    outcomes += run_program([Launch((*RUN, "--eval-interval", "1", *where))])
    for (rank,) in outcomes:
        assert rank.code == 0, rank.stderr[-3000:]
    return {name: recorded(root / name) for name in ("whole", "once", "resumed")}


def recorded(folder: Path) -> dict[str, dict[int, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {key: {row["iteration"]: row[key] for row in rows if key in row} for key in KEYS}


@pytest.mark.parametrize("key", KEYS)
def test_a_resumed_run_goes_on_with_random_states_schedule_and_place(runs, key):
    after = {step: value for step, value in runs["whole"][key].items() if step > 2}
    assert runs["resumed"][key] == after and sorted(after) == [3, 4]


def test_the_learning_rate_falls_by_packs_to_the_end_of_the_schedule(runs):
    expected = {step: LR * (1 - step / STEPS) for step in range(1, STEPS + 1)}
    assert runs["whole"]["learning-rate"] == pytest.approx(expected, abs=1e-12)


def test_every_evaluation_is_over_the_same_held_out_documents(runs):
    """So the last one does not depend on how many there were before."""
    assert runs["once"]["lm loss validation"][STEPS] == runs["whole"]["lm loss validation"][STEPS]


def test_an_evaluation_changes_nothing_of_the_training(runs):
    for key in ("lm loss", "grad-norm", "learning-rate"):
        assert runs["once"][key] == runs["whole"][key]
