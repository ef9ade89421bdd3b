"""The `hopper` backend: our sm_90a kernels, launched through the driver. Never run on a GPU yet.

    mask -> work list on the device (cached per mask) --+
    q, k, v -> three tensor maps (cached per address) --+-> one launch: every CTA takes query tiles until none is left

The host plans a mask once and afterwards only looks things up; it never waits for the device, and nothing is
proportional to queries x keys. The kernel is deterministic: every query row is computed by one CTA, in one
order. Rows of q, k and v that no slice holds may hold anything but are read; rows without keys give (0, -inf).

`attend` is a registered operator (`torch.ops.megatron_cp.attention_forward`) with a fake implementation, so
that compiled graphs may hold it; making the work list is plain Python and breaks the graph before it.
There is no backward pass yet: a call that needs gradients is refused, not computed by something else.
"""

# Q query rows, K key rows, N query heads, G kv heads, H head dim, Hv value head dim

import math
import threading
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from megatron_cp.attn.device_lists import DeviceList, forward_list
from megatron_cp.attn.hopper_checks import (
    NO_BACKWARD,
    check_layout,
    check_sink_gradient,
    find_variant,
    outside_compiled_graphs,
)
from megatron_cp.attn.options import AttendOptions
from megatron_cp.kernels import build
from megatron_cp.kernels.driver import BFLOAT16, FLOAT16, Driver, driver
from megatron_cp.kernels.params import FwdParams, TensorMap
from megatron_cp.mask import AttentionMask

LOG2_E = math.log2(math.e)
PANEL = 64  # columns of one box: 128 bytes of a 16-bit type
SECTION_BYTES = 32 << 20  # keys and values that are to stay in the second-level cache together
MAX_STREAMS = 256  # per device; each has a pair of work counters
COUNTER_BYTES = 128  # a cache line per pair
TINY_SCALE = 1e-30  # stands for softmax_scale = 0, with which masked scores would be -inf * 0


@dataclass(frozen=True, slots=True)
class _Kernel:
    """A loaded forward kernel and what its launch needs."""

    handle: int
    driver: Driver
    tile_rows: int
    tile_keys: int
    num_threads: int
    shared_bytes: int
    num_sms: int


def attend(
    q_QNH: Tensor,
    k_KGH: Tensor,
    v_KGH: Tensor,
    mask: AttentionMask,
    sink_N: Tensor | None,
    options: AttendOptions,
) -> tuple[Tensor, Tensor]:
    """Returns `(out [Q, N, Hv] in the dtype of q, lse [Q, N] float32)`, sink included."""
    check_sink_gradient(sink_N)
    lists = _work_list(q_QNH, v_KGH, mask, options.softcap)
    sink = None if sink_N is None else sink_N.detach().to(torch.float32).contiguous()
    scale, softcap = options.softmax_scale, options.softcap
    data, num_tiles, num_segs = lists
    call = _forward if _is_plain(q_QNH, k_KGH, v_KGH) else torch.ops.megatron_cp.attention_forward
    out, lse = call(q_QNH, k_KGH, v_KGH, data, num_tiles, num_segs, sink, scale, softcap, False)
    return out, lse


def _is_plain(q_QNH: Tensor, k_KGH: Tensor, v_KGH: Tensor) -> bool:
    """Returns whether nobody wants to see the operator: no compiler, no dispatch mode, no subclass.

    The dispatcher's way to a Python operator costs 8 us, more than the launch (EPYC core, torch 2.13).
    """
    return (
        not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and type(q_QNH) is type(k_KGH) is type(v_KGH) is Tensor
    )


def forward(
    q_QNH: Tensor, k_KGH: Tensor, v_KGH: Tensor, mask: AttentionMask, options: AttendOptions
) -> tuple[Tensor, Tensor]:
    """Returns `(out [Q, N, Hv], lse [Q, N])` in float32, (0, -inf) without keys."""
    data, num_tiles, num_segs = _work_list(q_QNH, v_KGH, mask, options.softcap)
    scale, softcap = options.softmax_scale, options.softcap
    return _forward(
        q_QNH, k_KGH, v_KGH, data, num_tiles, num_segs, None, scale, softcap, float_out=True
    )


def forward_onto_(
    out_QNH: Tensor,
    lse_QN: Tensor,
    q_QNH: Tensor,
    k_KGH: Tensor,
    v_KGH: Tensor,
    mask: AttentionMask,
    options: AttendOptions,
) -> None:
    """Merges this part's result into the partial `out` (float32 or the dtype of q) and `lse`, in place.

    Rows without keys in this part keep what they have.
    """
    lists = _work_list(q_QNH, v_KGH, mask, options.softcap)
    scales = (options.softmax_scale, options.softcap)
    _launch(q_QNH, k_KGH, v_KGH, lists, None, scales, out_QNH, lse_QN, accumulate=True)


