"""Where the time of a step goes: timers that Megatron-Core's schedule and optimizer start and stop too.

Levels, names and the text are Megatron-LM's: level 0 measures nothing, 1 what happens once a step, 2 every
micro-batch and send. Batches, saves and evaluations are on level 1 here.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from megatron_cp.mcore.checkpoint.optimizer import parts_of
from megatron_cp.training.config import TrainConfig

_SENDS = (
    "forward-recv",
    "forward-send",
    "backward-recv",
    "backward-send",
    "forward-send-forward-recv",
    "forward-send-backward-recv",
    "backward-send-forward-recv",
    "backward-send-backward-recv",
    "forward-backward-send-forward-backward-recv",
)
_OPTIMIZER = (
    "optimizer-copy-to-main-grad",
    "optimizer-unscale-and-check-inf",
    "optimizer-clip-main-grad",
    "optimizer-count-zeros",
    "optimizer-inner-step",
    "optimizer-copy-main-to-model-params",
)
# level -> names that it adds, in the order in which they are reported. Every rank reports all of them: what
# a rank has no part in (sends of a pipeline) is 0 there.
NAMES = {
    1: (
        *("batch-generator", "forward-backward", "layernorm-grads-all-reduce"),
        *("embedding-grads-all-reduce", "all-grads-sync", "params-all-gather"),
        *_OPTIMIZER,
        *("optimizer", "evaluate", "save-checkpoint"),
    ),
    2: ("forward-compute", "backward-compute", *_SENDS),
}


class _Timer:
    """Seconds between starts and stops since the last report."""

    def __init__(self) -> None:
        self.seconds = self._began = 0.0

    def start(self, barrier: bool = False) -> None:
        """Begins; with `barrier` when all ranks are here, so that no rank's wait is counted."""
        if barrier:
            dist.barrier()
        torch.cuda.synchronize()
        self._began = time.perf_counter()

    def stop(self, barrier: bool = False) -> None:
        """Ends; with `barrier` when all ranks are here."""
        if barrier:
            dist.barrier()
        torch.cuda.synchronize()
        self.seconds += time.perf_counter() - self._began


class _Off(_Timer):
    """Measures nothing."""

    def start(self, barrier: bool = False) -> None:
        """Does nothing."""

    stop = start


class Timers:
    """The timers of one rank, called as Megatron-Core calls its own."""

    def __init__(self, config: TrainConfig) -> None:
        """No timer at level 0."""
        self._options = config.records
        level = self._options.timing_log_level
        names = [name for number, group in NAMES.items() if number <= level for name in group]
        self._timers = {name: _Timer() for name in names}
        self._off, self._is_paused = _Off(), False

    def connect(self, model: list[Any], optimizer: Any) -> None:
        """Lets Megatron-Core's schedule and optimizer start and stop timers."""
        if not self._timers:
            return
        optimizers = parts_of(optimizer)
        for config in [part.config for part in (*model, *optimizers)]:
            config.timers = self
            config.barrier_with_L1_time = self._options.barrier_with_L1_time

    def __call__(self, name: str, log_level: int | None = None) -> _Timer:
        """Returns the timer of this name; one that does nothing below its level."""
        return self._off if self._is_paused else self._timers.get(name, self._off)

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Times the block; what Megatron-Core does in it is not added to its timers of a step."""
        timer = self(name)
        timer.start()
        self._is_paused, before = True, self._is_paused
        try:
            yield
        finally:
            self._is_paused = before
            timer.stop()

    def report(self, num_steps: int) -> tuple[str, dict[str, float]]:
        """Returns Megatron-LM's text over the steps since the last report, and its rows in seconds.

        Both are empty at level 0. Collective at the other levels: every rank calls it.
        """
        if not self._timers:
            return "", {}
        own = torch.tensor([timer.seconds for timer in self._timers.values()])
        own = (own / num_steps).to(torch.cuda.current_device())
        ranks = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(ranks, own)
        for timer in self._timers.values():
            timer.seconds = 0.0
        by_name = zip(self._timers, torch.stack(ranks, dim=1).tolist(), strict=True)
        measured = {name: values for name, values in by_name if any(values)}
        row = {f"{name}-time": max(values) for name, values in measured.items()}
        text = timers_text(measured, self._options.timing_log_option)
        return text, row if self._options.log_timers_to_tensorboard else {}


def timers_text(measured: dict[str, list[float]], option: str) -> str:
    """Returns Megatron-LM's lines for seconds by name and rank; a rank with 0 has no such timer.

    Source: the format strings of Megatron-Core 0.16, timers.py.
    """
    head = {"max": "max time across ranks (ms):", "minmax": "(min, max) time across ranks (ms):"}
    lines = [head.get(option, "times across ranks (ms):")]
    for name, values in measured.items():
        times = {rank: 1e3 * value for rank, value in enumerate(values) if value > 0}
        dotted = (name + " ").ljust(48, ".")
        if option == "max":
            lines.append(f"    {dotted}: {max(times.values()):.2f}")
        elif option == "minmax":
            lines.append(f"    {dotted}: ({min(times.values()):.2f}, {max(times.values()):.2f})")
        else:
            lines.append(f"  {name}:")
            lines += [f"     rank {rank:2d}: {value:.2f}" for rank, value in times.items()]
    return "\n".join(lines)
