"""Which rank keeps the others waiting.

Ranks wait for each other in every layer, so all of them take the same time for a step. Here a rank is busy
while it waits for its batch and while its main thread computes: a wait in a collective on a CPU takes no
processor time. On a GPU the processor time is that of the host, which launches kernels (never run on one): a
loader that stalls and a slow host show, a slow GPU does not.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


class Stragglers:
    """Busy seconds of this rank since the last report."""

    def __init__(self) -> None:
        self._seconds = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the block in full: nobody but this rank is in it."""
        start = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - start

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Counts the processor time of the block: waits for other ranks are not this rank's."""
        start = time.thread_time()
        yield
        self._seconds += time.thread_time() - start

    def report(self, num_steps: int, num_named: int) -> tuple[str, dict[str, float]]:
        """Returns a line and a row on the busy milliseconds per step of all ranks. Collective.

        The line names the `num_named` slowest and fastest ranks.
        """
        own = torch.tensor([1e3 * self._seconds / num_steps]).to(torch.cuda.current_device())
        self._seconds = 0.0
        ranks = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(ranks, own)
        return stragglers_line([float(busy) for busy in ranks], num_named)


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
