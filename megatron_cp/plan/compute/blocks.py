"""The mask cut into blocks, and what an assignment of the blocks to ranks costs.

    query chunks     . . . . . . . .        a block: one query chunk x one key chunk x one rank of the start,
      of rank 0      A . . . . . . .        so the start is an assignment of the blocks, exactly
                     B C . . . . . .        a net:   the rows of one side and owner that are in the same blocks;
      of rank 1      B C D . . . . .                 a rank needs them all as soon as it has one of the blocks
                     B C D E . . . .

A rank computes its blocks, takes in every foreign net once, and sends its own nets to all who need them:

    T = max over ranks of   compute + contention x link,   link      with link = the busiest of its four directions

Nets are exact to a row, so T is that of the slices themselves; only the blocks are coarse. Rows cross the network once
per node, to the rank at their owner's place there, which passes them on inside (`ThroughNodes` of
plan/transfer/routing.py); results go back along the same links. Latency and stages are not modelled.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_cp.mask import interval
from megatron_cp.mask.interval import IntArray
from megatron_cp.mask.slice import K_END, K_START, Q_END, Q_START, cut_rows, rows_area
from megatron_cp.plan.compute.bisection import Assignment
from megatron_cp.plan.hardware.rows import RowCost
from megatron_cp.plan.schema import BoolArray, FloatArray
from megatron_cp.plan.transfer.pass_builder import COLUMNS, PlacedMask


@dataclass(frozen=True)
class Problem:
    """A placed mask, and what computing its pairs and moving its rows costs."""

    placed: PlacedMask
    """The mask on P ranks (or head groups)."""
    row_cost: RowCost
    """Bytes, there and back, in both passes."""
    seconds_per_pair: float
    """Compute of one pair in both passes, on a rank of speed 1."""
    seconds_per_byte: tuple[float, float]
    """Of a rank's link inside the node, and between nodes."""
    node_size: int
    """Ranks of a node."""
    contention: float
    """Share of its compute that a rank loses while rows move (`Topology.contention`)."""
    speeds: FloatArray
    """How fast each rank computes: `[P]`."""


@dataclass(frozen=True)
class Loads:
    """What ranks have to do."""

    compute: FloatArray
    """Seconds: `[P]`."""
    links: FloatArray
    """Seconds of each direction, in and out inside the node, in and out between nodes: `[4, P]`."""
    contention: float
    readers: IntArray
    """For how many blocks of each rank a net is needed, its owner left out: `[nets, P]`."""
    in_node: IntArray
    """The same of each node other than the owner's: `[nets, nodes]`."""

    @cached_property
    def link(self) -> FloatArray:
        """The seconds of the busiest direction: `[P]`."""
        return self.links.max(axis=0)

    @cached_property
    def with_transfers(self) -> FloatArray:
        """The seconds of compute that transfers slow down: `[P]`."""
        return self.compute + self.contention * self.link

    @cached_property
    def seconds(self) -> FloatArray:
        """The time of each rank: `[P]`."""
        return np.maximum(self.with_transfers, self.link)


