"""Lower bounds of a pass: what no plan on equal numbers of tokens can beat.

A rank that owns L rows and computes `a` pairs touches r query rows and c key rows, L of each for nothing:

                  own keys   foreign keys          r c >= a                (a rectangle holds r c pairs)
    own queries   [ local ]  [           ]         own x own holds `local` pairs at most, L^2 or fewer:
    foreign       [       ]  [           ]         under a causal mask L (L + 1) / 2

so the foreign rows, each weighted by what it costs to move it there and its result back, cost at least the
smallest rectangle (isoperimetry) and at least the pairs that are not local over the pairs that one row can
have (must-move). The same holds for a node, which owns the rows of all its ranks, and under a head split of
degree h, where a rank owns h L rows of N / h heads and pays for the exchange.

Which plans: every plan of the schema that owns L tokens per rank, whatever it moves, relays, keeps or merges.
`time_bound` holds for every balance and every head degree (the smallest over all that divide); a volume is
bounded for given areas per rank, because an unbalanced plan can move nothing at all.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from megatron_cp.config import CPConfig, Topology
from megatron_cp.mask import AttentionMask
from megatron_cp.mask.interval import IntArray
from megatron_cp.mask.slice import HI, K_END, K_START, LO, Q_END, Q_START, transpose_rows
from megatron_cp.plan.hardware.cost import compute_seconds
from megatron_cp.plan.hardware.links import Links
from megatron_cp.plan.hardware.rows import RowCost, exchange_elements, head_split_bytes, row_size
from megatron_cp.plan.hardware.speeds import rank_speeds
from megatron_cp.plan.hardware.topology import get_topology
from megatron_cp.plan.placement.placement import tokens_per_rank
from megatron_cp.plan.schema import FloatArray, OwnRows, PassName
from megatron_cp.plan.transfer.head_split import head_degrees

BISECTIONS = 50


@dataclass(frozen=True)
class MaskExtent:
    """What the bounds know of a mask."""

    area: int
    row_degree: int
    """Most keys that one query sees."""
    key_degree: int
    """Most queries that see one key."""
    is_one_sided: bool
    """Whether no two different tokens see each other both ways (k <= q everywhere, or k >= q)."""

    def local_pairs(self, own: OwnRows) -> float:
        """Returns the most pairs that so many queries and keys can have among themselves."""
        if not (self.is_one_sided and own.are_same):
            return min(own.q * min(own.k, self.row_degree), own.k * min(own.q, self.key_degree))
        # the m-th of them sees at most m of them, and never more than the degree
        degree = min(self.row_degree, self.key_degree)
        rising = min(own.q, degree)
        return rising * (rising + 1) / 2 + (own.q - rising) * degree


@lru_cache(maxsize=64)
def mask_extent(mask: AttentionMask) -> MaskExtent:
    """Returns area, degrees and one-sidedness of a mask; O(slices log slices)."""
    rows = mask.array
    top = np.minimum(rows[:, HI], rows[:, K_END] - 1 - rows[:, Q_START])
    bottom = np.maximum(rows[:, LO], rows[:, K_START] - rows[:, Q_END] + 1)
    is_one_sided = bool((top <= 0).all() or (bottom >= 0).all())
    return MaskExtent(
        mask.area(), _largest_degree(rows), _largest_degree(transpose_rows(rows)), is_one_sided
    )


def _largest_degree(rows: IntArray) -> int:
    """Returns the most keys of any query row of tight rows.

    The keys of row q in one slice are min(k_end, q + hi + 1) - max(k_start, q + lo): two bends, so the
    sum over slices is linear between neighbouring bends, and largest at one of them.
    """
    if not len(rows):
        return 0
    q0, q1, k0, k1, lo, hi = rows.T
    bend_up, bend_down = np.clip(k1 - hi - 1, q0, q1), np.clip(k0 - lo, q0, q1)
    zero, one = np.zeros_like(q0), np.ones_like(q0)
    pieces = (  # from, to, constant, slope
        (q0, bend_up, hi + 1, one),
        (bend_up, q1, k1, zero),
        (q0, bend_down, -k0, zero),
        (bend_down, q1, -lo, -one),
    )
    at = np.concatenate([x for piece in pieces for x in piece[:2]])
    steps = np.concatenate(
        [sign * np.stack(piece[2:]) for piece in pieces for sign in (1, -1)], axis=1
    )
    order = np.argsort(at, kind="stable")
    points, first = np.unique(at[order], return_index=True)
    constant, slope = np.add.reduceat(steps[:, order], first, axis=1).cumsum(axis=1)
    ends = np.append(points[1:], points[-1] + 1) - 1
    return int(max((constant + slope * points).max(), (constant + slope * ends).max()))


# ---------------------------------------------------------------------- one rank, or one node


def least_cost(area: float, own: OwnRows, cost: RowCost, extent: MaskExtent) -> float:
    """Returns the least that foreign rows cost a rank that owns `own` rows and computes `area` pairs."""
    return max(_rectangle_cost(area, own, cost, extent), _must_move(area, own, cost, extent))


def _rectangle_cost(area: float, own: OwnRows, cost: RowCost, extent: MaskExtent) -> float:
    local = extent.local_pairs(own)
    if area <= local:
        return 0.0
    # Pairs of the rectangle, those that own rows cannot have included.
    whole = area - local + own.q * own.k
    rows = own.q if cost.query == 0 else math.sqrt(cost.key * whole / cost.query)
    rows = min(max(rows, own.q), whole / own.k)
    return cost.query * (rows - own.q) + cost.key * (whole / rows - own.k)


def _must_move(area: float, own: OwnRows, cost: RowCost, extent: MaskExtent) -> float:
    foreign = area - extent.local_pairs(own)
    if foreign <= 0:
        return 0.0
    return foreign * min(cost.query / extent.row_degree, cost.key / extent.key_degree)


def _even_cost(mean: float, most: float, own: OwnRows, cost: RowCost, extent: MaskExtent) -> float:
    """Returns the least mean cost when areas may be uneven: mean `mean`, none above `most`.

    Rectangles cost nothing up to the local pairs and then grow ever more slowly, so the worst that
    unevenness can do is to spread areas over both ends; must-move is linear.
    """
    local = extent.local_pairs(own)
    if mean <= local:
        return 0.0
    most = max(most, mean)
    chord = _rectangle_cost(most, own, cost, extent) * (mean - local) / (most - local)
    return max(chord, _must_move(mean, own, cost, extent))


# ---------------------------------------------------------------------- a pass


def volume_bound(
    areas: FloatArray, own: OwnRows, config: CPConfig, pass_name: PassName, mask: AttentionMask,
    head_degree: int = 1,
) -> float:  # fmt: skip
    """Returns the least mean inbound volume of ranks that compute `areas` (all heads), in units.

    Unit: one rank's query rows (`own.q` x query heads x head dim elements), as `AttentionPlan.stats` counts.
    Holds for every plan of this head degree with these areas and `own` rows per rank.
    """
    extent, cost = mask_extent(mask), _unit_cost(config, pass_name, head_degree)
    pairs = np.asarray(areas, dtype=np.float64) * head_degree
    moved = [least_cost(float(area), own.times(head_degree), cost, extent) for area in pairs]
    return float(np.mean(moved)) / own.q + _exchange_units(config, pass_name, head_degree, own)


def time_bound(
    mask: AttentionMask,
    cp_size: int,
    config: CPConfig,
    pass_name: PassName,
    own: OwnRows | None = None,
) -> float:
    """Returns the seconds of one pass of one layer that no plan is below.

    `own`: rows per rank, by default the fewest of the same tokens.
    """
    own = own or OwnRows.of_tokens(tokens_per_rank(mask.num_queries, cp_size, config))
    return time_bound_of(mask_extent(mask), cp_size, own, config, pass_name)


def time_bound_of(
    extent: MaskExtent, cp_size: int, own: OwnRows, config: CPConfig, pass_name: PassName
) -> float:
    """Returns `time_bound` of a mask of which no more is known than its extent. O(head degrees)."""
    return min(
        seconds
        for degree in head_degrees(cp_size, config)
        for seconds in _seconds_of_degree(extent, cp_size, own, config, pass_name, degree)
    )


@dataclass(frozen=True)
class _Level:
    """Ranks, or nodes as one head position sees them: units that share pairs and rows evenly or not."""

    mean: float
    """Pairs of a unit on average."""
    own: OwnRows
    """Rows that a unit owns."""
    pair_seconds: float
    """Seconds that the fastest unit takes for a pair."""
    byte_seconds: float
    """Seconds that a unit's links take for a byte, one way."""

    def at_once(self, there: RowCost, extent: MaskExtent) -> float:
        """Returns the least time of the unit with the largest area to receive its rows."""
        return least_cost(self.mean, self.own, there, extent) * self.byte_seconds

    def moving(self, seconds: float, both: RowCost, extent: MaskExtent) -> float:
        """Returns the least mean time that rows travel if no unit computes longer than `seconds`."""
        most = seconds / self.pair_seconds
        return _even_cost(self.mean, most, self.own, both, extent) * self.byte_seconds


