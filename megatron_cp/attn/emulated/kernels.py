"""Kernels of variants.json in the emulator, with the face that the host code of the GPU path expects of a kernel."""

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from torch import Tensor

from megatron_cp.kernels import build
from megatron_cp.kernels.emulator import library

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
class Session:
    """Settings of the launches inside `running`, and what each of them did."""

    settings: Settings
    runs: list[library.Run] = field(default_factory=list)


_session: ContextVar[Session | None] = ContextVar("megatron_cp_emulator_session", default=None)


@contextmanager
def running(settings: Settings) -> Iterator[Session]:
    """Launches in this context follow `settings` and are noted in the session that it yields."""
    session = Session(settings)
    token = _session.set(session)
    try:
        yield session
    finally:
        _session.reset(token)


def _current() -> Session:
    return _session.get() or Session(Settings())


class EmulatedKernel:
    """A variant in the emulator; it is its own `driver`."""

    def __init__(self, variant: build.Variant) -> None:
        defines = dict(define.split("=", 1) for define in variant.defines)
        self.num_threads = int(defines["MCP_THREADS"])
        self.shared_bytes = int(defines.get("MCP_SHARED_BYTES", 0))
        self.tile_rows = int(defines.get("MCP_BLOCK_M", 0))
        self.tile_keys = int(defines.get("MCP_BLOCK_N", 0))
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

    def run(self, params: ctypes.Structure, max_blocks: int, touched: dict[str, Tensor]) -> None:
        """Runs the kernel, which may read `touched` through TMA and read-only loads.

        Raises: EmulatorError with the first defect.
        """
        session = _current()
        settings = session.settings
        machine = library.Machine(
            min(settings.num_blocks, max_blocks),
            self.num_threads,
            self.shared_bytes,
            seed=settings.seed,
            host_threads=settings.host_threads,
            record_history=settings.record_history,
            ranges=tuple(_range(name, x) for name, x in touched.items()),
        )
        session.runs.append(self._kernel.run(params, machine))


def source_of(variant: build.Variant) -> library.Source:
    """Returns what the emulator compiles for a variant."""
    params = PARAMS[variant.kernel_pass]
    return library.Source(variant.name, variant.source, variant.entry, params, variant.defines)


def _range(name: str, x: Tensor) -> tuple[str, int, int]:
    if not x.numel():
        return name, x.data_ptr(), 0
    extent = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return name, x.data_ptr(), extent * x.element_size()
