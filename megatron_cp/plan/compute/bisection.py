"""Which rank computes which pairs: recursive bisection of the mask over the tree of ranks.

Tokens stay where they are; compute moves. A group of ranks, and the pairs that it must compute, are cut in two,
racks first (where there are any), then nodes, then ranks inside a node, until every group is one rank:

    the pairs of a group, in some order
    [ at home in the left half | ... | at home in the right half ]
                       ^ cut where both halves have their share of the area

Seven orders compete for every group: by how much pairs are at home in a half (their queries, their keys, or both),
among equals along queries or keys; and by how many rows a pair keeps at home. The order that needs the fewest remote
rows on both sides wins: a rectangle is cut across its longer side, and documents stay with their tokens as far as
the balance allows. The slice at the cut is cut itself, at a row, so areas are equal to a row's pairs. All groups of a
level are cut at once, and pairs are looked at in blocks that shrink with the groups, so the time grows with the
number of ranks and hardly with that of tokens.

Each order is the best for some masks: without those by the home of keys a full mask on 4 ranks needs 49 % more rows
than the proven optimum, without that by rows kept at home block-causal documents on 48 ranks take 1.5 times as long.
Ten more (the same ones backwards, and pairs where they lie) found fewer rows for eight tokens in three documents, 14 %
(tests/plan/test_solver_oracle.py), and slower plans on 40 to 256 ranks, by 1 %.

Compare the hypergraph partitioners of DCP (SOSP'25) and the integer programs of UltraAttn (SC'25).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_cp.mask import AttentionMask, interval
from megatron_cp.mask.interval import IntArray
from megatron_cp.mask.slice import (
    K_END,
    K_START,
    Q_END,
    Q_START,
    area_above,
    cut_rows,
    rows_area,
    tighten,
)
from megatron_cp.plan.hardware.rows import RowCost
from megatron_cp.plan.schema import BoolArray, FloatArray
from megatron_cp.plan.transfer.routing import Owners

# What half and double of each do: benchmarks/bench_search.py; results are linked in docs/plan.md.
PARTS_PER_GROUP = 96  # blocks are halved until a group has so many, or they are small
CHUNKS_PER_RANK = 4  # ... which means this fraction of a rank's rows
HOMES = ((1, 1), (1, 0), (0, 1))  # whether queries and keys pull a pair home


@dataclass(frozen=True)
class Assignment:
    """Disjoint slices int64 `[n, 6]` in token ids, and the rank that computes each."""

    parts: IntArray
    ranks: IntArray


def assign(
    mask: AttentionMask,
    owners: Owners,
    sizes: Sequence[int],
    cost: RowCost,
    loads: FloatArray,
) -> Assignment:
    """Returns slices for all ranks whose areas are as `loads` `[P]` (relative), with few remote rows.

    `sizes`: ranks of a node, of a rack, ..., ascending. `cost`: of a row there, results on the way back included.
    """
    groups = _Groups(np.zeros(1, np.int64), np.full(1, owners.num_ranks), sizes)
    parts = _Parts(mask.array, owners)
    while groups.open.any():
        parts.refine(groups)
        goes_right = _Cut(parts, groups, cost, loads).best()
        groups = groups.halve(parts, goes_right)
    return Assignment(parts.rows, groups.first[parts.group])


class _Groups:
    """Ranges of ranks, and where each is cut: between racks, or nodes, if it holds several, else in the middle."""

    def __init__(self, first: IntArray, stop: IntArray, sizes: Sequence[int]):
        self.first, self.stop, self.sizes = first, stop, sizes
        self.open: BoolArray = stop - first > 1
        self.middle = middle = (first + stop) // 2
        for size in sizes:  # the outermost has the last word
            low, high = first // size + 1, (stop - 1) // size
            between = np.clip((middle + size // 2) // size, low, np.maximum(low, high))
            self.middle = np.where(high >= low, between * size, self.middle)

    def half_of_rank(self, num_ranks: int) -> IntArray:
        """Returns a number for each rank that differs between halves of groups."""
        edges = interval.distinct(np.r_[self.first, self.middle])
        return np.searchsorted(edges, np.arange(num_ranks), side="right")

    def halve(self, parts: "_Parts", goes_right: BoolArray) -> "_Groups":
        """Returns the halves as groups and renumbers the parts."""
        keeps = np.stack([np.ones(len(self.open), dtype=bool), self.open], axis=1)
        number = np.cumsum(keeps.reshape(-1)).reshape(keeps.shape) - 1
        parts.group = number[parts.group, goes_right.astype(np.int64)]
        first = np.stack([self.first, self.middle], axis=1)[keeps]
        middle = np.where(self.open, self.middle, self.stop)
        return _Groups(first, np.stack([middle, self.stop], axis=1)[keeps], self.sizes)


class _Parts:
    """The pairs still to be assigned, as slices inside blocks of `chunk` x `chunk`, and their groups."""

    def __init__(self, rows: IntArray, owners: Owners):
        self.rows, self.owners = rows, owners
        self.group = np.zeros(len(rows), dtype=np.int64)
        own_rows = owners.num_ids // owners.num_ranks
        self.smallest = max(1, own_rows // CHUNKS_PER_RANK)
        self.chunk = self.smallest << int(np.log2(owners.num_ids / self.smallest))

    def refine(self, groups: "_Groups") -> None:
        """Cuts parts where the owner's half changes, and halves blocks until there are enough for a good cut."""
        half = groups.half_of_rank(self.owners.num_ranks)[self.owners.rank]
        opens = np.flatnonzero(np.r_[True, half[1:] != half[:-1]])
        ends = np.r_[opens[1:], len(half)] - 1
        self._cut(interval.columns(self.owners.ids[opens, 0], self.owners.ids[ends, 1]))
        while self.chunk > self.smallest and len(self.rows) < PARTS_PER_GROUP * len(groups.first):
            self.chunk //= 2
            self._cut_to_chunks()
        self._measure()

    def _cut_to_chunks(self) -> None:
        self._cut(interval.chunks(-(-self.owners.num_ids // self.chunk), self.chunk))

    def _cut(self, cells: IntArray) -> None:
        for start, end in ((Q_START, Q_END), (K_START, K_END)):
            self.rows, source, _ = cut_rows(self.rows, cells, start, end)
            self.group = self.group.take(source)

    def _measure(self) -> None:
        self.area = rows_area(self.rows).astype(np.float64)
        self.chunks = [self.rows[:, start] // self.chunk for start in (Q_START, K_START)]
        self.sizes = [
            (self.rows[:, end] - self.rows[:, start]).astype(np.float64)
            for start, end in ((Q_START, Q_END), (K_START, K_END))
        ]
        self.owner = [self.owners.rank_of(self.rows[:, start]) for start in (Q_START, K_START)]

    def replace(self, rows: IntArray, group: IntArray) -> None:
        """Takes other slices of the same pairs; `refine` measures them."""
        self.rows, self.group = rows, group


class _Cut:
    """One level: every open group is cut in two."""

    def __init__(self, parts: _Parts, groups: _Groups, cost: RowCost, loads: FloatArray):
        self.parts, self.groups, self.cost = parts, groups, cost
        upto = np.r_[0.0, np.cumsum(loads)]
        whole = upto[groups.stop] - upto[groups.first]
        share = (upto[groups.middle] - upto[groups.first]) / np.where(whole > 0, whole, 1.0)
        self.total = np.bincount(parts.group, parts.area, len(groups.first))
        self.target = np.where(groups.open, self.total * share, self.total)
        group = parts.group
        first, middle, stop = (x[group] for x in (groups.first, groups.middle, groups.stop))
        # Parts of a group that begin at the same row share rows: they are counted once.
        self.runs = [
            _runs(group, rows) for rows in (parts.rows[:, Q_START], parts.rows[:, K_START])
        ]
        self.is_left = [(owner >= first) & (owner < middle) for owner in parts.owner]
        self.is_right = [(owner >= middle) & (owner < stop) for owner in parts.owner]
        # In every order groups follow each other, so a place belongs to the same group in all of them.
        self.group = np.sort(group, kind="stable")

    def best(self) -> BoolArray:
        """Returns which parts go to the right halves; parts at a cut have been cut themselves."""
        orders = self._orders()
        area = self.parts.area[orders]
        before = np.cumsum(area, axis=1) - area
        before -= (np.cumsum(self.total) - self.total)[self.group]
        goes_right = before + area / 2 > self.target[self.group]
        best = self._remote_cost(orders, goes_right).argmin(axis=0)[self.group]
        places = np.arange(orders.shape[1])
        return self._split(orders[best, places], before[best, places])

    def _orders(self) -> IntArray:
        """Returns the parts group by group, in the orders that compete: int64 `[orders, parts]`."""
        parts = self.parts
        along = [np.argsort(chunk, kind="stable") for chunk in parts.chunks]
        pulls = [
            right.astype(np.int64) - left
            for left, right in zip(self.is_left, self.is_right, strict=True)
        ]
        heavier = 2 if self.cost.query >= self.cost.key else 1
        size = np.uint16 if len(self.target) < 8192 else np.int64
        keys = np.stack(
            [
                parts.group * 8
                + 4
                + q_home * heavier * pulls[0]
                + k_home * (3 - heavier) * pulls[1]
                for q_home, k_home in HOMES
            ]
        ).astype(size)
        ways = np.stack(along)
        sorted_by_key = keys[:, ways].argsort(axis=2, kind="stable")
        orders = np.take_along_axis(np.broadcast_to(ways, sorted_by_key.shape), sorted_by_key, 2)
        # Parts that would cost many rows for little area are those to leave at home.
        value = sum(
            cost * pull * rows
            for cost, pull, rows in zip(self.cost, pulls, parts.sizes, strict=True)
        )
        by_value = np.lexsort((value / parts.area, parts.group))
        orders = orders.reshape(len(HOMES) * len(along), len(by_value))
        return np.concatenate([orders, by_value[None]])

    def _remote_cost(self, orders: IntArray, goes_right: BoolArray) -> FloatArray:
        """Returns the cost of the remote rows of both halves of every group, in each order: `[orders, groups]`."""
        count = len(orders)
        cost = np.zeros((count, len(self.target)))
        which = np.arange(count)[:, None]
        for axis, row_cost in enumerate(self.cost):
            left, right = self.is_left[axis][orders], self.is_right[axis][orders]
            away = ~np.where(goes_right, right, left)
            run, group_of_run = self.runs[axis]
            cell = (2 * which + goes_right) * len(group_of_run) + run[orders]
            rows = np.zeros(count * 2 * len(group_of_run))
            rows[cell[away]] = self.parts.sizes[axis][orders[away]]
            both = rows.reshape(count, 2, len(group_of_run)).sum(axis=1)
            opens = np.unique(group_of_run, return_index=True)[1]
            cost[:, group_of_run[opens]] += row_cost * np.add.reduceat(both, opens, axis=1)
        return cost

    def _split(self, order: IntArray, before: FloatArray) -> BoolArray:
        group = self.group
        area, target = self.parts.area[order], self.target[group]
        goes_right = before >= target
        at_cut = np.flatnonzero(~goes_right & (before + area > target))
        rows = self.parts.rows.take(order, axis=0)
        left, right = (rows.take(at_cut, axis=0) for _ in range(2))
        cut = _row_at_area(left, (target - before)[at_cut])
        left[:, Q_END], right[:, Q_START] = cut, cut
        empty_left = cut == rows[at_cut, Q_START]
        has_both = ~empty_left & (cut < rows[at_cut, Q_END])
        goes_right[at_cut[empty_left]] = True
        rows[at_cut[has_both]] = tighten(left[has_both])
        more = tighten(right[has_both])
        self.parts.replace(np.concatenate([rows, more]), np.r_[group, group[at_cut[has_both]]])
        return np.r_[goes_right, np.ones(len(more), dtype=bool)]


def _runs(group: IntArray, start: IntArray) -> tuple[IntArray, IntArray]:
    """Returns a number for each (group, first row), and the group of each number."""
    stride = int(start.max(initial=0)) + 1
    found, number = np.unique(group * stride + start, return_inverse=True)
    return number, found // stride


def _row_at_area(rows: IntArray, wanted: FloatArray) -> IntArray:
    """Returns the query row at which each tight slice has about the wanted area above it."""
    low, high = rows[:, Q_START].copy(), rows[:, Q_END].copy()
    while (high - low > 1).any():
        middle = (low + high) // 2
        fits = area_above(rows, middle) <= wanted
        low, high = np.where(fits, middle, low), np.where(fits, high, middle)
    nearer_high = area_above(rows, high) - wanted < wanted - area_above(rows, low)
    return np.where(nearer_high, high, low)
