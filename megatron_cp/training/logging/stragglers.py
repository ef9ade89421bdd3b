"""Which rank keeps the others waiting.

Ranks wait for each other in every layer, so all of them take the same time for a step. Here a rank is busy
while it waits for its batch and while its main thread computes: a wait in a collective on a CPU takes no
processor time. On a GPU the processor time is that of the host, which launches kernels (it ran on one H100): a
loader that stalls and a slow host show, a slow GPU does not.

    --log-straggler      the slowest ranks, below each log line
    always               a rank that stays behind: 1.5 times the median of the other ranks of its pipeline
                         stage, which do the same work, in three looks in a row of ten steps or more each
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

# 75 looks of ten steps in five layouts of 2 and 4 CPU ranks, at a load of 10 to 17 on two cores: the largest of a
# look was 1.1 to 1.5 times, and twice more than 1.5; never in two looks in a row (2026-11-22).
_LEAST_STEPS, _NUM_LOOKS, _FACTOR = 10, 3, 1.5


@dataclass(frozen=True)
class SlowRank:
    """A rank that stays behind, and what it is compared with."""

    rank: int
    busy_ms: float
    others_ms: float
    """Median of the other ranks of its stage."""
    num_others: int

    def __str__(self) -> str:
        return (
            f"is slow: busy {self.busy_ms:.1f} ms a step, {self.others_ms:.1f} ms in the median of the "
            f"{self.num_others} other ranks of its stage"
        )


class Stragglers:
    """Busy seconds of this rank, and which rank stays behind. All ranks call every method in the same order."""

    def __init__(self, stage: int = 0, log_interval: int = 1) -> None:
        """For a rank of a pipeline stage; looks every `log_interval` steps, not sooner than every tenth."""
        self._stage = stage
        self._seconds = self._reported = self._looked_at = 0.0
        self._num_steps, self._interval = 0, max(log_interval, _LEAST_STEPS)
        self._behind: Counter[int] = Counter()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the block in full: nobody but this rank is in it."""
        start = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - start

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Counts the processor time of the block, a step: waits for other ranks are not this rank's."""
        start = time.thread_time()
        yield
        self._seconds += time.thread_time() - start
        self._num_steps += 1

    def told(self) -> tuple[int, ...]:
        """Returns busy microseconds a step and the pipeline stage where a look is due, nothing otherwise."""
        if self._num_steps < self._interval:
            return ()
        busy_us = 1e6 * (self._seconds - self._looked_at) / self._num_steps
        self._looked_at, self._num_steps = self._seconds, 0
        return int(busy_us), self._stage

    def stay_behind(self, told: Sequence[Sequence[int]]) -> list[SlowRank]:
        """Returns the ranks that now have been behind in three looks in a row, from what every rank told."""
        found = behind(told)
        self._behind = Counter({slow.rank: self._behind[slow.rank] + 1 for slow in found})
        return [slow for slow in found if self._behind[slow.rank] == _NUM_LOOKS]

    def report(self, num_steps: int, num_named: int) -> tuple[str, dict[str, float]]:
        """Returns a line and a row on the busy milliseconds per step of all ranks. Collective.

        The line names the `num_named` slowest and fastest ranks.
        """
        busy_ms = 1e3 * (self._seconds - self._reported) / num_steps
        self._reported = self._seconds
        own = torch.tensor([busy_ms]).to(torch.cuda.current_device())
        ranks = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(ranks, own)
        return stragglers_line([float(busy) for busy in ranks], num_named)


def behind(told: Sequence[Sequence[int]]) -> list[SlowRank]:
    """Returns the ranks that are busy 1.5 times as long as the others of their stage.

    `told`: (busy microseconds, stage) of each rank.
    """
    found = []
    for rank, (busy_us, stage) in enumerate(told):
        others = [us for other, (us, its) in enumerate(told) if its == stage and other != rank]
        if others and busy_us >= _FACTOR * statistics.median(others):
            typical_ms = statistics.median(others) / 1e3
            found.append(SlowRank(rank, busy_us / 1e3, typical_ms, len(others)))
    return found


def stragglers_line(busy_ms: list[float], num_named: int) -> tuple[str, dict[str, float]]:
    """Returns the line and the row for busy milliseconds by rank."""
    order = sorted(range(len(busy_ms)), key=lambda rank: -busy_ms[rank])
    mean = sum(busy_ms) / len(busy_ms)

    def named(ranks: list[int]) -> str:
        return ", ".join(f"rank {rank} {busy_ms[rank]:.1f}" for rank in ranks)

    line = (
        f" stragglers: busy time per step (ms), waits for other ranks left out | slowest: "
        f"{named(order[:num_named])} | fastest: {named(order[::-1][:num_named])} | mean: {mean:.1f} |"
    )
    worst = busy_ms[order[0]] / mean if mean > 0 else 1.0
    return line, {"straggler/rank": float(order[0]), "straggler/max_over_mean": worst}
