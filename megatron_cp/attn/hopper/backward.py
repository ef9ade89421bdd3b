"""The launches of the backward pass.

    out, dout, lse, dlse -> preprocess -> delta, lse in base 2     [4, N, rows]: what each row's scores need

    head dims up to 128:
    q, k, v, dout, delta, lse -> main -> dk, dv; dq as a float sum that key tiles add to, in any order
    dq sum -> postprocess -> dq                                    scaled, in the type asked for

    head dims above, and `deterministic`:
    q, k, v, dout, delta, lse -> main -> dk, dv
    q, k, v, dout, delta, lse -> dq                                from query tiles, added to by no one else

Key tiles own rows of dk and dv: no atomics there. Where the query heads of a group are worked on side by side instead
of one after another (`heads_per_item`), they add to dk and dv too.
"""

# Q query rows, K key rows, N query heads, G kv heads, H head dim, Hv value head dim, C copies, P padded rows

from functools import lru_cache

import torch
from torch import Tensor

from megatron_cp.attn.hopper.checks import GradientKernels, find_gradient_kernels, find_variant
from megatron_cp.attn.hopper.device_lists import BackwardList
from megatron_cp.attn.hopper.launch import (
    SECTION_BYTES,
    TiledKernel,
    counters,
    device_guard,
    heads_per_section,
    launch_rows,
    load_kernel,
    raw_stream,
    score_scales,
    tensor_map,
)
from megatron_cp.attn.hopper.row_stats import RowStats, stats_map
from megatron_cp.attn.hopper.worklist import TILE_COST
from megatron_cp.kernels.params import (
    BwdParams,
    BwdPostprocessParams,
    DqParams,
    TensorMap,
)

# As TILE_COST, of an item that adds to float sums: twice the bytes are written, and the sums are cleared and rounded.
ADDING_TILE_COST = 2 * TILE_COST
# What whole groups cost where their rows do not stay in the cache: CTAs of different lengths drift apart until they
# are at different heads. 562 TFLOP/s against 613 with one query head per kv head, causal 32K, head dim 128; 283
# against 423 with 256 (H100, 2026-11-22).
DRIFT = 1.09


