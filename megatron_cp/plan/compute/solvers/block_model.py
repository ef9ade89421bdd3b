"""The mask cut into blocks, and what an assignment of the blocks to units (ranks, or nodes) costs.

    query chunks     . . . . . . . .        a block: one query chunk x one key chunk x one rank of the start,
      of rank 0      A . . . . . . .        so the start is an assignment of the blocks, exactly
                     B C . . . . . .        a net:   the rows of one side that are in the same blocks;
      of rank 1      B C D . . . . .                 a unit needs them all as soon as it has one of the blocks
                     B C D E . . . .

A unit computes its blocks, takes in every foreign net once, and sends its own nets to all who need them:

    T = max over units of   compute + contention x link,   link      with link = max(in, out)

Nets are exact to a row, so the model's T is that of the slices themselves; only the blocks are coarse.
Rows cross the network once per node, to the rank at their owner's place there, which passes them on inside
(`ThroughNodes` of plan/transfer/routing.py); results go back along the same links. Latency and stages are not modelled.
"""

from dataclasses import dataclass

import numpy as np

from megatron_cp.mask import interval
from megatron_cp.mask.interval import IntArray
from megatron_cp.mask.slice import K_END, K_START, Q_END, Q_START, cut_rows, rows_area
from megatron_cp.plan.compute.bisection import Assignment, Weights
from megatron_cp.plan.schema import FloatArray
from megatron_cp.plan.transfer.pass_builder import COLUMNS, PlacedMask
from megatron_cp.plan.transfer.routing import DST, ID_START, ID_STOP, SRC, Owners, ThroughNodes

CHUNKS_PER_RANK = (8, 6, 4, 3, 2, 1)  # the first that is small enough


@dataclass(frozen=True)
class Problem:
    """A placed mask, and what computing its pairs and moving its rows costs."""

    placed: PlacedMask
    """The mask on P ranks (or head groups)."""
    weights: Weights
    """Bytes of a query row and of a key row, there and back, in both passes."""
    seconds_per_pair: float
    """Compute of one pair in both passes."""
    seconds_per_byte: tuple[float, float]
    """Of a rank's link inside the node, and between nodes."""
    node_size: int
    """Ranks of a node."""
    contention: float = 0.0
    """Share of its compute that a rank loses while rows move (`Topology.contention`)."""
    speeds: FloatArray | None = None
    """How fast each rank computes: `[P]`; None: all 1."""

    def speed_of(self, ranks: IntArray) -> FloatArray:
        """Returns how fast each of these ranks computes."""
        return np.ones(len(ranks)) if self.speeds is None else self.speeds[ranks]


@dataclass(frozen=True)
class Units:
    """Who shares blocks: the ranks of one node, or nodes, which have a link (a port) for each of their places."""

    width: IntArray
    """Ranks in each unit: `[units]`."""
    speed: FloatArray
    """Of those ranks together, which share its pairs by speed: `[units]`."""
    num_ports: int
    of_owner: IntArray
    """The unit that has a rank's own rows, or gets them first: `[P]`."""
    port_of_owner: IntArray
    """The port over which a rank's own rows leave, and enter other units that have it (else their last): `[P]`."""
    seconds_per_byte: float
    other_link: FloatArray
    """Seconds of links that no assignment changes: `[units]`."""

    @property
    def count(self) -> int:
        """Returns the number of units."""
        return len(self.width)


