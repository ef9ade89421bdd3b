"""From tensors to a launch, where they are.

What a call needs besides its tensors is looked up, and found after the first time: kernels by variant and
device, parameters but for addresses by shapes and options, tensor maps by address, shape and strides.
"""

import contextlib
import ctypes
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import lru_cache

import torch
from torch import Tensor

from megatron_cp.attn.hopper.checks import check_layout, find_variant, readable
from megatron_cp.attn.hopper.device_lists import DeviceList
from megatron_cp.attn.hopper.gpu import load_kernel
from megatron_cp.attn.hopper.machine import Kernel, KernelLoader, MapEncoder, Memory
from megatron_cp.attn.hopper.scores import Scores
from megatron_cp.attn.merge import apply_sink
from megatron_cp.kernels.driver import BFLOAT16, FLOAT16, FLOAT32
from megatron_cp.kernels.params import FwdParams, TensorMap

# Q query rows, K key rows, N query heads, G kv heads, H head dim, Hv value head dim

PANEL_BYTES = 128  # of one row of a box: 64 columns of a 16-bit type, 32 of float
# What is to stay in the second-level cache while it is read again and again.
SECTION_BYTES = 32 << 20
_is_head_by_head: ContextVar[bool] = ContextVar("megatron_cp_head_by_head", default=False)
MAX_TENSOR_MAPS = 4096
BLOCKS_PER_SM = 8  # of kernels that only stream rows
DTYPE_CODES = {torch.bfloat16: BFLOAT16, torch.float16: FLOAT16, torch.float32: FLOAT32}
_loaders: dict[str, KernelLoader] = {"cuda": load_kernel}


def run_on(device_type: str, load: KernelLoader) -> None:
    """Lets tensors of such a device have the kernels that `load` returns."""
    _loaders[device_type] = load


def kernel_for(x: Tensor, name: str) -> Kernel:
    """Returns a variant where `x` is."""
    device = x.device
    return _loaders[device.type](name, device.index or 0)


def num_blocks(kernel: Kernel, num_items: int, sm_share: float) -> int:
    """Returns how many CTAs take the items: one per multiprocessor, but for the share left to transfers.

    A persistent CTA leaves no room on its multiprocessor, so what is to run beside it needs one of its own.
    """
    return min(num_items, max(1, kernel.num_sms - math.ceil(sm_share * kernel.num_sms)))


def launch_forward(
    tensors: tuple[Tensor, Tensor, Tensor],
    lists: DeviceList,
    sink_N: Tensor | None,
    scores: Scores,
    results: tuple[Tensor, Tensor],
    *,
    earlier_QNH: Tensor | None = None,
    max_logits_N: Tensor | None = None,
    sm_share: float = 0.0,
) -> None:
    """Fills `results = (out [Q, N, Hv], lse [Q, N])` from (q, k, v) of any strides, on the current stream.

    With `earlier`, float32 with the strides of `out` or `out` itself, results are merged onto it and onto what `lse`
    holds, 0 and -inf in rows without keys; without it, `max_logits` (float32, contiguous) is raised to the largest
    logit of each head. `sm_share` of the multiprocessors stays free for transfers.
    """
    out_QNH, lse_QN = results
    if not lists.num_segs:
        fill_without_keys(out_QNH, lse_QN, sink_N, earlier_QNH)
        return
    q_QNH, _, v_KGH = tensors
    dims = (q_QNH.shape[2], v_KGH.shape[2])
    variant = find_variant("forward", q_QNH.dtype, *dims, scores.feature)
    if earlier_QNH is out_QNH:  # results of its own making are in order
        check_layout("out", out_QNH)
    kernel = kernel_for(q_QNH, variant.name)
    params, tensors = forward_params(kernel, tensors, lists, sink_N, scores, results, earlier_QNH)
    params.max_logits = max_logits_address(max_logits_N, earlier_QNH)
    blocks = num_blocks(kernel, params.num_tiles * q_QNH.shape[1], sm_share)

    def memory() -> Memory:
        return _forward_memory(tensors, lists, scores, sink_N, results, earlier_QNH, max_logits_N)

    kernel.launch(blocks, params, memory)


