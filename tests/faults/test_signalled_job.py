"""Signals as schedulers and launchers send them: to every process of a job, and to torchrun alone."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from megatron_cp.training.checkpoint.files import TRACKER, iteration_folder, read_manifest
from tests.processes import HANG_SECONDS, wait_until
from tests.training.commands import DATA, MODEL, command_line, environment, metrics

pytestmark = pytest.mark.timeout(1800)

RUN = (
    *MODEL, *DATA, "--num-workers", "1", "--micro-batch-size", "1", "--global-batch-size", "2",
    "--train-iters", "100000", "--lr", "1e-3", "--log-interval", "1", "--eval-iters", "0",
    "--exit-signal-handler",
)  # fmt: skip


@contextmanager
def job(folder: Path, command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A job, once it has made its first step; none of it runs after the block."""
    with (folder / "output.txt").open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, text=True, env=environment(str(folder)),
        )  # fmt: skip
    rows = folder / "run" / "metrics.jsonl"
    try:
        wait_until(
            lambda: process.poll() is not None or (rows.is_file() and rows.stat().st_size > 0),
            "no step was made",
        )
        assert process.poll() is None, (folder / "output.txt").read_text()[-3000:]
        yield process
    finally:
        send(signal.SIGKILL, process.pid)
        process.wait()


def send(number: int, pid: int) -> None:
    """Signals a process and all that it started, children first; torchrun gives ranks their own sessions."""
    for child in children_of(pid):
        send(number, child)
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def children_of(pid: int) -> list[int]:
    with suppress(OSError):
        tasks = Path(f"/proc/{pid}/task").glob("*/children")
        return [int(word) for task in tasks for word in task.read_text().split()]
    return []


def check_saved_once(folder: Path) -> None:
    said = (folder / "output.txt").read_text()
    iteration = int((folder / "run" / TRACKER).read_text())
    assert read_manifest(iteration_folder(folder / "run", iteration)) is not None
    assert said.count("successfully saved checkpoint") == 1, said[-3000:]
    assert "exiting program after receiving" in said
    assert max(metrics(folder / "run")) == iteration


def test_a_signal_to_every_process_of_a_job_ends_it_with_code_0(tmp_path: Path):
    """SLURM's `--signal=USR1@300`: launcher, ranks, loader workers and wandb get it."""
    torchrun = command_line(2, *RUN, "--exit-signal", "SIGUSR1", "--save", str(tmp_path / "run"))
    with job(tmp_path, ["bash", "-c", 'trap "" USR1; exec "$@"', "job", *torchrun]) as process:
        send(signal.SIGUSR1, process.pid)
        code = process.wait(HANG_SECONDS)
    assert code == 0, (tmp_path / "output.txt").read_text()[-3000:]
    check_saved_once(tmp_path)
    assert len(list((tmp_path / "run").rglob("*.wandb"))) == 1
    assert "wandb stopped working" not in (tmp_path / "output.txt").read_text()


def test_torchrun_passes_sigterm_on_and_waits_for_the_save(tmp_path: Path):
    save = ("--save", str(tmp_path / "run"), "--no-wandb")
    with job(tmp_path, command_line(2, *RUN, *save)) as process:
        process.send_signal(signal.SIGTERM)
        process.wait(HANG_SECONDS)
    check_saved_once(tmp_path)


def test_a_signal_before_the_first_import_is_kept(tmp_path: Path):
    """The program signals itself as the first thing after the handler is there."""
    program = (
        "import os, signal, sys, time\n"
        "from megatron_cp.training import exit_signal\n"
        "exit_signal.catch_exit_signal(['--exit-signal-handler'])\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "assert exit_signal.arrived() and 'torch' not in sys.modules\n"
        "if os.fork() == 0:\n"
        "    exit_signal._arrived = False\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    os._exit(int(exit_signal.arrived()))\n"
        "assert os.wait()[1] == 0, 'a fork took the signal for its own'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=environment(str(tmp_path)),
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("SIGTERM received") == 1
