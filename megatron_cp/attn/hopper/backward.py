"""The launches of the backward pass.

    out, dout, lse, dlse -> preprocess -> delta, lse in base 2     [4, N, rows]: what each row's scores need
    q, k, v, dout, delta, lse -> main -> dk, dv; dq as a float sum that key tiles add to
    dq sum -> postprocess -> dq                                    scaled, in the type asked for

Key tiles own rows of dk and dv: no atomics there. They add to dq in any order, or in turns: then the same bits
come out in every run (`deterministic`). Where the query heads of a group are worked on side by side instead of one
after another (`heads_per_item`), they add to dk and dv too.
"""

# Q query rows, K key rows, N query heads, G kv heads, H head dim, Hv value head dim, C copies, P padded rows

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_cp.attn.hopper.checks import find_variant, is_readable
from megatron_cp.attn.hopper.device_lists import BackwardList
from megatron_cp.attn.hopper.launch import (
    LOG2_E,
    SECTION_BYTES,
    TiledKernel,
    counters,
    device_guard,
    find_map,
    launch_rows,
    load_kernel,
    raw_stream,
    remember_map,
    score_scales,
    tensor_map,
)
from megatron_cp.attn.hopper.worklist import TILE_COST
from megatron_cp.kernels.driver import FLOAT32
from megatron_cp.kernels.params import (
    BwdParams,
    BwdPostprocessParams,
    BwdPreprocessParams,
    TensorMap,
)

# The copy engine wants 16 bytes of strides, and of where a box starts: rows per head are a multiple of 4, and
# statistics are kept once for each row modulo 4 that a tile may start at.
ROW_PADDING = STAT_COPIES = 4
# As TILE_COST, of an item that adds to float sums: twice the bytes are written, and the sums are cleared and rounded.
ADDING_TILE_COST = 2 * TILE_COST
# What whole groups cost where their rows do not stay in the cache: CTAs of different lengths drift apart until they
# are at different heads. 562 TFLOP/s against 613 with one query head per kv head, causal 32K, head dim 128; 283
# against 423 with 256 (H100, 2026-11-22).
DRIFT = 1.09


class RowStats(NamedTuple):
    """What the main kernel reads per row, float32 `[C, N, P]`: copy c holds row r at r - c, zeros behind row Q."""

    lse_2: Tensor  # lse in base 2; +inf for rows without keys
    delta: Tensor


def readable(x: Tensor) -> Tensor:
    """Returns `x`, copied if the copy engine cannot read it where it lies."""
    return x if is_readable(x) else x.contiguous()