def _forward_memory(
    tensors: tuple[Tensor, Tensor, Tensor],
    lists: DeviceList,
    scores: Scores,
    sink_N: Tensor | None,
    results: tuple[Tensor, Tensor],
    earlier_QNH: Tensor | None,
    max_logits_N: Tensor | None,
) -> Memory:
    (q_QNH, k_KGH, v_KGH), (out_QNH, lse_QN) = tensors, results
    read = {"q": q_QNH, "k": k_KGH, "v": v_KGH, "work list": lists.data, "sink": sink_N}
    out, lse = {"out": out_QNH}, {"lse": lse_QN}
    filled = {} if earlier_QNH is out_QNH else out
    if earlier_QNH is None:
        return Memory.of(read | scores.touched(), filled | lse, {"max_logits": max_logits_N})
    held = {} if earlier_QNH is out_QNH else {"earlier": earlier_QNH}
    return Memory.of(read | held | scores.touched(), filled, out | lse)


def empty_results(q_QNH: Tensor, v_KGH: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns room for `(out [Q, N, Hv] in dtype, lse [Q, N] float32)`."""
    num_rows, num_heads, _ = q_QNH.shape
    shape = (num_rows, num_heads, v_KGH.shape[-1])
    # Without a dtype new_empty is twice as fast.
    out = q_QNH.new_empty(shape) if dtype == q_QNH.dtype else q_QNH.new_empty(shape, dtype=dtype)
    return out, q_QNH.new_empty((num_rows, num_heads), dtype=torch.float32)


def launch_rows(
    name: str,
    x: Tensor,
    num_items: int,
    params: ctypes.Structure,
    memory: Callable[[], Memory] | None = None,
) -> None:
    """Launches a kernel that gives a warp to every row and head, where `x` is."""
    if not num_items:
        return
    kernel = kernel_for(x, name)
    warps = kernel.num_threads // 32
    blocks = min(-(-num_items // warps), BLOCKS_PER_SM * kernel.num_sms)
    kernel.launch(blocks, params, memory)


def forward_params(
    kernel: Kernel,
    tensors: tuple[Tensor, Tensor, Tensor],
    lists: DeviceList,
    sink_N: Tensor | None,
    scores: Scores,
    results: tuple[Tensor, Tensor],
    earlier_QNH: Tensor | None,
) -> tuple[FwdParams, tuple[Tensor, Tensor, Tensor]]:
    """Returns the kernel's parameters without counters and largest logits, and the tensors as it reads them.

    Where `earlier` is `out` itself, tiles without keys are left out.
    """
    (q_QNH, k_KGH, v_KGH), (out_QNH, lse_QN) = tensors, results
    in_place = earlier_QNH is out_QNH
    assert sink_N is None or not in_place, "a sink joins every row once"
    assert earlier_QNH is None or (
        earlier_QNH.dtype == torch.float32 and earlier_QNH.stride() == out_QNH.stride()
    )
    params = FwdParams.from_buffer_copy(
        _fixed_fields(
            *(q_QNH.shape, v_KGH.shape, out_QNH.stride(), lse_QN.stride(), out_QNH.dtype),
            lists.num_with_keys if in_place else lists.num_tiles,
            *(scores.softmax_scale, scores.softcap, section_bytes()),
        )
    )
    q_QNH, params.q_map = mapped(q_QNH, kernel.tile_rows, kernel.driver)
    k_KGH, params.k_map = mapped(k_KGH, kernel.tile_keys, kernel.driver)
    v_KGH, params.v_map = mapped(v_KGH, kernel.tile_keys, kernel.driver)
    params.tiles = lists.data.data_ptr()
    params.segments = params.tiles + 16 * lists.num_tiles
    params.order = params.segments + 32 * lists.num_segs
    params.out, params.lse = out_QNH.data_ptr(), lse_QN.data_ptr()
    params.sink = None if sink_N is None else sink_N.data_ptr()
    params.earlier = None if earlier_QNH is None else earlier_QNH.data_ptr()
    if scores.words is not None:
        params.dropout = scores.dropout()
    return params, (q_QNH, k_KGH, v_KGH)


@lru_cache(maxsize=1024)
def _fixed_fields(  # noqa: PLR0913  what it depends on
    q_shape: torch.Size,
    v_shape: torch.Size,
    out_strides: tuple[int, ...],
    lse_strides: tuple[int, ...],
    out_dtype: torch.dtype,
    num_tiles: int,
    softmax_scale: float,
    softcap: float,
    num_bytes: int,
) -> FwdParams:
    """Returns the parameters without addresses and dropout: those of all calls alike. To be copied."""
    (_, num_heads, head_dim), (num_keys, num_kv_heads, value_dim) = q_shape, v_shape
    scores, columns = Scores(softmax_scale, softcap), head_dim + value_dim
    score_scale, cap, cap_scale = scores.scales()
    return FwdParams(
        out_row_stride=out_strides[0],
        out_head_stride=out_strides[1],
        lse_row_stride=lse_strides[0],
        lse_head_stride=lse_strides[1],
        num_tiles=num_tiles,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        heads_per_section=heads_per_section(num_heads, num_kv_heads, num_keys, columns, num_bytes),
        num_keys=num_keys,
        score_scale=score_scale,
        cap=cap,
        cap_scale=cap_scale,
        out_is_float=out_dtype == torch.float32,
        score_per_lse=scores.score_per_lse(),
    )


def max_logits_address(max_logits_N: Tensor | None, earlier_QNH: Tensor | None) -> int | None:
    """Returns where the kernel raises the largest logits; rows that start from an earlier lse would hide them."""
    assert max_logits_N is None or (
        earlier_QNH is None and max_logits_N.dtype == torch.float32 and max_logits_N.is_contiguous()
    )
    return None if max_logits_N is None else max_logits_N.data_ptr()


def fill_without_keys(
    out_QNH: Tensor, lse_QN: Tensor, sink_N: Tensor | None, earlier_QNH: Tensor | None
) -> None:
    """Writes what rows hold to which no key comes; there may be none to point a tensor map at."""
    held = earlier_QNH
    if held is None:
        held = out_QNH.zero_()
        lse_QN.fill_(-torch.inf)
    if sink_N is not None:
        held, lse = apply_sink(held, lse_QN, sink_N)
        lse_QN.copy_(lse)
    if held is not out_QNH:
        out_QNH.copy_(held)


def heads_per_section(
    num_heads: int, num_kv_heads: int, num_keys: int, columns: int, num_bytes: int
) -> int:
    """Returns how many query heads run side by side: those whose keys and values fit `num_bytes` of the cache."""
    fitting = num_bytes // max(1, num_keys * columns * 2)
    return min(num_heads, max(1, fitting) * (num_heads // num_kv_heads))


def section_bytes() -> int:
    """Returns what the heads that run side by side may read again and again."""
    return 0 if _is_head_by_head.get() else SECTION_BYTES


@contextlib.contextmanager
def head_by_head() -> Iterator[None]:
    """Runs heads one after another inside, as where their keys are too many for the cache: for small tests."""
    token = _is_head_by_head.set(True)
    try:
        yield
    finally:
        _is_head_by_head.reset(token)


def mapped(x: Tensor, box_rows: int, on: MapEncoder) -> tuple[Tensor, TensorMap]:
    """Returns `x` `[rows, heads, columns]`, copied if the copy engine cannot read it where it lies, and its map.

    Boxes are 128 bytes of `box_rows` rows.
    """
    found = find_map((x.data_ptr(), x.shape, x.stride(), x.dtype, box_rows))
    if found is None:
        x = readable(x)
        found = tensor_map("x", x, box_rows, on)
    return x, found


def tensor_map(name: str, x: Tensor, box_rows: int, on: MapEncoder) -> TensorMap:
    """Returns the map of `x`, as `mapped`. Raises ValueError for a layout that the copy engine cannot read."""
    strides = x.stride()
    key = (x.data_ptr(), x.shape, strides, x.dtype, box_rows)
    cached = find_map(key)
    if cached is None:
        check_layout(name, x)
        rows, heads, columns = x.shape
        # A dimension of size 1 may have any stride in torch, not in a tensor map.
        head_stride = strides[1] if heads > 1 else columns
        row_stride = strides[0] if rows > 1 else heads * head_stride
        size = x.element_size()
        on.ensure_context(x.device.index or 0)
        encoded = on.encode_tensor_map(
            DTYPE_CODES[x.dtype],
            x.data_ptr(),
            (columns, heads, rows),
            (size * head_stride, size * row_stride),
            (PANEL_BYTES // size, 1, box_rows),
        )
        cached = remember_map(key, encoded)
    return cached


def find_map(key: tuple[object, ...]) -> TensorMap | None:
    """Returns the map that was remembered under this key."""
    return _tensor_maps.get(key)


def remember_map(key: tuple[object, ...], encoded: bytes) -> TensorMap:
    """Returns an encoded map, found from now on under its key."""
    if len(_tensor_maps) >= MAX_TENSOR_MAPS:
        _tensor_maps.clear()  # addresses that never come back
    made = _tensor_maps[key] = TensorMap.from_buffer_copy(encoded)
    return made


_tensor_maps: dict[tuple[object, ...], TensorMap] = {}