@dataclass(frozen=True)
class Blocks:
    """Blocks, nets, and which net is needed for which block."""

    problem: Problem
    parts: IntArray
    """The pairs, int64 `[n, 6]` in token ids; every part has queries of one owner and keys of one."""
    block: IntArray
    """The block of each part: `[n]`."""
    start: IntArray
    """The rank of each block to begin with: `[blocks]`."""
    compute: FloatArray
    """Seconds to compute each block at speed 1: `[blocks]`."""
    pins: IntArray
    """Which net is needed for which block: int64 (net, block) `[pins, 2]`, by blocks."""
    owner: IntArray
    """The rank that has the rows of each net: `[nets]`."""
    bytes: FloatArray
    """Of the rows of each net, there and back: `[nets]`."""

    @classmethod
    def of(cls, problem: Problem, assignment: Assignment, chunks_per_rank: int) -> "Blocks":
        """Returns the blocks of an assignment; every rank's tokens are so many chunks."""
        runs, chunk_of_run = _chunks(problem.placed, chunks_per_rank)
        parts, source, q_run = cut_rows(assignment.parts, runs, Q_START, Q_END)
        parts, again, k_run = cut_rows(parts, runs, K_START, K_END)
        ranks = assignment.ranks[source[again]]
        stride = int(chunk_of_run.max(initial=0)) + 1
        key = (ranks * stride + chunk_of_run[q_run[again]]) * stride + chunk_of_run[k_run]
        _, first, block = np.unique(key, return_index=True, return_inverse=True)
        area = np.bincount(block, rows_area(parts), len(first)).astype(np.float64)
        owners, sides = problem.placed.owners, []
        for columns, row_bytes in zip(COLUMNS.values(), problem.row_cost, strict=True):
            pins, rows, first_row = _nets(parts[:, columns], block)
            sides.append((pins, owners.rank_of(first_row), rows * row_bytes))
        (pins, *_), (more, *_) = sides
        more[:, 0] += len(sides[0][1])
        pins = np.concatenate([pins, more])
        return cls(
            problem,
            parts,
            block,
            ranks[first],
            area * problem.seconds_per_pair,
            pins.take(pins[:, 1].argsort(kind="stable"), axis=0),
            *(np.concatenate([one[which] for one in sides]) for which in (1, 2)),
        )

    @property
    def num_blocks(self) -> int:
        """Returns the number of blocks."""
        return len(self.start)

    @property
    def num_ranks(self) -> int:
        """Returns the number of ranks."""
        return self.problem.placed.num_ranks

    def assignment(self, rank_of_block: IntArray) -> Assignment:
        """Returns the pairs of every block on its rank."""
        return Assignment(self.parts, rank_of_block[self.block])

    def loads(self, rank_of_block: IntArray) -> Loads:
        """Returns what ranks have to do: `rank_of_block` `[blocks]`."""
        readers, num_ranks = self._readers(rank_of_block), self.num_ranks
        in_node = self._by_node(readers)
        inside = self.near * (readers > 0)
        enters = self.far * (in_node > 0)
        seconds = np.concatenate([inside.ravel(), enters.ravel(), enters.ravel()])
        sent = np.bincount(self._senders, seconds, 3 * num_ranks).reshape(3, num_ranks)
        links = np.concatenate([inside.sum(axis=0)[None], sent])
        work = np.bincount(rank_of_block, self.compute, num_ranks) / self.problem.speeds
        return Loads(work, links, self.problem.contention, readers, in_node)

    def _readers(self, rank_of_block: IntArray) -> IntArray:
        first_of_net, own = self._cells
        cell = first_of_net + rank_of_block.take(self.pins[:, 1])
        count = np.bincount(cell, minlength=len(self.owner) * self.num_ranks)
        count[own] = 0
        return count.reshape(-1, self.num_ranks)

    def _by_node(self, of_rank: IntArray) -> IntArray:
        """Returns sums over the ranks of each node other than the owner's: `[nets, nodes]` of `[nets, P]`."""
        first = np.arange(0, self.num_ranks, self.problem.node_size)
        if len(first) == 1:
            return np.zeros((len(of_rank), 1), dtype=of_rank.dtype)
        return np.where(self.is_home, 0, np.add.reduceat(of_rank, first, axis=1))

    @cached_property
    def node(self) -> IntArray:
        """The node of each rank: `[P]`."""
        return np.arange(self.num_ranks) // self.problem.node_size

    @cached_property
    def is_home(self) -> BoolArray:
        """Whether a node is that of a net's owner: `[nets, nodes]`."""
        nodes = np.arange(self.node[-1] + 1)
        return self.node[self.owner][:, None] == nodes

    @cached_property
    def relay(self) -> IntArray:
        """The rank by which a net enters each node: `[nets, nodes]`; at home its owner."""
        size = self.problem.node_size
        first = np.arange(0, self.num_ranks, size)
        return np.minimum(first + (self.owner % size)[:, None], self.num_ranks - 1)

    @cached_property
    def source(self) -> IntArray:
        """The rank that sends a net to each rank inside its node: `[nets, P]`."""
        return self.relay[:, self.node]

    @cached_property
    def passes_inside(self) -> BoolArray:
        """Whether a net reaches a rank by a link inside the node, at the end: `[nets, P]`."""
        return self.source != np.arange(self.num_ranks)

    @cached_property
    def near(self) -> FloatArray:
        """Seconds in which a net reaches each rank by a link inside the node: `[nets, P]`."""
        return (self.bytes[:, None] * self.problem.seconds_per_byte[0]) * self.passes_inside

    @cached_property
    def far(self) -> FloatArray:
        """Seconds in which a net enters each node: `[nets, nodes]`."""
        return (self.bytes[:, None] * self.problem.seconds_per_byte[1]) * ~self.is_home

    @cached_property
    def _cells(self) -> tuple[IntArray, IntArray]:
        """Of a table `[nets, P]`: where each pin's net begins, and where the owner of each net is."""
        owners = np.arange(len(self.owner)) * self.num_ranks + self.owner
        return self.pins[:, 0] * self.num_ranks, owners

    @cached_property
    def _senders(self) -> IntArray:
        """Who sends for each cell of `near`, receives for each of `far`, and sends for those; each P further."""
        owner = np.broadcast_to(self.owner[:, None], self.relay.shape)
        ranks = (self.source, self.relay + self.num_ranks, owner + 2 * self.num_ranks)
        return np.concatenate([one.ravel() for one in ranks])


