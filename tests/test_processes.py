"""What tests leave behind is found: orphans of every kind, and files in shared memory."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests import processes

ORPHANS = {
    "its parent ended": "sleep 3600 > /dev/null & echo $!",
    "in a session of its own": "setsid sleep 3600 > /dev/null & echo $!",
}


@pytest.mark.parametrize("command", ORPHANS.values(), ids=ORPHANS)
def test_an_orphan_is_found(command, monkeypatch):
    pid = int(subprocess.run(["sh", "-c", command], stdout=subprocess.PIPE, check=True).stdout)
    try:
        processes.wait_until(lambda: pid in processes.left_running(), "it was not adopted")
        monkeypatch.setattr(processes, "HANG_SECONDS", 0.1)
        with pytest.raises(AssertionError, match=r"processes are left.*sleep 3600"):
            processes.check_nothing_is_left(set())
    finally:
        os.kill(pid, signal.SIGKILL)
    monkeypatch.undo()
    processes.wait_until(lambda: pid not in processes.left_running(), "it still runs")


def test_a_file_in_shared_memory_that_nobody_holds_is_found(monkeypatch):
    before = processes.shared_memory()
    file = Path("/dev/shm", f"psm_of_a_test_{os.getpid()}")
    file.touch()
    monkeypatch.setattr(processes, "HANG_SECONDS", 0.1)
    with file.open("rb"):
        processes.check_nothing_is_left(before)  # somebody holds it
    try:
        with pytest.raises(AssertionError, match=file.name):
            processes.check_nothing_is_left(before)
    finally:
        file.unlink()
    processes.check_nothing_is_left(before)


def test_a_semaphore_whose_maker_was_killed_inside_glibc_goes_once_nobody_holds_it(monkeypatch):
    before = processes.shared_memory()
    first, second = (
        Path("/dev/shm", f"sem.{name}{os.getpid()}") for name in ("of_glibc_", "mp-of_a_test_")
    )
    first.touch()
    second.hardlink_to(first)
    monkeypatch.setattr(processes, "HANG_SECONDS", 0.1)
    try:
        with second.open("rb"):
            processes.check_nothing_is_left(before)
            assert second.exists()  # its maker may be between the two names
        processes.check_nothing_is_left(before)
        assert not first.exists() and not second.exists()
        second.touch()
        with pytest.raises(AssertionError, match=second.name):
            processes.check_nothing_is_left(before)
    finally:
        first.unlink(missing_ok=True)
        second.unlink(missing_ok=True)
