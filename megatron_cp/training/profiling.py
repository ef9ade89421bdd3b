"""Traces of a few steps: where the time of host and device goes, and what memory holds.

    --profile ──> <tensorboard-dir or run-dir>/rank0.steps11-12.pt.trace.json ──> Perfetto, chrome, tensorboard

The stage loops of attention name what they do (runtime/spans.py), so that each transfer stands beside the stage
under which it hides. A range `cp step 11` covers each step; evaluations and samples of text lie outside of them. The
run's page draws one layer of it (report/run/trace.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from megatron_cp.training.config import TrainConfig
from megatron_cp.training.logging.lines import told_if_refused


class StepProfiler:
    """The trace of one rank: begun after `--profile-step-start` steps, written after `--profile-step-end`."""

    def __init__(self, config: TrainConfig) -> None:
        """Begins nothing."""
        self._options = config.records
        self._wants = self._options.profile and config.parallel.rank in self._options.profile_ranks
        self._profile: profile | None = None
        self._step: record_function | None = None
        self._first = 0

    def before_step(self, iteration: int) -> None:
        """Begins the trace with the step after `iteration`, if it is the one."""
        options = self._options
        if (
            not self._wants
            or not options.profile_step_start <= iteration < options.profile_step_end
        ):
            return
        if self._profile is None:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profile, self._first = profile(activities=activities), iteration + 1
            self._profile.start()
        self._step = record_function(f"cp step {iteration + 1}")
        self._step.__enter__()

    def after_step(self, iteration: int) -> None:
        """Ends the step's range, and writes the trace after its last step."""
        self._end_step()
        if self._profile is not None and iteration >= self._options.profile_step_end:
            self.finish(iteration)

    def finish(self, iteration: int) -> None:
        """Writes what there is of an unfinished trace: the run ends before its last step."""
        if self._profile is None:
            return
        self._end_step()
        self._profile.stop()
        folder = Path(self._options.tensorboard_dir or self._options.run_dir or "")
        name = f"rank{dist.get_rank()}.steps{self._first}-{iteration}.pt.trace.json"
        with told_if_refused(f"the profile {folder / name}"):
            folder.mkdir(parents=True, exist_ok=True)
            unfinished = folder / f"{name}.unfinished"
            self._profile.export_chrome_trace(str(unfinished))
            unfinished.replace(folder / name)
            print(f"profile of rank {dist.get_rank()}: {folder / name}", flush=True)
        self._profile, self._wants = None, False

    def _end_step(self) -> None:
        if self._step is not None:
            self._step.__exit__(None, None, None)
        self._step = None


@contextmanager
def memory_history(config: TrainConfig) -> Iterator[None]:
    """Records each allocation of the last rank's GPU, and writes them where `--memory-snapshot-path` says.

    Written when the block ends, also by an error: out of memory is one. It ran on one H100.
    """
    is_last = dist.get_rank() == dist.get_world_size() - 1
    if not (config.records.record_memory_history and is_last and torch.cuda.is_available()):
        yield
        return
    torch.cuda.memory._record_memory_history()
    try:
        yield
    finally:
        torch.cuda.memory._dump_snapshot(config.records.memory_snapshot_path)


@contextmanager
def step_profiler(config: TrainConfig, iteration: Callable[[], int]) -> Iterator[StepProfiler]:
    """Yields the profiler of the run; what it began is written when the block ends."""
    profiler = StepProfiler(config)
    try:
        yield profiler
    finally:
        profiler.finish(iteration())
