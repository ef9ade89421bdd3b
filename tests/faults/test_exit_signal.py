"""The exit signal to one rank: all ranks agree, save once, and leave with code 0, wherever they are."""

import json
import os
import shutil
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from megatron_cp.training import exit_signal
from megatron_cp.training.checkpoint.files import TRACKER, iteration_folder, read_manifest
from tests.faults.program import Kill, Launch, Outcome, run_program
from tests.training.commands import DATA, MODEL

pytestmark = pytest.mark.timeout(1800)

HANDLER = ("--exit-signal-handler",)
RUN = (
    *MODEL, *DATA, "--micro-batch-size", "1", "--global-batch-size", "2", "--train-iters", "4",
    "--lr", "1e-3", "--log-interval", "1", "--eval-iters", "3", "--eval-interval", "2", "--no-wandb",
    "--context-parallel-size", "2", "--hidden-dropout", "0.1", "--split", "2,1,1", "--num-workers", "1",
)  # fmt: skip
STEP, SAVE = "megatron_cp.training.bad_steps.check", "megatron.core.dist_checkpointing"


def term(module: str, function: str, call: int = 1, times: int = 1, after: bool = False) -> Kill:
    return Kill(1, module, function, call, after, (signal.SIGTERM,) * times)


# where the signal comes -> the iteration at which the run leaves (None: nothing to save yet)
PLACES: dict[str, tuple[Kill, int | None]] = {
    "while the model is built": (term("megatron_cp.training.pretrain", "build_model"), None),
    "in a step": (term(STEP, "StepCheck.compute", 2), 2),
    "twice in a step": (term(STEP, "StepCheck.compute", 2, times=2), 2),
    # two micro-batches of a step and one run of the schedule a batch: the second batch of the evaluation
    "in an evaluation": (term("megatron_cp.training.step", "Runner.sums", 4), 2),
    "in a save": (term(SAVE, "save", 1, after=True), 3),
    "in the last evaluation": (term("megatron_cp.training.step", "Runner.sums", 9), 4),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, dict[str, list[Outcome]]]:
    """One run that nobody disturbs, one for each place, and one that goes on after a signal."""
    root = tmp_path_factory.mktemp("signals")

    def launch(name: str, *more: str, kill: Kill | None = None) -> Launch:
        return Launch((*RUN, "--save", str(root / name), *more), 2, kill=kill)

    launches = {"whole": launch("whole")}
    for name, (kill, _) in PLACES.items():
        launches[name] = launch(name, "--save-interval", "3", *HANDLER, kill=kill)
    launches["without the flag"] = launch("without the flag", kill=PLACES["in a step"][0])
    usr1 = Kill(0, STEP, "StepCheck.compute", 2, signals=(signal.SIGUSR1,))
    launches["another signal"] = launch(
        "another signal", *HANDLER, "--exit-signal", "SIGUSR1", kill=usr1
    )
    outcomes = dict(zip(launches, run_program(list(launches.values())), strict=True))
    shutil.copytree(root / "in an evaluation", root / "restart")
    rest = launch("restart", *HANDLER, "--load", str(root / "restart"))
    (outcomes["restart"],) = run_program([rest])
    return root, outcomes


def rows_of(folder: Path, key: str) -> dict[int, float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["iteration"]: row[key] for row in rows if key in row}


@pytest.mark.parametrize("name", PLACES)
def test_every_rank_leaves_with_code_0_after_one_save(runs, name: str):
    root, outcomes = runs
    ranks, iteration = outcomes[name], PLACES[name][1]
    assert [rank.code for rank in ranks] == [0, 0], ranks[1].stderr[-3000:]
    assert ranks[0].stdout.count("exiting program after receiving SIGTERM.") == 1
    assert ranks[1].stderr.count("SIGTERM received") == 1
    saves = {None: 0, 2: 1, 3: 1, 4: 2}[iteration]
    assert ranks[0].stdout.count("successfully saved checkpoint") == saves
    tracker = root / name / TRACKER
    assert (tracker.read_text() if tracker.exists() else None) == (iteration and str(iteration))
    if iteration is not None:
        assert read_manifest(iteration_folder(root / name, iteration)) is not None
    assert not list((root / name).glob("*.unfinished"))


def test_an_evaluation_that_is_cut_short_is_not_logged(runs):
    root, outcomes = runs
    key = "lm loss validation"
    assert sorted(rows_of(root / "whole", key)) == [2, 4]
    assert rows_of(root / "in an evaluation", key) == {}
    assert "validation loss" not in outcomes["in an evaluation"][1].stdout
    assert sorted(rows_of(root / "in the last evaluation", key)) == [2]


def test_a_restart_after_a_signal_ends_bitwise_where_the_undisturbed_run_ends(runs):
    root, outcomes = runs
    restart = outcomes["restart"]
    assert [rank.code for rank in restart] == [0, 0], restart[0].stderr[-3000:]
    for key in ("lm loss", "grad-norm"):
        whole = rows_of(root / "whole", key)
        assert rows_of(root / "restart", key) == whole
        assert sorted(whole) == [1, 2, 3, 4]


def test_without_the_flag_a_signal_does_what_it_does_to_any_program(runs):
    ranks = runs[1]["without the flag"]
    assert ranks[1].code == -signal.SIGTERM
    assert ranks[0].code not in (0, None)


def test_the_signal_can_be_chosen(runs):
    ranks = runs[1]["another signal"]
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].stderr[-3000:]
    assert "exiting program after receiving SIGUSR1." in ranks[0].stdout
    assert (runs[0] / "another signal" / TRACKER).read_text() == "2"


@pytest.fixture
def caught(monkeypatch):
    """This process notes SIGUSR2 for the length of a test."""
    for name in ("_caught", "_catcher", "_arrived"):
        monkeypatch.setattr(exit_signal, name, getattr(exit_signal, name))
    before = signal.getsignal(signal.SIGUSR2)
    exit_signal.catch_exit_signal(["--exit-signal-handler", "--exit-signal", "SIGUSR2"])
    yield
    signal.signal(signal.SIGUSR2, before)


def test_the_signal_is_noted_and_said_once_and_a_fork_that_writes_says_nothing(caught, capfd):
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGUSR2)
        os._exit(int(exit_signal.arrived()))
    assert os.waitpid(child, 0)[1] == 0
    assert not exit_signal.arrived()
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGUSR2)
    assert exit_signal.arrived()
    said = capfd.readouterr().err
    assert said == "SIGUSR2 received: this rank leaves after the current step\n"


def test_a_program_that_the_last_checkpoint_needs_never_sees_the_signal(caught):
    with exit_signal.held_back():
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR2)  # whatever threads others left
        assert not exit_signal.arrived()
        status = subprocess.run(["cat", "/proc/self/status"], stdout=subprocess.PIPE, text=True)
    assert exit_signal.arrived()
    (blocked,) = (x for x in status.stdout.splitlines() if x.startswith("SigBlk:"))
    assert int(blocked.split()[1], 16) >> (signal.SIGUSR2 - 1) & 1
