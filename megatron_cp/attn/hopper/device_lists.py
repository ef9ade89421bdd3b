"""Work lists on the device: made once per mask and tile shape, copied once, found again in a microsecond.

Nothing is proportional to queries x keys, and no call waits for the device (attn/device_arrays.py). A CUDA graph
keeps the address of a list: who keeps the graph must keep the mask.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_cp.attn.device_arrays import Int32Array, Prepared, for_mask
from megatron_cp.attn.hopper.worklist import (
    WorkList,
    backward_work,
    dq_turns,
    forward_work,
    staggered,
)
from megatron_cp.mask import AttentionMask

# From here on adding to the same rows of dq at the same time costs more than the cache gives back: full 32K, 348
# against 383 TFLOP/s with head dim 256, 381 against 390 with 192, but 598 against 593 with 128 (H100, 2026-11-22).
STAGGERED_HEAD_DIM = 192


class DeviceList(NamedTuple):
    """A forward work list as one int32 tensor: tiles `[num_tiles, 4]`, segments `[num_segs, 8]`, order."""

    data: Tensor
    num_tiles: int
    num_segs: int


class BackwardList(NamedTuple):
    """A backward work list as one int32 tensor: as DeviceList, then the turns of the deterministic mode.

    `num_runs` is 0 without turns; else `[num_segs, 3]` and `[num_runs, 2]` follow the order. A query head's tiles are
    visited `num_visits` times, `most_visits` times for one tile of keys.
    """

    data: Tensor
    num_tiles: int
    num_segs: int
    num_slots: int
    num_runs: int
    num_visits: int
    most_visits: int


def forward_list(
    mask: AttentionMask, tile_rows: int, tile_keys: int, device: torch.device, stream: int
) -> DeviceList:
    """Returns the forward work list of a mask on a device, ready for `stream` (a raw CUDA stream).

    Raises: ValueError for a mask whose slices leave its grid, or that is too large.
    """

    def prepare(mask: AttentionMask) -> Prepared:
        work = forward_work(mask, tile_rows, tile_keys)
        _check_inside(work, mask.num_queries, mask.num_keys)
        counts = len(work.tiles), len(work.segs)
        arrays = [_one([work.tiles, work.segs, work.order])]
        return arrays, lambda data: DeviceList(data[0], *counts)

    use = ("hopper forward", tile_rows, tile_keys)
    lists: DeviceList = for_mask(mask, use, device, prepare, stream)
    return lists


def backward_list(
    mask: AttentionMask,
    tile_rows: int,
    tile_keys: int,
    device: torch.device,
    stream: int,
    *,
    has_turns: bool,
    head_dim: int,
) -> BackwardList:
    """Returns the backward work list of a mask on a device, ready for `stream`; with turns if asked for.

    Tiles that begin at the same queries are staggered from STAGGERED_HEAD_DIM on, where there are no turns.

    Raises: ValueError as `forward_list`.
    """
    is_staggered = head_dim >= STAGGERED_HEAD_DIM

    def prepare(mask: AttentionMask) -> Prepared:
        work = backward_work(mask, tile_rows, tile_keys)
        _check_inside(work, mask.num_keys, mask.num_queries)
        parts, num_slots, num_runs = [work.tiles, work.segs, work.order], 0, 0
        if has_turns:
            turns = dq_turns(work, mask.num_queries)
            parts += [turns.segments, turns.runs]
            num_slots, num_runs = turns.num_slots, len(turns.runs)
        elif is_staggered:
            work = staggered(work)
            parts = [work.tiles, work.segs, work.order]
        visits = work.visits_of_tiles
        sizes = len(work.tiles), len(work.segs), num_slots, num_runs
        counts = (*sizes, int(visits.sum()), int(visits.max(initial=0)))
        return [_one(parts)], lambda data: BackwardList(data[0], *counts)

    use = ("hopper backward", tile_rows, tile_keys, has_turns, is_staggered)
    lists: BackwardList = for_mask(mask, use, device, prepare, stream)
    return lists


def _one(parts: list[Int32Array]) -> Int32Array:
    """Returns the parts one after another, as the kernels' parameters count on."""
    return np.concatenate([part.ravel() for part in parts])


def _check_inside(work: WorkList, num_rows: int, num_columns: int) -> None:
    """Raises ValueError if a slice leaves the grid: the kernel would read or write outside the tensors."""
    rows = int(work.tiles[:, 1].sum())
    columns = (int(work.segs[:, 0].min()), int(work.segs[:, 1].max())) if len(work.segs) else (0, 0)
    first = int(work.tiles[0, 0]) if len(work.tiles) else 0
    if first < 0 or rows > num_rows or columns[0] < 0 or columns[1] > num_columns:
        raise ValueError(
            f"mask slices span rows [{first}, {first + rows}) and columns {columns}, outside the grid "
            f"{num_rows} x {num_columns}; build masks with from_slices, which checks this"
        )