def empty_gradient(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns memory for the gradient of `x`, contiguous, not yet written."""
    return x.new_empty(x.shape, dtype=dtype)


def preprocess(
    out_QNH: Tensor, dout_QNH: Tensor, lse_QN: Tensor, dlse_QN: Tensor | None
) -> RowStats:
    """Returns the row statistics of a whole result; `delta = rowsum(dout * out) - dlse`.

    `out` is float32 or has the dtype of `dout`; both are read 16 bytes at a time (`readable`).
    """
    out_QNH = readable(out_QNH)
    stats, num_items = empty_stats(lse_QN), lse_QN.numel()
    params, _kept = preprocess_params(out_QNH, dout_QNH, lse_QN, dlse_QN, stats)
    name = find_variant("backward_preprocess", dout_QNH.dtype, None, dout_QNH.shape[2], None).name
    launch_rows(name, dout_QNH, num_items, params)
    return stats


def preprocess_params(
    out_QNH: Tensor, dout_QNH: Tensor, lse_QN: Tensor, dlse_QN: Tensor | None, stats: RowStats
) -> tuple[BwdPreprocessParams, Tensor | None]:
    """Returns the parameters, and `dlse` as they read it: to be kept until the launch."""
    if dlse_QN is not None and dlse_QN.stride() != lse_QN.stride():
        dlse_QN = torch.empty_like(lse_QN).copy_(dlse_QN)
    params = BwdPreprocessParams(
        out_QNH.data_ptr(),
        dout_QNH.data_ptr(),
        lse_QN.data_ptr(),
        None if dlse_QN is None else dlse_QN.data_ptr(),
        stats.lse_2.data_ptr(),
        stats.delta.data_ptr(),
        *out_QNH.stride()[:2],
        *dout_QNH.stride()[:2],
        *lse_QN.stride(),
        dout_QNH.shape[0],
        stats.delta.shape[2],
        dout_QNH.shape[1],
        out_QNH.dtype == torch.float32,
    )
    return params, dlse_QN


def stats_of(lse_QN: Tensor, delta_QN: Tensor) -> RowStats:
    """Returns the row statistics from a `delta` that the caller has."""
    num_rows, num_heads = lse_QN.shape
    empty, padded = lse_QN == -torch.inf, padded_rows(num_rows)
    rows = lse_QN.new_zeros((2, num_heads, padded + STAT_COPIES), dtype=torch.float32)
    rows[0, :, :num_rows] = (lse_QN * LOG2_E).masked_fill_(empty, torch.inf).t()
    rows[1, :, :num_rows] = delta_QN.masked_fill(empty, 0.0).t()
    # Copy c begins c rows later: one pass over the rows makes all of them.
    head = padded + STAT_COPIES
    shifted = rows.as_strided((2, STAT_COPIES, num_heads, padded), (num_heads * head, 1, head, 1))
    both = shifted.contiguous()
    return RowStats(both[0], both[1])


def launch_backward(
    dout_QNH: Tensor,
    tensors: tuple[Tensor, Tensor, Tensor],
    stats: RowStats,
    lists: BackwardList,
    scales: tuple[float, float],
    *,
    float_grads: bool,
    sm_share: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns `(dq, dk, dv)` of (q, k, v), in float32 or their dtype, from the current stream of their device.

    `scales` are softmax_scale and softcap; `sm_share` of the multiprocessors stays free for transfers.

    Raises: ValueError for layouts that the copy engine cannot read.
    """
    q_QNH, _, _ = tensors
    dtype = torch.float32 if float_grads else q_QNH.dtype
    dq_sum = q_QNH.new_zeros(q_QNH.shape, dtype=torch.float32)
    dk, dv = add_gradients_(
        dq_sum, dout_QNH, tensors, stats, lists, scales, dtype=dtype, sm_share=sm_share
    )
    dq = dq_sum if float_grads else empty_gradient(dq_sum, dtype)
    if lists.num_segs:
        _postprocess(dq_sum, dq, q_QNH.dtype, scales[0])
    elif not float_grads:
        dq.zero_()
    return dq, dk, dv


def add_gradients_(
    dq_sum: Tensor,
    dout_QNH: Tensor,
    tensors: tuple[Tensor, Tensor, Tensor],
    stats: RowStats,
    lists: BackwardList,
    scales: tuple[float, float],
    *,
    dtype: torch.dtype,
    sm_share: float,
) -> tuple[Tensor, Tensor]:
    """Adds to `dq_sum` (float32, contiguous, without softmax_scale) and returns `(dk, dv)` in `dtype`."""
    q_QNH, k_KGH, v_KGH = tensors
    if not lists.num_segs:
        return k_KGH.new_zeros(k_KGH.shape, dtype=dtype), v_KGH.new_zeros(v_KGH.shape, dtype=dtype)
    device = q_QNH.device.index or 0
    has_softcap = scales[1] > 0
    dims = (q_QNH.shape[2], v_KGH.shape[2])
    variant = find_variant("backward", q_QNH.dtype, *dims, has_softcap)
    with device_guard(device):
        kernel, stream = load_kernel(variant.name, device), raw_stream(device)
        num_sms = kernel.num_blocks(kernel.num_sms, sm_share)
        heads = heads_per_item(q_QNH, k_KGH, v_KGH, lists, num_sms)
        dk, dv = room_for_gradients((k_KGH, v_KGH), dtype, is_added=heads < group_of(q_QNH, k_KGH))
        turn_counters = None
        if lists.num_runs:
            size = (q_QNH.shape[1], lists.num_slots)
            turn_counters = q_QNH.new_zeros(size, dtype=torch.int32)
        params = main_params(
            kernel, (q_QNH, k_KGH, v_KGH, dout_QNH), stats, lists, scales, (dq_sum, dk, dv), heads
        )
        pair = counters(device, stream)
        params.counters = pair.address
        params.turn_counters = None if turn_counters is None else turn_counters.data_ptr()
        num_items = lists.num_tiles * (q_QNH.shape[1] // heads)
        kernel.launch(kernel.num_blocks(num_items, sm_share), stream, params, device)
    return dk.to(dtype), dv.to(dtype)


def group_of(q_QNH: Tensor, k_KGH: Tensor) -> int:
    """Returns how many query heads share a kv head."""
    return q_QNH.shape[1] // k_KGH.shape[1]


def heads_per_item(
    q_QNH: Tensor, k_KGH: Tensor, v_KGH: Tensor, lists: BackwardList, num_sms: int
) -> int:
    """Returns how many query heads a work item visits: the whole group, or one, whichever ends sooner.

    In turns always the group: which item adds to dk first is chance.
    """
    group = group_of(q_QNH, k_KGH)
    if group == 1 or lists.num_runs:
        return group
    visits = (lists.num_tiles, lists.num_visits, lists.most_visits)
    return _faster(group, q_QNH.shape[1], *visits, _row_bytes(q_QNH, v_KGH), num_sms)


@lru_cache(maxsize=4096)
def _faster(
    group: int,
    num_heads: int,
    num_tiles: int,
    num_visits: int,
    most_visits: int,
    row_bytes: int,
    num_sms: int,
) -> int:
    """Returns 1 or `group`, whichever ends sooner. From plain numbers, so that it is found again in a microsecond."""

    def end(heads: int, tile_cost: float) -> float:
        """Returns when the last section's longest item ends, which begins with that section, or all work, in visits."""
        num_items = num_heads // heads
        every = num_heads * num_visits + num_tiles * num_items * tile_cost
        num_sections = -(-num_items // _items_per_section(heads * row_bytes, num_items))
        before_last = every / num_sms * (1 - 1 / num_sections)
        return max(every / num_sms, before_last + heads * most_visits + tile_cost)

    drift = DRIFT if group * row_bytes > SECTION_BYTES else 1.0
    return 1 if end(1, ADDING_TILE_COST) < drift * end(group, TILE_COST) else group


def room_for_gradients(
    tensors: tuple[Tensor, Tensor], dtype: torch.dtype, *, is_added: bool
) -> list[Tensor]:
    """Returns memory for the gradients of (k, v): float zeros where work items add to them."""
    if is_added:
        return [x.new_zeros(x.shape, dtype=torch.float32) for x in tensors]
    return [empty_gradient(x, dtype) for x in tensors]


def main_params(
    kernel: TiledKernel,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    stats: RowStats,
    lists: BackwardList,
    scales: tuple[float, float],
    gradients: tuple[Tensor, Tensor, Tensor],
    heads: int,
) -> BwdParams:
    """Returns the main kernel's parameters without its counters; a work item visits `heads` query heads."""
    (q, k, v, dout), (dq_sum, dk, dv) = tensors, gradients
    num_queries, num_heads, _ = q.shape
    tiles = lists.data.data_ptr()
    segs = tiles + 16 * lists.num_tiles
    order = segs + 32 * lists.num_segs
    turn_segments = order + 4 * lists.num_tiles
    on, rows, keys = kernel.driver, kernel.tile_rows, kernel.tile_keys
    params = BwdParams(
        tensor_map("q", q, rows, on),
        tensor_map("dout", dout, rows, on),
        tensor_map("k", k, keys, on),
        tensor_map("v", v, keys, on),
        _stats_map(stats.lse_2, num_queries, kernel),
        _stats_map(stats.delta, num_queries, kernel),
        tensor_map("dq", dq_sum, rows, on),
        tiles,
        segs,
        order,
    )
    params.dk, params.dv = dk.data_ptr(), dv.data_ptr()
    if lists.num_runs:
        params.turn_segments = turn_segments
        params.turn_runs = turn_segments + 12 * lists.num_segs
    params.dk_row_stride, params.dk_head_stride = dk.stride()[:2]
    params.dv_row_stride, params.dv_head_stride = dv.stride()[:2]
    params.num_tiles, params.num_slots = lists.num_tiles, lists.num_slots
    params.num_heads, params.num_kv_heads = num_heads, k.shape[1]
    num_items = num_heads // heads
    params.heads_per_item, params.items_per_group = heads, group_of(q, k) // heads
    # In turns key tiles of one head wait for each other, and those of many heads side by side wait less.
    params.heads_per_section = (
        num_items if lists.num_runs else _items_per_section(heads * _row_bytes(q, v), num_items)
    )
    params.num_queries = num_queries
    params.score_scale, params.cap, params.cap_scale = score_scales(*scales)
    params.softmax_scale = scales[0]
    params.grads_are_float = dk.dtype == torch.float32
    return params


def _items_per_section(item_bytes: int, num_items: int) -> int:
    """Returns the items of how many heads run side by side: those whose queries fit the cache."""
    return min(num_items, max(1, SECTION_BYTES // max(1, item_bytes)))


def _row_bytes(q: Tensor, v: Tensor) -> int:
    """Returns the bytes of one query head's rows of q and dout."""
    return q.shape[0] * (q.shape[2] + v.shape[2]) * 2


def _stats_map(x_CNP: Tensor, num_rows: int, kernel: TiledKernel) -> TensorMap:
    """Returns the map of row statistics: plain boxes of as many rows as a tile has."""
    num_copies, num_heads, padded = x_CNP.shape
    key = ("row statistics", x_CNP.data_ptr(), num_rows, num_heads, kernel.tile_rows)
    cached = find_map(key)
    if cached is None:
        strides = (4 * padded, 4 * padded * num_heads)
        sizes, box = (num_rows, num_heads, num_copies), (kernel.tile_rows, 1, 1)
        encoded = kernel.driver.encode_tensor_map(
            FLOAT32, x_CNP.data_ptr(), sizes, strides, box, swizzled=False
        )
        cached = remember_map(key, encoded)
    return cached


def _postprocess(dq_sum: Tensor, dq: Tensor, dtype: torch.dtype, softmax_scale: float) -> None:
    name = find_variant("backward_postprocess", dtype, dq.shape[2], None, None).name
    num_items = dq.shape[0] * dq.shape[1]
    launch_rows(name, dq, num_items, postprocess_params(dq_sum, dq, softmax_scale))


def postprocess_params(dq_sum: Tensor, dq: Tensor, softmax_scale: float) -> BwdPostprocessParams:
    """Returns the parameters of the kernel that scales and converts dq."""
    return BwdPostprocessParams(
        dq_sum.data_ptr(),
        dq.data_ptr(),
        *dq_sum.stride()[:2],
        *dq.stride()[:2],
        dq.shape[0],
        dq.shape[1],
        softmax_scale,
        dq.dtype == torch.float32,
    )


def empty_stats(lse_QN: Tensor) -> RowStats:
    """Returns room for the statistics of as many rows as `lse` has."""
    num_rows, num_heads = lse_QN.shape
    shape = (2, STAT_COPIES, num_heads, padded_rows(num_rows))
    both = lse_QN.new_empty(shape, dtype=torch.float32)
    return RowStats(both[0], both[1])


def padded_rows(num_rows: int) -> int:
    """Returns the rows of a head's statistics: 16 bytes, which the copy engine wants of strides, divide them."""
    return -(-num_rows // ROW_PADDING) * ROW_PADDING
