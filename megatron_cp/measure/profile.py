"""The profile of a cluster, as `--cp-topology FILE.json` reads it, measured by all of its ranks together.

It is tested on CPU ranks, and ran with two ranks on one H100; between GPUs it never did.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_cp.config import Topology
from megatron_cp.measure.links import (
    SIZES,
    Crossing,
    Link,
    crossings,
    exchange,
    measure_link,
    ports,
)
from megatron_cp.measure.rates import SHAPES, Heads, kernel_calls, lost_to_transfers, rate_table
from megatron_cp.measure.stopwatch import Stopwatch, Tick

SLOW = 0.93  # of the median rank's speed: worth a word


@dataclass(frozen=True)
class Cluster:
    """The ranks that measure: equally many in every node, and in every wider group that is named."""

    name: str
    node_size: int
    wider: tuple[int, ...]
    """Ranks of racks, pods ..., ascending."""

    def check(self, num_ranks: int) -> None:
        """Raises ValueError for sizes that do not contain each other, or do not divide the ranks."""
        inside = 1
        for size in (self.node_size, *self.wider):
            if size % inside or (size == inside and size > 1) or num_ranks % size:
                raise ValueError(
                    f"groups of {size} ranks do not fit {num_ranks} ranks in groups of {inside}: each size must be a "
                    "larger multiple of the one inside, and divide the number of ranks"
                )
            inside = size


@dataclass(frozen=True)
class Measured:
    """A profile, and what people should know of it."""

    profile: dict[str, Any]
    notes: tuple[str, ...]


def measure(cluster: Cluster, heads: Heads, rounds: int, usual: Topology, tick: Tick) -> Measured:
    """Returns the profile of the ranks of this job. Collective over all of them.

    `usual`: the machine whose bandwidth between nodes is taken where there is one node only.
    """
    num_ranks, stopwatch = dist.get_world_size(), Stopwatch(heads.device, rounds)
    cluster.check(num_ranks)
    shapes = SHAPES[heads.device.type]
    own = stopwatch.own_least(kernel_calls(heads, shapes), tick, "attention")
    slow = _slow_ranks(own[shapes[-1], shapes[-1], "", "forward"], heads.device)
    links = [
        measure_link(one, stopwatch, tick, f"links between groups of {one.inside}")
        for one in crossings(num_ranks, cluster.node_size, cluster.wider)
    ]
    inner = links[0]
    outer = links[1:] if cluster.node_size > 1 else links  # a node of one rank has no links inside
    profile: dict[str, Any] = {
        "name": cluster.name,
        "node_size": cluster.node_size,
        "inner_gbytes_per_s": inner.gbytes_per_s,
        "latency_us": inner.latency_us,
    }
    if outer:
        profile |= _beyond_nodes(cluster, outer, stopwatch, tick)
    else:
        profile["outer_gbytes_per_s"] = usual.outer_gbytes_per_s
        profile["name"] += f" (between nodes as {usual.name})"
    transfer = exchange(Crossing(1, num_ranks), SIZES[heads.device.type][-1], heads.device)
    profile["contention"] = lost_to_transfers(heads, shapes[-1], transfer, stopwatch, tick)
    profile["kernel"] = rate_table(_of_median_rank(own, heads.device), heads)
    notes = [f"rank {rank} computes at {speed:.2f} of the median" for rank, speed in slow]
    if not outer:
        notes.append(
            f"one node: its links to others were not measured, those of {usual.name} stand"
        )
    return Measured(profile, tuple(notes))


def _beyond_nodes(
    cluster: Cluster, outer: Sequence[Link], stopwatch: Stopwatch, tick: Tick
) -> dict[str, Any]:
    """Returns what a profile says of several nodes: the link between them, ports, wider groups."""
    first, *further = outer
    found: dict[str, Any] = {"outer_gbytes_per_s": first.gbytes_per_s}
    whole = (*cluster.wider, dist.get_world_size())[0]
    one_each = Crossing(cluster.node_size, whole, alone=True)
    alone = measure_link(one_each, stopwatch, tick, "one link of each node")
    shared = ports(cluster.node_size, first, alone)
    if shared is not None:
        found |= {"outer_gbytes_per_s": alone.gbytes_per_s, "nics_per_node": shared}
    if further:
        latency, levels = first.latency_us, []
        for size, link in zip(cluster.wider, further, strict=True):
            latency = max(latency, link.latency_us)
            levels.append({"size": size, "gbytes_per_s": link.gbytes_per_s, "latency_us": latency})
        found["outer_levels"] = levels
    return found


def _slow_ranks(seconds: float, device: torch.device) -> list[tuple[int, float]]:
    """Returns ranks that compute slower than most, and their speed in that of the median."""
    all_seconds = torch.zeros(dist.get_world_size(), dtype=torch.float64, device=device)
    all_seconds[dist.get_rank()] = seconds
    dist.all_reduce(all_seconds)
    speeds = (all_seconds.quantile(0.5) / all_seconds).tolist()
    return [(rank, speed) for rank, speed in enumerate(speeds) if speed < SLOW]


def _of_median_rank(own: dict[Any, float], device: torch.device) -> dict[Any, float]:
    """Returns the median rank's time of each call: a slow rank is named, not mixed in."""
    mine = torch.tensor(list(own.values()), dtype=torch.float64, device=device)
    all_of_them = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(all_of_them, mine)
    return dict(zip(own, torch.stack(all_of_them).median(dim=0).values.tolist(), strict=True))
