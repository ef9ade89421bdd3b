"""From tensors to a launch: loaded kernels, tensor maps, work counters, all cached.

What a call needs besides its tensors is looked up, and found after the first time: kernels by variant and
device, tensor maps by address, shape and strides, counters by stream. The host never waits for the device.
"""

import contextlib
import ctypes
import math
import threading
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_cp.attn.hopper.checks import GradientKernels, check_layout, find_variant
from megatron_cp.attn.hopper.device_lists import DeviceList
from megatron_cp.attn.hopper.scores import Scores
from megatron_cp.attn.merge import apply_sink
from megatron_cp.device_memory import SharedTensor, share
from megatron_cp.kernels import build, loading
from megatron_cp.kernels.driver import BFLOAT16, FLOAT16, FLOAT32, Driver, driver
from megatron_cp.kernels.params import FwdParams, TensorMap

# Q query rows, K key rows, N query heads, G kv heads, H head dim, Hv value head dim

PANEL_BYTES = 128  # of one row of a box: 64 columns of a 16-bit type, 32 of float
PANEL = 64
SECTION_BYTES = (
    32 << 20
)  # what is to stay in the second-level cache while it is read again and again
_is_head_by_head: ContextVar[bool] = ContextVar("megatron_cp_head_by_head", default=False)
MAX_STREAMS = 256  # per device; each has a pair of work counters
COUNTER_BYTES = 128  # a cache line per pair
MAX_TENSOR_MAPS = 4096
BLOCKS_PER_SM = 8  # of kernels that only stream rows
DTYPE_CODES = {torch.bfloat16: BFLOAT16, torch.float16: FLOAT16, torch.float32: FLOAT32}


class MapEncoder(Protocol):
    """What makes tensor maps: the driver, or what stands in for it."""

    def ensure_context(self, device: int) -> None:
        """Makes a context of the device current."""

    def encode_tensor_map(
        self,
        dtype: int,
        address: int,
        sizes: Sequence[int],
        stride_bytes: Sequence[int],
        box: Sequence[int],
        swizzled: bool = True,
    ) -> bytes:
        """Returns the 128 bytes of a tensor map."""


class TiledKernel(Protocol):
    """What parameters are made for."""

    @property
    def driver(self) -> MapEncoder:
        """Returns what makes its tensor maps."""

    @property
    def tile_rows(self) -> int:
        """Returns the query rows of a tile."""

    @property
    def tile_keys(self) -> int:
        """Returns the key rows of a tile."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A loaded kernel and what its launch needs."""

    handle: int
    driver: Driver
    num_threads: int
    shared_bytes: int
    num_sms: int
    tile_rows: int  # 0 where the kernel has no tiles
    tile_keys: int

    def num_blocks(self, num_items: int, sm_share: float) -> int:
        """Returns how many CTAs take the items: one per multiprocessor, but for the share left to transfers.

        A persistent CTA leaves no room on its multiprocessor, so what is to run beside it needs one of its own.
        """
        return min(num_items, max(1, self.num_sms - math.ceil(sm_share * self.num_sms)))

    def launch(self, num_blocks: int, stream: int, params: ctypes.Structure, device: int) -> None:
        """Launches on a raw stream of the current device."""
        if not hasattr(_thread, "has_context"):
            self.driver.ensure_context(device)
            _thread.has_context = True
        self.driver.launch(
            self.handle, num_blocks, self.num_threads, self.shared_bytes, stream, params
        )


@lru_cache(maxsize=256)
def load_kernel(name: str, device: int) -> Kernel:
    """Returns a variant on a device; its first use by a process may compile it."""
    on = driver()
    defines = dict(define.split("=", 1) for define in build.variants()[name].defines)
    shared_bytes = int(defines.get("MCP_SHARED_BYTES", 0))
    return Kernel(
        loading.load_variant(name, on, device),
        on,
        int(defines["MCP_THREADS"]),
        shared_bytes,
        num_sms(device),
        *tile_shape(name),
    )


