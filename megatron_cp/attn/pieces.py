"""Cuts mask slices into the few shapes that a blocked CPU kernel computes at full speed.

    full            causal          band             a slice = few pieces
    # # # #         # . . .         # # . .          # # # . . .      F F F . . .
    # # # #         # # . .         # # # .          # # # # . .  =   F F F C . .
    # # # #         # # # .         . # # #          # # # # # .      F F F C C .

A slice that only its upper diagonal cuts is one full and one causal piece, however long: cutting attention into many
small operations is what costs on a CPU. A slice with a lower diagonal (sliding window) is cut into blocks of rows,
each with just the keys that its rows see.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron_cp.mask import AttentionMask

# A triangle of fewer pairs is cheaper to compute and mask than a second operation (40 us on a 2-core Zen 4).
SMALL_TRIANGLE = 4096
# Rows of a block in a band; a block wastes about as many pairs as it has rows, per row.
MAX_BAND_ROWS = 256
MIN_BAND_ROWS = 32
# Longer key ranges of a band block are computed apart as a full piece, so that masks stay small.
MAX_BAND_KEYS = 2048


@dataclass(frozen=True, slots=True)
class Piece:
    """Pairs of a box `[q_start, q_end) x [k_start, k_end)` with `lo <= column - row <= hi`, counted from the box's corner.

    Every row and every column of the box holds at least one pair. `causal` is `hi = 0` with an open lower side.
    """

    q_start: int
    q_end: int
    k_start: int
    k_end: int
    lo: int
    hi: int
    kind: Literal["full", "causal", "band"]

    @property
    def num_rows(self) -> int:
        """Number of query rows."""
        return self.q_end - self.q_start

    @property
    def num_keys(self) -> int:
        """Number of keys."""
        return self.k_end - self.k_start


def pieces_of(mask: AttentionMask) -> Iterator[Piece]:
    """Yields disjoint pieces that cover the mask, in a fixed order; their work is close to the mask's area."""
    for q0, q1, k0, k1, lo, hi in mask.array.tolist():
        if lo > k0 - q1 + 1:
            yield from _cut_band(q0, q1, k0, k1, lo, hi)
        else:
            yield from _cut_lower_open(q0, q1, k0, k1, hi)


def tiles_of(piece: Piece, max_rows: int, max_keys: int) -> Iterator[Piece]:
    """Yields the piece cut into tiles of at most `max_rows x max_keys`, row blocks outside, keys inside, none empty."""
    lo = piece.lo + piece.k_start - piece.q_start
    hi = piece.hi + piece.k_start - piece.q_start
    for a in range(piece.q_start, piece.q_end, max_rows):
        b = min(a + max_rows, piece.q_end)
        first, last = max(piece.k_start, a + lo), min(piece.k_end, b + hi)
        for c in range(first, last, max_keys):
            d = min(c + max_keys, last)
            # Rows of this tile that see any of its keys.
            yield _piece(max(a, c - hi), min(b, d - lo), c, d, lo, hi)


def _piece(q0: int, q1: int, k0: int, k1: int, lo: int, hi: int) -> Piece:
    """Returns the piece of a tight box with absolute diagonals `lo` and `hi`."""
    lo, hi = max(lo - k0 + q0, q0 - q1 + 1), min(hi - k0 + q0, k1 - k0 - 1)
    kind: Literal["full", "causal", "band"] = "band"
    if lo == q0 - q1 + 1:
        kind = "full" if hi == k1 - k0 - 1 else "causal" if hi == 0 else "band"
    return Piece(q0, q1, k0, k1, lo, hi, kind)


def _cut_lower_open(q0: int, q1: int, k0: int, k1: int, hi: int) -> Iterator[Piece]:
    """Yields the pieces of a slice that at most its upper diagonal cuts."""
    open_lo = k0 - q1 + 1
    num_seen_by_first = q0 + hi + 1 - k0
    missing = k1 - k0 - num_seen_by_first
    if num_seen_by_first == 1 or missing * (missing + 1) // 2 <= SMALL_TRIANGLE:
        yield _piece(q0, q1, k0, k1, open_lo, hi)
        return
    corner = q0 + hi
    yield _piece(q0, q1, k0, corner, open_lo, corner - q0)
    yield _piece(q0, q1, corner, k1, corner - q1 + 1, hi)


def _cut_band(q0: int, q1: int, k0: int, k1: int, lo: int, hi: int) -> Iterator[Piece]:
    """Yields the pieces of a slice with a lower diagonal, block of rows by block of rows."""
    width = min(hi - lo + 1, k1 - k0)
    rows = min(MAX_BAND_ROWS, max(MIN_BAND_ROWS, width // 2))
    for a in range(q0, q1, rows):
        b = min(a + rows, q1)
        first, last = max(k0, a + lo), min(k1, b + hi)
        if last - first <= MAX_BAND_KEYS:
            yield _piece(a, b, first, last, lo, hi)
            continue
        inner_first, inner_last = max(first, b - 1 + lo), min(last, a + hi + 1)
        if first < inner_first:
            yield _piece(a, min(b, inner_first - lo), first, inner_first, lo, hi)
        if inner_first < inner_last:
            yield _piece(a, b, inner_first, inner_last, lo, hi)
        if inner_last < last:
            yield _piece(max(a, inner_last - hi), b, inner_last, last, lo, hi)