def _seconds_of_degree(
    extent: MaskExtent,
    cp_size: int,
    own: OwnRows,
    config: CPConfig,
    pass_name: PassName,
    degree: int,
) -> Iterator[float]:
    """Yields the bounds of head groups inside nodes, and of groups across nodes.

    Each is the exchange of heads, and after it the largest of three: rows that have to move, work that cannot start
    before foreign rows are there, and the load with what moving rows takes from it.
    """
    topology, speeds = get_topology(config.topology), rank_speeds(config, cp_size)
    one = compute_seconds(1.0, config, pass_name) / degree  # of 1/h of the heads
    pair = one / float(speeds.max())
    there, both = _byte_cost(config, pass_name, degree)
    has_nodes = cp_size > topology.node_size
    gbytes = topology.inner_gbytes_per_s + (topology.outer_gbytes_per_s if has_nodes else 0.0)
    ranks = _Level(extent.area * degree / cp_size, own.times(degree), pair, 1e-9 / gbytes)
    foreign = ranks.mean - extent.local_pairs(ranks.own)
    critical = topology.latency_us * 1e-6 + foreign * pair if foreign > 0 else 0.0
    exchange = head_split_bytes(own, degree, config, pass_name) * 1e-9
    latency = 2e-6 * topology.latency_us if degree > 1 else 0.0

    def bound(levels: list[_Level], gbytes_per_s: float) -> float:
        exposed = exchange / gbytes_per_s + latency
        at_once = max(level.at_once(there, extent) for level in levels)

        def moving(seconds: float) -> float:
            return max(level.moving(seconds, both, extent) for level in levels)

        volume = max(at_once, _least_time(0.0, 1.0, moving))
        # every rank computes, and loses a share while its rows travel; on average, by speed, no less than this
        mean_speed = float(speeds.mean())
        share = topology.contention * float(speeds.min()) / mean_speed
        slowed = _least_time(ranks.mean * one / mean_speed, share, moving)
        return exposed + max(slowed, volume, critical)

    if (
        has_nodes and degree > 1
    ):  # groups across nodes: a slow exchange, and nodes may hold every row
        yield bound([ranks], topology.outer_gbytes_per_s)
    if degree > topology.node_size:
        return
    wider = [
        _Level(extent.area / count, own.times(size), pair * degree / size, 1e-9 / rate)
        for count, size, rate in _whole_levels(topology, cp_size, degree)
    ]
    yield bound([ranks, *wider], topology.inner_gbytes_per_s)