@lru_cache(maxsize=256)
def tile_shape(name: str) -> tuple[int, int]:
    """Returns `(query rows, key rows)` of a variant's tiles, zeros where it has none."""
    defines = dict(define.split("=", 1) for define in build.variants()[name].defines)
    return int(defines.get("MCP_BLOCK_M", 0)), int(defines.get("MCP_BLOCK_N", 0))


def gradient_tiles(kernels: GradientKernels) -> tuple[tuple[int, int], tuple[int, int] | None]:
    """Returns the tile shapes of the kernel for dk and dv and, if there is one, of that for dq alone."""
    dq_tile = None if kernels.dq is None else tile_shape(kernels.dq.name)
    return tile_shape(kernels.main.name), dq_tile


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
    """Fills `results = (out [Q, N, Hv], lse [Q, N])` from (q, k, v) on the current stream of their device.

    With `earlier`, float32 with the strides of `out` or `out` itself, results are merged onto it and onto what `lse`
    holds, 0 and -inf in rows without keys; without it, `max_logits` (float32, contiguous) is raised to the largest
    logit of each head. `sm_share` of the multiprocessors stays free for transfers.
    """
    out_QNH, lse_QN = results
    if not lists.num_segs:
        fill_without_keys(out_QNH, lse_QN, sink_N, earlier_QNH)
        return
    q_QNH, _, v_KGH = tensors
    device = q_QNH.device.index or 0
    dims = (q_QNH.shape[2], v_KGH.shape[2])
    variant = find_variant("forward", q_QNH.dtype, *dims, scores.feature)
    if earlier_QNH is out_QNH:  # results of its own making are in order
        check_layout("out", out_QNH)
    with device_guard(device):
        kernel = load_kernel(variant.name, device)
        stream = raw_stream(device)
        params = forward_params(kernel, tensors, lists, sink_N, scores, results, earlier_QNH)
        params.max_logits = max_logits_address(max_logits_N, earlier_QNH)
        pair = counters(device, stream)
        params.counters = pair.address
        num_blocks = kernel.num_blocks(params.num_tiles * q_QNH.shape[1], sm_share)
        kernel.launch(num_blocks, stream, params, device)


