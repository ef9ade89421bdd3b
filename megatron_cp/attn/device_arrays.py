"""Integer arrays that a mask needs on a device: made once, copied once, found again in a microsecond.

All arrays of one use travel in one pinned, non-blocking copy, and live as long as their mask. No call waits
for the device: a stream that meets them for the first time waits for the copy on the device. On devices
without streams the copy is a plain one.
"""

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_cp.mask import AttentionMask

Int32Array = NDArray[np.int32]
Prepared = tuple[Sequence[Int32Array], Callable[[list[Tensor]], Any]]
# Every array begins at a multiple of so many integers (16 bytes): what kernels may assume of a pointer.
ALIGNMENT = 4


@dataclass(slots=True)
class _Entry:
    mask: "weakref.ref[AttentionMask]"
    data: Tensor
    made: Any
    copied: "torch.cuda.Event | None"  # recorded behind the copy
    streams: set[int]  # those that may read without waiting


_Key = tuple[int, Hashable, torch.device]
_entries: dict[_Key, _Entry] = {}


def for_mask(
    mask: AttentionMask,
    use: Hashable,
    device: torch.device,
    prepare: Callable[[AttentionMask], "Prepared"],
    stream: int | None = None,
) -> Any:
    """Returns what `prepare` makes of a mask with its arrays on the device, ready for the current stream.

    It is asked once per mask, `use` and device: for arrays, and for a function that takes them as int32 tensors
    and must not start work on the device, since another stream that finds the result waits for the copy alone.
    `stream`: the current one as the driver knows it, from a caller who has asked already.
    """
    if stream is None:
        stream = _stream(device)
    key = (id(mask), use, device)
    entry = _entries.get(key)
    if entry is None or entry.mask() is not mask:
        arrays, finish = prepare(mask)
        data, parts, copied = _copy(arrays, device)
        owner = weakref.ref(mask, lambda _: _entries.pop(key, None))
        entry = _entries[key] = _Entry(owner, data, finish(parts), copied, {stream})
    elif stream not in entry.streams and not _is_capturing(entry.data.device):
        _wait_for_copy(entry)
        entry.streams.add(stream)
    return entry.made


def num_cached() -> int:
    """Returns how many uses are held; each goes with its mask."""
    return len(_entries)


def _copy(
    arrays: Sequence[Int32Array], device: torch.device
) -> "tuple[Tensor, list[Tensor], torch.cuda.Event | None]":
    """Returns all arrays as one tensor on the device, its parts in their shapes, and an event behind the copy."""
    if _is_capturing(device):
        raise RuntimeError(
            "the first call with a mask must not be inside a CUDA graph capture; call it once before, and keep the "
            "mask as long as the graph"
        )
    sizes = [-(-array.size // ALIGNMENT) * ALIGNMENT for array in arrays]
    begins = np.cumsum([0, *sizes])
    packed = np.zeros(int(begins[-1]), dtype=np.int32)
    for begin, array in zip(begins, arrays, strict=False):
        packed[begin : begin + array.size] = array.ravel()
    data, copied = torch.from_numpy(packed), None
    if device.type == "cuda":
        data = data.pin_memory().to(device, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(device))
    else:
        data = data.to(device)
    parts = [
        data.narrow(0, begin, array.size).view(array.shape)
        for begin, array in zip(begins.tolist(), arrays, strict=False)
    ]
    return data, parts, copied


def _stream(device: torch.device) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0


def _is_capturing(device: torch.device) -> bool:
    """Returns whether the current stream records a CUDA graph.

    A capture begins behind a synchronisation, so that what was copied before is there without waiting.
    """
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _wait_for_copy(entry: _Entry) -> None:
    """Makes the current stream wait for the copy, and keeps the memory until the stream is done with it."""
    if entry.copied is not None:
        stream = torch.cuda.current_stream(entry.data.device)
        stream.wait_event(entry.copied)
        entry.data.record_stream(stream)