def backward(
    dout_QNH: Tensor,
    q_QNH: Tensor,
    k_KGH: Tensor,
    v_KGH: Tensor,
    lse_QN: Tensor,
    delta_QN: Tensor,
    mask: AttentionMask,
    options: AttendOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """Raises NotImplementedError: the backward kernels are not built."""
    raise NotImplementedError(NO_BACKWARD)


# ---------------------------------------------------------------------- the operator


LIBRARY = torch.library.Library("megatron_cp", "DEF")
LIBRARY.define(
    "attention_forward(Tensor q, Tensor k, Tensor v, Tensor work, int num_tiles, int num_segs, Tensor? sink, "
    "float softmax_scale, float softcap, bool float_out) -> (Tensor, Tensor)"
)


def _forward(  # noqa: PLR0913  the operator's schema
    q_QNH: Tensor,
    k_KGH: Tensor,
    v_KGH: Tensor,
    work: Tensor,
    num_tiles: int,
    num_segs: int,
    sink_N: Tensor | None,
    softmax_scale: float,
    softcap: float,
    float_out: bool,
) -> tuple[Tensor, Tensor]:
    out, lse = _allocate(q_QNH, v_KGH, float_out)
    lists, scales = DeviceList(work, num_tiles, num_segs), (softmax_scale, softcap)
    _launch(q_QNH, k_KGH, v_KGH, lists, sink_N, scales, out, lse, accumulate=False)
    return out, lse


def _forward_fake(  # noqa: PLR0913  the operator's schema
    q_QNH: Tensor,
    k_KGH: Tensor,
    v_KGH: Tensor,
    work: Tensor,
    num_tiles: int,
    num_segs: int,
    sink_N: Tensor | None,
    softmax_scale: float,
    softcap: float,
    float_out: bool,
) -> tuple[Tensor, Tensor]:
    return _allocate(q_QNH, v_KGH, float_out)


def _refuse_backward(ctx: object, *gradients: Tensor) -> None:
    raise NotImplementedError(NO_BACKWARD)


LIBRARY.impl("attention_forward", _forward, "CUDA")
torch.library.register_fake("megatron_cp::attention_forward", _forward_fake, lib=LIBRARY)
torch.library.register_autograd("megatron_cp::attention_forward", _refuse_backward, lib=LIBRARY)


def _allocate(q_QNH: Tensor, v_KGH: Tensor, float_out: bool) -> tuple[Tensor, Tensor]:
    num_rows, num_heads, _ = q_QNH.shape
    shape = (num_rows, num_heads, v_KGH.shape[-1])
    out = q_QNH.new_empty(shape, dtype=torch.float32) if float_out else q_QNH.new_empty(shape)
    return out, q_QNH.new_empty((num_rows, num_heads), dtype=torch.float32)


# ---------------------------------------------------------------------- the launch


@outside_compiled_graphs
def _work_list(q_QNH: Tensor, v_KGH: Tensor, mask: AttentionMask, softcap: float) -> DeviceList:
    variant = find_variant(q_QNH.dtype, q_QNH.shape[-1], v_KGH.shape[-1], softcap > 0)
    device = q_QNH.device
    tile_rows, tile_keys = _tile(variant.name)
    return forward_list(mask, tile_rows, tile_keys, device, _raw_stream(device.index or 0))


def _launch(  # noqa: PLR0913  inputs, list, results
    q_QNH: Tensor,
    k_KGH: Tensor,
    v_KGH: Tensor,
    lists: DeviceList,
    sink_N: Tensor | None,
    scales: tuple[float, float],
    out_QNH: Tensor,
    lse_QN: Tensor,
    *,
    accumulate: bool,
) -> None:
    """Fills `out` and `lse` on the current stream of the device of `q`."""
    if not lists.num_segs:
        _fill_without_keys(out_QNH, lse_QN, sink_N, accumulate)
        return
    device = q_QNH.device.index or 0
    if _current_device() != device:
        with torch.cuda.device(device):
            _launch(
                q_QNH, k_KGH, v_KGH, lists, sink_N, scales, out_QNH, lse_QN, accumulate=accumulate
            )
        return
    _, num_heads, head_dim = q_QNH.shape
    num_keys, num_kv_heads, value_dim = v_KGH.shape
    variant = find_variant(q_QNH.dtype, head_dim, value_dim, scales[1] > 0)
    kernel = _kernel(variant.name, device)
    tiles = lists.data.data_ptr()
    segs = tiles + 16 * lists.num_tiles
    stream = _raw_stream(device)
    params = FwdParams(
        _tensor_map("q", q_QNH, kernel.tile_rows, kernel.driver),
        _tensor_map("k", k_KGH, kernel.tile_keys, kernel.driver),
        _tensor_map("v", v_KGH, kernel.tile_keys, kernel.driver),
        tiles,
        segs,
        segs + 32 * lists.num_segs,
        _counters(device, stream),
        out_QNH.data_ptr(),
        lse_QN.data_ptr(),
        None if sink_N is None else sink_N.data_ptr(),
        *out_QNH.stride()[:2],
        *lse_QN.stride(),
        lists.num_tiles,
        num_heads,
        num_kv_heads,
        _heads_per_section(num_heads, num_kv_heads, num_keys, head_dim + value_dim),
        num_keys,
        *_score_scales(*scales),
        out_QNH.dtype == torch.float32,
        accumulate,
    )
    num_blocks = min(kernel.num_sms, lists.num_tiles * num_heads)
    if not hasattr(_thread, "has_context"):
        kernel.driver.ensure_context(device)
        _thread.has_context = True
    kernel.driver.launch(
        kernel.handle, num_blocks, kernel.num_threads, kernel.shared_bytes, stream, params
    )


def _fill_without_keys(
    out_QNH: Tensor, lse_QN: Tensor, sink_N: Tensor | None, accumulate: bool
) -> None:
    """Writes what rows without keys hold; there may be no key to point a tensor map at."""
    if not accumulate:
        out_QNH.zero_()
        lse_QN.fill_(-torch.inf) if sink_N is None else lse_QN.copy_(sink_N.expand_as(lse_QN))


def _score_scales(softmax_scale: float, softcap: float) -> tuple[float, float, float]:
    """Returns `score_scale, cap, cap_scale` as params.h defines them."""
    scale = softmax_scale or TINY_SCALE
    if not softcap:
        return scale * LOG2_E, 0.0, 0.0
    return LOG2_E, softcap, 2 * LOG2_E * scale / softcap


def _heads_per_section(num_heads: int, num_kv_heads: int, num_keys: int, key_columns: int) -> int:
    """Returns how many query heads run side by side: those whose keys and values fit the cache."""
    fitting = SECTION_BYTES // max(1, num_keys * key_columns * 2)
    return min(num_heads, max(1, fitting) * (num_heads // num_kv_heads))


def _tensor_map(name: str, x: Tensor, box_rows: int, on: Driver) -> TensorMap:
    strides = x.stride()
    key = (x.data_ptr(), x.shape, strides, x.dtype, box_rows)
    cached = _tensor_maps.get(key)
    if cached is None:
        check_layout(name, x)
        rows, heads, head_dim = x.shape
        # A dimension of size 1 may have any stride in torch, not in a tensor map.
        head_stride = strides[1] if heads > 1 else head_dim
        row_stride = strides[0] if rows > 1 else heads * head_stride
        dtype = BFLOAT16 if x.dtype == torch.bfloat16 else FLOAT16
        on.ensure_context(x.device.index or 0)
        encoded = on.encode_tensor_map(
            dtype,
            x.data_ptr(),
            (head_dim, heads, rows),
            (2 * head_stride, 2 * row_stride),
            (PANEL, 1, box_rows),
        )
        if len(_tensor_maps) >= MAX_TENSOR_MAPS:
            _tensor_maps.clear()  # addresses that never come back
        cached = _tensor_maps[key] = TensorMap.from_buffer_copy(encoded)
    return cached


MAX_TENSOR_MAPS = 4096
_tensor_maps: dict[tuple[object, ...], TensorMap] = {}


@lru_cache(maxsize=64)
def _kernel(name: str, device: int) -> _Kernel:
    """Returns a loaded kernel; the first call of a process may compile it."""
    variant, on = build.variants()[name], driver()
    shared_bytes = int(variant.value("MCP_SHARED_BYTES"))
    handle = on.load_kernel(build.cubin(name), variant.entry, shared_bytes, device)
    threads = int(variant.value("MCP_THREADS"))
    return _Kernel(handle, on, *_tile(name), threads, shared_bytes, _num_sms(device))


@lru_cache(maxsize=64)
def _tile(name: str) -> tuple[int, int]:
    variant = build.variants()[name]
    return int(variant.value("MCP_BLOCK_M")), int(variant.value("MCP_BLOCK_N"))


@lru_cache(maxsize=64)
def _num_sms(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _current_device() -> int:
    return torch.cuda.current_device()


def _raw_stream(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


_thread = threading.local()
_counter_lock = threading.Lock()
_counter_pools: dict[int, Tensor] = {}
_counter_of_stream: dict[tuple[int, int], int] = {}


def _counters(device: int, stream: int) -> int:
    """Returns the address of the stream's pair of work counters, zero between launches.

    Raises: RuntimeError on the first use of a device inside a CUDA graph capture.
    """
    address = _counter_of_stream.get((device, stream))
    if address is None:
        with _counter_lock:
            address = _new_counters(device, stream)
            _counter_of_stream[device, stream] = address
    return address


def _new_counters(device: int, stream: int) -> int:
    pool = _counter_pools.get(device)
    if pool is None:
        pool = _counter_pools[device] = _zeroed_counters(device)
    index = sum(1 for known, other in _counter_of_stream if known == device and other != stream)
    if index >= MAX_STREAMS:
        raise RuntimeError(
            f"stream {stream} is number {index + 1} to run attention on device {device}, at most "
            f"{MAX_STREAMS} are allowed; reuse streams"
        )
    return pool.data_ptr() + COUNTER_BYTES * index


def _zeroed_counters(device: int) -> Tensor:
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "the first call of backend='hopper' on a device must not be inside a CUDA graph capture; "
            "call it once before"
        )
    pool = torch.zeros(MAX_STREAMS * COUNTER_BYTES // 4, dtype=torch.int32, device=f"cuda:{device}")
    torch.cuda.synchronize(device)  # once per process: any stream may use its pair next
    return pool
