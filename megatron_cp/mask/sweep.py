"""Joins over many slices at once: which meet, which overlap, what one set leaves of another.

All functions take tight rows `[n, 6]`. The pairs of rows whose boxes meet on the cheaper axis are
enumerated with sorted searches, so two sets of 10^4 slices are joined without looking at 10^8
pairs.
"""

import itertools
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from megatron_cp.mask.interval import IntArray, expand_ranges
from megatron_cp.mask.slice import (
    HI,
    K_END,
    K_START,
    LO,
    Q_END,
    Q_START,
    intersect_rows,
    rows_area,
    subtract_rows,
)

AXES = ((Q_START, Q_END), (K_START, K_END))
LOW_SIDES = [Q_START, K_START, LO]
NUM_ORDERS = 5  # in which neighbours are merged
PAIRS_PER_BLOCK = 1 << 20  # bounds what one step of a join may hold to about 200 MB


def meeting_pairs(a: IntArray, b: IntArray) -> tuple[IntArray, IntArray]:
    """Returns `(i, j)`, sorted, for all rows `a[i]` and `b[j]` that share a pair."""
    joins = [_AxisJoin(a, b, start, end) for start, end in AXES]
    cheaper = min(joins, key=lambda join: join.num_candidates)
    blocks = [np.zeros((2, 0), dtype=np.int64)]
    for first, second in cheaper.candidates():
        meet = _share_a_pair(a[first], b[second])
        blocks.append(np.stack([first[meet], second[meet]]))
    first, second = np.concatenate(blocks, axis=1)
    order = np.lexsort((second, first))
    return first[order], second[order]


def subtract(a: IntArray, b: IntArray) -> IntArray:
    """Returns disjoint rows of the pairs of `a` outside `b`; both sets are disjoint and sorted."""
    finished = []
    while True:
        first, second = meeting_pairs(a, b)
        touched, begin, count = np.unique(first, return_index=True, return_counts=True)
        finished.append(np.delete(a, touched, axis=0))
        if not len(touched):
            return np.concatenate(finished)
        # Cut out the middle hole of each row: what remains meets about half of its holes each.
        a = subtract_rows(a[touched], b[second[begin + count // 2]])


def find_overlap(rows: IntArray) -> tuple[int, int] | None:
    """Returns the indices, in order, of two rows that share a pair, or None."""
    joins = [_AxisJoin(rows, rows, start, end) for start, end in AXES]
    for first, second in min(joins, key=lambda join: join.num_candidates).candidates():
        apart = first != second
        first, second = first[apart], second[apart]
        hits = np.flatnonzero(_share_a_pair(rows[first], rows[second]))
        if len(hits):
            i, j = int(first[hits[0]]), int(second[hits[0]])
            return min(i, j), max(i, j)
    return None


def merge(rows: IntArray) -> IntArray:
    """Returns the same pairs in fewer rows: two rows become one where their union is a slice."""
    # Neighbours side by side, above each other, on one diagonal, and of one corner, in turn.
    orders = itertools.cycle(
        (
            [K_START, Q_END, Q_START],
            [Q_START, K_END, K_START],
            [Q_START, LO],
            [Q_START, HI],
            [Q_START, K_START],
        )
    )
    columns, area = np.ascontiguousarray(rows.T), rows_area(rows)
    in_vain = 0
    while in_vain < NUM_ORDERS and len(area) > 1:
        order = np.lexsort(columns[next(orders)])
        joined, area = _join_neighbours(columns.take(order, axis=1), area.take(order))
        in_vain = in_vain + 1 if len(area) == columns.shape[1] else 0
        columns = joined
    return np.ascontiguousarray(columns.T)


class _AxisJoin:
    """The pairs of rows whose boxes meet on one axis, counted before they are listed."""

    def __init__(self, a: IntArray, b: IntArray, start: int, end: int):
        # Either b starts inside a (ties included), or a starts strictly inside b: each pair once.
        self.parts = []
        for owner, other, a_owns in ((a, b, True), (b, a, False)):
            order = np.argsort(other[:, start], kind="stable")
            starts = other[order, start]
            low = np.searchsorted(starts, owner[:, start], side="left" if a_owns else "right")
            high = np.searchsorted(starts, owner[:, end], side="left")
            self.parts.append((order, low, np.maximum(low, high), a_owns))
        self.num_candidates = sum(int((high - low).sum()) for _, low, high, _ in self.parts)

    def candidates(self) -> Iterator[tuple[IntArray, IntArray]]:
        """Yields `(i, j)` in blocks of bounded size."""
        for order, low, high, a_owns in self.parts:
            spent = np.cumsum(high - low)
            begin = 0
            while begin < len(low):
                limit = (spent[begin - 1] if begin else 0) + PAIRS_PER_BLOCK
                stop = max(begin + 1, int(np.searchsorted(spent, limit, side="right")))
                owner, place = expand_ranges(low[begin:stop], high[begin:stop])
                owner, other = owner + begin, order[place]
                yield (owner, other) if a_owns else (other, owner)
                begin = stop


def _share_a_pair(a: IntArray, b: IntArray) -> NDArray[np.bool_]:
    q0, q1, k0, k1, lo, hi = intersect_rows(a, b).T
    return (q0 < q1) & (k0 < k1) & (lo <= hi) & (lo < k1 - q0) & (k0 - q1 < hi)


def _join_neighbours(columns: IntArray, area: IntArray) -> tuple[IntArray, IntArray]:
    """Returns slices `[6, n]` and their areas with neighbours joined whose bounding slice holds no other pair."""
    while len(area) > 1:
        one, other = columns[:, :-1], columns[:, 1:]
        touch = np.ones(len(area) - 1, dtype=bool)
        for start, end in AXES:
            touch &= other[start] <= one[end]
            touch &= one[start] <= other[end]
        near = np.flatnonzero(touch)  # few: a slice's keys move on by one from row to row
        # The bounding slice of two tight rows is tight: it contains their convex hull and its sides
        # are integers on every row and column, so the closed form of the area holds.
        pairs = one.take(near, axis=1), other.take(near, axis=1)
        bounding = np.maximum(*pairs)
        bounding[LOW_SIDES] = np.minimum(pairs[0][LOW_SIDES], pairs[1][LOW_SIDES])
        joined_area = rows_area(bounding.T)
        joins = joined_area == area.take(near) + area.take(near + 1)
        if not joins.any():
            break
        # Of a run of joinable neighbours take every other one; the loop comes back for the rest.
        pair = near[joins]
        opens = np.ones(len(pair), dtype=bool)
        opens[1:] = pair[1:] != pair[:-1] + 1
        run_start = np.maximum.accumulate(np.where(opens, pair, 0))
        taken = (pair - run_start) % 2 == 0
        first = pair[taken]
        columns[:, first] = bounding[:, joins][:, taken]
        area[first] = joined_area[joins][taken]
        stays = np.ones(len(area), dtype=bool)
        stays[first + 1] = False
        columns, area = columns.compress(stays, axis=1), area.compress(stays)
    return columns, area
