"""Writes checkpoints aside and puts each in its place: complete, or not there.

    begin ──> <save>/iter_N.unfinished ──> files, index, manifest ──> rename, tracker ──> saved
                  └── what a disk or a folder refuses, on any rank ──> removed, told on every rank

With `--async-save` the files are written while training goes on; everything after them waits until they are
complete on all ranks. There is never more than one unfinished save. After a failure the checkpoint before stays
the latest, and `--on-save-error` says whether training goes on.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megatron_cp.mcore.checkpoint.optimizer import fill_missing_state
from megatron_cp.training.checkpoint import dist_format, files, legacy_format
from megatron_cp.training.checkpoint.background import BackgroundWrite
from megatron_cp.training.checkpoint.state import first_line, manifest_of
from megatron_cp.training.logging.lines import print_rank_0, warn
from megatron_cp.training.run_state import RunState
from megatron_cp.training.together import gather

_SAVE = {"torch_dist": dist_format.save, "torch": legacy_format.save}
# What a disk refuses, as Python, torch and Megatron-Core say it; torch's own is a BaseException.
_UNWRITABLE = (OSError, RuntimeError, CheckpointException)


class SaveError(RuntimeError):
    """A checkpoint could not be written; raised on every rank alike."""


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
        options = state.config.checkpoint
        assert options.save is not None
        self._state, self._on_saved = state, on_saved
        self._root = Path(options.save)
        self._unfinished: _Unfinished | None = None
        self._saved_at = None if options.load is None else state.iteration
        goes_on = options.load is not None and Path(options.load).resolve() == self._root.resolve()
        self._goes_on_from = state.iteration if goes_on and state.iteration else None
        self._has_published = False

    def save(self, *, is_last: bool = False) -> None:
        """Saves the run as it is now; an unfinished save is finished before.

        Raises SaveError, on every rank alike, if it cannot be written and training is to stop then, or
        if it `is_last`: with nothing after it there is nothing to go on with.
        """
        self.finish()
        began = time.perf_counter()
        state, options = self._state, self._state.config.checkpoint
        print_rank_0(
            f"saving checkpoint at iteration {state.iteration:7d} to {self._root} in "
            f"{options.ckpt_format} format"
        )
        if not options.no_save_optim:
            fill_missing_state(state.optimizer)
        unfinished = _Unfinished(state.iteration, state.flops, manifest_of(state), began)
        self._unfinished = unfinished
        with self._or_removed(unfinished, is_last=is_last):
            self._write(unfinished)
        if self._unfinished is None:
            return
        unfinished.blocked_s = time.perf_counter() - began
        if not options.async_save:
            self.finish(is_last=is_last)

    @property
    def is_saving(self) -> bool:
        """Whether a save is unfinished; the same on every rank."""
        return self._unfinished is not None

    @property
    def newest(self) -> int | None:
        """The iteration of the newest checkpoint, saved, loaded or on its way; the same on every rank."""
        return self._saved_at if self._unfinished is None else self._unfinished.iteration

    def is_written(self) -> bool:
        """Whether the files of this rank are complete. Not collective."""
        write = None if self._unfinished is None else self._unfinished.write
        return write is None or write.is_done()

    def finish(self, *, is_last: bool = False) -> None:
        """Waits until the unfinished save, if there is one, is complete on all ranks, and publishes it.

        Raises SaveError as `save` does.
        """
        if self._unfinished is None:
            return
        start, unfinished = time.perf_counter(), self._unfinished
        previous: int | None = None
        with self._or_removed(unfinished, is_last=is_last):
            if unfinished.write is not None:
                with self._together(unfinished):
                    unfinished.write.finish()
            with self._together(unfinished, told=Exception):
                if dist.get_rank() == 0:
                    previous = self._publish(unfinished)
        if self._unfinished is None:
            return
        self._unfinished, self._saved_at = None, unfinished.iteration
        layout = self._state.config.parallel
        tp, pp = layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size
        print_rank_0(
            f"  successfully saved checkpoint from iteration {unfinished.iteration:7d} to {self._root} "
            f"[ t 1/{tp}, p 1/{pp} ]"
        )
        if dist.get_rank() == 0:
            self._clean_up(previous, unfinished.iteration)
        end = time.perf_counter()
        blocked_s = unfinished.blocked_s + end - start
        save_s = end - unfinished.began
        self._on_saved(Saved(unfinished.iteration, unfinished.flops, save_s, blocked_s))

    def abandon(self) -> None:
        """Ends what is written in the background; the tracker keeps naming the checkpoint before."""
        if self._unfinished is not None and self._unfinished.write is not None:
            self._unfinished.write.abandon()
        self._unfinished = None

    def _write(self, unfinished: _Unfinished) -> None:
        """Writes the files aside, or begins to. Collective. Raises SaveError on every rank alike."""
        state, options = self._state, self._state.config.checkpoint
        folder = files.unfinished_folder(self._root, unfinished.iteration)
        with self._together(unfinished, told=Exception):
            if dist.get_rank() == 0:
                files.remove_folder(folder)  # a save that was killed half-way leaves parts behind
                folder.mkdir(parents=True)
        with self._together(unfinished):
            if options.async_save:
                unfinished.write = dist_format.save_in_background(state, folder)
            else:
                _SAVE[options.ckpt_format](state, folder)

    def _publish(self, unfinished: _Unfinished) -> int | None:
        """Puts the written folder in its place; returns the iteration that the tracker named before. On rank 0."""
        root, number = self._root, unfinished.iteration
        if not self._has_published:
            start = self._goes_on_from
            aside = files.move_aside(root, after=start)
            if aside is not None:
                whose = (
                    "of an earlier run"
                    if start is None
                    else f"after iteration {start}, which this run took anew"
                )
                print_rank_0(f"  note: {root} held checkpoints {whose}; they are in {aside}")
            self._has_published = True
        previous = files.previous_iteration(root)
        files.write_manifest(files.unfinished_folder(root, number), unfinished.manifest)
        files.publish(root, number)
        return previous

    def _clean_up(self, previous: int | None, current: int) -> None:
        """Removes what the checkpoint in its place makes needless. What stays is told: it is no failed save."""
        interval = self._state.config.checkpoint.save_retain_interval
        try:
            files.remove_replaced(self._root, previous, current, interval)
        except OSError as failure:
            warn(
                f"an older checkpoint could not be removed: {failure}; iteration {current} is saved "
                "and is the latest, and the older one may be damaged: remove it by hand"
            )

    @contextmanager
    def _together(
        self,
        unfinished: _Unfinished,
        told: type[BaseException] | tuple[type[BaseException], ...] = _UNWRITABLE,
    ) -> Iterator[None]:
        """Within the block a rank writes; after it all ranks know whether every one of them could.

        Collective. Raises SaveError on every rank alike, with what the first of them was refused. `told`
        is `Exception` where the block holds no collective: the others already wait here then.
        """
        own: tuple[int, str] | None = None
        cause: BaseException | None = None
        try:
            yield
        except told as failure:
            own, cause = _reason(failure, self._root), failure
        # Of a failed writer only the rank that keeps the index is told why.
        reasons = sorted(
            (x for x in gather(own) if x is not None), key=lambda reason: not reason[1]
        )
        if reasons:
            rank, text = reasons[0]
            raise SaveError(
                f"{files.iteration_folder(self._root, unfinished.iteration)} could not be written: "
                f"{text or 'a writer failed'} (rank {rank}); the checkpoint before it stays the latest"
            ) from cause

    @contextmanager
    def _or_removed(self, unfinished: _Unfinished, *, is_last: bool) -> Iterator[None]:
        """Removes what the block began if it fails, and goes on or raises as `--on-save-error` says."""
        try:
            yield
        except SaveError as failure:
            self.abandon()
            dist.barrier()  # nobody writes any more
            if dist.get_rank() == 0:
                with suppress(OSError):
                    files.remove_folder(files.unfinished_folder(self._root, unfinished.iteration))
            dist.barrier()
            stops = self._state.config.checkpoint.on_save_error == "stop"
            if is_last or stops:
                more = "; --on-save-error continue trains on without it" if stops else ""
                raise SaveError(
                    f"{failure}; free space or mend the folder, and go on from there with --load{more}"
                ) from failure
            warn(f"{failure}; training goes on (--on-save-error continue)")


# What torch says where a file took fewer bytes than it was given; the system's own reason is lost there.
_SHORT_WRITE = "unexpected pos"


def _reason(failure: BaseException, folder: Path) -> tuple[int, str]:
    """Returns the rank that could not write, and why, with the free space; no text where another rank knows."""
    rank = dist.get_rank()
    if isinstance(failure, CheckpointException):
        if not failure.failures:
            return rank, ""
        rank, (failure, _) = next(iter(failure.failures.items()))
    said = first_line(failure)
    if not isinstance(failure, _UNWRITABLE):
        said = f"{type(failure).__name__}: {said}"
    if _SHORT_WRITE in said:
        said = "a file was written in part, as on a full disk"
    return rank, f"{said}; {_free_space(folder)}"


def _free_space(folder: Path) -> str:
    """Returns how much is free where the folder is, or that the folder is not there."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError as problem:
        return f"{folder}: {problem.strerror}"
    return f"{usage.free / 1e6:.1f} MB of {usage.total / 1e6:.1f} MB are free in {folder}"
