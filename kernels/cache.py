"""The user's cache of compiled files: private, each file made once and seen whole or not at all.

Whoever can write there can run code as the user, on the GPU too, so a folder that others can write to is refused.
Standard library only.
"""

import errno
import fcntl
import grp
import os
import pwd
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def user_folder(kind: str, content: str) -> Path:
    """Returns `$XDG_CACHE_HOME/megatron_cp/kind` (~/.cache without it), made on first use with mode 0700.

    `content`: what an error calls the files there.

    Raises: PermissionError if the folder belongs to someone else or if others can write to it, or to a folder above
    it: they could put another in its place.
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
    for above in _up_to_home(folder.resolve()):
        state = above.stat()
        if state.st_uid not in (os.getuid(), 0) or _others_can_replace(state):
            raise PermissionError(
                f"{content} cache {folder} lies below {above}, which has owner {state.st_uid} and mode "
                f"{stat.S_IMODE(state.st_mode):o}: others could replace the cache; chmod go-w it, or set XDG_CACHE_HOME"
            )
    return folder


def _up_to_home(folder: Path) -> list[Path]:
    """Returns the folders above, up to the home of the user, or to the root outside of it."""
    above = list(folder.parents)
    home = Path.home().resolve()
    return above[: above.index(home) + 1] if home in above else above


def _others_can_replace(state: os.stat_result) -> bool:
    """Whether others can rename what is in a folder; not where it is sticky, or its group is the user's own."""
    if state.st_mode & stat.S_ISVTX:
        return False
    by_group = bool(state.st_mode & stat.S_IWGRP) and not _is_own_group(state.st_gid)
    return by_group or bool(state.st_mode & stat.S_IWOTH)


def _is_own_group(number: int) -> bool:
    """Whether a group is that of the user alone, of the same name, as most systems make one."""
    try:
        group, user = grp.getgrgid(number), pwd.getpwuid(os.getuid())
    except KeyError:
        return False
    return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def make_once(path: Path, make: Callable[[], None]) -> Path:
    """Returns `path` after `make()` has made it, unless it is there; processes that need it at once wait for one.

    Where the file system has no locks, the worst is to make it twice.
    """
    if not path.is_file():
        lock = _open_lock(path.with_suffix(".lock"))
        try:
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.is_file():  # another process may have made it meanwhile
                make()
        finally:
            os.close(lock)
    return path


def _open_lock(path: Path) -> int:
    """Returns a descriptor; never through a link, which would open a file of another's choice."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as problem:
        if problem.errno != errno.ELOOP:
            raise
        raise PermissionError(f"{path} is a link; a lock must be a file: remove it") from None


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
