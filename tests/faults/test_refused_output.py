"""A log that nobody takes: the run ends as it would have, with the same numbers."""

import errno
import io
import os
import signal
import subprocess
import sys

import pytest

from megatron_cp.training import exit_signal, output
from tests.processes import HANG_SECONDS
from tests.training.commands import ROOT, SMALL_RUN, environment, metrics, train

RUN = tuple(SMALL_RUN)


def open_refusing(kind: str) -> int:
    """A descriptor that takes nothing: of a full disk, or of a pipe whose reader is gone."""
    if kind == "full disk":
        return os.open("/dev/full", os.O_WRONLY)
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize("kind", ["full disk", "gone reader"])
def test_a_run_whose_log_is_refused_ends_like_another(tmp_path, kind: str):
    command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *RUN, "--save", str(tmp_path / "run")]
    log = open_refusing(kind)
    try:
        done = subprocess.run(
            command,
            stdout=log,
            stderr=log,
            timeout=HANG_SECONDS,
            env=environment(str(tmp_path)),
            check=False,
        )
    finally:
        os.close(log)
    assert done.returncode == 0
    train(1, *RUN, "--run-dir", str(tmp_path / "other"))
    losses = metrics(tmp_path / "run")
    assert sorted(losses) == [1, 2, 3, 4] and losses == metrics(tmp_path / "other")
    assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text() == "4"


@pytest.mark.parametrize("buffered", [True, False])
def test_lines_are_lost_while_they_are_refused_and_told_once(capfd, buffered: bool):
    reader, writer = os.pipe()
    place = os.dup(writer)
    raw = io.FileIO(writer, "w")
    given = io.TextIOWrapper(
        io.BufferedWriter(raw) if buffered else raw, write_through=not buffered
    )
    stream = output._patient(given, "the log")
    print("first", file=stream, flush=True)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, writer)
    for _ in range(3):
        print("lost" * 5000, file=stream, flush=True)
    os.dup2(place, writer)
    print("last", file=stream, flush=True)
    assert os.read(reader, 100_000) == b"first\nlast\n"
    told = capfd.readouterr().err
    assert told == "WARNING: lines are lost: the log: No space left on device; the run goes on\n"
    stream.close()
    given.close()
    for descriptor in (reader, place, full):
        os.close(descriptor)


def test_a_signal_is_kept_where_nothing_can_be_said_of_it(monkeypatch):
    def refuse(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(exit_signal, "_catcher", os.getpid())
    monkeypatch.setattr(exit_signal, "_arrived", False)
    monkeypatch.setattr(exit_signal.os, "write", refuse)
    exit_signal._note(signal.SIGUSR1, None)
    assert exit_signal.arrived()
