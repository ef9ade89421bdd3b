"""What tests leave behind is found: orphans of every kind, and files in shared memory."""

import multiprocessing
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


@pytest.fixture
def shared(tmp_path, monkeypatch) -> Path:
    """A folder in the place of shared memory: tests beside this one look into, and clear, the real one."""
    monkeypatch.setattr(processes, "_SHARED_MEMORY", tmp_path)
    return tmp_path


def test_a_file_in_shared_memory_that_nobody_holds_is_found(shared, monkeypatch):
    file = shared / "psm_of_a_test"
    file.touch()
    with file.open("rb"):
        processes.check_nothing_is_left(set())  # somebody holds it
    _assert_it_is_found(file, monkeypatch)
    processes.check_nothing_is_left({file.name})


def test_a_semaphore_whose_maker_was_killed_inside_glibc_goes_once_nobody_holds_it(
    shared, monkeypatch
):
    first, second = (shared / f"sem.{name}" for name in ("of_glibc", "mp-of_a_test"))
    first.touch()
    second.hardlink_to(first)
    with second.open("rb"):
        processes.check_nothing_is_left(set())
        assert second.exists()  # its maker may be between the two names
    processes.check_nothing_is_left(set())
    assert not first.exists() and not second.exists()
    second.touch()
    _assert_it_is_found(second, monkeypatch)


def _assert_it_is_found(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as impatient:
        impatient.setattr(processes, "HANG_SECONDS", 0.1)
        with pytest.raises(AssertionError, match=file.name):
            processes.check_nothing_is_left(set())


def test_shared_memory_is_where_semaphores_of_python_lie():
    semaphore = multiprocessing.get_context("spawn").Semaphore()
    assert semaphore._semlock.name.removeprefix("/") in {
        name.removeprefix("sem.") for name in processes.shared_memory()
    }
