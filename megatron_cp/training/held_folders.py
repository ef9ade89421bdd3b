"""One live run in a folder: a second one is refused, and what a dead one left behind refuses nobody.

    <folder>/.in_use     "node7 4711": machine and process that hold the lock on this file

The first rank holds a record lock. The kernel drops it when that process ends, however it ends, and no child inherits
it. A file server keeps the locks of a machine that died until their lease is over; so another machine's is waited
for. Where the file system has no locks nothing is refused.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from megatron_cp.training.logging.lines import print_rank_0

NAME = ".in_use"
# The lease of Linux's NFS 4 server is 90 s, and Lustre takes about 150 s to give a client up.
_LEASE_S = 180.0


def hold(flag: str, folder: Path) -> int:
    """Returns the descriptor that holds the folder's lock.

    Raises ValueError where another process keeps it, OSError where there can be none.
    """
    path, own_host = folder / NAME, socket.gethostname()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    end = time.monotonic() + _LEASE_S
    is_told = False
    try:
        while (holder := _taken(descriptor)) is not None:
            host, _, process = holder.partition(" ")
            who = f"process {process} on {host}"
            if host == own_host or time.monotonic() > end:
                raise ValueError(
                    f"{flag} {folder} is in use by another run, {who}; give a folder of its own to this run, or end "
                    f"the other (if no such process is there any more, remove {path})"
                )
            if not is_told:
                print_rank_0(f"> {flag} {folder} is in use by {who}; waiting for its end")
                is_told = True
            time.sleep(1)
        with suppress(OSError):  # a full disk; held is held
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{own_host} {os.getpid()}".encode(), 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _taken(descriptor: int) -> str | None:
    """Locks the file and returns None; where another process has the lock, what it wrote of itself."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as problem:
        if problem.errno not in (errno.EACCES, errno.EAGAIN):
            raise
        return os.pread(descriptor, 300, 0).decode(errors="replace")
    return None
