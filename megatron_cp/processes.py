"""A process that ends with the one that started it, however that one ends.

Nothing but the standard library is imported here: loader workers and launched ranks call it before slow imports.
"""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def die_with_parent(parent: int) -> None:
    """From now on the kernel kills this process when `parent`, which started it, dies, also by SIGKILL.

    The process ends at once where the parent, given as its number, is gone already. Linux counts the thread that
    started the process as its parent.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)
