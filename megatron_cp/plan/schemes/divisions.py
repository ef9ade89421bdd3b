"""Turns "this rank computes these blocks" into stages that hide their transfers.

    stage     0        1 ... F                            F + 1 ... T
    work      local    blocks of foreign queries          own queries against foreign keys
    moves              rows as they are first needed;     the other keys; results of foreign queries
                       all stay                           go home under this work

Inside both groups a rank's blocks go from small to large in rows and keys alike, so that every stage needs about
as many new rows; each stage has the same share of the rank's pairs.
"""

import numpy as np

from megatron_cp.mask import AttentionMask, interval
from megatron_cp.mask.interval import IntArray
from megatron_cp.mask.slice import K_END, K_START, Q_END, Q_START, cut_rows, rows_area
from megatron_cp.plan.schema import Pass
from megatron_cp.plan.transfer.pass_builder import PassBuilder, PlacedMask
from megatron_cp.plan.transfer.routing import Route


def cut_to_chunks(mask: AttentionMask, ranks: IntArray, chunk: int) -> tuple[IntArray, IntArray]:
    """Returns the mask in blocks of chunks, slices int64 `[n, 6]`, and the rank of each."""
    cells = interval.chunks(len(ranks), chunk)
    parts, _, _ = cut_rows(mask.array, cells, Q_START, Q_END)
    parts, _, column = cut_rows(parts, cells, K_START, K_END)
    return parts, ranks[parts[:, Q_START] // chunk, column]


def pass_in_divisions(
    placed: PlacedMask, parts: IntArray, ranks: IntArray, num_divisions: int, route: Route
) -> Pass:
    """Returns own blocks first, then `num_divisions` stages in which `ranks[i]` computes the other `parts[i]`.

    `parts` int64 `[n, 6]` lie inside one run of owned tokens each, on both sides. A row travels once.
    """
    q_own = placed.owners.rank_of(parts[:, Q_START]) == ranks
    k_own = placed.owners.rank_of(parts[:, K_START]) == ranks
    area = rows_area(parts)
    is_first, is_second = ~q_own, q_own & ~k_own
    num_first, num_second = _shares(area[is_first].sum(), area[is_second].sum(), num_divisions)
    stage = np.zeros(len(parts), dtype=np.int64)
    for group, begin, count in ((is_first, 1, num_first), (is_second, 1 + num_first, num_second)):
        stage[group] = begin + _equal_areas(placed, parts[group], ranks[group], count)
    builder = PassBuilder(placed, route)
    for index in range(1 + num_first + num_second):
        now = stage == index
        keeps_q = 1 < index <= num_first
        builder.add(parts[now], ranks[now], keeps_k=index > 1, keeps_q=keeps_q)
    return builder.build()


def _shares(first: int, second: int, num_divisions: int) -> tuple[int, int]:
    """Returns how many divisions two groups of so many pairs get, at least one each if it has any."""
    if not first or not second:
        return num_divisions * bool(first), num_divisions * bool(second)
    count = round(num_divisions * int(first) / int(first + second))
    count = min(max(count, 1), max(1, num_divisions - 1))
    return count, max(1, num_divisions - count)


def _equal_areas(placed: PlacedMask, parts: IntArray, ranks: IntArray, count: int) -> IntArray:
    """Returns which of `count` divisions each part is in: equal areas per rank, rows and keys in step."""
    if not len(parts):
        return np.zeros(0, dtype=np.int64)
    q_place = _place_in_rank(placed, parts[:, Q_START], ranks)
    k_place = _place_in_rank(placed, parts[:, K_START], ranks)
    order = np.lexsort((k_place, q_place, np.maximum(q_place, k_place), ranks))
    area = rows_area(parts)[order]
    opens = np.flatnonzero(np.r_[True, np.diff(ranks[order]) != 0])
    sizes = np.diff(np.r_[opens, len(order)])
    before = np.cumsum(area) - area
    before -= np.repeat(before[opens], sizes)
    total = np.repeat(np.add.reduceat(area, opens), sizes)
    division = np.empty(len(parts), dtype=np.int64)
    division[order] = (2 * before + area) * count // (2 * total)  # by the middle of the part
    return division


def _place_in_rank(placed: PlacedMask, ids: IntArray, ranks: IntArray) -> IntArray:
    """Returns how far a part's rows stand among those of its rank, in 2^20ths: nearest owners first."""
    distance = (placed.owners.rank_of(ids) - ranks) % placed.num_ranks
    keys = (ranks * placed.num_ranks + distance) * placed.space.stride + ids
    values, place = np.unique(keys, return_inverse=True)
    rank = values // (placed.num_ranks * placed.space.stride)
    first = np.searchsorted(rank, rank, side="left")
    size = np.searchsorted(rank, rank, side="right") - first
    fraction = ((np.arange(len(values)) - first) << 20) // size
    return fraction[place]