def _chunks(placed: PlacedMask, per_rank: int) -> tuple[IntArray, IntArray]:
    """Returns runs of token ids `[n, 2]` of one owner each, and the chunk of each; a chunk may have several runs."""
    owners = placed.owners
    size = -(-placed.own_rows // per_rank)
    by_rank = np.argsort(owners.rank, kind="stable")
    ids, rank = owners.ids[by_rank], owners.rank[by_rank]
    length = ids[:, 1] - ids[:, 0]
    row = np.cumsum(length) - length  # every rank has own_rows rows: counted through all ranks
    local = row - rank * placed.own_rows
    pieces = interval.cut(np.stack([local, local + length], axis=1), size)
    which = np.repeat(np.arange(len(ids)), (local + length - 1) // size - local // size + 1)
    runs = pieces + (ids[:, 0] - local)[which][:, None]
    by_id = np.argsort(runs[:, 0])
    return runs[by_id], (rank[which] * per_rank + pieces[:, 0] // size)[by_id]


def _nets(ranges: IntArray, block: IntArray) -> tuple[IntArray, FloatArray, IntArray]:
    """Groups the rows of one side by the blocks that they are in; those of a block are of one owner.

    Returns pins (net, block), the rows of each net and its first row.
    """
    span = int(ranges.max(initial=0)) + 1  # every block has rows of its own: none is in it twice
    united = interval.normalise(interval.grouped(ranges, block, span))
    block, ranges = interval.ungrouped(united, span)
    edges = interval.distinct(ranges)
    low, high = np.searchsorted(edges, ranges[:, 0]), np.searchsorted(edges, ranges[:, 1])
    which, atom = interval.expand_ranges(low, high)
    stride = int(block.max(initial=0)) + 1
    atom, blocks = np.divmod(interval.distinct(atom * stride + block[which]), stride)
    opens = np.flatnonzero(np.diff(atom, prepend=-1))
    rows = (edges[1:] - edges[:-1])[atom[opens]]
    # Atoms in the same blocks have the same sum of scattered block numbers.
    same = np.add.reduceat(_scattered(blocks), opens) if len(opens) else opens
    _, first, net = np.unique(same, return_index=True, return_inverse=True)
    of_net, place = interval.expand_ranges(opens[first], np.append(opens, len(atom))[first + 1])
    pins = np.stack([of_net, blocks[place]], axis=1)
    return pins, np.bincount(net, rows, len(first)).astype(np.float64), edges[atom[opens[first]]]


def _scattered(numbers: IntArray) -> IntArray:
    """Returns numbers that look random and are the same everywhere: SplitMix64's last step (Steele et al., 2014)."""
    x = numbers.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))).view(np.int64)
