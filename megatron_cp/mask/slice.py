"""The one shape of attention: a box of query rows and key columns, cut by a diagonal band.

    MaskSlice(q_start, q_end, k_start, k_end, lo, hi) allows the pairs (q, k) with

        q_start <= q < q_end,   k_start <= k < k_end,   lo <= k - q <= hi

    k ->        full            causal (hi=0)     window (lo=-2, hi=0)
    q   # # # #         # . . .           # . . .
    |   # # # #         # # . .           # # . .
    v   # # # #         # # # .           # # # .
        # # # #         # # # #           . # # #

The shape is closed under cropping, shifting, intersection and transposition, and its area is a
closed form; that is why forward and backward, whole and sharded attention can share every routine.

The functions below work on *rows*: int64 arrays `[n, 6]` with those six columns. A row is **tight**
when every query row and every key column of its box holds at least one allowed pair and `lo`, `hi`
lie inside the box. Tight rows make the closed forms branch-free.
"""

import operator
from dataclasses import dataclass

import numpy as np

from megatron_cp.mask.interval import IntArray, columns, overlapping_pairs

Q_START, Q_END, K_START, K_END, LO, HI = range(6)
OPEN = 1 << 40  # beyond every token index; stands for an open side until `tighten` clamps it
MAX_TOKENS = 1 << 31  # of a grid's side: areas stay below 2^63


def make_rows(
    q_start: int | IntArray,
    q_end: int | IntArray,
    k_start: int | IntArray,
    k_end: int | IntArray,
    lo: int | IntArray = -OPEN,
    hi: int | IntArray = OPEN,
) -> IntArray:
    """Returns int64 rows `[n, 6]` from columns; a scalar serves all rows."""
    columns = np.broadcast_arrays(q_start, q_end, k_start, k_end, lo, hi)
    return np.stack(columns, axis=-1).reshape(-1, 6).astype(np.int64, copy=False)


def tighten(rows: IntArray) -> IntArray:
    """Returns the same pairs as tight rows; rows without any pair are dropped."""
    q0, q1, k0, k1, lo, hi = rows.T
    q0, q1 = np.maximum(q0, k0 - hi), np.minimum(q1, k1 - lo)
    k0, k1 = np.maximum(k0, q0 + lo), np.minimum(k1, q1 + hi)
    lo, hi = np.maximum(lo, k0 - q1 + 1), np.minimum(hi, k1 - 1 - q0)
    keep = (q0 < q1) & (k0 < k1) & (lo <= hi)
    return columns(q0, q1, k0, k1, lo, hi).compress(keep, axis=0)


def rows_area(rows: IntArray) -> IntArray:
    """Returns the number of pairs of each tight row: int64 `[n]`; the box without two corners."""
    q0, q1, k0, k1, lo, hi = rows.T
    upper, lower = k1 - 1 - q0 - hi, q1 - 1 - k0 + lo  # legs; tight rows cut whole triangles off
    return (q1 - q0) * (k1 - k0) - _triangle(upper) - _triangle(lower)


def area_above(rows: IntArray, cut: IntArray) -> IntArray:
    """Returns the number of pairs of each tight row above query row `cut[i]` of its box: int64 `[n]`."""
    q0, _, k0, k1, lo, hi = rows.T
    upper = k1 - 1 - q0 - hi
    rest, lower = np.maximum(upper - (cut - q0), 0), np.maximum(cut - 1 - k0 + lo, 0)
    return (cut - q0) * (k1 - k0) - _triangle(upper) + _triangle(rest) - _triangle(lower)


def _triangle(leg: IntArray) -> IntArray:
    return leg * (leg + 1) // 2


def crop_rows(
    rows: IntArray, q: tuple[int, int] | None = None, k: tuple[int, int] | None = None
) -> IntArray:
    """Returns the pairs inside the query range `q` and the key range `k`, tight, not rebased."""
    rows = rows.copy()
    for span, start, end in ((q, Q_START, Q_END), (k, K_START, K_END)):
        if span is not None:
            rows[:, start] = np.maximum(rows[:, start], span[0])
            rows[:, end] = np.minimum(rows[:, end], span[1])
    return tighten(rows)


def shift_rows(rows: IntArray, q: int | IntArray = 0, k: int | IntArray = 0) -> IntArray:
    """Returns the rows moved by `q` queries and `k` keys (scalars, or one value per row)."""
    q_, k_ = np.asarray(q), np.asarray(k)
    moved = [rows[:, Q_START] + q_, rows[:, Q_END] + q_, rows[:, K_START] + k_, rows[:, K_END] + k_]
    return columns(*moved, rows[:, LO] + (k_ - q_), rows[:, HI] + (k_ - q_))


