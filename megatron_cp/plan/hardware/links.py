"""The links of a machine, a tree of levels: how long rows take from ranks to ranks.

    level 0    inside a node                       a row from rank 0 to rank 5, in nodes of 2 and racks of 4:
    level 1    out of a node                       out of the node of rank 0 and out of its rack, into those of rank 5;
    level 2    out of a rack, ...                  nothing inside a node

A rank sends and receives on all levels at once, and the slowest decides. Where a node has fewer network ports than
ranks, what its ranks send (and receive) goes through all of them together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_cp.config import Topology
from megatron_cp.mask.interval import IntArray
from megatron_cp.plan.schema import FloatArray


@dataclass(frozen=True, eq=False)
class Links:
    """The links between ranks, or between head groups as those at one place in them use them."""

    sizes: tuple[int, ...]
    """Ranks (head groups) of a node, of a rack, ...; never empty."""
    gbytes_per_s: tuple[float, ...]
    """Of one rank on each level: `[1 + len(sizes)]`."""
    latency: tuple[float, ...]
    """Seconds of a transfer on each level."""
    node_gbytes_per_s: float | None
    """Of all ports of a node, for what its ranks send out of it together; None where every rank has its own."""

    @classmethod
    def of(cls, topology: Topology, degree: int = 1) -> "Links":
        """Returns the links of ranks, or of head groups of `degree` ranks: those at each place use them at once."""
        levels = topology.outer_levels
        sizes = [
            max(1, size // degree) for size in (topology.node_size, *(one.size for one in levels))
        ]
        rates = [topology.inner_gbytes_per_s, topology.outer_gbytes_per_s]
        rates += [one.gbytes_per_s for one in levels]
        latency = [topology.latency_us, topology.latency_us]
        for one in levels:
            latency.append(latency[-1] if one.latency_us is None else one.latency_us)
        nics = topology.nics_per_node
        shared = None if nics is None else nics * topology.outer_gbytes_per_s / degree
        return cls(tuple(sizes), tuple(rates), tuple(1e-6 * one for one in latency), shared)

    @property
    def node_size(self) -> int:
        """Returns the ranks (head groups) of a node."""
        return self.sizes[0]

    @cached_property
    def seconds_per_byte(self) -> FloatArray:
        """Of one rank on each level: float64 `[1 + len(sizes)]`."""
        return 1e-9 / np.array(self.gbytes_per_s)

    def level(self, src: IntArray, dst: IntArray) -> IntArray:
        """Returns the outermost level that rows from `src[i]` to `dst[i]` use: 0 inside a node."""
        levels = (src // self.node_size != dst // self.node_size).astype(np.int64)
        for size in self.sizes[1:]:
            levels += src // size != dst // size
        return levels

    def moved(
        self,
        src: IntArray,
        dst: IntArray,
        amount: IntArray | FloatArray,
        num_ranks: int,
        level: IntArray | None = None,
    ) -> FloatArray:
        """Returns what ranks send and receive on each level: float64 `[2, P, levels]`, of messages of `amount[i]`.

        `level`: of each message, where ranks stand here several times and have other numbers.
        """
        level = self.level(src, dst) if level is None else level
        count = len(self.gbytes_per_s)
        ends = np.concatenate([count * src + level, count * (num_ranks + dst) + level])
        both = np.bincount(ends, np.concatenate([amount, amount]), minlength=2 * count * num_ranks)
        moved = both.astype(np.float64).reshape(2, num_ranks, count)
        for outer in range(count - 1, 1, -1):  # what leaves a rack leaves a node
            moved[:, :, outer - 1] += moved[:, :, outer]
        return moved

    def passed(self, level: IntArray) -> FloatArray:
        """Returns 1 for each level that a row with this outermost one uses, else 0: float64 `[..., levels]`."""
        every = np.arange(len(self.gbytes_per_s))
        outermost = every[:, None]
        table = np.where(outermost > 0, (every > 0) & (every <= outermost), every == 0)
        return table[level].astype(np.float64)

    def seconds(self, moved: FloatArray) -> FloatArray:
        """Returns how long each level takes, the ports of a node as a part of its level: of `[..., P, levels]` bytes.

        A rank waits for the ports of its node if it sends anything through them.
        """
        seconds: FloatArray = moved * self.seconds_per_byte
        if self.node_gbytes_per_s is not None:
            shared = self._of_nodes(moved[..., 1]) * (1e-9 / self.node_gbytes_per_s)
            waits = moved[..., 1] > 0
            seconds[..., 1] = np.where(waits, np.maximum(seconds[..., 1], shared), 0.0)
        return seconds

    def _of_nodes(self, amounts: FloatArray) -> FloatArray:
        """Returns for each rank what all of its node have together: `[..., P]`."""
        num_ranks = amounts.shape[-1]
        node = np.arange(num_ranks) // self.node_size
        first = np.arange(0, num_ranks, self.node_size)
        return np.add.reduceat(amounts, first, axis=-1)[..., node]

    def hop_latency(self, src: IntArray, dst: IntArray, amount: IntArray | FloatArray) -> float:
        """Returns the latency of the outermost level on which anything moves, 0 if nothing does."""
        if not amount.any():
            return 0.0
        if len(set(self.latency)) == 1:
            return self.latency[0]
        return self.latency[int(self.level(src, dst)[amount > 0].max())]

    def exchange(self, groups: Sequence[tuple[int, ...]]) -> tuple[float, float]:
        """Returns a rank's GB/s and the latency if all ranks exchange with those of their group, ascending, at once.

        All that is sent is taken to go as far as any of it does.
        """
        first, last = (np.array([group[end] for group in groups]) for end in (0, -1))
        level = int(self.level(first, last).max())
        rate = min(self.gbytes_per_s[min(level, 1) : level + 1])
        if level and self.node_gbytes_per_s is not None:
            in_node = min(self.node_size, sum(map(len, groups)))
            rate = min(rate, self.node_gbytes_per_s / in_node)
        return rate, self.latency[level]
