"""Says a mask in as few calls of a variable-length attention operator as it can.

One call computes many sequences, and in all of them the same window: with `sq` queries and `sk` keys,

    query i sees key j   <=>   sk - sq - left <= j - i <= sk - sq + right        (-1: that side is open)

so the window hangs on the bottom right corner. A tight slice is such a sequence as it stands, whatever its
band: its last query and its last key have a pair, hence neither number is negative. What costs calls is that
slices differ in them, and that in one call no query row and no key row stands twice: then partial results
and gradients are written without collisions, and what is gathered is never larger than q, k and v.

    causal (-1, 0)    full (-1, -1)    window (1, 0)    bend (-1, 1): as it stands, or cut in two
    # . . .           # # #            # . . .          # # .        # # .     (-1, 0)
    # # . .           # # #            # # . .          # # #        . . .
    # # # .                            . # # .          # # #   or   # # #     full
    # # # #                            . . # #                       # # #

1. Slices are taken as they are, or neighbours joined to larger ones; bends are cut or not, the upper, the lower
   or both; staircases of keys are cut by halves or not. Of these ways the one with the fewest calls is taken, and of
   several the one that cuts least.
2. Boxes of one key range become one sequence, and so do boxes of one query range, whose keys are gathered
   one behind the other; a box in front of a slice with the same queries and an open lower side joins it.
3. Sequences of one window that do not collide are one call; an open side takes any window that cuts nothing.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_cp.mask import AttentionMask
from megatron_cp.mask.interval import IntArray, as_intervals
from megatron_cp.mask.slice import K_END, K_START, Q_END, Q_START, crop_rows, tighten
from megatron_cp.mask.slice import OPEN as OPEN_END
from megatron_cp.mask.sweep import merge

Range = tuple[int, int]

OPEN = -1
# flash-attn 2's backward pass allocates 128 rows of float32 per sequence beside those of q (mha_varlen_bwd): at
# 32 heads of 128 these are 1.1 GB for 512 sequences, and 137 GB for 65,535, where CUDA's grid ends.
MAX_SEQUENCES = 512


class Sequence(NamedTuple):
    """Queries and keys of one sequence, as row ranges one behind the other, and its window."""

    queries: tuple[Range, ...]
    keys: tuple[Range, ...]
    left: int
    right: int

    @property
    def num_queries(self) -> int:
        """Returns the number of query rows."""
        return sum(end - start for start, end in self.queries)

    @property
    def num_keys(self) -> int:
        """Returns the number of key rows."""
        return sum(end - start for start, end in self.keys)


@dataclass(frozen=True)
class VarlenCall:
    """One call: rows to gather, where sequences end, and the window that they share.

    `q_rows`, `k_rows` int64 `[m, 2]`: row ranges in the order in which they are packed, no row twice.
    `cu_seqlens_q`, `cu_seqlens_k` int32 `[sequences + 1]`: no sequence is empty, and every packed row is
    in one. `max_q`, `max_k`: at least the longest sequence, and what the operators need (`_longest`).
    """

    q_rows: IntArray
    k_rows: IntArray
    cu_seqlens_q: NDArray[np.int32]
    cu_seqlens_k: NDArray[np.int32]
    max_q: int
    max_k: int
    left: int
    right: int

    @property
    def is_causal(self) -> bool:
        """Returns whether the window is the causal one."""
        return self.left == OPEN and self.right == 0


def group_calls(mask: AttentionMask) -> tuple[VarlenCall, ...]:
    """Returns calls whose pairs are exactly those of the mask, each pair once; those of most rows come first."""
    # What is cut most comes first: it has few calls where others would have thousands, which take seconds to find.
    fewest: list[_Group] = []
    for way in _ways_to_cut(mask.array):
        fewest = _colour(_sequences(way), len(fewest) or math.inf) or fewest
    calls = [call for group in fewest for call in _to_calls(group)]
    return tuple(sorted(calls, key=lambda call: -int(call.cu_seqlens_q[-1])))


# ---------------------------------------------------------------------- ways to cut slices


def _ways_to_cut(rows: IntArray) -> Iterator[IntArray]:
    """Yields the slices cut by halves; with both kinds of bends cut, the lower, the upper; joined; as they are."""
    joined = merge(rows)
    if len(rows) > 2:
        yield np.concatenate(_halve(joined))
        yield np.concatenate(_halve(rows))
    upper, lower = _cut_upper(joined), _cut_lower(joined)
    both = _cut_lower(upper)
    if both is not upper and upper is not joined:
        yield both
    yield from (way for way in (lower, upper) if way is not joined)
    if len(joined) < len(rows):
        yield joined
    yield rows


def _halve(rows: IntArray) -> list[IntArray]:
    """Returns the same pairs cut at keys, half by half, until the halves' slices share no keys."""
    starts, ends = np.sort(rows[:, K_START]), np.sort(rows[:, K_END])
    inner = ends[ends < ends[-1]] if len(rows) else ends
    if not len(inner):
        inner = starts[starts > starts[0]] if len(rows) else starts
    if not len(inner) or (starts[1:] >= ends[:-1]).all():
        return [rows]
    where = inner[len(inner) // 2]
    crosses = (rows[:, K_START] < where) & (rows[:, K_END] > where)
    before, after = (
        crop_rows(rows[crosses], k=(0, where)),
        crop_rows(rows[crosses], k=(where, OPEN_END)),
    )
    low = rows[rows[:, K_END] <= where]
    high = np.concatenate([rows[rows[:, K_START] >= where], after])
    return [before, *_halve(low), *_halve(high)]


def _cut_upper(rows: IntArray) -> IntArray:
    """Returns the same pairs; where the upper diagonal ends above the last row, the rows below are apart."""
    q0, q1, _, k1, _, hi = rows.T
    bend = k1 - hi  # the row below the first one that sees the last key
    bent = (hi < k1 - 1 - q0) & (bend < q1)
    return _cut(rows, bent, Q_START, Q_END, bend)


def _cut_lower(rows: IntArray) -> IntArray:
    """Returns the same pairs; a slice cut by a lower diagonal alone loses the keys that all its rows see."""
    q0, q1, k0, k1, lo, hi = rows.T
    first_common = q1 - 1 + lo
    bent = (hi >= k1 - 1 - q0) & (first_common > k0) & (first_common < k1 - 1)
    return _cut(rows, bent, K_START, K_END, first_common)


def _cut(
    rows: IntArray, chosen: NDArray[np.bool_], start: int, end: int, where: IntArray
) -> IntArray:
    if not chosen.any():
        return rows
    before, after = rows[chosen].copy(), rows[chosen].copy()
    before[:, end] = after[:, start] = where[chosen]
    return np.concatenate([rows[~chosen], tighten(np.concatenate([before, after]))])


# ---------------------------------------------------------------------- sequences


def _sequences(rows: IntArray) -> list[Sequence]:
    """Returns the sequences of tight slices, boxes joined where that is free."""
    rows = rows[np.lexsort((rows[:, K_START], rows[:, Q_START]))]
    q0, q1, k0, k1, lo, hi = rows.T
    left = np.where(lo <= k0 - q1 + 1, OPEN, k1 - q1 - lo)
    right = np.where(hi >= k1 - 1 - q0, OPEN, hi - (k1 - q1))
    is_box = (left == OPEN) & (right == OPEN)
    columns = [column[~is_box].tolist() for column in (q0, q1, k0, k1, left, right)]
    banded = [
        Sequence(((a, b),), ((c, d),), e, f) for a, b, c, d, e, f in zip(*columns, strict=True)
    ]
    boxes = _join_boxes(rows[is_box][:, [Q_START, Q_END, K_START, K_END]])
    return _absorb(boxes, banded)


def _join_boxes(boxes: IntArray) -> list[tuple[tuple[Range, ...], tuple[Range, ...]]]:
    """Returns `(queries, keys)` of boxes, those of one key range and then those of one query set joined."""
    by_keys: dict[Range, list[Range]] = {}
    for q0, q1, k0, k1 in boxes.tolist():
        by_keys.setdefault((k0, k1), []).append((q0, q1))
    by_queries: dict[tuple[Range, ...], list[Range]] = {}
    for keys, queries in by_keys.items():
        by_queries.setdefault(tuple(queries), []).append(keys)
    return [(queries, tuple(keys)) for queries, keys in by_queries.items()]


def _absorb(
    boxes: list[tuple[tuple[Range, ...], tuple[Range, ...]]], banded: list[Sequence]
) -> list[Sequence]:
    """Returns boxes and banded sequences; a box is put in front of a sequence of the same queries."""
    places = {seq.queries: index for index, seq in enumerate(banded) if seq.left == OPEN}
    result = list(banded)
    for queries, keys in boxes:
        index = places.pop(queries, None)
        if index is None:
            result.append(Sequence(queries, keys, OPEN, OPEN))
        else:
            seq = banded[index]
            result[index] = Sequence(queries, (*keys, *seq.keys), OPEN, seq.right)
    return result


# ---------------------------------------------------------------------- calls


@dataclass
class _Occupied:
    """Disjoint row ranges, sorted."""

    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    def is_free(self, ranges: Iterable[Range]) -> bool:
        """Returns whether no range meets what is held."""
        for start, end in ranges:
            place = bisect_right(self.starts, start)
            if place and self.ends[place - 1] > start:
                return False
            if place < len(self.starts) and self.starts[place] < end:
                return False
        return True

    def add(self, ranges: Iterable[Range]) -> None:
        for start, end in ranges:
            place = bisect_right(self.starts, start)
            self.starts.insert(place, start)
            self.ends.insert(place, end)


@dataclass
class _Group:
    """Sequences that share a window and no row."""

    left: int
    right: int
    sequences: list[Sequence] = field(default_factory=list)
    queries: _Occupied = field(default_factory=_Occupied)
    keys: _Occupied = field(default_factory=_Occupied)

    def takes(self, seq: Sequence) -> bool:
        """Returns whether the sequence may join: its window agrees, no row is there already."""
        return (
            _agrees(seq.left, self.left, seq.num_keys)
            and _agrees(seq.right, self.right, seq.num_queries)
            and self.queries.is_free(seq.queries)
            and self.keys.is_free(seq.keys)
        )

    def add(self, seq: Sequence) -> None:
        self.sequences.append(seq)
        self.queries.add(seq.queries)
        self.keys.add(seq.keys)


def _agrees(side: int, window: int, size: int) -> bool:
    """Returns whether a side of a sequence of `size` rows or keys is what the window's side makes of it."""
    return side == window or (side == OPEN and window >= size - 1)


def _colour(sequences: list[Sequence], most: float) -> list[_Group] | None:
    """Returns the sequences in at most so many groups, first fit: fixed windows before those that may widen or narrow.

    None where they need more.
    """

    def order(seq: Sequence) -> tuple[int, tuple[Range, ...]]:
        return (seq.left == OPEN) + (seq.right == OPEN), seq.queries

    groups: list[_Group] = []
    for seq in sorted(sequences, key=order):
        home = next((group for group in groups if group.takes(seq)), None)
        if home is None:
            if len(groups) >= most:
                return None
            home = _Group(seq.left, seq.right)
            groups.append(home)
        home.add(seq)
    return groups


def _to_calls(group: _Group) -> Iterator[VarlenCall]:
    """Yields the calls of a group in the order of its rows, of MAX_SEQUENCES at most."""
    sequences = sorted(group.sequences, key=lambda seq: seq.queries)
    for first in range(0, len(sequences), MAX_SEQUENCES):
        yield _to_call(sequences[first : first + MAX_SEQUENCES], group.left, group.right)


def _to_call(sequences: list[Sequence], left: int, right: int) -> VarlenCall:
    num_queries = [seq.num_queries for seq in sequences]
    num_keys = [seq.num_keys for seq in sequences]
    left, right, max_q, max_k = _longest(left, right, max(num_queries), max(num_keys))
    return VarlenCall(
        q_rows=_joined([part for seq in sequences for part in seq.queries]),
        k_rows=_joined([part for seq in sequences for part in seq.keys]),
        cu_seqlens_q=np.cumsum([0, *num_queries], dtype=np.int32),
        cu_seqlens_k=np.cumsum([0, *num_keys], dtype=np.int32),
        max_q=max_q,
        max_k=max_k,
        left=left,
        right=right,
    )


def _longest(left: int, right: int, max_q: int, max_k: int) -> tuple[int, int, int, int]:
    """Returns a window and longest lengths from which flash-attn 2 makes that very window.

    It takes a right side of `max_k` or more for an open one, and an open one beside a left side for `max_k`:
    wrong where queries outnumber keys. A longer `max_k` only adds thread blocks that find nothing to do.
    With `max_q = 1` it goes another way, which exchanges heads and rows.
    Source: `mha_varlen_fwd`, `set_params_fprop` of flash_api.cpp (flash-attn 2.8, torch 2.13).
    """
    if left != OPEN and right == OPEN:
        right = max_q - 1
    return left, right, max(max_q, 2), max(max_k, right + 1)


def _joined(ranges: list[Range]) -> IntArray:
    """Returns the ranges in their order, those that go on where the one before ends joined."""
    array = as_intervals(ranges)
    opens = np.r_[True, array[1:, 0] != array[:-1, 1]]
    closes = np.r_[opens[1:], True]
    return np.stack([array[opens, 0], array[closes, 1]], axis=1)