def empty_gradient(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns memory for the gradient of `x`, contiguous, not yet written."""
    return x.new_empty(x.shape, dtype=dtype)


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
    given = (dout_QNH, tensors, stats, lists, scales)
    if lists.dq_tiles and lists.num_segs:
        dq = empty_gradient(q_QNH, dtype)
        dk, dv = _launch_main(None, *given, dtype=dtype, sm_share=sm_share)
        _launch_dq(dq, *given, adds=False, sm_share=sm_share)
        return dq, dk, dv
    dq_sum = q_QNH.new_zeros(q_QNH.shape, dtype=torch.float32)
    dk, dv = _launch_main(dq_sum, *given, dtype=dtype, sm_share=sm_share)
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
    given = (dout_QNH, tensors, stats, lists, scales)
    if not lists.dq_tiles:
        return _launch_main(dq_sum, *given, dtype=dtype, sm_share=sm_share)
    gradients = _launch_main(None, *given, dtype=dtype, sm_share=sm_share)
    _launch_dq(dq_sum, *given, adds=True, sm_share=sm_share)
    return gradients


def _launch_main(
    dq_sum: Tensor | None,
    dout_QNH: Tensor,
    tensors: tuple[Tensor, Tensor, Tensor],
    stats: RowStats,
    lists: BackwardList,
    scales: tuple[float, float],
    *,
    dtype: torch.dtype,
    sm_share: float,
) -> tuple[Tensor, Tensor]:
    """Returns `(dk, dv)` in `dtype`; adds to `dq_sum` if it is given."""
    q_QNH, k_KGH, v_KGH = tensors
    if not lists.num_segs:
        return k_KGH.new_zeros(k_KGH.shape, dtype=dtype), v_KGH.new_zeros(v_KGH.shape, dtype=dtype)
    device = q_QNH.device.index or 0
    variant = _kernels(tensors, scales, lists).main
    with device_guard(device):
        kernel, stream = load_kernel(variant.name, device), raw_stream(device)
        num_sms = kernel.num_blocks(kernel.num_sms, sm_share)
        heads = heads_per_item(q_QNH, k_KGH, v_KGH, lists, num_sms)
        dk, dv = room_for_gradients((k_KGH, v_KGH), dtype, is_added=heads < group_of(q_QNH, k_KGH))
        params = main_params(
            kernel, (q_QNH, k_KGH, v_KGH, dout_QNH), stats, lists, scales, (dq_sum, dk, dv), heads
        )
        pair = counters(device, stream)
        params.counters = pair.address
        num_items = lists.num_tiles * (q_QNH.shape[1] // heads)
        kernel.launch(kernel.num_blocks(num_items, sm_share), stream, params, device)
    return dk.to(dtype), dv.to(dtype)


def _launch_dq(
    dq: Tensor,
    dout_QNH: Tensor,
    tensors: tuple[Tensor, Tensor, Tensor],
    stats: RowStats,
    lists: BackwardList,
    scales: tuple[float, float],
    *,
    adds: bool,
    sm_share: float,
) -> None:
    """Fills `dq` from query tiles, or adds to it, then without softmax_scale."""
    if not lists.dq_segs:
        return
    q_QNH = tensors[0]
    device = q_QNH.device.index or 0
    variant = _kernels(tensors, scales, lists).dq
    assert variant is not None, "the list has query tiles"
    with device_guard(device):
        kernel, stream = load_kernel(variant.name, device), raw_stream(device)
        params = dq_params(kernel, (*tensors, dout_QNH), stats, lists, scales, dq)
        pair = counters(device, stream)
        params.counters, params.accumulate = pair.address, adds
        params.factor = 1.0 if adds else scales[0]
        num_items = lists.dq_tiles * q_QNH.shape[1]
        kernel.launch(kernel.num_blocks(num_items, sm_share), stream, params, device)


def _kernels(
    tensors: tuple[Tensor, Tensor, Tensor], scales: tuple[float, float], lists: BackwardList
) -> GradientKernels:
    q_QNH, _, v_KGH = tensors
    dims = (q_QNH.shape[2], v_KGH.shape[2])
    return find_gradient_kernels(q_QNH.dtype, *dims, scales[1] > 0, lists.dq_tiles > 0)


def group_of(q_QNH: Tensor, k_KGH: Tensor) -> int:
    """Returns how many query heads share a kv head."""
    return q_QNH.shape[1] // k_KGH.shape[1]


def heads_per_item(
    q_QNH: Tensor, k_KGH: Tensor, v_KGH: Tensor, lists: BackwardList, num_sms: int
) -> int:
    """Returns how many query heads a work item visits: the whole group, or one, whichever ends sooner.

    In order always the group: which item adds to dk first is chance.
    """
    group = group_of(q_QNH, k_KGH)
    if group == 1 or lists.in_order:
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
    gradients: tuple[Tensor | None, Tensor, Tensor],
    heads: int,
) -> BwdParams:
    """Returns the main kernel's parameters without its counters; a work item visits `heads` query heads.

    `gradients` are (sum of dq, dk, dv), without the sum for a kernel of dk and dv alone.
    """
    (q, k, v, dout), (dq_sum, dk, dv) = tensors, gradients
    num_queries, num_heads, _ = q.shape
    tiles = lists.data.data_ptr()
    segs = tiles + 16 * lists.num_tiles
    order = segs + 32 * lists.num_segs
    on, rows, keys = kernel.driver, kernel.tile_rows, kernel.tile_keys
    params = BwdParams(
        tensor_map("q", q, rows, on),
        tensor_map("dout", dout, rows, on),
        tensor_map("k", k, keys, on),
        tensor_map("v", v, keys, on),
        stats_map(stats.lse_2, num_queries, kernel),
        stats_map(stats.delta, num_queries, kernel),
        TensorMap() if dq_sum is None else tensor_map("dq", dq_sum, rows, on),
        tiles,
        segs,
        order,
    )
    params.dk, params.dv = dk.data_ptr(), dv.data_ptr()
    params.dk_row_stride, params.dk_head_stride = dk.stride()[:2]
    params.dv_row_stride, params.dv_head_stride = dv.stride()[:2]
    params.num_tiles = lists.num_tiles
    params.num_heads, params.num_kv_heads = num_heads, k.shape[1]
    num_items = num_heads // heads
    params.heads_per_item, params.items_per_group = heads, group_of(q, k) // heads
    params.heads_per_section = _items_per_section(heads * _row_bytes(q, v), num_items)
    params.num_queries = num_queries
    params.score_scale, params.cap, params.cap_scale = score_scales(*scales)
    params.softmax_scale = scales[0]
    params.grads_are_float = dk.dtype == torch.float32
    return params


def dq_params(
    kernel: TiledKernel,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    stats: RowStats,
    lists: BackwardList,
    scales: tuple[float, float],
    dq: Tensor,
) -> DqParams:
    """Returns the parameters of the kernel for dq alone, without counters, factor and whether it adds."""
    q, k, v, dout = tensors
    (num_keys, num_kv_heads, head_dim), num_heads = k.shape, q.shape[1]
    tiles = lists.data.data_ptr() + main_bytes(lists)
    segs = tiles + 16 * lists.dq_tiles
    on, rows, keys = kernel.driver, kernel.tile_rows, kernel.tile_keys
    return DqParams(
        tensor_map("q", q, rows, on),
        tensor_map("dout", dout, rows, on),
        tensor_map("k", k, keys, on),
        tensor_map("v", v, keys, on),
        tiles,
        segs,
        segs + 32 * lists.dq_segs,
        None,
        stats.lse_2.data_ptr(),
        stats.delta.data_ptr(),
        dq.data_ptr(),
        *dq.stride()[:2],
        lists.dq_tiles,
        num_heads,
        num_kv_heads,
        heads_per_section(num_heads, num_kv_heads, num_keys, head_dim + v.shape[2]),
        num_keys,
        stats.delta.shape[2],
        *score_scales(*scales),
        1.0,
        dq.dtype == torch.float32,
        False,
    )


def main_bytes(lists: BackwardList) -> int:
    """Returns where the list of the kernel for dq begins: the order before it ends at a multiple of 16 bytes."""
    return 16 * lists.num_tiles + 32 * lists.num_segs + -(-lists.num_tiles // 4) * 16


def _items_per_section(item_bytes: int, num_items: int) -> int:
    """Returns the items of how many heads run side by side: those whose queries fit the cache."""
    return min(num_items, max(1, SECTION_BYTES // max(1, item_bytes)))


def _row_bytes(q: Tensor, v: Tensor) -> int:
    """Returns the bytes of one query head's rows of q and dout."""
    return q.shape[0] * (q.shape[2] + v.shape[2]) * 2


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
