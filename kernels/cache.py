"""The user's cache of compiled files: private, each file made once and seen whole or not at all.

Whoever can write there can run code as the user, on the GPU too, so a folder that others can write to is refused.
Standard library only.
"""

import fcntl
import os
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def user_folder(kind: str, content: str) -> Path:
    """Returns `$XDG_CACHE_HOME/megatron_cp/kind` (~/.cache without it), made on first use with mode 0700.

    `content`: what an error calls the files there.

    Raises: PermissionError if the folder belongs to someone else or if others can write to it.
    """
    folder = _folder(kind)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return _checked(folder, content)


def existing_folder(kind: str, content: str) -> Path | None:
    """Returns the same folder if it is there, None if not. Raises PermissionError like `user_folder`."""
    folder = _folder(kind)
    return _checked(folder, content) if folder.is_dir() else None


def _folder(kind: str) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "megatron_cp", kind)


def _checked(folder: Path, content: str) -> Path:
    state = folder.stat()
    if state.st_uid != os.getuid() or state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(
            f"{content} cache {folder} has owner {state.st_uid} and mode {stat.S_IMODE(state.st_mode):o}; it must "
            f"belong to user {os.getuid()} and be writable by nobody else: chmod 700 it, or set XDG_CACHE_HOME"
        )
    return folder


def make_once(path: Path, make: Callable[[], None]) -> Path:
    """Returns `path` after `make()` has made it, unless it is there; processes that need it at once wait for one.

    Where the file system has no locks, the worst is to make it twice.
    """
    if not path.is_file():
        with path.with_suffix(".lock").open("w") as lock:
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.is_file():  # another process may have made it meanwhile
                make()
    return path


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file that others see whole or not at all."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        with suppress(FileNotFoundError):
            Path(name).unlink()
        raise
