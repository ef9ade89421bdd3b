"""Work lists on the device: made once per mask and tile shape, copied once, found again in a microsecond.

An entry lives as long as its mask. Nothing is proportional to queries x keys, and no call waits for the
device: a stream that uses a list for the first time waits for the copy on the device.
"""

import weakref
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_cp.attn.worklist import WorkList, forward_work
from megatron_cp.mask import AttentionMask


class DeviceList(NamedTuple):
    """A forward work list as one int32 tensor: tiles `[num_tiles, 4]`, segments `[num_segs, 8]`, order."""

    data: Tensor
    num_tiles: int
    num_segs: int


@dataclass(slots=True)
class _Entry:
    mask: "weakref.ref[AttentionMask]"
    lists: DeviceList
    copied: "torch.cuda.Event | None"  # recorded behind the copy
    streams: set[int] = field(default_factory=set)  # those that may read without waiting


_Key = tuple[int, int, int, torch.device]
_entries: dict[_Key, _Entry] = {}


def forward_list(
    mask: AttentionMask, tile_rows: int, tile_keys: int, device: torch.device, stream: int
) -> DeviceList:
    """Returns the forward work list of a mask on a device, ready for `stream` (a raw CUDA stream).

    Raises: ValueError for a mask whose slices leave its grid, or that is too large.
    """
    key = (id(mask), tile_rows, tile_keys, device)
    entry = _entries.get(key)
    if entry is None or entry.mask() is not mask:
        work = forward_work(mask, tile_rows, tile_keys)
        _check_inside(work, mask)
        entry = _Entry(weakref.ref(mask, lambda _: _entries.pop(key, None)), *_copy(work, device))
        entry.streams.add(stream)
        _entries[key] = entry
    elif stream not in entry.streams:
        _share(entry)
        entry.streams.add(stream)
    return entry.lists


def num_cached() -> int:
    """Returns how many lists are held; each goes with its mask."""
    return len(_entries)


def _copy(work: WorkList, device: torch.device) -> tuple[DeviceList, "torch.cuda.Event | None"]:
    """Returns the list on the device, copied on the current stream, and an event behind the copy."""
    parts = [work.tiles.ravel(), work.segs.ravel(), work.order]
    packed = torch.from_numpy(np.concatenate(parts))
    counts = len(work.tiles), len(work.segs)
    if device.type != "cuda":
        return DeviceList(packed.to(device), *counts), None
    data = packed.pin_memory().to(device, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return DeviceList(data, *counts), event


def _share(entry: _Entry) -> None:
    """Makes the current stream wait for the copy, and keeps the memory until the stream is done with it."""
    data = entry.lists.data
    if entry.copied is not None:
        stream = torch.cuda.current_stream(data.device)
        stream.wait_event(entry.copied)
        data.record_stream(stream)


def _check_inside(work: WorkList, mask: AttentionMask) -> None:
    """Raises ValueError if a slice leaves the grid: the kernel would read or write outside the tensors."""
    rows = int(work.tiles[:, 1].sum())
    k_range = (int(work.segs[:, 0].min()), int(work.segs[:, 1].max())) if len(work.segs) else (0, 0)
    first = int(work.tiles[0, 0]) if len(work.tiles) else 0
    if first < 0 or rows > mask.num_queries or k_range[0] < 0 or k_range[1] > mask.num_keys:
        raise ValueError(
            f"mask slices span rows [{first}, {first + rows}) and keys {k_range}, outside the grid "
            f"{mask.num_queries} x {mask.num_keys}; build masks with from_slices, which checks this"
        )
