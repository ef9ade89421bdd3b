"""Nothing of a run outlives torchrun: its ranks end with it, and what they left in the temporary folder goes.

    torchrun ──> ranks          the kernel kills them when torchrun dies, also by SIGKILL
        └──────> rank 0 ──> a small process that waits for torchrun's end, tidies up, and ends

    torchelastic_*/                      torchrun makes it for logs that nobody asked for, and leaves it after every run
    megatron_cp_<torchrun>_*/            one of each rank: temporary files of wandb, of compilers, and ours
    /dev/shm/sem.megatron_cp_<torchrun>_*    semaphores whose makers were killed before they had unlinked them

A rank cannot do this itself: it may be killed, and torchrun starts others below its folder. Nothing but the standard
library is imported here: this runs before the slow imports.
"""

from __future__ import annotations

import getpass
import multiprocessing
import os
import re
import select
import shutil
import signal
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_cp.processes import die_with_parent

_MADE_BY_TORCHRUN = "torchelastic_"
_SHARED_MEMORY = Path("/dev/shm")
_FOR_THE_RUN = (
    signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2,
)  # fmt: skip


def end_with_torchrun(environment: Mapping[str, str]) -> None:
    """Makes this rank, and its temporary files, end with torchrun. Call it first, in the main thread.

    Does nothing under another launcher, and nothing about files on a Linux before 5.3.
    """
    if "TORCHELASTIC_RUN_ID" not in environment:
        return
    launcher = os.getppid()
    die_with_parent(launcher)
    if not hasattr(os, "pidfd_open"):
        return
    try:
        handle = os.pidfd_open(launcher)
    except OSError:
        return
    prefix = f"megatron_cp_{launcher}_{_start_of(launcher)}_"
    if environment.get("LOCAL_RANK") == environment.get("TORCHELASTIC_RESTART_COUNT") == "0":
        error_file = environment.get("TORCHELASTIC_ERROR_FILE", "")
        _tidy_up_after(handle, _folder_of_torchrun(error_file), Path(tempfile.gettempdir()), prefix)
    os.close(handle)
    _use_own_temporary_folder(prefix)
    name_semaphores(prefix)


def _start_of(pid: int) -> str:
    """Returns when a process started, in clock ticks: with its number nobody else's name, in containers too."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def _folder_of_torchrun(error_file: str) -> Path | None:
    """Returns the temporary folder above the file; None where logs go to a folder of the user's."""
    above = (path for path in Path(error_file).parents if path.name.startswith(_MADE_BY_TORCHRUN))
    return next(above, None)


def _use_own_temporary_folder(prefix: str) -> None:
    """Makes temporary files of this process, and of those that it starts, go into a folder of its own.

    What is compiled stays where torch keeps it for the next run.
    """
    user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    kept = Path(tempfile.gettempdir()) / f"torchinductor_{user}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(kept))
    tempfile.tempdir = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix=prefix)


def name_semaphores(prefix: str) -> None:
    """Makes semaphores of this process, and of those that it forks, begin with the prefix, not with Python's."""
    own: Any = multiprocessing.current_process()
    own._config["semprefix"] = f"/{prefix}"  # what forks inherit; Python has no public name for it


def _tidy_up_after(launcher: int, logs: Path | None, temporary: Path, prefix: str) -> None:
    """Forks the process that waits for the end of `launcher`, a descriptor, and removes what is left.

    It holds no pipe and heeds no signal of the run.
    """
    if os.fork():
        return
    try:
        os.setsid()
        for number in _FOR_THE_RUN:
            signal.signal(number, signal.SIG_IGN)
        nothing = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(nothing, standard)
        select.select([launcher], [], [])
        if logs is not None:
            remove_empty_folders(logs)
        remove_own_folders(temporary, prefix)
        remove_own_semaphores(_SHARED_MEMORY, prefix)
    finally:
        os._exit(0)


def remove_empty_folders(folder: Path) -> None:
    """Removes the folder and those below it that hold no file; logs that a user asked for stay."""
    for below, _, _ in os.walk(folder, topdown=False):
        with suppress(OSError):
            Path(below).rmdir()


def remove_own_folders(parent: Path, prefix: str) -> None:
    """Removes this user's folders of that name; links, and what belongs to others, stay."""
    for path in parent.glob(f"{prefix}*"):
        with suppress(FileNotFoundError):
            if path.lstat().st_uid == os.getuid() and path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)


def remove_own_semaphores(parent: Path, prefix: str) -> None:
    """Removes this user's semaphores of that name, and the names under which glibc made them."""
    own = set()
    for path in parent.glob(f"sem.{prefix}*"):
        with suppress(FileNotFoundError):  # others of the run remove theirs at the same time
            found = path.lstat()
            own |= {found.st_ino} if found.st_uid == os.getuid() else set()
    for path in parent.glob("sem.*"):
        with suppress(FileNotFoundError):
            if path.lstat().st_ino in own:
                path.unlink()
