"""Bandwidth and latency of the levels of a cluster, by all-to-alls that cross one level and no other.

    inside a node      every rank sends to the others of its node, all nodes at once
    between nodes      every rank sends to those of other nodes, as many bytes to each
    between groups     the same for racks, pods ..., as far as the user names their sizes

What is measured is what the prices count: bytes that one rank sends, while all others send as much.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from megatron_cp.comm.all_to_all import PendingRows, start_all_to_all
from megatron_cp.measure.stopwatch import Call, Stopwatch, Tick

SIZES = {"cpu": (1 << 14, 1 << 20, 1 << 23), "cuda": (1 << 16, 1 << 22, 1 << 27)}
"""Bytes that a rank sends in all, by device."""
ONE_PORT = (
    0.75  # of what a rank reaches alone, reached by all of a node: each has a port of its own
)


@dataclass(frozen=True)
class Crossing:
    """Rows that leave groups of `inside` consecutive ranks and stay in groups of `whole`."""

    inside: int
    whole: int
    alone: bool = False
    """The first rank of each inner group sends, and no other."""

    def splits(self, rank: int, num_ranks: int, size: int) -> list[int]:
        """Returns the bytes that a rank sends to each other, and receives of it: about `size` in all."""
        group = range(rank // self.whole * self.whole, (rank // self.whole + 1) * self.whole)
        partners = [one for one in group if one // self.inside != rank // self.inside]
        if self.alone:
            partners = [one for one in partners if one % self.inside == rank % self.inside == 0]
        splits = [0] * num_ranks
        for partner in partners:
            splits[partner] = size // len(partners)
        return splits


@dataclass(frozen=True)
class Link:
    """What a rank reaches on one level."""

    gbytes_per_s: float
    latency_us: float


def crossings(num_ranks: int, node_size: int, wider: Sequence[int]) -> list[Crossing]:
    """Returns the levels that so many ranks have, from the inside to the outside."""
    sizes = [1, node_size, *wider, num_ranks]
    pairs = itertools.pairwise(sorted({size for size in sizes if size <= num_ranks}))
    return [Crossing(inside, whole) for inside, whole in pairs]


Start = Callable[[], PendingRows]
"""Begins to move rows; `wait()` on the result."""


def exchange(crossing: Crossing, size: int, device: torch.device) -> Start:
    """Returns what begins to move so many bytes of each rank."""
    rank, num_ranks, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    assert group is not None, "a job has a group of all ranks"
    splits = crossing.splits(rank, num_ranks, size)
    sent = torch.zeros(sum(splits), dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)
    return lambda: start_all_to_all(sent, splits, splits, group, received)


def measure_link(crossing: Crossing, stopwatch: Stopwatch, tick: Tick, what: str) -> Link:
    """Returns the line through the times of messages of several sizes, on the slowest rank. Collective."""
    sizes = SIZES[stopwatch.device.type]
    calls = {size: waited(exchange(crossing, size, stopwatch.device)) for size in sizes}
    return fitted(stopwatch.least(calls, tick, what))


def waited(start: Start) -> Call:
    """Returns the call that moves rows and waits for them."""
    return lambda: start().wait()


def fitted(seconds: Mapping[int, float]) -> Link:
    """Returns the link whose latency and bandwidth explain the times of messages, each as well as the others."""
    sizes, times = np.array(list(seconds), dtype=float), np.array(list(seconds.values()))
    slope, latency = np.polyfit(sizes, times, 1, w=1 / times)
    slope = max(slope, 1e-15) if latency > 0 else float((times / sizes).min())
    return Link(1e-9 / slope, max(0.0, latency * 1e6))


def ports(node_size: int, together: Link, alone: Link) -> int | None:
    """Returns how many ports the ranks of a node share; None where each has one."""
    if together.gbytes_per_s >= ONE_PORT * alone.gbytes_per_s:
        return None
    return max(1, round(node_size * together.gbytes_per_s / alone.gbytes_per_s))
