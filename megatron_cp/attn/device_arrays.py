"""Integer arrays that a mask needs on a device: made once, copied once, found again in a microsecond.

All arrays of one use travel in one pinned, non-blocking copy, and live as long as their mask. No call waits
for the device (`device_memory.py`).
"""

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_cp.device_memory import SharedTensor, copy_to, current_stream, is_capturing, share
from megatron_cp.mask import AttentionMask

Int32Array = NDArray[np.int32]
Prepared = tuple[Sequence[Int32Array], Callable[[list[Tensor]], Any]]
# Every array begins at a multiple of so many integers (16 bytes): what kernels may assume of a pointer.
ALIGNMENT = 4


@dataclass(slots=True)
class _Entry:
    mask: "weakref.ref[AttentionMask]"
    made: Any
    arrays: SharedTensor


_Key = tuple[int, Hashable, torch.device]
_entries: dict[_Key, _Entry] = {}


def for_mask(
    mask: AttentionMask,
    use: Hashable,
    device: torch.device,
    prepare: Callable[[AttentionMask], "Prepared"],
) -> Any:
    """Returns what `prepare` makes of a mask with its arrays on the device, ready for the current stream.

    It is asked once per mask, `use` and device: for arrays, and for a function that takes them as int32 tensors
    and must not start work on the device, since another stream that finds the result waits for the copy alone.
    """
    key = (id(mask), use, device)
    entry = _entries.get(key)
    if entry is None or entry.mask() is not mask:
        arrays, finish = prepare(mask)
        data, parts = _copy(arrays, device)
        owner = weakref.ref(mask, lambda _: _entries.pop(key, None))
        entry = _entries[key] = _Entry(owner, finish(parts), share(data))
    entry.arrays.wait(current_stream(device))
    return entry.made


def num_cached() -> int:
    """Returns how many uses are held; each goes with its mask."""
    return len(_entries)


def _copy(arrays: Sequence[Int32Array], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """Returns all arrays as one tensor on the device, and its parts in their shapes."""
    if is_capturing(device):
        raise RuntimeError(
            "the first call with a mask must not be inside a CUDA graph capture; call it once before, and keep the "
            "mask as long as the graph"
        )
    sizes = [-(-array.size // ALIGNMENT) * ALIGNMENT for array in arrays]
    begins = np.cumsum([0, *sizes])
    packed = np.zeros(int(begins[-1]), dtype=np.int32)
    for begin, array in zip(begins, arrays, strict=False):
        packed[begin : begin + array.size] = array.ravel()
    data = copy_to(torch.from_numpy(packed), device)
    parts = [
        data.narrow(0, begin, array.size).view(array.shape)
        for begin, array in zip(begins.tolist(), arrays, strict=False)
    ]
    return data, parts
