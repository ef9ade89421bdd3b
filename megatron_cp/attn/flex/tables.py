"""What FlexAttention reads of a mask, in shapes that make one graph serve all masks.

Two tables, both straight from the slices:

    blocks        which blocks of 128 x 128 pairs are partial or full, by query block and by key block
    intervals     per query row the keys that it sees, as 1 or 8 intervals, unused ones empty

A compiled graph is bound to what its mask function does, hence to the number of intervals: there are two
(`NUM_INTERVALS`). A mask whose rows need more is cut at keys into parts that need fewer; their results are merged
as those of any parts. All else is the size of a dimension. Rows and keys are padded to whole blocks, at
least two: torch compiles anew for a size of 1, and where a size is no multiple of the block.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_cp.attn import device_arrays
from megatron_cp.attn.device_arrays import Int32Array
from megatron_cp.mask import AttentionMask, block_table, row_intervals
from megatron_cp.mask.interval import IntArray

BLOCK_SIZE = 128
# 8 holds every stage of every planner on documents, causal and sliding windows, 2 to 8 ranks (tests/attn).
NUM_INTERVALS = (1, 8)


class Part(NamedTuple):
    """A mask over the keys `[k_start, k_end)` on the device.

    `blocks`: counts and indices of partial, then of full key blocks by query block, then the same of query
    blocks by key block, as the constructor of BlockMask takes them. `starts`, `ends`: int32 `[padded rows]` per
    interval. `used_rows`, `used_keys`: int32, 1 where any pair is.
    """

    k_start: int
    k_end: int
    blocks: tuple[Tensor, ...]
    starts: tuple[Tensor, ...]
    ends: tuple[Tensor, ...]
    used_rows: Tensor
    used_keys: Tensor


@dataclass(frozen=True)
class _HostPart:
    k_start: int
    k_end: int
    blocks: list[Int32Array]
    intervals: Int32Array
    used: list[Int32Array]

    @property
    def arrays(self) -> list[Int32Array]:
        return [*self.blocks, *self.intervals, *self.used]


def parts_of(mask: AttentionMask, device: torch.device) -> tuple[Part, ...]:
    """Returns the parts of a mask on a device, made and copied once as long as the mask lives."""
    parts: tuple[Part, ...] = device_arrays.for_mask(mask, "flex", device, _prepare)
    return parts


def padded(size: int) -> int:
    """Returns a number of rows rounded up to whole blocks, at least two."""
    return max(2, -(-size // BLOCK_SIZE)) * BLOCK_SIZE


def _prepare(mask: AttentionMask) -> device_arrays.Prepared:
    host_parts = _cut(mask, 0)

    def finish(tensors: list[Tensor]) -> tuple[Part, ...]:
        given, parts = iter(tensors), []
        for host in host_parts:
            mine = [next(given) for _ in host.arrays]
            blocks = tuple(x[None, None] for x in mine[:8])
            intervals = tuple(mine[8:-2])
            sides = intervals[: len(intervals) // 2], intervals[len(intervals) // 2 :]
            parts.append(Part(host.k_start, host.k_end, blocks, *sides, *mine[-2:]))
        return tuple(parts)

    return [array for host in host_parts for array in host.arrays], finish


def _cut(mask: AttentionMask, k_start: int) -> list[_HostPart]:
    """Returns parts none of which needs more intervals per row than there are; none without a pair.

    Raises NotImplementedError where tables of some block of keys alone are too large.
    """
    if not mask.num_slices:
        return []
    try:
        part = _host_part(mask, k_start)
    except NotImplementedError:  # tables of half of the keys may fit
        if mask.num_keys <= BLOCK_SIZE:
            raise
        part = None
    if part is not None:
        return [part]
    half = mask.num_keys // 2
    low, high = mask.crop(k=(0, half)), mask.crop(k=(half, mask.num_keys))
    return [*_cut(low, k_start), *_cut(high, k_start + half)]


def _host_part(mask: AttentionMask, k_start: int) -> _HostPart | None:
    """Returns a mask as one part, None if it needs more intervals per row than there are."""
    intervals = row_intervals(mask)
    if len(intervals) > NUM_INTERVALS[-1]:
        return None
    whole = AttentionMask(padded(mask.num_queries), padded(mask.num_keys), mask.array)
    blocks = [
        array
        for side in (whole, whole.transpose())
        for array in block_table(side, BLOCK_SIZE, BLOCK_SIZE).kv_arrays()
    ]
    used = [
        _covered(mask.array[:, columns], size)
        for columns, size in ((slice(0, 2), whole.num_queries), (slice(2, 4), whole.num_keys))
    ]
    padded_intervals = _padded_intervals(intervals, whole.num_queries)
    return _HostPart(k_start, k_start + mask.num_keys, blocks, padded_intervals, used)


def _padded_intervals(intervals: IntArray, num_rows: int) -> Int32Array:
    """Returns `[2 R, num_rows]`: the starts of R intervals, then the ends; R one of NUM_INTERVALS."""
    num_intervals = next(number for number in NUM_INTERVALS if number >= len(intervals))
    table = np.zeros((2, num_intervals, num_rows), dtype=np.int32)
    table[:, : len(intervals), : intervals.shape[1]] = intervals.transpose(2, 0, 1)
    return table.reshape(2 * num_intervals, num_rows)


def _covered(spans: IntArray, size: int) -> Int32Array:
    """Returns int32 `[size]`, 1 in rows that a span holds."""
    depth = np.bincount(spans[:, 0], minlength=size + 1) - np.bincount(
        spans[:, 1], minlength=size + 1
    )
    return (np.cumsum(depth)[:size] > 0).astype(np.int32)
