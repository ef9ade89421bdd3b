"""Cuts mask slices into boxes that a CPU computes at full speed: few, large, with little outside the mask.

    causal          cut into         window          cut into
    # . . .         B . . .          # . . .         B . . .         F  full box, no mask
    # # . .         B B . .          # # . .         B B . .         B  band: box with a small mask
    # # # .         F F B .          . # # .         . B B .
    # # # #         F F B B          . . # #         . B B B

A triangle is cut into blocks of rows, each with just the keys that its rows see; where that is many
keys, those that 1024 rows have in common are one full box. The causal mode of PyTorch's operator
computes whole blocks of 512 keys instead, twice the work at 512 rows (docs/numerics.md).

A piece is a slice in whose box every row and every column holds at least one pair; a side that cuts
nothing is open (None).
"""

from collections.abc import Iterator

from megatron_cp.mask import AttentionMask, MaskSlice

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


def pieces_of(mask: AttentionMask) -> Iterator[MaskSlice]:
    """Yields disjoint pieces that cover the mask, in a fixed order; their work is close to the mask's area."""
    for q0, q1, k0, k1, lo, hi in mask.array.tolist():
        if lo > k0 - q1 + 1:
            yield from _cut_band(q0, q1, k0, k1, lo, hi)
        else:
            yield from _cut_trapezoid(q0, q1, k0, k1, hi)


def tiles_of(piece: MaskSlice, max_rows: int, max_keys: int) -> Iterator[MaskSlice]:
    """Yields the piece cut into tiles of at most `max_rows x max_keys`, row blocks outside, keys inside, none empty."""
    lo, hi = diagonals_of(piece)
    for a in range(piece.q_start, piece.q_end, max_rows):
        b = min(a + max_rows, piece.q_end)
        first, last = max(piece.k_start, a + lo), min(piece.k_end, b + hi)
        for c in range(first, last, max_keys):
            d = min(c + max_keys, last)
            yield _box(max(a, c - hi), min(b, d - lo), c, d, lo, hi)


def diagonals_of(piece: MaskSlice) -> tuple[int, int]:
    """Returns `lo` and `hi` of a piece; where a side is open, the outermost diagonal that its box has."""
    outer_lo, outer_hi = piece.k_start - piece.q_end + 1, piece.k_end - 1 - piece.q_start
    return (
        outer_lo if piece.lo is None else piece.lo,
        outer_hi if piece.hi is None else piece.hi,
    )


def _box(q0: int, q1: int, k0: int, k1: int, lo: int, hi: int) -> MaskSlice:
    """Returns the piece of a tight box between two diagonals."""
    open_lo, open_hi = lo <= k0 - q1 + 1, hi >= k1 - 1 - q0
    return MaskSlice(q0, q1, k0, k1, None if open_lo else lo, None if open_hi else hi)


def _cut_full(q0: int, q1: int, k0: int, k1: int) -> Iterator[MaskSlice]:
    """Yields a full box in parts small enough for what an operator allocates."""
    for a in range(q0, q1, MAX_FULL_ROWS):
        b = min(a + MAX_FULL_ROWS, q1)
        for c in range(k0, k1, MAX_FULL_KEYS):
            d = min(c + MAX_FULL_KEYS, k1)
            yield MaskSlice(a, b, c, d)


def _cut_trapezoid(q0: int, q1: int, k0: int, k1: int, hi: int) -> Iterator[MaskSlice]:
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


def _cut_band(q0: int, q1: int, k0: int, k1: int, lo: int, hi: int) -> Iterator[MaskSlice]:
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
