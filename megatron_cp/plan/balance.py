"""Deals equal numbers of chunks to ranks so that every rank has the same attention area, near its keys.

Starts from the stream in order (the best locality there is) and exchanges single chunks between a loaded
and an idle rank, always the pair that moves the fewest additional key rows among those that help enough.
Compare MagiAttention's area dispatch (min-heap over chunks sorted by area), which balances as well but
scatters documents over ranks; it is here too, as the start for masks where the exchanges get stuck.
"""

import heapq

import numpy as np
from numpy.typing import NDArray

from megatron_cp.mask import AttentionMask
from megatron_cp.mask.interval import IntArray, expand_ranges
from megatron_cp.mask.slice import K_END, K_START, Q_END, Q_START, tighten

FloatArray = NDArray[np.float64]
MAX_EXCHANGES_PER_RANK = 64
USEFUL_SHARE = 0.5  # an exchange must reach this share of the best improvement on offer


def chunk_areas(mask: AttentionMask, chunk_size: int, num_chunks: int) -> FloatArray:
    """Returns the mask area of each chunk's query rows: float64 `[num_chunks]`."""
    bounds = np.minimum(np.arange(num_chunks + 1) * chunk_size, mask.num_queries)
    return mask.area_of_rows(bounds).astype(np.float64)


def chunk_needs(mask: AttentionMask, chunk_size: int, num_chunks: int) -> FloatArray:
    """Returns how many key rows of chunk j the queries of chunk i may see: float64 `[i, j]`.

    Slices of one chunk that share keys are counted once each, capped at the chunk: an estimate.
    """
    rows = mask.array
    first, last = rows[:, Q_START] // chunk_size, (rows[:, Q_END] - 1) // chunk_size + 1
    which, chunk = expand_ranges(first, last)
    parts = rows[which]
    parts[:, Q_START] = np.maximum(parts[:, Q_START], chunk * chunk_size)
    parts[:, Q_END] = np.minimum(parts[:, Q_END], (chunk + 1) * chunk_size)
    parts = tighten(parts)  # tight rows cut along q keep a pair in every row: none vanishes
    begin, end = parts[:, K_START] // chunk_size, (parts[:, K_END] - 1) // chunk_size + 1
    piece, column = expand_ranges(begin, end)
    low = np.maximum(parts[piece, K_START], column * chunk_size)
    high = np.minimum(parts[piece, K_END], (column + 1) * chunk_size)
    needs = np.zeros((num_chunks, num_chunks))
    np.add.at(needs, (chunk[piece], column), high - low)
    return np.minimum(needs, chunk_size)


def in_order(num_chunks: int, cp_size: int) -> IntArray:
    """Returns the stream in order: rank r owns the r-th run of chunks, int64 `[P, n]`."""
    return np.arange(num_chunks, dtype=np.int64).reshape(cp_size, -1)


def largest_first(areas: FloatArray, cp_size: int) -> IntArray:
    """Returns the deal of the largest chunk to the least loaded rank with room, again and again.

    Source: longest-processing-time rule with equal counts; MagiAttention's min-heap dispatch.
    """
    room = len(areas) // cp_size
    owned: list[list[int]] = [[] for _ in range(cp_size)]
    heap = [(0.0, rank) for rank in range(cp_size)]
    for chunk in np.argsort(-areas, kind="stable").tolist():
        load, rank = heapq.heappop(heap)
        owned[rank].append(chunk)
        if len(owned[rank]) < room:
            heapq.heappush(heap, (load + areas[chunk], rank))
    return np.array(owned, dtype=np.int64)


def exchange_chunks(
    owned: IntArray, areas: FloatArray, needs: FloatArray, tolerance: float
) -> IntArray:
    """Returns `owned` after exchanges that bring max/mean area to `1 + tolerance`, or as near as they go."""
    owned = owned.copy()
    loads = areas[owned].sum(axis=1)
    target = loads.mean() * (1 + tolerance)
    for _ in range(MAX_EXCHANGES_PER_RANK * len(owned)):
        if loads.max() <= target:
            break
        move = _best_exchange(owned, areas, needs, loads)
        if move is None:
            break
        a, i, b, j = move
        owned[a, i], owned[b, j] = owned[b, j], owned[a, i]
        loads[[a, b]] = areas[owned[[a, b]]].sum(axis=1)
    return owned


def _best_exchange(
    owned: IntArray, areas: FloatArray, needs: FloatArray, loads: FloatArray
) -> tuple[int, int, int, int] | None:
    """Returns (rank a, slot, rank b, slot) to exchange, a being the most loaded rank; None if stuck."""
    a = int(loads.argmax())
    best: tuple[float, int, int, int, int] | None = None
    for b in np.argsort(loads, kind="stable")[: max(4, len(owned) // 8)].tolist():
        if b == a:
            continue
        change = areas[owned[a]][:, None] - areas[owned[b]][None, :]
        after = np.maximum(loads[a] - change, loads[b] + change)
        gain = loads[a] - after
        if gain.max() <= 1e-9 * loads[a]:
            continue
        moved = _extra_rows(owned[a], owned[b], needs)
        cost = np.full_like(gain, np.inf)
        np.divide(moved, gain, out=cost, where=gain >= USEFUL_SHARE * gain.max())
        i, j = np.unravel_index(int(cost.argmin()), cost.shape)
        if best is None or cost[i, j] < best[0]:
            best = (float(cost[i, j]), a, int(i), b, int(j))
    return None if best is None else best[1:]


def _extra_rows(mine: IntArray, theirs: IntArray, needs: FloatArray) -> FloatArray:
    """Returns an estimate of the key rows moved more when slot i of `mine` and j of `theirs` change."""

    def cost_at(chunks: IntArray, home: IntArray) -> FloatArray:
        covered = needs[home].max(axis=0)
        covered[home] = np.inf  # own rows are never received
        return np.maximum(needs[chunks] - covered, 0).sum(axis=1)

    here, there = cost_at(mine, mine), cost_at(theirs, theirs)
    leave = cost_at(mine, theirs) - here
    enter = cost_at(theirs, mine) - there
    total = leave[:, None] + enter[None, :]
    return np.maximum(total - total.min() + 1.0, 1.0)
