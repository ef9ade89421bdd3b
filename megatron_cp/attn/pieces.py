"""Cuts mask slices into boxes that a CPU computes at full speed: few, large, with little outside the mask.

    causal          cut into         window          cut into
    # . . .         B . . .          # . . .         B . . .         F  full box, no mask
    # # . .         B B . .          # # . .         B B . .         B  band: box with a small mask
    # # # .         F F B .          . # # .         . B B .
    # # # #         F F B B          . . # #         . B B B

A triangle is cut into blocks of rows, each with just the keys that its rows see; where that is many
keys, those that 1024 rows have in common are one full box. The causal mode of PyTorch's operator
computes whole blocks of 512 keys instead, twice the work at 512 rows (docs/numerics.md).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_cp.mask import AttentionMask

# Rows of a long triangle that share one full box of keys. More rows would make the triangles at its end larger, fewer
# would make more operations.
TRIANGLE_ROWS = 1024
# Rows of a block: per row it computes half as many pairs in vain.
BLOCK_ROWS = 64
# Blocks of a wide band may be taller; blocks of a narrow one must be flatter.
WIDE_BAND, TALL_BLOCK_ROWS = 2048, 256
NARROW_BAND, FLAT_BLOCK_ROWS = 96, 32
# Full boxes are computed in parts of this size, which bounds what the operator's backward allocates.
MAX_FULL_ROWS, MAX_FULL_KEYS = 4096, 8192
# Longer key ranges are computed apart, as full boxes, so that masks stay small.
MAX_BAND_KEYS = 2048


@dataclass(frozen=True, slots=True)
class Piece:
    """Pairs of a box with `lo <= column - row <= hi`, row and column counted from the box's corner.

    Every row and every column of the box holds at least one pair, so `lo <= 0 <= hi`.
    """

    q_start: int
    q_end: int
    k_start: int
    k_end: int
    lo: int
    hi: int

    @property
    def num_rows(self) -> int:
        """Number of query rows."""
        return self.q_end - self.q_start

    @property
    def num_keys(self) -> int:
        """Number of keys."""
        return self.k_end - self.k_start

    @property
    def cuts_lower(self) -> bool:
        """True if `lo` excludes a pair of the box."""
        return self.lo > 1 - self.num_rows

    @property
    def cuts_upper(self) -> bool:
        """True if `hi` excludes a pair of the box."""
        return self.hi < self.num_keys - 1


def pieces_of(mask: AttentionMask) -> Iterator[Piece]:
    """Yields disjoint pieces that cover the mask, in a fixed order; their work is close to the mask's area."""
    for q0, q1, k0, k1, lo, hi in mask.array.tolist():
        if lo > k0 - q1 + 1:
            yield from _cut_band(q0, q1, k0, k1, lo, hi)
        else:
            yield from _cut_trapezoid(q0, q1, k0, k1, hi)


def tiles_of(piece: Piece, max_rows: int, max_keys: int) -> Iterator[Piece]:
    """Yields the piece cut into tiles of at most `max_rows x max_keys`, row blocks outside, keys inside, none empty."""
    lo = piece.lo + piece.k_start - piece.q_start
    hi = piece.hi + piece.k_start - piece.q_start
    for a in range(piece.q_start, piece.q_end, max_rows):
        b = min(a + max_rows, piece.q_end)
        first, last = max(piece.k_start, a + lo), min(piece.k_end, b + hi)
        for c in range(first, last, max_keys):
            d = min(c + max_keys, last)
            yield _box(max(a, c - hi), min(b, d - lo), c, d, lo, hi)


def _box(q0: int, q1: int, k0: int, k1: int, lo: int, hi: int) -> Piece:
    """Returns the piece of a tight box with diagonals `lo` and `hi` counted from the grid's corner."""
    shift = k0 - q0
    return Piece(q0, q1, k0, k1, max(lo - shift, q0 - q1 + 1), min(hi - shift, k1 - k0 - 1))


def _cut_full(q0: int, q1: int, k0: int, k1: int) -> Iterator[Piece]:
    """Yields a full box in parts small enough for what an operator allocates."""
    for a in range(q0, q1, MAX_FULL_ROWS):
        b = min(a + MAX_FULL_ROWS, q1)
        for c in range(k0, k1, MAX_FULL_KEYS):
            d = min(c + MAX_FULL_KEYS, k1)
            yield Piece(a, b, c, d, a - b + 1, d - c - 1)


def _cut_trapezoid(q0: int, q1: int, k0: int, k1: int, hi: int) -> Iterator[Piece]:
    """Yields the pieces of a slice that at most its upper diagonal cuts.

    Its first row sees the keys `[k0, q0 + hi]`, each row one more, and from row `bend` on all.
    """
    bend = k1 - 1 - hi
    end = bend + 1 if bend > q0 else q0
    for a in range(q0, end, TRIANGLE_ROWS):
        b = min(a + TRIANGLE_ROWS, end)
        corner = a + hi
        if corner - k0 >= MAX_BAND_KEYS - TRIANGLE_ROWS:
            yield from _cut_full(a, b, k0, corner)
        else:
            corner = k0
        for c in range(a, b, BLOCK_ROWS):
            d = min(c + BLOCK_ROWS, b)
            yield _box(c, d, corner, d + hi, corner - d + 1, hi)
    if end < q1:
        yield from _cut_full(end, q1, k0, k1)


def _cut_band(q0: int, q1: int, k0: int, k1: int, lo: int, hi: int) -> Iterator[Piece]:
    """Yields the pieces of a slice that its lower diagonal cuts, block of rows by block of rows."""
    width = min(hi - lo + 1, k1 - k0)
    rows = TALL_BLOCK_ROWS if width >= WIDE_BAND else BLOCK_ROWS
    rows = FLAT_BLOCK_ROWS if width < NARROW_BAND else rows
    for a in range(q0, q1, rows):
        b = min(a + rows, q1)
        first, last = max(k0, a + lo), min(k1, b + hi)
        inner_first, inner_last = max(first, b - 1 + lo), min(last, a + hi + 1)
        if last - first <= MAX_BAND_KEYS:
            yield _box(a, b, first, last, lo, hi)
            continue
        if first < inner_first:
            yield _box(a, min(b, inner_first - lo), first, inner_first, lo, hi)
        yield from _cut_full(a, b, inner_first, inner_last)
        if inner_last < last:
            yield _box(max(a, inner_last - hi), b, inner_last, last, lo, hi)
