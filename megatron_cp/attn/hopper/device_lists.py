"""Work lists on the device: made once per mask and tile shape, copied once, found again in a microsecond.

Nothing is proportional to queries x keys, and no call waits for the device (attn/device_arrays.py). A CUDA graph
keeps the address of a list: who keeps the graph must keep the mask.
"""

# Q query rows, K key rows, N query heads, G kv heads, H head dim

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_cp.attn.device_arrays import Int32Array, Prepared, for_mask
from megatron_cp.attn.features import Feature, feature_of
from megatron_cp.attn.hopper.checks import find_gradient_kernels, find_variant
from megatron_cp.attn.hopper.machine import tile_shape
from megatron_cp.attn.hopper.worklist import WorkList, backward_work, forward_work
from megatron_cp.attn.options import AttendOptions
from megatron_cp.mask import AttentionMask


class DeviceList(NamedTuple):
    """A forward work list as one int32 tensor: tiles `[num_tiles, 4]`, segments `[num_segs, 8]`, order.

    `num_with_keys` of the tiles have any; they are the first in the order.
    """

    data: Tensor
    num_tiles: int
    num_segs: int
    num_with_keys: int


class BackwardList(NamedTuple):
    """A backward work list as one int32 tensor: as DeviceList, then the list of the kernel for dq alone.

    The first has `num_with_queries` tiles with queries, the other `dq_tiles` tiles, `dq_with_keys` of them with keys,
    and `dq_segs` segments, 0 where the kernel for dk and dv adds up dq. A query head's tiles are visited `num_visits`
    times, `most_visits` times for one tile of keys.
    `in_order`: sums are to have the same bits in every run.
    """

    data: Tensor
    num_tiles: int
    num_with_queries: int
    num_segs: int
    num_visits: int
    most_visits: int
    dq_tiles: int
    dq_with_keys: int
    dq_segs: int
    in_order: bool


def work_of(
    q_QNH: Tensor, v_KGH: Tensor, mask: AttentionMask, options: AttendOptions
) -> DeviceList:
    """Returns the work of the forward kernel that such a call takes."""
    dims = (q_QNH.shape[-1], v_KGH.shape[-1])
    variant = find_variant("forward", q_QNH.dtype, *dims, _feature(options))
    return forward_list(mask, *tile_shape(variant.name), q_QNH.device)


def gradient_work_of(
    q_QNH: Tensor, v_KGH: Tensor, mask: AttentionMask, options: AttendOptions
) -> BackwardList:
    """Returns the work of the kernels that make the gradients of such a call."""
    dims, in_order = (q_QNH.shape[-1], v_KGH.shape[-1]), options.deterministic
    kernels = find_gradient_kernels(q_QNH.dtype, *dims, _feature(options), in_order)
    dq_tile = None if kernels.dq is None else tile_shape(kernels.dq.name)
    tile = tile_shape(kernels.main.name)
    return backward_list(mask, tile, dq_tile, q_QNH.device, in_order=in_order)


def _feature(options: AttendOptions) -> Feature:
    return feature_of(options.softcap > 0, options.dropout is not None)


def forward_list(
    mask: AttentionMask, tile_rows: int, tile_keys: int, device: torch.device
) -> DeviceList:
    """Returns the forward work list of a mask on a device, ready for the current stream.

    Raises: ValueError for a mask whose slices leave its grid, or that is too large.
    """

    def prepare(mask: AttentionMask) -> Prepared:
        work = forward_work(mask, tile_rows, tile_keys)
        _check_inside(work, mask.num_queries, mask.num_keys)
        counts = len(work.tiles), len(work.segs), work.num_with_segments
        arrays = [_one([work.tiles, work.segs, work.order])]
        return arrays, lambda data: DeviceList(data[0], *counts)

    use = ("hopper forward", tile_rows, tile_keys)
    lists: DeviceList = for_mask(mask, use, device, prepare)
    return lists


def backward_list(
    mask: AttentionMask,
    tile: tuple[int, int],
    dq_tile: tuple[int, int] | None,
    device: torch.device,
    *,
    in_order: bool,
) -> BackwardList:
    """Returns the backward work list of a mask on a device, ready for the current stream.

    `tile` (query rows, keys) is that of the kernel for dk and dv, `dq_tile` that of the kernel for dq if there is one.

    Raises: ValueError as `forward_list`.
    """

    def prepare(mask: AttentionMask) -> Prepared:
        work = backward_work(mask, *tile)
        _check_inside(work, mask.num_keys, mask.num_queries)
        parts, dq_counts = [work.tiles, work.segs, work.order], (0, 0, 0)
        if dq_tile is not None:
            dq_work = forward_work(mask, *dq_tile)
            parts += [dq_work.tiles, dq_work.segs, dq_work.order]
            dq_counts = len(dq_work.tiles), dq_work.num_with_segments, len(dq_work.segs)
        visits = work.visits_of_tiles
        counts = len(work.tiles), work.num_with_segments, len(work.segs)
        most = int(visits.sum()), int(visits.max(initial=0))
        return [_one(parts)], lambda data: BackwardList(
            data[0], *counts, *most, *dq_counts, in_order
        )

    use = ("hopper backward", tile, dq_tile, in_order)
    lists: BackwardList = for_mask(mask, use, device, prepare)
    return lists


def _one(parts: list[Int32Array]) -> Int32Array:
    """Returns the parts one after another, each from a multiple of 16 bytes on, as the kernels count on."""
    flat = [part.ravel() for part in parts]
    return np.concatenate([np.pad(part, (0, -len(part) % 4)) for part in flat])


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
