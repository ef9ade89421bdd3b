"""A GPU behind its driver: loaded kernels by variant and device, work counters by stream.

The host never waits for the device.
"""

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_cp.attn.hopper.machine import Memory, tile_shape
from megatron_cp.device_memory import SharedTensor, share
from megatron_cp.kernels import build, loading
from megatron_cp.kernels.driver import Driver, driver

MAX_STREAMS = 256  # per device; each has a pair of work counters
COUNTER_BYTES = 128  # a cache line per pair


@dataclass(frozen=True, slots=True)
class GpuKernel:
    """A loaded kernel and what its launch needs."""

    handle: int
    driver: Driver
    device: int
    num_threads: int
    shared_bytes: int
    num_sms: int
    tile_rows: int  # 0 where the kernel has no tiles
    tile_keys: int

    def launch(
        self,
        num_blocks: int,
        params: ctypes.Structure,
        memory: Callable[[], Memory] | None = None,
    ) -> None:
        """Launches on the current stream of the kernel's device, whose memory nobody watches over."""
        if current_device() == self.device:
            self._launch(num_blocks, params)
        else:
            with torch.cuda.device(self.device):
                self._launch(num_blocks, params)

    def _launch(self, num_blocks: int, params: ctypes.Structure) -> None:
        if not hasattr(_thread, "has_context"):
            self.driver.ensure_context(self.device)
            _thread.has_context = True
        stream = raw_stream(self.device)
        if hasattr(params, "counters"):
            pair = counters(self.device, stream)
            params.counters = pair.address
        self.driver.launch(
            self.handle, num_blocks, self.num_threads, self.shared_bytes, stream, params
        )


class Counters(NamedTuple):
    """A pair of work counters, zero when the launch begins, and the tensor to keep until then, if any."""

    address: int
    memory: Tensor | None


def counters(device: int, stream: int) -> Counters:
    """Returns work counters for one launch on a stream: the stream's own, which the last CTA sets to zero again.

    A launch that a CUDA graph records gets a pair in the graph's memory, zeroed by the graph: all graphs are recorded
    on one stream, and may be replayed side by side.
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


@lru_cache(maxsize=256)
def load_kernel(name: str, device: int) -> GpuKernel:
    """Returns a variant on a device; its first use by a process may compile it."""
    on = driver()
    defines = dict(define.split("=", 1) for define in build.variants()[name].defines)
    return GpuKernel(
        loading.load_variant(name, on, device),
        on,
        device,
        int(defines["MCP_THREADS"]),
        int(defines.get("MCP_SHARED_BYTES", 0)),
        num_sms(device),
        *tile_shape(name),
    )


@lru_cache(maxsize=64)
def num_sms(device: int) -> int:
    """Returns the number of multiprocessors."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def current_device() -> int:
    """Returns the ordinal of the thread's current device."""
    return torch.cuda.current_device()


def raw_stream(device: int) -> int:
    """Returns the current stream of a device as the driver knows it."""
    return torch._C._cuda_getCurrentRawStream(device)


def is_capturing() -> bool:
    """Returns whether a CUDA graph records the current stream."""
    return torch.cuda.is_current_stream_capturing()


_thread = threading.local()
_counter_lock = threading.Lock()
_counter_pools: dict[int, SharedTensor] = {}
_counter_of_stream: dict[tuple[int, int], int] = {}


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
