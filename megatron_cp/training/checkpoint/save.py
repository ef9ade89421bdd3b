"""Writes checkpoints aside and puts each in its place: complete, or not there.

    begin ──> <save>/iter_N.unfinished ──> files, index, manifest ──> rename, tracker ──> saved

With `--async-save` the files are written while training goes on; everything after them waits until they are
complete on all ranks. There is never more than one unfinished save.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_cp.training.checkpoint import dist_format, files, legacy_format
from megatron_cp.training.checkpoint.background import BackgroundWrite
from megatron_cp.training.checkpoint.state import RunState, manifest_of
from megatron_cp.training.logging.lines import print_rank_0

_SAVE = {"torch_dist": dist_format.save, "torch": legacy_format.save}


@dataclass(frozen=True)
class Saved:
    """A checkpoint that the tracker names now."""

    iteration: int
    flops: int
    save_s: float
    """From the beginning until the tracker named it."""
    blocked_s: float
    """How much of that training waited."""


@dataclass
class _Unfinished:
    """A save between its beginning and its tracker, with what the run was at the beginning."""

    iteration: int
    flops: int
    manifest: dict[str, Any]
    began: float
    blocked_s: float = 0.0
    write: BackgroundWrite | None = None


class Saver:
    """The saves of one run. Every rank calls every method but `is_written` and `abandon` together."""

    def __init__(
        self, state: RunState, on_saved: Callable[[Saved], None] = lambda saved: None
    ) -> None:
        """`on_saved` is told of each checkpoint when it is in its place."""
        assert state.config.checkpoint.save is not None
        self._state, self._on_saved = state, on_saved
        self._root = Path(state.config.checkpoint.save)
        self._unfinished: _Unfinished | None = None

    def save(self) -> None:
        """Saves the run as it is now; an unfinished save is finished before."""
        self.finish()
        began = time.perf_counter()
        state, options = self._state, self._state.config.checkpoint
        print_rank_0(
            f"saving checkpoint at iteration {state.iteration:7d} to {self._root} in "
            f"{options.ckpt_format} format"
        )
        folder = files.unfinished_folder(self._root, state.iteration)
        if dist.get_rank() == 0:
            files.remove_folder(folder)  # a save that was killed half-way leaves parts behind
            folder.mkdir(parents=True)
        dist.barrier()
        unfinished = _Unfinished(state.iteration, state.flops, manifest_of(state), began)
        self._unfinished = unfinished
        if options.async_save:
            unfinished.write = dist_format.save_in_background(state, folder)
        else:
            _SAVE[options.ckpt_format](state, folder)
        unfinished.blocked_s = time.perf_counter() - began
        if not options.async_save:
            self.finish()

    @property
    def is_saving(self) -> bool:
        """Whether a save is unfinished; the same on every rank."""
        return self._unfinished is not None

    def is_written(self) -> bool:
        """Whether the files of this rank are complete. Not collective."""
        write = None if self._unfinished is None else self._unfinished.write
        return write is None or write.is_done()

    def finish(self) -> None:
        """Waits until the unfinished save, if there is one, is complete on all ranks, and publishes it."""
        if self._unfinished is None:
            return
        start, unfinished = time.perf_counter(), self._unfinished
        if unfinished.write is not None:
            unfinished.write.finish()
        dist.barrier()
        if dist.get_rank() == 0:
            self._publish(unfinished)
        dist.barrier()
        self._unfinished = None
        layout = self._state.config.parallel
        tp, pp = layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size
        print_rank_0(
            f"  successfully saved checkpoint from iteration {unfinished.iteration:7d} to {self._root} "
            f"[ t 1/{tp}, p 1/{pp} ]"
        )
        end = time.perf_counter()
        blocked_s = unfinished.blocked_s + end - start
        save_s = end - unfinished.began
        self._on_saved(Saved(unfinished.iteration, unfinished.flops, save_s, blocked_s))

    def abandon(self) -> None:
        """Ends what is written in the background; the tracker keeps naming the checkpoint before."""
        if self._unfinished is not None and self._unfinished.write is not None:
            self._unfinished.write.abandon()
        self._unfinished = None

    def _publish(self, unfinished: _Unfinished) -> None:
        """Puts the written folder in its place; on rank 0."""
        root, number = self._root, unfinished.iteration
        previous = files.latest_iteration(root)
        options, folder = self._state.config.checkpoint, files.unfinished_folder(root, number)
        files.write_manifest(folder, unfinished.manifest, hashed=options.verify_integrity)
        files.publish(root, number)
        files.remove_replaced(root, previous, number, options.save_retain_interval)
