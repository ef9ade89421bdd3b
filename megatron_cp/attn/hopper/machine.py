"""What launches ask of a kernel: on a GPU behind its driver (gpu.py), or in the emulator (attn/emulated/machine.py).

The host code above is one for both, so that what the emulator proves of it holds on a GPU.
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

from torch import Tensor

from megatron_cp.kernels import build


class Memory(NamedTuple):
    """The tensors of a launch by name, for a machine that watches over them."""

    read: dict[str, Tensor]
    """What the kernel reads and does not write."""
    filled: dict[str, Tensor]
    """What the kernel writes whole, whatever it held."""
    changed: dict[str, Tensor]
    """What it adds to, or merges with what it holds."""

    @classmethod
    def of(cls, *named: Mapping[str, Tensor | None]) -> "Memory":
        """Returns the memory of tensors some of which are not there."""
        given = [{name: x for name, x in part.items() if x is not None} for part in named]
        return cls(*given)


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


class Kernel(Protocol):
    """A kernel on a machine, and what its launch needs."""

    @property
    def driver(self) -> MapEncoder:
        """Returns what makes its tensor maps."""

    @property
    def num_threads(self) -> int:
        """Returns the threads of a CTA."""

    @property
    def num_sms(self) -> int:
        """Returns how many CTAs that fill a multiprocessor run at once."""

    @property
    def tile_rows(self) -> int:
        """Returns the query rows of a tile, 0 where the kernel has no tiles."""

    @property
    def tile_keys(self) -> int:
        """Returns the key rows of a tile."""

    def launch(
        self,
        num_blocks: int,
        params: ctypes.Structure,
        memory: Callable[[], Memory] | None = None,
    ) -> None:
        """Launches on the current stream of the kernel's device, with work counters where `params` has them.

        `memory` is asked by a machine that watches over it.
        """


KernelLoader = Callable[[str, int], Kernel]
"""Returns a variant on a device of a kind; its first use by a process may compile it."""


@lru_cache(maxsize=256)
def tile_shape(name: str) -> tuple[int, int]:
    """Returns `(query rows, key rows)` of a variant's tiles, zeros where it has none."""
    defines = dict(define.split("=", 1) for define in build.variants()[name].defines)
    return int(defines.get("MCP_BLOCK_M", 0)), int(defines.get("MCP_BLOCK_N", 0))
