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

import os
import queue
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from megatron_cp.mcore.versions import compat
from megatron_cp.processes import die_with_parent
from megatron_cp.training.checkpoint.integrity import HashedFile

_rank_that_saves: int | None = None


@contextmanager
def saving_in_this_process(
    results: Any = None, failures: list[OSError | RuntimeError] | None = None
) -> Iterator[None]:
    """Within the block, Megatron-Core saves without a process that outlives this one.

    Its writers hash what they write. `results` carries what they report, for a save that goes on after the
    block; without it this process waits for the save. `failures` gets what kept this rank from writing a file of
    its own: raised there, it would leave the other ranks in a collective for ever. The caller tells them.
    """
    global _rank_that_saves
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    noted = partial(_noting, [] if failures is None else failures)
    queue_of_results = queue.Queue() if results is None else results
    replaced: list[tuple[Any, str, Any]] = [
        (filesystem_async, "_results_queue", queue_of_results),
        (filesystem_async, "open", HashedFile),
    ]
    if failures is not None:
        replaced += [
            (owner, name, noted(getattr(owner, name)))
            for owner, name in (
                *compat.writers_of_common_state(),
                (filesystem_async.FileSystemWriterAsync, "finish"),
                (serialization, "save_config"),
            )
        ]
    _rank_that_saves = os.getpid()
    try:
        with ExitStack() as undo:
            for owner, name, value in replaced:
                undo.enter_context(_replaced(owner, name, value))
            yield
    finally:
        _rank_that_saves = None


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Within the block the owner's name stands for another value."""
    was_there, before = name in vars(owner), getattr(owner, name, None)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if was_there:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def _noting(
    failures: list[OSError | RuntimeError], write: Callable[..., None]
) -> Callable[..., None]:
    """Returns a function that writes a file of this rank alone, and notes why it could not."""

    def noting(*arguments: Any) -> None:
        try:
            write(*arguments)
        except (OSError, RuntimeError) as failure:  # torch makes a full disk a RuntimeError
            failures.append(failure)

    return noting


def _end_with_the_rank() -> None:
    """In a forked writer: the kernel kills it when the rank dies, also by SIGKILL.

    A writer whose results nobody takes would wait for ever.
    """
    global _rank_that_saves
    if _rank_that_saves is None:
        return
    die_with_parent(_rank_that_saves)
    _rank_that_saves = None  # what this process forks has another parent


os.register_at_fork(after_in_child=_end_with_the_rank)
