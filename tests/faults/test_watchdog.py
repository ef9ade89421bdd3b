"""A rank that is stopped or never comes: the others name it, with its stage, before their collectives give up."""

import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_cp.training.watchdog import Beat, Progress, Watchdog, record_collectives, verdict
from tests.faults.program import Kill, Launch, run_program
from tests.training.commands import DATA, MODEL, error_lines

RUN = (
    *MODEL, *DATA, "--micro-batch-size", "1", "--global-batch-size", "2", "--train-iters", "50", "--lr", "1e-3",
    "--log-interval", "1", "--eval-iters", "0", "--no-wandb",
)  # fmt: skip
CP2 = ("--context-parallel-size", "2")
IMPATIENT = "tests.faults.plants.impatient"
LOOP = "megatron_cp.training.loop"
STEP = "megatron_cp.training.step"
STOPPED = {
    "in the forward pass": (
        CP2,
        Kill(1, "megatron_cp.training.gpt", "local_batch", 5, signals=(signal.SIGSTOP,)),
        "forward and backward of step 3",
    ),
    "while it waits for batches": (
        ("--pipeline-model-parallel-size", "2"),
        Kill(0, STEP, "next_batches", 4, signals=(signal.SIGSTOP,)),
        "batches of step 4",
    ),
}


@pytest.mark.timeout(1800)
def test_a_rank_that_is_stopped_or_stays_away_is_named_with_its_stage_and_all_stacks_are_kept(
    tmp_path,
):
    launches = [
        Launch((*RUN, *flags, "--run-dir", str(tmp_path / name)), 2, kill=kill, plant=IMPATIENT)
        for name, (flags, kill, _) in STOPPED.items()
    ]
    late = (*RUN, *CP2, "--run-dir", str(tmp_path / "late"))
    launches.append(Launch(late, 2, plant="tests.faults.plants.late_rank"))
    *stopped, waited_for = run_program(launches, at_once=len(launches))
    for (name, (_, kill, stage)), ranks in zip(STOPPED.items(), stopped, strict=True):
        other = ranks[1 - kill.rank]
        assert ranks[kill.rank].code is None
        assert other.code == 1, other.stderr[-3000:]
        assert "warning: nothing moved for" in other.stderr
        (line,) = error_lines(other.stderr)
        assert f"error: rank {kill.rank} (pipeline stage" in line
        assert "is stopped (SIGSTOP)" in line
        assert f"its last stage: {stage}" in line
        stack = tmp_path / name / "stacks" / f"rank_{1 - kill.rank}.txt"
        assert "loop.py" in stack.read_text()
    (line,) = error_lines(waited_for[0].stderr)
    assert waited_for[0].code == 1
    assert "the other ranks wait for rank 1 (pipeline stage 0, replica 0, context rank 1" in line
    assert "forward and backward of step 2, at faults/plants.py" in line.replace("tests/", "")
    for rank in (0, 1):
        assert "faults/plants.py" in (tmp_path / "late/stacks/rank_1.txt").read_text()
        assert (tmp_path / f"late/stacks/rank_{rank}.txt").stat().st_size


def beat(rank: int, count: int, *, waits: bool, host: str = "far") -> Beat:
    return Beat(rank, host, 1, count, f"rank {rank} (stage)", "update of step 3", "a.py:1", waits)


def test_ranks_of_other_nodes_are_named_too():
    first = [beat(0, 5, waits=True), beat(1, 5, waits=True), beat(2, 5, waits=True)]
    second = [beat(0, 7, waits=True), beat(1, 5, waits=True), beat(2, 7, waits=True)]
    line, speaker = verdict(first, second)
    assert line.startswith("rank 1 (stage) on far, process 1, does not answer")
    assert "its last stage: update of step 3, when it was last heard of" in line
    assert speaker == 0


def test_nothing_is_said_where_no_rank_waits():
    first = [beat(0, 5, waits=False), beat(1, 5, waits=False)]
    second = [beat(0, 6, waits=False), beat(1, 6, waits=False)]
    assert verdict(first, second) is None


def test_ranks_that_all_wait_may_be_in_different_collectives():
    first = [beat(0, 5, waits=True), beat(1, 5, waits=True)]
    second = [beat(0, 6, waits=True), beat(1, 6, waits=True)]
    line, _ = verdict(first, second)
    assert "every rank waits in a collective" in line


def told(folder: Path, capfd) -> list[str]:
    """The lines of rank 0, which found something, with that folder for its run."""
    watchdog = Watchdog.__new__(Watchdog)  # no thread, no store
    records, parallel = SimpleNamespace(run_dir=str(folder)), SimpleNamespace(rank=0)
    watchdog.config = SimpleNamespace(records=records, parallel=parallel)
    watchdog.place, watchdog.progress = "rank 0 (stage)", Progress(3, "update")
    try:
        watchdog._tell("rank 1 is stopped", 0, 48.0)
    finally:
        os.close(watchdog.progress.memory)
    assert watchdog.finding == f"rank 1 is stopped; stacks are in {folder / 'stacks'}"
    return capfd.readouterr().err.splitlines()


def test_the_line_comes_and_then_the_stack(tmp_path, capfd):
    (line,) = told(tmp_path, capfd)
    assert line.startswith("warning: nothing moved for 48 s: rank 1 is stopped; stacks are in ")
    stack = (tmp_path / "stacks" / "rank_0.txt").read_text()
    assert stack.startswith("rank 0 (stage), in update of step 3\nrank 1 is stopped\n")
    assert "test_watchdog.py" in stack


@pytest.mark.parametrize("fault", ["a full disk", "no folder"])
def test_a_stack_that_cannot_be_written_keeps_no_line(tmp_path, capfd, fault: str):
    if fault == "a full disk":
        (tmp_path / "run" / "stacks").mkdir(parents=True)
        (tmp_path / "run" / "stacks" / "rank_0.txt").symlink_to("/dev/full")
    else:
        (tmp_path / "run").write_text("a file")
    first, second = told(tmp_path / "run", capfd)
    assert first.startswith("warning: nothing moved for 48 s: rank 1 is stopped")
    assert second.startswith("warning: the stack of rank 0 (stage) could not be written: [Errno ")


@pytest.mark.parametrize(
    ("version", "name"),
    [("2.8.0", "TORCH_NCCL_TRACE_BUFFER_SIZE"), ("2.13.0+cpu", "TORCH_FR_BUFFER_SIZE")],
)
def test_the_flight_recorder_is_asked_for_by_the_name_that_torch_knows(
    version, name, tmp_path, monkeypatch
):
    monkeypatch.setattr(torch, "__version__", version)
    environment: dict[str, str] = {}
    record_collectives(str(tmp_path), environment)
    assert {key for key in environment if "BUFFER" in key} == {name}
    assert (tmp_path / "stacks").is_dir()