@dataclass(frozen=True)
class BlockModel:
    """Blocks, nets and their costs. All seconds are those of one rank."""

    slices: IntArray
    """The pairs, int64 `[n, 6]` in token ids."""
    source: IntArray
    """The slice that was given, of which each is a piece: `[n]`."""
    block: IntArray
    """The block of each slice: `[n]`."""
    compute: FloatArray
    """Seconds to compute each block: `[blocks]`."""
    start: IntArray
    """The unit of each block to begin with: `[blocks]`."""
    pins: IntArray
    """Which net is needed for which block: int64 `[pins, 2]`, sorted."""
    owner: IntArray
    """The unit that has the rows of each net: `[nets]`."""
    port: IntArray
    """The port over which they travel: `[nets]`."""
    travel: FloatArray
    """Seconds to bring the rows of each net to another unit: `[nets]`."""
    units: Units
    contention: float

    @property
    def num_blocks(self) -> int:
        """Returns the number of blocks."""
        return len(self.compute)

    def seconds(self, unit_of_block: IntArray) -> float:
        """Returns T of an assignment: the unit of each block `[blocks]`."""
        return float(self.unit_seconds(unit_of_block).max())

    def unit_seconds(self, unit_of_block: IntArray) -> FloatArray:
        """Returns the time of every unit: `[units]`."""
        units = self.units
        compute = np.bincount(unit_of_block, self.compute, units.count) / units.speed
        busiest = self.links(self.pins, unit_of_block).reshape(2, units.count, -1).max(axis=(0, 2))
        return _seconds(compute, np.maximum(busiest, units.other_link), self.contention)

    def links(self, pins: IntArray, unit_of_block: IntArray) -> FloatArray:
        """Returns the seconds that foreign rows of some pins take, in and out: `[2, units * ports]`."""
        count = self.units.count
        needs = interval.distinct(pins[:, 0] * count + unit_of_block[pins[:, 1]])
        net, unit = needs // count, needs % count
        foreign = unit != self.owner[net]
        ends, travel = self.ends(net[foreign], unit[foreign]), self.travel[net[foreign]]
        return np.array([np.bincount(end, travel, count * self.units.num_ports) for end in ends])

    def ends(self, net: IntArray, unit: IntArray) -> tuple[IntArray, IntArray]:
        """Returns where foreign nets come in at units that need them, and where they go out: unit * ports + port."""
        ports, last = self.units.num_ports, self.units.width[unit] - 1
        came = unit * ports + np.minimum(self.port[net], last)
        return came, self.owner[net] * ports + self.port[net]

    def least_seconds(self) -> float:
        """Returns T of equal loads when nothing moves; no assignment is faster."""
        return float(self.compute.sum() / self.units.speed.sum())


def _seconds(compute: FloatArray, link: FloatArray, contention: float) -> FloatArray:
    return np.maximum(compute + contention * link, link)


def measure(problem: Problem, assignment: Assignment) -> float:
    """Returns T of an assignment to ranks, exact to a row: what every solver is judged by."""
    area = np.bincount(
        assignment.ranks, rows_area(assignment.parts), minlength=problem.placed.num_ranks
    )
    compute = area.astype(np.float64) * problem.seconds_per_pair
    compute = compute / problem.speed_of(np.arange(problem.placed.num_ranks))
    link = link_seconds(problem, assignment).max(axis=0)
    return float(_seconds(compute, link, problem.contention).max())


def link_seconds(problem: Problem, assignment: Assignment) -> FloatArray:
    """Returns the seconds of every rank's link inside its node and between nodes, the busier end: `[2, P]`."""
    placed, num_ranks = problem.placed, problem.placed.num_ranks
    ends = np.zeros((2, 2, num_ranks))  # (in, out) x (inside, between nodes)
    route, space = ThroughNodes(problem.node_size), placed.space
    for columns, weight in _sides(problem.weights):
        wanted = space.keys_of(assignment.parts[:, columns], assignment.ranks)
        missing = space.missing(interval.normalise(wanted))
        for hop in route(placed.owners, space, missing) if len(missing) else []:
            far = hop[:, SRC] // problem.node_size != hop[:, DST] // problem.node_size
            rows = (hop[:, ID_STOP] - hop[:, ID_START]) * weight
            for end, column in enumerate((DST, SRC)):
                for level, chosen in enumerate((~far, far)):
                    ends[end, level] += np.bincount(hop[chosen, column], rows[chosen], num_ranks)
    return ends.max(axis=0) * np.array(problem.seconds_per_byte)[:, None]


def _sides(weights: Weights) -> tuple[tuple[list[int], float], ...]:
    """Returns the columns of a slice's rows on each side, and the bytes of a row there."""
    return (COLUMNS["q"], weights.query), (COLUMNS["k"], weights.key)


