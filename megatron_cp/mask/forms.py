"""Masks from and to the plainest forms: (query range, key range, type) triples, dense booleans."""

from collections.abc import Sequence
from numbers import Integral

import numpy as np
from numpy.typing import NDArray

from megatron_cp.mask.checks import as_array, as_ranges, as_tokens, check_mask
from megatron_cp.mask.interval import IntArray, runs_of_rows
from megatron_cp.mask.mask import AttentionMask, from_rows
from megatron_cp.mask.slice import K_END, K_START, OPEN, Q_END, Q_START, make_rows, tighten

RANGE_TYPES = ("full", "causal", "inv_causal", "bi_causal")


def from_ranges(
    q_ranges: Sequence[Sequence[int]] | IntArray,
    k_ranges: Sequence[Sequence[int]] | IntArray,
    types: Sequence[str | int] | str | int,
    *,
    num_queries: int | None = None,
    num_keys: int | None = None,
) -> AttentionMask:
    """Returns the mask of boxes `q_ranges[i] x k_ranges[i]`, each cut as `types[i]` says.

        full (0)     causal (1)     inv_causal (2)     bi_causal (3)
        # # # #      # # . .        # # # #            # # . .
        # # # #      # # # .        . # # #            . # # .
        # # # #      # # # #        . . # #            . . # #

    causal is aligned at the bottom right of its box (`k - q <= k_end - q_end`), inv_causal at the
    top left (`k - q >= k_start - q_start`), bi_causal is both. One type serves all boxes. Unless
    given, the grid ends where the last range ends. Raises ValueError naming two boxes that share a
    pair.

    Source: MagiAttention's AttnSlice and its type numbers.
    """
    queries, keys = as_ranges("q_ranges", q_ranges), as_ranges("k_ranges", k_ranges)
    if len(queries) != len(keys):
        raise ValueError(
            f"q_ranges has {len(queries)} entries and k_ranges {len(keys)}; each box needs one of "
            "both: give lists of one length"
        )
    codes = _type_codes(types, len(queries))
    hi = np.where(codes & 1, keys[:, 1] - queries[:, 1], OPEN)
    lo = np.where(codes & 2, keys[:, 0] - queries[:, 0], -OPEN)
    rows = make_rows(queries[:, 0], queries[:, 1], keys[:, 0], keys[:, 1], lo, hi)
    grid_queries = _grid_size("num_queries", num_queries, queries, "q_ranges")
    grid_keys = _grid_size("num_keys", num_keys, keys, "k_ranges")
    return from_rows(grid_queries, grid_keys, rows, "ranges")


def from_dense(dense: NDArray[np.bool_]) -> AttentionMask:
    """Returns the mask of a boolean matrix `[num_queries, num_keys]` (True = allowed).

    Costs O(queries x keys): for small masks and tests. Full, causal and banded regions come back as
    single slices.
    """
    matrix = as_array("dense", dense)
    if matrix.ndim != 2 or matrix.dtype != np.bool_:
        raise ValueError(
            f"dense has dtype {matrix.dtype} and shape {matrix.shape}; it must be bool of shape "
            "[num_queries, num_keys]: compare an additive mask with 0 first"
        )
    q, k_start, k_end = runs_of_rows(matrix)
    num_queries, num_keys = matrix.shape
    return AttentionMask(num_queries, num_keys, make_rows(q, q + 1, k_start, k_end)).merged()


def to_ranges(mask: AttentionMask) -> tuple[IntArray, IntArray, IntArray]:
    """Returns `(q_ranges [n, 2], k_ranges [n, 2], types [n])`, types 0..3 as in `from_ranges`.

    A slice whose band bends inside its box becomes up to three boxes.
    """
    check_mask(mask)
    q0, q1, k0, k1, lo, hi = mask.array.T
    # Before row `rises` the first key is k0, from there it is q + lo. Before row `caps` the last
    # key is q + hi, from there k1 - 1. On the bend itself both hold, so a side that cuts nothing
    # gets no part.
    rises = np.where(k0 - lo == q1 - 1, q1, k0 - lo)
    caps = np.where(k1 - 1 - hi == q0, q0, k1 - hi)
    caps = np.minimum(caps, q1)
    first, second = np.minimum(rises, caps), np.maximum(rises, caps)
    parts, types = [], []
    for start, end in ((q0, first), (first, second), (second, q1)):
        solid = start < end
        row = tighten(make_rows(start, end, k0, k1, lo, hi)[solid])
        parts.append(row)
        types.append(np.where(end <= caps, 1, 0)[solid] + np.where(start >= rises, 2, 0)[solid])
    rows, codes = np.concatenate(parts), np.concatenate(types)
    order = np.lexsort((rows[:, K_START], rows[:, Q_START]))
    return rows[order, Q_START : Q_END + 1], rows[order, K_START : K_END + 1], codes[order]


def _type_codes(types: Sequence[str | int] | str | int, count: int) -> IntArray:
    """Returns one code per box: bit 0 = upper bound on `k - q`, bit 1 = lower bound."""
    try:
        items = [types] * count if isinstance(types, str | int) else list(types)
    except TypeError:
        raise ValueError(
            f"types={types!r} must be one of {', '.join(RANGE_TYPES)} or 0, 1, 2, 3, or a list of one per box: use one "
            "of these"
        ) from None
    if len(items) != count:
        raise ValueError(
            f"types has {len(items)} entries for {count} boxes; give one per box, or one for all"
        )
    codes = {name: code for code, name in enumerate(RANGE_TYPES)} | {c: c for c in range(4)}
    unknown = [
        i
        for i, item in enumerate(items)
        if not isinstance(item, str | Integral) or item not in codes
    ]
    if unknown:
        raise ValueError(
            f"types[{unknown[0]}]={items[unknown[0]]!r} is unknown; allowed are "
            f"{', '.join(RANGE_TYPES)} or 0, 1, 2, 3: use one of these"
        )
    return np.array([codes[item] for item in items], dtype=np.int64)


def _grid_size(name: str, size: int | None, ranges: IntArray, ranges_name: str) -> int:
    reach = int(ranges[:, 1].max()) if len(ranges) else 0
    if size is None:
        return reach
    if reach > as_tokens(name, size):
        raise ValueError(
            f"{name}={size} must be at least {reach}, where {ranges_name} end; enlarge the grid"
        )
    return int(size)
