"""Kills at random points of a run, and whether the run that goes on ends with the bits of one that nobody killed.

    whole run of a layout                          losses, gradient norms, evaluations, last checkpoint
    the same, a random rank killed at a random     then started again until it ends: all of it equal?
    moment of a step, a save, a load or an evaluation

Who draws the kills says the seed; moments are seconds, so two machines kill at different places.
"""

import json
import random
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_cp.training.checkpoint.files import TRACKER, iteration_folder, read_manifest
from tests.faults.program import Kill, Launch, Outcome, run_program
from tests.processes import HANG_SECONDS
from tests.training.checkpoints import tensors_of
from tests.training.commands import DATA, MODEL

RUN = (
    *MODEL, *DATA, "--micro-batch-size", "1", "--global-batch-size", "2", "--train-iters", "5",
    "--lr", "1e-3", "--log-interval", "1", "--eval-iters", "1", "--eval-interval", "2",
    "--split", "2,1,1", "--no-wandb", "--hidden-dropout", "0.1", "--save-interval", "2",
)  # fmt: skip
_CP2 = ("--context-parallel-size", "2")
LAYOUTS = {
    "CP 2": (2, _CP2),
    "CP 2, async saves": (2, (*_CP2, "--async-save")),
    "TP 2 x CP 2": (4, (*_CP2, "--tensor-model-parallel-size", "2")),
    "TP 2 x CP 2, async saves": (4, (*_CP2, "--tensor-model-parallel-size", "2", "--async-save")),
    "PP 2 x CP 2": (4, (*_CP2, "--pipeline-model-parallel-size", "2")),
    "PP 2 x CP 2, async saves": (4, (*_CP2, "--pipeline-model-parallel-size", "2", "--async-save")),
}
# phase -> what begins it, how often a run calls it, about how many seconds it lasts
PHASES = {
    "step": (("megatron_cp.training.bad_steps.check", "StepCheck.compute"), 5, 0.2),
    "save": (("megatron_cp.training.checkpoint.save", "Saver.save"), 3, 0.5),
    "load": (("megatron_cp.training.pretrain", "load_checkpoint"), 1, 0.5),
    "evaluation": (("megatron_cp.training.loop", "evaluate"), 2, 0.1),
}
_KEYS = ("lm loss", "grad-norm", "learning-rate", "data/cursor", "lm loss validation")


@dataclass(frozen=True)
class Trial:
    """One kill."""

    name: str
    layout: str
    phase: str
    kill: Kill


@dataclass(frozen=True)
class Verdict:
    """How a trial went: whether the rank died, after which checkpoint it went on, what differs at the end."""

    trial: Trial
    died: bool
    went_on_from: int | None
    difference: str | None


def draw(number: int, seed: int, layouts: tuple[str, ...] = tuple(LAYOUTS)) -> list[Trial]:
    """Kills that go through layouts and phases in turn, at random ranks, calls and moments."""
    dice, trials = random.Random(seed), []
    places = [(layout, phase) for phase in PHASES for layout in layouts]
    for place in range(number):
        layout, phase = places[place % len(places)]
        (module, function), calls, seconds = PHASES[phase]
        kill = Kill(
            rank=dice.randrange(LAYOUTS[layout][0]),
            module=module,
            function=function,
            call=1 + dice.randrange(calls),
            delay_s=dice.uniform(0, seconds),
        )
        trials.append(Trial(f"{place} {phase}", layout, phase, kill))
    return trials


def run_trials(trials: list[Trial], root: Path) -> list[Verdict]:
    """Runs the layouts whole, then every trial until it ends well, and compares."""
    layouts = sorted({trial.layout for trial in trials})
    wholes = run_program([_launch(layout, root / layout) for layout in layouts])
    for layout, ranks in zip(layouts, wholes, strict=True):
        _check_ended_well(layout, ranks)
    for trial in trials:
        if trial.phase == "load":  # a run that was stopped after its first save
            _leave_half(root / trial.layout, root / trial.name)
    killed = run_program([_launch(t.layout, root / t.name, t.kill) for t in trials])
    trackers = [root / trial.name / TRACKER for trial in trials]
    found = [int(path.read_text()) if path.is_file() else None for path in trackers]
    again = run_program([_launch(t.layout, root / t.name) for t in trials])
    verdicts = []
    for trial, before, after, at in zip(trials, killed, again, found, strict=True):
        died = before[trial.kill.rank].code == -signal.SIGKILL
        _check_ended_well(trial.name, after)
        difference = _difference(root / trial.layout, root / trial.name)
        verdicts.append(Verdict(trial, died, at, difference))
    return verdicts


def _launch(layout: str, folder: Path, kill: Kill | None = None) -> Launch:
    world_size, flags = LAYOUTS[layout]
    where = ("--save", str(folder), "--load", str(folder))
    # Ranks that look for a dead one in the store, to make a group with it, wait long: here no torchrun ends them.
    timeout = HANG_SECONDS if kill is None else HANG_SECONDS / 5
    return Launch((*RUN, *flags, *where), world_size, kill=kill, timeout=timeout)


def _check_ended_well(name: str, ranks: list[Outcome]) -> None:
    assert all(rank.code == 0 for rank in ranks), f"{name}: " + "".join(
        rank.stderr[-2000:] for rank in ranks
    )


def _leave_half(whole: Path, folder: Path) -> None:
    """The folder of the whole run as it was after its first save."""
    first = iteration_folder(whole, 2)
    shutil.copytree(first, folder / first.name)
    (folder / TRACKER).write_text("2")
    shutil.copy(whole / "run.json", folder)
    rows = (whole / "metrics.jsonl").read_text().splitlines(keepends=True)
    kept = [row for row in rows if json.loads(row)["iteration"] <= 2]
    (folder / "metrics.jsonl").write_text("".join(kept))


def _difference(whole: Path, folder: Path) -> str | None:
    """What differs first between a run that went on and the whole one; None if every bit is equal."""
    expected, found = _rows(whole), _rows(folder)
    for place in sorted(expected.keys() | found.keys()):
        if expected.get(place) != found.get(place):
            return f"{place}: {found.get(place)}, {expected.get(place)} in the whole run"
    last = [iteration_folder(run, 5) for run in (whole, folder)]
    manifests = [read_manifest(path) for path in last]
    assert manifests[0] is not None and manifests[1] is not None
    if manifests[0]["data"] != manifests[1]["data"]:
        return "the loader's state"
    tensors = [tensors_of(path) for path in last]
    if tensors[0].keys() != tensors[1].keys():
        return "the names of the tensors"
    for name, tensor in tensors[0].items():
        if not torch.equal(tensor, tensors[1][name]):
            return name
    return None


def _rows(folder: Path) -> dict[tuple[int, str], float]:
    """Every value that a run records of its steps and evaluations, by iteration and name."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {(row["iteration"], key): row[key] for row in rows for key in _KEYS if key in row}