def cut_into_blocks(
    problem: Problem, parts: IntArray, start: IntArray, units: Units, max_size: int
) -> BlockModel | None:
    """Returns the blocks of slices `parts` `[n, 6]` that units `start` `[n]` compute now.

    Chunks are as small as blocks x units and pins x units, together at most `max_size`, allow; None if even one
    chunk per rank is too many.
    """
    for per_rank in CHUNKS_PER_RANK:
        model = _cut(problem, parts, start, units, per_rank)
        if (model.num_blocks + len(model.pins)) * units.count <= max_size:
            return model
    return None


def _cut(
    problem: Problem, parts: IntArray, start: IntArray, units: Units, per_rank: int
) -> BlockModel:
    runs, chunk_of_run = _chunks(problem.placed, per_rank)
    parts, source, q_run = cut_rows(parts, runs, Q_START, Q_END)
    parts, again, k_run = cut_rows(parts, runs, K_START, K_END)
    source, start = source[again], start[source[again]]
    chunks = chunk_of_run[q_run[again]], chunk_of_run[k_run]
    _, first, block = np.unique(
        np.stack([start, *chunks], axis=1), axis=0, return_index=True, return_inverse=True
    )
    block = block.reshape(-1)
    area = np.bincount(block, rows_area(parts), len(first))
    pins: list[IntArray] = []
    owners: list[IntArray] = []
    travel: list[FloatArray] = []
    for columns, weight in _sides(problem.weights):
        net_pins, rows, first_row = _nets(parts[:, columns], block)
        net_pins[:, 0] += sum(len(one) for one in owners)
        pins.append(net_pins)
        owners.append(problem.placed.owners.rank_of(first_row))
        travel.append(rows.astype(np.float64) * weight * units.seconds_per_byte)
    owner = np.concatenate(owners)
    return BlockModel(
        slices=parts,
        source=source,
        block=block,
        compute=area.astype(np.float64) * problem.seconds_per_pair,
        start=start[first],
        pins=np.concatenate(pins),
        owner=units.of_owner[owner],
        port=units.port_of_owner[owner],
        travel=np.concatenate(travel),
        units=units,
        contention=problem.contention,
    )


def _chunks(placed: PlacedMask, per_rank: int) -> tuple[IntArray, IntArray]:
    """Returns runs of token ids `[n, 2]` of one owner each, and the chunk of each; a chunk may have several runs."""
    owners: Owners = placed.owners
    size = -(-placed.own_rows // per_rank)
    by_rank = np.argsort(owners.rank, kind="stable")
    ids, rank = owners.ids[by_rank], owners.rank[by_rank]
    length = ids[:, 1] - ids[:, 0]
    row = (
        np.cumsum(length) - length
    )  # every rank has own_rows rows, so this counts them through all ranks
    local = row - rank * placed.own_rows
    pieces = interval.cut(np.stack([local, local + length], axis=1), size)
    which = np.repeat(np.arange(len(ids)), (local + length - 1) // size - local // size + 1)
    runs = pieces + (ids[:, 0] - local)[which][:, None]
    return runs, rank[which] * per_rank + pieces[:, 0] // size


def _nets(ranges: IntArray, block: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Groups the rows of one side by the blocks that they are in.

    Returns pins (net, block), the rows of each net and its first row.
    """
    edges = interval.distinct(ranges)
    low, high = np.searchsorted(edges, ranges[:, 0]), np.searchsorted(edges, ranges[:, 1])
    which, atom = interval.expand_ranges(low, high)
    pairs = np.unique(np.stack([atom, block[which]], axis=1), axis=0)
    opens = np.flatnonzero(np.diff(pairs[:, 0], prepend=-1))
    members: dict[bytes, int] = {}
    net_of_atom = [
        members.setdefault(one.tobytes(), len(members)) for one in np.split(pairs[:, 1], opens[1:])
    ]
    atoms = pairs[opens, 0]
    rows = np.bincount(net_of_atom, (edges[1:] - edges[:-1])[atoms], len(members))
    _, first = np.unique(np.array(net_of_atom, dtype=np.int64), return_index=True)
    pins = [
        np.stack([np.full(len(blocks), net), blocks], axis=1)
        for net, key in enumerate(members)
        for blocks in [np.frombuffer(key, dtype=np.int64)]
    ]
    return np.concatenate(pins), rows, edges[atoms[first]]