def launch_rows(name: str, x: Tensor, num_items: int, params: ctypes.Structure) -> None:
    """Launches a kernel that gives a warp to every row and head."""
    if not num_items:
        return
    device = x.device.index or 0
    with device_guard(device):
        kernel = load_kernel(name, device)
        warps = kernel.num_threads // 32
        num_blocks = min(-(-num_items // warps), BLOCKS_PER_SM * num_sms(device))
        kernel.launch(num_blocks, raw_stream(device), params, device)


def forward_params(
    kernel: TiledKernel,
    tensors: tuple[Tensor, Tensor, Tensor],
    lists: DeviceList,
    sink_N: Tensor | None,
    scores: Scores,
    results: tuple[Tensor, Tensor],
    earlier_QNH: Tensor | None,
) -> FwdParams:
    """Returns the kernel's parameters without counters and largest logits.

    Where `earlier` is `out` itself, tiles without keys are left out.
    """
    (q_QNH, k_KGH, v_KGH), (out_QNH, lse_QN) = tensors, results
    in_place = earlier_QNH is out_QNH
    assert sink_N is None or not in_place, "a sink joins every row once"
    assert earlier_QNH is None or (
        earlier_QNH.dtype == torch.float32 and earlier_QNH.stride() == out_QNH.stride()
    )
    num_heads, head_dim = q_QNH.shape[1:]
    num_keys, num_kv_heads, value_dim = v_KGH.shape
    tiles = lists.data.data_ptr()
    segs = tiles + 16 * lists.num_tiles
    return FwdParams(
        tensor_map("q", q_QNH, kernel.tile_rows, kernel.driver),
        tensor_map("k", k_KGH, kernel.tile_keys, kernel.driver),
        tensor_map("v", v_KGH, kernel.tile_keys, kernel.driver),
        tiles,
        segs,
        segs + 32 * lists.num_segs,
        None,
        out_QNH.data_ptr(),
        lse_QN.data_ptr(),
        None if sink_N is None else sink_N.data_ptr(),
        None,
        None if earlier_QNH is None else earlier_QNH.data_ptr(),
        *out_QNH.stride()[:2],
        *lse_QN.stride(),
        lists.num_with_keys if in_place else lists.num_tiles,
        num_heads,
        num_kv_heads,
        heads_per_section(num_heads, num_kv_heads, num_keys, head_dim + value_dim),
        num_keys,
        *scores.scales(),
        out_QNH.dtype == torch.float32,
        scores.dropout(),
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


def heads_per_section(num_heads: int, num_kv_heads: int, num_keys: int, columns: int) -> int:
    """Returns how many query heads run side by side: those whose keys and values fit the cache."""
    fitting = section_bytes() // max(1, num_keys * columns * 2)
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


def tensor_map(name: str, x: Tensor, box_rows: int, on: MapEncoder) -> TensorMap:
    """Returns the map of `x` `[rows, heads, columns]` with boxes of 128 bytes of `box_rows` rows.

    Raises: ValueError for a layout that the copy engine cannot read.
    """
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


@lru_cache(maxsize=64)
def num_sms(device: int) -> int:
    """Returns the number of multiprocessors."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def current_device() -> int:
    """Returns the ordinal of the thread's current device."""
    return torch.cuda.current_device()


def raw_stream(device: int) -> int:
    """Returns the current stream of a device as the driver knows it."""
    return torch.cuda.current_stream(device).cuda_stream


_NO_GUARD = contextlib.nullcontext()


def device_guard(device: int) -> contextlib.AbstractContextManager[object]:
    """Returns a context in which the device is current."""
    return _NO_GUARD if current_device() == device else torch.cuda.device(device)


_thread = threading.local()
_counter_lock = threading.Lock()
_counter_pools: dict[int, SharedTensor] = {}
_counter_of_stream: dict[tuple[int, int], int] = {}


class Counters(NamedTuple):
    """A pair of work counters, zero when the launch begins, and the tensor to keep until then, if any."""

    address: int
    memory: Tensor | None


def counters(device: int, stream: int) -> Counters:
    """Returns work counters for one launch on a stream: the stream's own, which the last CTA sets to zero again.

    A launch that a CUDA graph records gets a pair in the graph's memory, zeroed by the graph: all graphs are
    recorded on one stream, and may be replayed side by side.
    """
    if is_capturing():
        pair = torch.zeros(2, dtype=torch.int32, device=f"cuda:{device}")
        return Counters(pair.data_ptr(), pair)
    address = _counter_of_stream.get((device, stream))
    if address is None:
        with _counter_lock:  # another thread may have come first
            address = _counter_of_stream.get((device, stream)) or _new_counters(device, stream)
            _counter_of_stream[device, stream] = address
    return Counters(address, None)


def is_capturing() -> bool:
    """Returns whether a CUDA graph records the current stream."""
    return torch.cuda.is_current_stream_capturing()


def _new_counters(device: int, stream: int) -> int:
    pool = _counter_pools.get(device)
    if pool is None:
        pool = _counter_pools[device] = zeroed_counters(device)
    index = sum(1 for known, other in _counter_of_stream if known == device and other != stream)
    if index >= MAX_STREAMS:
        raise RuntimeError(
            f"stream {stream} is number {index + 1} to run attention on device {device}, at most "
            f"{MAX_STREAMS} are allowed; reuse streams"
        )
    pool.wait(stream)
    return pool.data.data_ptr() + COUNTER_BYTES * index


def zeroed_counters(device: int) -> SharedTensor:
    """Returns the counters of all streams, all zero."""
    size = MAX_STREAMS * COUNTER_BYTES // 4
    return share(torch.zeros(size, dtype=torch.int32, device=f"cuda:{device}"))
