"""Work lists of the kernels: which tile of rows visits which keys, and in which order. NumPy only.

A mask becomes tiles of at most BM rows and, per tile, a few segments; a kernel knows nothing else of masks:

    keys ->  k0        k0+BN      k0+2BN     k1         row r of q0 <= r < q1 sees the keys
    row0     # # # # # # # # # # # # # .                    [max(k0, r + lo), min(k1, r + hi + 1))
     |       # # # # # # # # # # # # # # .              key tile j begins at k0 + j * BN; those with
    row0     # # # # # # # # # # # # # # # .            full_begin <= j < full_end need no mask
    +rows    |-- full --|-- full --|-partial-|

Tiles are cut where a slice's rows begin or end, so that every row of a tile sees the same slices; runs of
intervals shorter than a tile are put into one where that is cheaper, and then the segments' rows q0, q1 tell
them apart. Every row is in exactly one tile, also rows without keys, so one thread block owns each row of the
result: no locks, no atomics. (Unless the backward pass deals out the query heads of a group: heads_per_item.)

The backward pass takes the same arrays of the *transposed* mask: tiles of BN keys, segments of queries in
steps of BM. There a tile with fewer than BN rows is never full, because the sum over its keys (dQ) would take
in the keys of the next tile.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_cp.mask import AttentionMask
from megatron_cp.mask.interval import IntArray, distinct, expand_ranges
from megatron_cp.mask.slice import transpose_rows

Int32Array = NDArray[np.int32]

OPEN_LO, OPEN_HI = -(1 << 29), 1 << 29  # what lo and hi say when they cut nothing
MAX_ROWS = 1 << 29  # r + lo and r + hi must stay inside int32 on the device

# Costs in visits of a full key tile: prologue and epilogue of a tile, and what the mask of a partial
# one adds. Estimates from cycle counts (not measured); they decide the order and where to group only.
TILE_COST, PARTIAL_COST = 2.0, 1.25

# Columns of a segment.
K0, K1, LO, HI, Q0, Q1, FULL_BEGIN, FULL_END = range(8)


@dataclass(frozen=True, slots=True)
class WorkList:
    """Tiles, segments and order of one mask for one tile shape; shared by all heads and layers.

    `tiles` int32 `[num_tiles, 4]`: row0, rows, seg0, num_segs, by row0. `segs` int32 `[num_segs, 8]`: k0, k1,
    lo, hi, q0, q1, full_begin, full_end, by tile, then k0. `order` int32 `[num_tiles]`: longest tile first.
    """

    tiles: Int32Array
    segs: Int32Array
    order: Int32Array
    tile_rows: int
    step: int

    @property
    def num_visits(self) -> int:
        """Returns how many key tiles are computed per head, full and partial."""
        return int(_visits(self.segs, self.step).sum())

    @property
    def visits_of_tiles(self) -> IntArray:
        """Returns how many of them each tile computes, `[num_tiles]`."""
        seg0, num_segs = self.tiles[:, 2], self.tiles[:, 3]
        until = np.append(0, np.cumsum(_visits(self.segs, self.step)))
        return until[seg0 + num_segs] - until[seg0]

    @property
    def num_with_segments(self) -> int:
        """Returns how many tiles have any; the others are the last in `order`."""
        return int(np.count_nonzero(self.tiles[:, 3]))

    @property
    def num_full(self) -> int:
        """Returns how many of the visits need no mask."""
        return int((self.segs[:, FULL_END] - self.segs[:, FULL_BEGIN]).sum())

    @property
    def nbytes(self) -> int:
        """Returns the size of the arrays."""
        return self.tiles.nbytes + self.segs.nbytes + self.order.nbytes


def forward_work(mask: AttentionMask, tile_rows: int, tile_keys: int) -> WorkList:
    """Returns tiles of `tile_rows` queries whose segments step through keys by `tile_keys`.

    O((slices + tiles) log slices + segments). Raises ValueError for a mask beyond 2^29 rows or keys.
    """
    _check_size(mask)
    return _build(mask.array, mask.num_queries, tile_rows, tile_keys, full_rows=0)


def backward_work(mask: AttentionMask, tile_rows: int, tile_keys: int) -> WorkList:
    """Returns tiles of `tile_keys` keys whose segments step through queries by `tile_rows`.

    In the arrays, rows are keys and keys are queries. Raises ValueError as `forward_work`.
    """
    _check_size(mask)
    rows = transpose_rows(mask.array)
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    return _build(rows, mask.num_keys, tile_keys, tile_rows, full_rows=tile_keys)


def _check_size(mask: AttentionMask) -> None:
    if max(mask.num_queries, mask.num_keys) >= MAX_ROWS:
        raise ValueError(
            f"mask grid {mask.num_queries} x {mask.num_keys} must stay below {MAX_ROWS} rows and keys; "
            "crop it into parts"
        )


def _build(rows: IntArray, num_rows: int, tile_rows: int, step: int, full_rows: int) -> WorkList:
    """Returns the work list of tight `rows` sorted by row start; short intervals share tiles if cheaper."""
    cuts = distinct(np.concatenate([rows[:, 0], rows[:, 1], [0, num_rows]]))
    groups = _group_short(cuts, tile_rows)
    if len(groups) < len(cuts):
        groups = _split_costly(rows, cuts, groups, tile_rows, step, full_rows)
    starts, stops = _tile_bounds(groups, tile_rows)
    tile_of, segs = _segments(rows, starts, stops, step, full_rows)
    num_segs = np.bincount(tile_of, minlength=len(starts))
    seg0 = np.cumsum(num_segs) - num_segs
    tiles = np.stack([starts, stops - starts, seg0, num_segs], axis=1).astype(np.int32)
    order = np.argsort(-_tile_costs(tile_of, segs, len(starts), step), kind="stable")
    return WorkList(tiles, segs.astype(np.int32), order.astype(np.int32), tile_rows, step)


def _group_short(cuts: IntArray, tile_rows: int) -> IntArray:
    """Returns the cuts that remain when neighbouring intervals are put together up to `tile_rows` rows."""
    reach = np.searchsorted(cuts, cuts + tile_rows, side="right") - 1
    if (reach[:-1] <= np.arange(1, len(cuts))).all():
        return cuts
    next_cut, last = np.maximum(reach, np.arange(len(cuts)) + 1).tolist(), len(cuts) - 1
    chosen = [0]
    while chosen[-1] < last:
        chosen.append(next_cut[chosen[-1]])
    return cuts[chosen]


def _split_costly(
    rows: IntArray, cuts: IntArray, groups: IntArray, tile_rows: int, step: int, full_rows: int
) -> IntArray:
    """Returns `groups` with those cut apart again that cost more together than apart."""
    costs = []
    for bounds in (groups, cuts):
        starts, stops = _tile_bounds(bounds, tile_rows)
        tile_of, segs = _segments(rows, starts, stops, step, full_rows)
        tile_costs = _tile_costs(tile_of, segs, len(starts), step)
        group = np.searchsorted(groups, starts, side="right") - 1
        costs.append(np.bincount(group, weights=tile_costs, minlength=len(groups) - 1))
    together, apart = costs
    group_of_cut = np.searchsorted(groups, cuts[:-1], side="right") - 1
    keep = np.append(together[group_of_cut] > apart[group_of_cut], True)
    keep[np.searchsorted(cuts, groups)] = True
    return cuts[keep]


def _tile_bounds(bounds: IntArray, tile_rows: int) -> tuple[IntArray, IntArray]:
    """Returns `(start, stop)` of all tiles: each interval between bounds in steps of `tile_rows`."""
    starts, stops = bounds[:-1], bounds[1:]
    which, index = expand_ranges(np.zeros_like(starts), -(-(stops - starts) // tile_rows))
    first = starts[which] + index * tile_rows
    return first, np.minimum(first + tile_rows, stops[which])


def _segments(
    rows: IntArray, starts: IntArray, stops: IntArray, step: int, full_rows: int
) -> tuple[IntArray, IntArray]:
    """Returns the tile of each segment, sorted, and the segments `[n, 8]` in int64."""
    low = np.searchsorted(stops, rows[:, 0], side="right")
    high = np.searchsorted(starts, rows[:, 1], side="left")
    which, tile = expand_ranges(low, high)
    q0, q1, k0, k1, lo, hi = rows[which].T
    # A tight row keeps a pair in every row of its box, so no part is empty.
    q0, q1 = np.maximum(q0, starts[tile]), np.minimum(q1, stops[tile])
    k0, k1 = np.maximum(k0, q0 + lo), np.minimum(k1, q1 + hi)
    lo = np.where(q1 - 1 + lo <= k0, OPEN_LO, lo)
    hi = np.where(q0 + hi + 1 >= k1, OPEN_HI, hi)
    segs = _join(np.stack([tile, k0, k1, lo, hi, q0, q1], axis=1))
    tile, k0, k1, lo, hi, q0, q1 = segs.T
    covers = (q0 == starts[tile]) & (q1 == stops[tile]) & (q1 - q0 >= full_rows)
    begin = -(-(np.maximum(k0, q1 - 1 + lo) - k0) // step)
    end = np.where(covers, (np.minimum(k1, q0 + hi + 1) - k0) // step, 0)
    begin, end = (np.where(begin < end, side, 0) for side in (begin, end))
    return tile, np.stack([k0, k1, lo, hi, q0, q1, begin, end], axis=1)


def _join(segs: IntArray) -> IntArray:
    """Returns rows (tile, k0, k1, lo, hi, q0, q1) joined where two of a tile are one, by tile and k0."""
    tile, k0, k1, lo, hi, q0, q1 = segs.T
    segs = segs[np.lexsort((q0, hi, lo, k1, k0, tile))]
    same = (segs[1:, :5] == segs[:-1, :5]).all(axis=1)
    segs = _join_runs(segs, same & (segs[1:, 5] == segs[:-1, 6]), last=(6,))
    tile, k0, k1, lo, hi, q0, q1 = segs.T
    segs = segs[np.lexsort((k0, q1, q0, tile))]
    same = (segs[1:, [0, 5, 6]] == segs[:-1, [0, 5, 6]]).all(axis=1)
    uncut = (segs[:-1, 4] == OPEN_HI) & (segs[1:, 3] == OPEN_LO)
    segs = _join_runs(segs, same & uncut & (segs[1:, 1] == segs[:-1, 2]), last=(2, 4))
    return segs[np.lexsort((segs[:, 5], segs[:, 1], segs[:, 0]))]


def _join_runs(segs: IntArray, joins: NDArray[np.bool_], last: tuple[int, ...]) -> IntArray:
    """Returns one row per run of joined neighbours: its first, with the columns `last` of its last."""
    if not joins.any():
        return segs
    first = np.flatnonzero(np.append(True, ~joins))
    joined = segs[first]
    final = np.append(first[1:], len(segs)) - 1
    for column in last:
        joined[:, column] = segs[final, column]
    return joined


def _visits(segs: NDArray[np.integer], step: int) -> IntArray:
    return -(-(segs[:, K1].astype(np.int64) - segs[:, K0]) // step)


def _tile_costs(
    tile_of: IntArray, segs: IntArray, num_tiles: int, step: int
) -> NDArray[np.float64]:
    """Returns the cost of every tile in visits."""
    full = segs[:, FULL_END] - segs[:, FULL_BEGIN]
    cost = full + PARTIAL_COST * (_visits(segs, step) - full)
    visits = np.bincount(tile_of, weights=cost, minlength=num_tiles)
    return visits.astype(np.float64) + TILE_COST