def _whole_levels(
    topology: Topology, cp_size: int, degree: int
) -> Iterator[tuple[int, int, float]]:
    """Yields count, ranks and GB/s out of one of the nodes, racks, ... if there are several of them.

    Per head position a node is one rank with the rows and links of all of its ranks.
    """
    links = Links.of(topology)
    sizes = (topology.node_size, *(level.size for level in topology.outer_levels))
    for size, one_rank in zip(sizes, links.gbytes_per_s[1:], strict=True):
        if cp_size > size:
            rate = one_rank * size
            if size == topology.node_size and links.node_gbytes_per_s is not None:
                rate = min(rate, links.node_gbytes_per_s)
            yield -(-cp_size // size), size, rate / degree


def _least_time(least: float, share: float, moving: Callable[[float], float]) -> float:
    """Returns the smallest T with `least + share * moving(T) <= T`; `moving` falls as T grows."""
    low, high = least, least + share * moving(least)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if least + share * moving(middle) <= middle:
            high = middle
        else:
            low = middle
    return low


def _byte_cost(config: CPConfig, pass_name: PassName, degree: int) -> tuple[RowCost, RowCost]:
    """Returns bytes of a row on its way there, and there and back."""
    query, key = (row_size(config, pass_name, side, degree) for side in ("q", "k"))
    return RowCost(query.there, key.there), RowCost(query.both_ways, key.both_ways)


def _unit_cost(config: CPConfig, pass_name: PassName, degree: int) -> RowCost:
    """Returns elements of a row there and back, in those of one query row of all heads."""
    query, key = (row_size(config, pass_name, side, degree) for side in ("q", "k"))
    return RowCost(query.units, key.units)


def _exchange_units(config: CPConfig, pass_name: PassName, degree: int, own: OwnRows) -> float:
    return exchange_elements(config, pass_name, degree, own) * (degree - 1) / degree
