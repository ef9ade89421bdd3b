"""Megatron-Core's checkpoint writer, so that nothing of it outlives the rank that saves.

Its writer keeps a queue of results in a process of its own, which it starts at the first save and never
ends: 270 MB that hold the rank's standard output open. When the rank is killed, that process stays, and
whoever reads the output (`torchrun ... | tee log`) waits for ever. A save that training waits for runs in
the rank itself and needs no such process: a queue in memory carries the results.

    save ──> forked writers (one per file) ──> results ──> queue in memory ──> metadata
             end with the save, or with the rank that forked them

A save in the background (`background.py`) brings a pipe in place of that queue. Nothing is replaced outside
the `with` block.
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)
_rank_that_saves: int | None = None


@contextmanager
def saving_in_this_process(results: Any = None) -> Iterator[None]:
    """Within the block, Megatron-Core saves without a process that outlives this one.

    `results` carries what writers report, for a save that goes on after the block; without it this
    process waits for the save.
    """
    global _rank_that_saves
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    previous = filesystem_async._results_queue
    filesystem_async._results_queue = queue.Queue() if results is None else results
    _rank_that_saves = os.getpid()
    try:
        yield
    finally:
        _rank_that_saves = None
        filesystem_async._results_queue = previous


def _end_with_the_rank() -> None:
    """In a forked writer: the kernel kills it when the rank dies, also by SIGKILL.

    A writer whose results nobody takes would wait for ever.
    """
    global _rank_that_saves
    if _rank_that_saves is None:
        return
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != _rank_that_saves:  # it died before the line above
        os._exit(1)
    _rank_that_saves = None  # what this process forks has another parent


os.register_at_fork(after_in_child=_end_with_the_rank)