def intersect_rows(a: IntArray, b: IntArray) -> IntArray:
    """Returns row `i` of `a` met with row `i` of `b`, *not* tightened, so that counts agree."""
    low = np.maximum(a[:, [Q_START, K_START, LO]], b[:, [Q_START, K_START, LO]])
    high = np.minimum(a[:, [Q_END, K_END, HI]], b[:, [Q_END, K_END, HI]])
    return columns(low[:, 0], high[:, 0], low[:, 1], high[:, 1], low[:, 2], high[:, 2])


def subtract_rows(a: IntArray, b: IntArray) -> IntArray:
    """Returns the pairs of row `i` of `a` outside row `i` of `b`; boxes meet. At most 6n rows."""
    q0, q1, k0, k1, lo, hi = a.T
    q_in0, q_in1, k_in0, k_in1, lo_in, hi_in = intersect_rows(a, b).T
    pieces = [
        make_rows(q0, q_in0, k0, k1, lo, hi),
        make_rows(q_in1, q1, k0, k1, lo, hi),
        make_rows(q_in0, q_in1, k0, k_in0, lo, hi),
        make_rows(q_in0, q_in1, k_in1, k1, lo, hi),
        make_rows(q_in0, q_in1, k_in0, k_in1, lo, lo_in - 1),
        make_rows(q_in0, q_in1, k_in0, k_in1, hi_in + 1, hi),
    ]
    return tighten(np.concatenate(pieces))


def cut_rows(
    rows: IntArray, ranges: IntArray, start: int, end: int
) -> tuple[IntArray, IntArray, IntArray]:
    """Returns the tight parts of tight `rows` inside ranges of one axis, and the row and the range of each part.

    The ranges are disjoint and not empty.
    """
    ranges_in_order = ranges[:, 0].argsort(kind="stable")
    ordered = ranges.take(ranges_in_order, axis=0)
    which, span = overlapping_pairs(rows[:, [start, end]], ordered)
    parts = rows.take(which, axis=0)
    first, last = (ordered[:, side].take(span) for side in (0, 1))
    is_cut = (parts[:, start] < first) | (parts[:, end] > last)
    cut = parts[is_cut]  # of thousands of small slices hardly one
    cut[:, start] = np.maximum(cut[:, start], first[is_cut])
    cut[:, end] = np.minimum(cut[:, end], last[is_cut])
    # The other axis shrinks too, but a tight row keeps at least one pair in every row and column of
    # its box, so no part vanishes here and the indices stay aligned.
    parts[is_cut] = tighten(cut)
    return parts, which, ranges_in_order.take(span)


def cut_rows_at(
    rows: IntArray, bounds: IntArray, start: int, end: int
) -> tuple[IntArray, IntArray, IntArray]:
    """Returns what `cut_rows` does for the ranges from each of `bounds`, which never fall, to the next."""
    solid = np.flatnonzero(np.diff(bounds))
    ranges = columns(bounds[solid], bounds[solid + 1])
    parts, which, span = cut_rows(rows, ranges, start, end)
    return parts, which, solid.take(span)


def transpose_rows(rows: IntArray) -> IntArray:
    """Returns the rows with queries and keys exchanged: `(lo, hi)` becomes `(-hi, -lo)`."""
    swapped = [rows[:, i] for i in (K_START, K_END, Q_START, Q_END)]
    return columns(*swapped, -rows[:, HI], -rows[:, LO])


@dataclass(frozen=True, slots=True)
class MaskSlice:
    """Pairs `q_start <= q < q_end`, `k_start <= k < k_end`, `lo <= k - q <= hi`; None = open."""

    q_start: int
    q_end: int
    k_start: int
    k_end: int
    lo: int | None = None
    hi: int | None = None

    @classmethod
    def from_row(cls, row: IntArray) -> "MaskSlice":
        """Returns a tight row as a slice; a side that cuts nothing is open (None)."""
        if not isinstance(row, np.ndarray) or row.shape != (6,) or row.dtype.kind not in "iu":
            raise ValueError(
                f"row={row!r} must be six integers, q_start, q_end, k_start, k_end, lo, hi; give a row of an array"
            )
        q0, q1, k0, k1, lo, hi = (int(v) for v in row)
        open_lo, open_hi = lo <= k0 - q1 + 1, hi >= k1 - 1 - q0
        return cls(q0, q1, k0, k1, None if open_lo else lo, None if open_hi else hi)


def as_span(name: str, span: object) -> tuple[int, int]:
    """Returns a pair of integers. Raises TypeError for anything else."""
    try:
        start, end = map(operator.index, span)  # type: ignore[call-overload]
        return start, end
    except (TypeError, ValueError):
        raise TypeError(
            f"{name}={span!r} must be a pair of integers, (start, end); give both ends, or None for all"
        ) from None
