"""The emulator as the machine that the host code of the GPU path launches on.

It watches over the memory of a launch: what the kernel is to fill holds no number before, and what it made holds
nothing of a register that was never written.
"""

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_cp.attn.hopper.machine import Memory, tile_shape
from megatron_cp.kernels import build
from megatron_cp.kernels.emulator import library
from megatron_cp.kernels.emulator.library import EmulatorError

PARAMS = {
    "forward": "mcp::attn::FwdParams",
    "backward": "mcp::attn::BwdParams",
    "backward_dkdv": "mcp::attn::BwdParams",
    "backward_dq": "mcp::attn::DqParams",
    "backward_preprocess": "mcp::attn::BwdPreprocessParams",
    "backward_postprocess": "mcp::attn::BwdPostprocessParams",
    "merge_rows": "mcp::rows::MergeRowsParams",
    "add_rows": "mcp::rows::AddRowsParams",
}
SWIZZLE_NONE, SWIZZLE_128 = 0, 3  # of the driver's enumeration
# Registers that hold nothing, as the emulator marks them; arithmetic keeps all but the sign and the quiet bit.
POISON = (0x7FA1BEEF, 0x7FA57FA5)
POISON_MASK = 0x7FBFFFFF


@dataclass(frozen=True)
class Settings:
    """How to run: `seed` orders what is asynchronous (0 kind, others adversarial), `num_blocks` is the grid.

    One host thread gives the same run for the same seed; several share the work as they happen to come.
    """

    seed: int = 1
    num_blocks: int = 2
    host_threads: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    record_history: bool = False


@dataclass
class Launches:
    """Settings of the launches inside `running`, and what each of them did."""

    settings: Settings
    runs: list[library.Run] = field(default_factory=list)


_launches: ContextVar[Launches | None] = ContextVar("megatron_cp_emulator_launches", default=None)


@contextmanager
def running(settings: Settings) -> Iterator[Launches]:
    """Launches in this context follow `settings` and are noted in what it yields."""
    launches = Launches(settings)
    token = _launches.set(launches)
    try:
        yield launches
    finally:
        _launches.reset(token)


def _current() -> Launches:
    return _launches.get() or Launches(Settings())


class EmulatedKernel:
    """A variant in the emulator; it is its own `driver`."""

    def __init__(self, variant: build.Variant) -> None:
        defines = dict(define.split("=", 1) for define in variant.defines)
        self.num_threads = int(defines["MCP_THREADS"])
        self.shared_bytes = int(defines.get("MCP_SHARED_BYTES", 0))
        self.tile_rows, self.tile_keys = tile_shape(variant.name)
        self.driver = self
        self._kernel = library.load(source_of(variant))

    @property
    def num_sms(self) -> int:
        """Returns how many CTAs the emulated machine runs at once."""
        return _current().settings.num_blocks

    def ensure_context(self, device: int) -> None:
        """Does nothing: the CPU is always there."""

    def encode_tensor_map(
        self,
        dtype: int,
        address: int,
        dims: Sequence[int],
        strides: Sequence[int],
        box: Sequence[int],
        swizzled: bool = True,
    ) -> bytes:
        """Returns the 128 bytes of a tensor map. Raises ValueError for what the driver refuses."""
        swizzle = SWIZZLE_128 if swizzled else SWIZZLE_NONE
        return self._kernel.encode_tiled(dtype, address, dims, strides, box, swizzle=swizzle)

    def launch(
        self,
        num_blocks: int,
        params: ctypes.Structure,
        memory: Callable[[], Memory] | None = None,
    ) -> None:
        """Runs the kernel to its end.

        Raises: EmulatorError with the first defect: also a value from nowhere in its results, and counters left set.
        """
        launches, touched = _current(), Memory({}, {}, {}) if memory is None else memory()
        settings, written = launches.settings, touched.filled | touched.changed
        for x in touched.filled.values():
            x.fill_(torch.nan)
        pair = torch.zeros(2, dtype=torch.int32)
        ranges = [_range(name, x, False) for name, x in touched.read.items()]
        ranges += [_range(name, x, True) for name, x in written.items()]
        if hasattr(params, "counters"):
            params.counters = pair.data_ptr()
            ranges.append(_range("counters", pair, True))
        machine = library.Machine(
            num_blocks,
            self.num_threads,
            self.shared_bytes,
            seed=settings.seed,
            host_threads=settings.host_threads,
            record_history=settings.record_history,
            ranges=() if memory is None else tuple(ranges),
        )
        launches.runs.append(self._kernel.run(params, machine))
        _check_results(written)
        if pair.any():
            raise EmulatorError(f"the kernel left its work counters at {pair.tolist()}")


def load_kernel(name: str, device: int) -> EmulatedKernel:
    """Returns a variant, compiled at its first use, on the one device, which has no streams."""
    return EmulatedKernel(build.variants()[name])


def _check_results(results: dict[str, Tensor]) -> None:
    """Raises EmulatorError if a register without a value was stored."""
    for name, x in results.items():
        if x.dtype == torch.float32:
            bits = x.contiguous().view(torch.int32) & POISON_MASK
            if any((bits == value).any() for value in POISON):
                raise EmulatorError(
                    f"{name} holds values of registers that were never written, or read in flight"
                )


def source_of(variant: build.Variant) -> library.Source:
    """Returns what the emulator compiles for a variant."""
    params = PARAMS[variant.kernel_pass]
    return library.Source(variant.name, variant.source, variant.entry, params, variant.defines)


def _range(name: str, x: Tensor, is_written: bool) -> tuple[str, int, int, bool]:
    """Returns the memory from the first element of a tensor to its last."""
    if not x.numel():
        return name, x.data_ptr(), 0, is_written
    extent = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return name, x.data_ptr(), extent * x.element_size(), is_written
