"""`torchrun ... | tee log` ends when a rank is killed, also one that has written checkpoints."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.processes import HANG_SECONDS, left_running
from tests.training.commands import SMALL_RUN, command_line, environment

pytestmark = [pytest.mark.slow]

LONG = ("--train-iters", "100000", "--lr-decay-iters", "100000", "--eval-iters", "0", "--no-wandb")


def rank_zero() -> int:
    """The process id of the run's first rank."""
    for pid in left_running():
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        if b"RANK=0" in variables and b"pretrain_gpt.py" in command:
            return pid
    raise AssertionError(f"no rank 0 among {left_running()}")


def test_the_output_of_a_run_ends_when_its_first_rank_is_killed_after_a_save(tmp_path: Path):
    flags = [*SMALL_RUN, *LONG, "--save", str(tmp_path / "run"), "--save-interval", "2"]
    run = subprocess.Popen(
        command_line(2, *flags, "--context-parallel-size", "2"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment(str(tmp_path)),
    )
    tee = subprocess.Popen(["cat"], stdin=run.stdout, stdout=subprocess.PIPE, text=True)
    run.stdout.close()  # the reader is the only one
    said = []
    for line in tee.stdout:
        said.append(line)
        if "successfully saved checkpoint from iteration       4" in line:
            os.kill(rank_zero(), signal.SIGKILL)
            break
    else:
        raise AssertionError("".join(said)[-3000:])
    rest, _ = tee.communicate(timeout=HANG_SECONDS)  # until nobody holds the pipe open
    assert tee.returncode == 0
    assert run.wait(timeout=HANG_SECONDS) != 0
    assert "Signal 9 (SIGKILL)" in rest
