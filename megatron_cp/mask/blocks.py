"""A mask seen by rows and by blocks, computed from its slices: what kernels and pictures ask for.

row_intervals      per query, the key intervals it sees            [R, num_queries, 2]
cell_areas         allowed pairs in every cell of a coarse grid    [rows, columns]
block_table        which blocks are empty, partial, full: FlexAttention's BlockMask
to_mask_mod        FlexAttention's mask function over row intervals
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_cp.mask.checks import as_array, as_bounds, as_count, as_int32, as_tokens, check_mask
from megatron_cp.mask.forms import from_dense
from megatron_cp.mask.interval import IntArray, expand_ranges
from megatron_cp.mask.mask import AttentionMask
from megatron_cp.mask.patterns import block_sparse
from megatron_cp.mask.slice import (
    HI,
    K_END,
    K_START,
    LO,
    Q_END,
    Q_START,
    cut_rows_at,
    make_rows,
    rows_area,
    shift_rows,
    tighten,
)

MaskMod = Callable[[Any, Any, Any, Any], Any]
MAX_ROWS = 1 << 24  # of a table by rows, all slices together: some hundred megabytes
MAX_BLOCKS = 1 << 22  # that are neither whole nor empty: some hundred megabytes
MAX_LISTED = 1 << 27  # entries of a table of blocks by blocks, 4 bytes each
MAX_ASKED = 1 << 32  # pairs that a mask function is asked for: minutes
Int32Array = NDArray[np.int32]
BLOCK_MASK_FIELDS = (
    "BLOCK_SIZE", "seq_lengths", "mask_mod", "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices",
)  # fmt: skip


def row_intervals(mask: AttentionMask) -> IntArray:
    """Returns the keys of every query as R sorted, disjoint intervals: `[R, num_queries, 2]`.

    R is the largest number that any query needs (at least 1); unused intervals are (0, 0). O(R x
    queries). Raises NotImplementedError for tables of more than 2^24 rows or intervals.
    """
    check_mask(mask)
    num_rows = int((mask.array[:, Q_END] - mask.array[:, Q_START]).sum())
    if max(num_rows, mask.num_queries) > MAX_ROWS:
        raise NotImplementedError(
            f"a table of {mask.num_queries} queries with {num_rows} intervals in all is too large: at most {MAX_ROWS} "
            "of either are allowed; crop the mask first, or use to_ranges"
        )
    which, q = expand_ranges(mask.array[:, Q_START], mask.array[:, Q_END])
    rows = mask.array[which]
    start = np.maximum(rows[:, K_START], q + rows[:, LO])
    end = np.minimum(rows[:, K_END], q + rows[:, HI] + 1)
    order = np.lexsort((start, q))
    q, start, end = q[order], start[order], end[order]
    # Slices are disjoint, so neighbours of one row either touch (one interval) or leave a gap.
    touches = (q[1:] == q[:-1]) & (start[1:] == end[:-1])
    opens = np.flatnonzero(np.r_[True, ~touches][: len(q)])
    closes = np.r_[opens[1:], len(q)][: len(opens)] - 1
    q, start, end = q[opens], start[opens], end[closes]
    place = np.arange(len(q)) - np.searchsorted(q, q, side="left")
    most = int(place.max(initial=0)) + 1
    if most * mask.num_queries > 2 * MAX_ROWS:
        raise NotImplementedError(
            f"a table of {most} intervals for each of {mask.num_queries} queries is too large: at most {2 * MAX_ROWS} "
            "in all are allowed; crop the mask first, or use to_ranges"
        )
    intervals = np.zeros((most, mask.num_queries, 2), dtype=np.int64)
    intervals[place, q, 0] = start
    intervals[place, q, 1] = end
    return intervals


def even_bounds(size: int, cells: int) -> IntArray:
    """Returns where at most so many cells of a side begin, and the end: int64 `[n + 1]`."""
    cells = min(size, cells)
    return np.arange(cells + 1, dtype=np.int64) * size // max(1, cells)


def cell_areas(mask: AttentionMask, q_bounds: IntArray, k_bounds: IntArray) -> IntArray:
    """Returns the allowed pairs in each cell of a coarse grid: int64 `[rows, columns]`.

    Cell (i, j) is `[q_bounds[i], q_bounds[i+1]) x [k_bounds[j], k_bounds[j+1])`; bounds never fall.
    """
    check_mask(mask)
    q_bounds, k_bounds = as_bounds("q_bounds", q_bounds), as_bounds("k_bounds", k_bounds)
    strips, _, i = cut_rows_at(mask.array, q_bounds, Q_START, Q_END)
    cells, strip, j = cut_rows_at(strips, k_bounds, K_START, K_END)
    areas = np.zeros((len(q_bounds) - 1, len(k_bounds) - 1), dtype=np.int64)
    np.add.at(areas, (i[strip], j), rows_area(cells))
    return areas


@dataclass(frozen=True)
class BlockTable:
    """Which blocks of `q_block x k_block` pairs a mask touches.

    `partial` int64 `[n, 2]`: (query block, key block) with some pairs; `full` int64 `[m, 3]`:
    (query block, first key block, last + 1) with all pairs of every block in the range. Both are
    sorted. A block cut short by the end of the grid is never full, as in FlexAttention.
    """

    q_block: int
    k_block: int
    num_q_blocks: int
    num_k_blocks: int
    partial: IntArray
    full: IntArray

    def kv_arrays(self) -> tuple[Int32Array, Int32Array, Int32Array, Int32Array]:
        """Returns kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices of a BlockMask.

        int32, `[query blocks]` and `[query blocks, key blocks]`; `BlockMask.from_kv_blocks` takes
        them with two leading dimensions of 1. Entries behind the counts are 0. Raises NotImplementedError for
        tables of more than 2^27 entries.
        """
        if self.num_q_blocks * self.num_k_blocks > MAX_LISTED:
            raise NotImplementedError(
                f"a BlockMask of {self.num_q_blocks} x {self.num_k_blocks} blocks is too large, at most {MAX_LISTED} "
                "are allowed; take larger blocks, or crop the mask first"
            )
        which, j = expand_ranges(self.full[:, 1], self.full[:, 2])
        return (
            *self._listed(self.partial[:, 0], self.partial[:, 1]),
            *self._listed(self.full[which, 0], j),
        )

    def _listed(self, i: IntArray, j: IntArray) -> tuple[Int32Array, Int32Array]:
        counts = np.bincount(i, minlength=self.num_q_blocks).astype(np.int32)
        indices = np.zeros((self.num_q_blocks, self.num_k_blocks), dtype=np.int32)
        indices[i, np.arange(len(i)) - np.searchsorted(i, i, side="left")] = j
        return counts, indices


def block_table(mask: AttentionMask, q_block: int = 128, k_block: int = 128) -> BlockTable:
    """Returns the blocks of a mask from its slices; no pair is looked at one by one.

    Raises NotImplementedError for more than 2^22 strips of slices, or blocks that are neither whole nor empty.
    """
    check_mask(mask)
    q_block = as_count("q_block", q_block, minimum=1)
    k_block = as_count("k_block", k_block, minimum=1)
    num_q, num_k = -(-mask.num_queries // q_block), -(-mask.num_keys // k_block)
    starts, ends = mask.array[:, Q_START] // q_block, -(-mask.array[:, Q_END] // q_block)
    _check_blocks(int((ends - starts).sum()), "strips of slices")
    strips, _, i = cut_rows_at(mask.array, np.arange(num_q + 1) * q_block, Q_START, Q_END)
    q0, q1, k0, k1, lo, hi = strips.T
    first, last = k0 // k_block, -(-k1 // k_block)
    # Keys that every query of a whole strip sees; the blocks inside them are full in this slice
    # alone.
    inner = -(-np.maximum(k0, q1 - 1 + lo) // k_block)
    outer = np.minimum(k1, q0 + hi + 1) // k_block
    whole = (q1 - q0 == q_block) & (inner < outer)
    inner, outer = np.where(whole, inner, last), np.where(whole, outer, last)
    edge = np.concatenate([np.stack([first, inner], 1), np.stack([outer, last], 1)])
    _check_blocks(int((edge[:, 1] - edge[:, 0]).sum()), "blocks that are neither whole nor empty")
    owner, j = expand_ranges(edge[:, 0], edge[:, 1])
    owner = owner % max(1, len(strips))
    cells = strips[owner]
    cells[:, K_START] = np.maximum(cells[:, K_START], j * k_block)
    cells[:, K_END] = np.minimum(cells[:, K_END], (j + 1) * k_block)
    # Several slices may fill one block together: add up before deciding.
    blocks, inverse = np.unique(i[owner] * num_k + j, return_inverse=True)
    areas = np.zeros(len(blocks), dtype=np.int64)
    np.add.at(areas, inverse, rows_area(tighten(cells)))
    together = blocks[areas == q_block * k_block]
    rest = blocks[areas < q_block * k_block]
    full = np.concatenate(
        [
            np.stack([i[whole], inner[whole], outer[whole]], axis=1),
            np.stack([together // num_k, together % num_k, together % num_k + 1], axis=1)
            if num_k
            else np.zeros((0, 3), dtype=np.int64),
        ]
    )
    full = full[np.lexsort((full[:, 1], full[:, 0]))]
    partial = np.stack(np.divmod(rest, max(1, num_k)), axis=1)
    return BlockTable(q_block, k_block, num_q, num_k, partial, full)


def _check_blocks(count: int, what: str) -> None:
    if count > MAX_BLOCKS:
        raise NotImplementedError(
            f"a table of blocks would have {count} {what}, at most {MAX_BLOCKS} are allowed; take larger blocks, or "
            "crop the mask first"
        )


def to_mask_mod(mask: AttentionMask, convert: Callable[[Int32Array], Any] = np.asarray) -> MaskMod:
    """Returns `mask_mod(batch, head, q, k)` for FlexAttention: true where query q sees key k.

    The function reads `2 R` integers per query (`row_intervals`). `convert` puts its tables where q
    and k live: `lambda table: torch.from_numpy(table).to(device)` for FlexAttention, nothing for
    NumPy.
    """
    _check_callable("convert", convert)
    intervals = as_int32(row_intervals(mask), "mask_mod")
    tables = [
        (convert(np.ascontiguousarray(part[:, 0])), convert(np.ascontiguousarray(part[:, 1])))
        for part in intervals
    ]

    def mask_mod(batch: Any, head: Any, q: Any, k: Any) -> Any:
        del batch, head  # one mask serves all
        start, end = tables[0]
        allowed = (start[q] <= k) & (k < end[q])
        for start, end in tables[1:]:
            allowed = allowed | ((start[q] <= k) & (k < end[q]))
        return allowed

    return mask_mod


def from_mask_mod(
    mask_mod: MaskMod,
    num_queries: int,
    num_keys: int | None = None,
    convert: Callable[[IntArray], Any] = np.asarray,
) -> AttentionMask:
    """Returns the mask of a FlexAttention mask function, asked once per pair: O(queries x keys).

    The function is called with arrays of indices, batch and head 0 among them; `convert` makes them what it can
    work with (`torch.from_numpy` for one that reads tensors, and for FlexAttention's `and_masks` and `or_masks`).
    Rows are asked in blocks, so memory stays small, but use a builder for long sequences.
    """
    _check_callable("mask_mod", mask_mod)
    _check_callable("convert", convert)
    num_queries = as_tokens("num_queries", num_queries)
    num_keys = num_queries if num_keys is None else as_tokens("num_keys", num_keys)
    if num_queries * num_keys > MAX_ASKED:
        raise NotImplementedError(
            f"mask_mod would be asked for {num_queries} x {num_keys} pairs, at most 2^32 are allowed; use a builder"
        )
    step = max(1, (1 << 22) // max(1, num_keys))
    parts = [np.zeros((0, 6), dtype=np.int64)]
    for start in range(0, num_queries, step):
        q = np.arange(start, min(start + step, num_queries))
        dense = _asked(mask_mod, (0, 0), q, np.arange(num_keys), convert)
        parts.append(shift_rows(from_dense(dense).array, q=start))
    return AttentionMask(num_queries, num_keys, np.concatenate(parts)).merged()


def from_block_mask(
    block_mask: Any, convert: Callable[[IntArray], Any] | None = None
) -> AttentionMask:
    """Returns the mask of a FlexAttention BlockMask (any object with its fields).

    Full blocks become boxes, the mask function is asked for the pairs of partial blocks only, of every batch entry
    and head. `convert` makes indices what it can work with: tensors beside `kv_indices` if none is given.
    Raises NotImplementedError if batch entries or heads differ: one AttentionMask serves all.
    """
    missing = [name for name in BLOCK_MASK_FIELDS if not hasattr(block_mask, name)]
    if missing:
        raise TypeError(
            f"block_mask is a {type(block_mask).__name__} without {', '.join(missing)}; give a BlockMask of "
            "FlexAttention"
        )
    q_block, k_block = (int(size) for size in block_mask.BLOCK_SIZE)
    num_queries, num_keys = (int(size) for size in block_mask.seq_lengths)
    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    entries = list(np.ndindex(*block_mask.kv_indices.shape[:2]))
    made: Callable[[IntArray], Any] = getattr(block_mask.kv_indices, "new_tensor", np.asarray)
    made = made if convert is None else convert
    arrays = [_same_for_all(name, getattr(block_mask, name)) for name in names]
    num_blocks = (-(-num_queries // q_block), -(-num_keys // k_block))
    assert arrays[1] is not None
    if arrays[1].shape != num_blocks:
        raise ValueError(
            f"block_mask has tables of {arrays[1].shape[0]} x {arrays[1].shape[1]} blocks, its {num_queries} x "
            f"{num_keys} tokens have {num_blocks[0]} x {num_blocks[1]}; give the whole BlockMask, not a part of it"
        )
    mask = AttentionMask(num_queries, num_keys, make_rows(0, 0, 0, 0))
    if arrays[2] is not None:
        table = _table_of(arrays[2], arrays[3])
        mask = block_sparse(table, q_block, k_block).crop((0, num_queries), (0, num_keys))
    rows = [mask.array]
    for i, j in np.argwhere(_table_of(arrays[0], arrays[1])).tolist():
        q = np.arange(i * q_block, min((i + 1) * q_block, num_queries))
        k = np.arange(j * k_block, min((j + 1) * k_block, num_keys))
        first, *others = (_asked(block_mask.mask_mod, entry, q, k, made) for entry in entries)
        if any((first != other).any() for other in others):
            raise NotImplementedError(
                "mask_mod differs between batch entries or heads of the block mask; one AttentionMask serves all: "
                "convert each entry by itself"
            )
        part = from_dense(first)
        rows.append(shift_rows(part.array, i * q_block, j * k_block))
    return AttentionMask(num_queries, num_keys, np.concatenate(rows)).merged()


def _check_callable(name: str, value: object) -> None:
    if not callable(value):
        raise TypeError(
            f"{name}={value!r} must be a function; give one of the form in the docstring"
        )


def _asked(
    mask_mod: MaskMod,
    entry: tuple[int, ...],
    q: IntArray,
    k: IntArray,
    convert: Callable[[IntArray], Any],
) -> NDArray[np.bool_]:
    """Returns what a mask function says of a batch entry and head about every pair: bool `[queries, keys]`."""
    batch, head = (convert(np.array(index)) for index in entry)
    try:
        said = mask_mod(batch, head, convert(q[:, None]), convert(k[None]))
    except (AttributeError, TypeError) as error:
        if convert is not np.asarray:
            raise
        raise TypeError(
            f"mask_mod does not work with NumPy arrays ({error}); give convert=torch.from_numpy for one that reads "
            "tensors"
        ) from error
    allowed = as_array("what mask_mod returns", _on_the_host(said))
    if allowed.dtype.kind not in "biuf" or allowed.ndim > 2:
        raise TypeError(
            f"mask_mod returns dtype {allowed.dtype} and shape {allowed.shape}; it must return booleans that "
            "broadcast to [queries, keys]"
        )
    return np.broadcast_to(allowed.astype(bool), (len(q), len(k)))


def _on_the_host(array: Any) -> Any:
    """Returns an array, or a tensor of another device copied to where NumPy reads it."""
    return array.cpu() if hasattr(array, "cpu") else array


def _same_for_all(name: str, tensor: Any) -> IntArray | None:
    """Returns the entry of batch 0 and head 0, or None for None; refuses entries that differ."""
    if tensor is None:
        return None
    array = np.asarray(_on_the_host(tensor))
    if (array != array[:1, :1]).any():
        raise NotImplementedError(
            f"{name} differs between batch entries or heads of the block mask; one AttentionMask serves all: convert "
            "each entry by itself"
        )
    return array[0, 0].astype(np.int64)


def _table_of(counts: IntArray | None, indices: IntArray | None) -> NDArray[np.bool_]:
    assert counts is not None and indices is not None
    table = np.zeros(indices.shape, dtype=bool)
    i, place = expand_ranges(np.zeros_like(counts), counts)
    table[i, indices[i, place]] = True
    return table
