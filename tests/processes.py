"""What tests leave behind: processes that still run and files in shared memory.

The test session adopts every descendant whose parent died (PR_SET_CHILD_SUBREAPER), so none can hide behind
a killed parent, a session of its own or a closed pipe. Nothing here has a fixed time: what must happen is
waited for until it does, and `HANG_SECONDS` later it is a hang, on a slow machine under load too.
"""

import contextlib
import ctypes
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Set
from multiprocessing import resource_tracker
from pathlib import Path

from megatron_cp.training.leftovers import remove_own_semaphores

HANG_SECONDS = 300.0
_PR_SET_CHILD_SUBREAPER = 36
_blamed: set[int] = (
    set()
)  # left processes that a test has answered for: the next one need not wait for them too
_SHARED_MEMORY = Path("/dev/shm")
# What torch, Python and our runs name theirs; files of other programs are none of our business.
_OUR_NAMES = ("torch_", "psm_", "sem.mp-", "sem.megatron_cp_")


def wait_until(holds: Callable[[], object], what: str) -> None:
    """Returns when `holds()` is true. Raises AssertionError with `what` if it never is."""
    end = time.monotonic() + HANG_SECONDS
    while not holds():
        assert time.monotonic() < end, f"{what} (waited {HANG_SECONDS:.0f} s)"
        time.sleep(0.02)


def adopt_orphans() -> None:
    """From now on a descendant whose parent dies becomes a child of this process."""
    assert ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def is_running(pid: int) -> bool:
    """Whether the process exists and is not a zombie that nobody has reaped yet."""
    return _parent_of(pid) is not None


def left_running() -> dict[int, str]:
    """Returns the command line of every descendant that no pool or executor of the session owns."""
    parents = {pid: parent for pid in _processes() if (parent := _parent_of(pid)) is not None}
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    owned = {process.pid for process in multiprocessing.active_children()}
    owned.add(resource_tracker._resource_tracker._pid)
    found: dict[int, str] = {}
    waiting = [os.getpid()]
    while waiting:
        for pid in children.get(waiting.pop(), []):
            waiting.append(pid)
            if pid not in owned:
                found[pid] = _command_of(pid)
    return found


def shared_memory() -> set[str]:
    """Returns the names of torch's, Python's and our files in shared memory."""
    files = _SHARED_MEMORY.iterdir() if _SHARED_MEMORY.is_dir() else ()
    return {file.name for file in files if file.name.startswith(_OUR_NAMES)}


def check_nothing_is_left(shared_before: set[str]) -> None:
    """Raises AssertionError if a process, or a file in shared memory that nobody holds, stays."""
    try:
        wait_until(lambda: not left_running().keys() - _blamed, "processes are left")
    except AssertionError as hang:
        left = {pid: command for pid, command in left_running().items() if pid not in _blamed}
        _blamed.update(left)
        raise AssertionError(f"{hang}: {left}") from None
    if not shared_memory() - shared_before:
        return

    def ownerless() -> set[str]:
        found = {name for name in shared_memory() - shared_before if not _is_held(name)}
        return {name for name in found if not _removes_half_made_semaphore(name)}

    try:
        wait_until(lambda: not ownerless(), "files are left in shared memory")
    except AssertionError as hang:
        raise AssertionError(f"{hang}: {ownerless()}") from None


def _removes_half_made_semaphore(name: str) -> bool:
    """Returns whether this was one that nobody holds, and whose maker was killed inside glibc: it goes.

    Glibc had given it the second of two names, and not yet taken back the first. Under torchrun a run removes its own,
    which begin with another word; ranks of tests cannot.
    """
    with contextlib.suppress(FileNotFoundError):
        if name.startswith("sem.mp-") and (_SHARED_MEMORY / name).stat().st_nlink > 1:
            remove_own_semaphores(_SHARED_MEMORY, name.removeprefix("sem."))
            return True
    return False


def temporary_folders(folder: Path) -> set[str]:
    """Returns what a run keeps in its temporary folder while it lives: torchrun's, wandb's and our folders.

    What wandb makes when it is imported lies in ours; the session's pools, which live on, have theirs outside.
    """
    ours = ("torchelastic_", "megatron_cp_", "wandb-")
    return {path.name for path in folder.iterdir() if path.name.startswith(ours)}


def check_nothing_stays_in(folder: Path, but: Set[str] = frozenset()) -> None:
    """Raises AssertionError if a run that has ended leaves folders in its temporary folder, but those from before."""
    try:
        wait_until(lambda: not temporary_folders(folder) - but, "temporary folders are left")
    except AssertionError as hang:
        raise AssertionError(f"{hang}: {temporary_folders(folder) - but}") from None


def _processes() -> Iterator[int]:
    return (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())


def _parent_of(pid: int) -> int | None:
    """Returns the parent of a process that runs; None for one that ended."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return None
    return None if state in "ZX" else int(parent)


def _command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()[:200]
    except OSError:
        return "ended meanwhile"


def _is_held(name: str) -> bool:
    """Whether some process has the file open or mapped: then it is that process's."""
    path = _SHARED_MEMORY / name
    for pid in _processes():
        try:
            descriptors = Path(f"/proc/{pid}/fd").iterdir()
            if any(descriptor.readlink() == path for descriptor in descriptors):
                return True
            if str(path) in Path(f"/proc/{pid}/maps").read_text():
                return True
        except OSError:
            continue
    return False
