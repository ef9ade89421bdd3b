"""Work lists on the device: made once per mask and tile shape, copied once, found again in a microsecond.

An entry lives as long as its mask. Nothing is proportional to queries x keys, and no call waits for the
device: a stream that uses a list for the first time waits for the copy on the device. A CUDA graph keeps the
address of a list: who keeps the graph must keep the mask.
"""

import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_cp.attn.hopper.worklist import WorkList, backward_work, dq_turns, forward_work
from megatron_cp.mask import AttentionMask


class DeviceList(NamedTuple):
    """A forward work list as one int32 tensor: tiles `[num_tiles, 4]`, segments `[num_segs, 8]`, order."""

    data: Tensor
    num_tiles: int
    num_segs: int


class BackwardList(NamedTuple):
    """A backward work list as one int32 tensor: as DeviceList, then the turns of the deterministic mode.

    `num_runs` is 0 without turns; else `[num_segs, 3]` and `[num_runs, 2]` follow the order.
    """

    data: Tensor
    num_tiles: int
    num_segs: int
    num_slots: int
    num_runs: int


@dataclass(slots=True)
class _Entry:
    mask: "weakref.ref[AttentionMask]"
    lists: Any  # DeviceList or BackwardList, as the key says
    copied: "torch.cuda.Event | None"  # recorded behind the copy
    streams: set[int] = field(default_factory=set)  # those that may read without waiting


_Key = tuple[int, str, int, int, torch.device]
_entries: dict[_Key, _Entry] = {}


def forward_list(
    mask: AttentionMask, tile_rows: int, tile_keys: int, device: torch.device, stream: int
) -> DeviceList:
    """Returns the forward work list of a mask on a device, ready for `stream` (a raw CUDA stream).

    Raises: ValueError for a mask whose slices leave its grid, or that is too large.
    """
    key = (id(mask), "forward", tile_rows, tile_keys, device)
    entry = _ready(key, mask, stream)
    if entry is None:
        work = forward_work(mask, tile_rows, tile_keys)
        _check_inside(work, mask.num_queries, mask.num_keys)
        data, copied = _copy([work.tiles, work.segs, work.order], device)
        lists = DeviceList(data, len(work.tiles), len(work.segs))
        entry = _keep(key, mask, lists, copied, stream)
    result: DeviceList = entry.lists
    return result


def backward_list(
    mask: AttentionMask,
    tile_rows: int,
    tile_keys: int,
    device: torch.device,
    stream: int,
    *,
    has_turns: bool,
) -> BackwardList:
    """Returns the backward work list of a mask on a device, ready for `stream`; with turns if asked for.

    Raises: ValueError as `forward_list`.
    """
    kind = "backward in turns" if has_turns else "backward"
    key = (id(mask), kind, tile_rows, tile_keys, device)
    entry = _ready(key, mask, stream)
    if entry is None:
        work = backward_work(mask, tile_rows, tile_keys)
        _check_inside(work, mask.num_keys, mask.num_queries)
        parts, num_slots, num_runs = [work.tiles, work.segs, work.order], 0, 0
        if has_turns:
            turns = dq_turns(work, mask.num_queries)
            parts += [turns.segments, turns.runs]
            num_slots, num_runs = turns.num_slots, len(turns.runs)
        data, copied = _copy(parts, device)
        lists = BackwardList(data, len(work.tiles), len(work.segs), num_slots, num_runs)
        entry = _keep(key, mask, lists, copied, stream)
    result: BackwardList = entry.lists
    return result


def num_cached() -> int:
    """Returns how many lists are held; each goes with its mask."""
    return len(_entries)


def _ready(key: _Key, mask: AttentionMask, stream: int) -> _Entry | None:
    """Returns the entry of this very mask, which the stream may read, or None."""
    entry = _entries.get(key)
    if entry is None or entry.mask() is not mask:
        return None
    if stream not in entry.streams and not _is_capturing(entry.lists.data.device):
        _share(entry)
        entry.streams.add(stream)
    return entry


def _keep(
    key: _Key,
    mask: AttentionMask,
    lists: DeviceList | BackwardList,
    copied: "torch.cuda.Event | None",
    stream: int,
) -> _Entry:
    owner = weakref.ref(mask, lambda _: _entries.pop(key, None))
    entry = _entries[key] = _Entry(owner, lists, copied, {stream})
    return entry


def _copy(
    parts: "list[np.ndarray[Any, np.dtype[np.int32]]]", device: torch.device
) -> "tuple[Tensor, torch.cuda.Event | None]":
    """Returns the parts one after another on the device, copied on the current stream, and an event behind."""
    if _is_capturing(device):
        raise RuntimeError(
            "the first call of backend='hopper' with a mask must not be inside a CUDA graph capture; call it once "
            "before, and keep the mask as long as the graph"
        )
    packed = torch.from_numpy(np.concatenate([part.ravel() for part in parts]))
    if device.type != "cuda":
        return packed.to(device), None
    data = packed.pin_memory().to(device, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return data, event


def _is_capturing(device: torch.device) -> bool:
    """Returns whether the current stream records a CUDA graph.

    A capture begins behind a synchronisation, so that lists copied before are there without waiting.
    """
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _share(entry: _Entry) -> None:
    """Makes the current stream wait for the copy, and keeps the memory until the stream is done with it."""
    data: Tensor = entry.lists.data
    if entry.copied is not None:
        stream = torch.cuda.current_stream(data.device)
        stream.wait_event(entry.copied)
        data.record_stream(stream)


def _check_inside(work: WorkList, num_rows: int, num_columns: int) -> None:
    """Raises ValueError if a slice leaves the grid: the kernel would read or write outside the tensors."""
    rows = int(work.tiles[:, 1].sum())
    columns = (int(work.segs[:, 0].min()), int(work.segs[:, 1].max())) if len(work.segs) else (0, 0)
    first = int(work.tiles[0, 0]) if len(work.tiles) else 0
    if first < 0 or rows > num_rows or columns[0] < 0 or columns[1] > num_columns:
        raise ValueError(
            f"mask slices span rows [{first}, {first + rows}) and columns {columns}, outside the grid "
            f"{num_rows} x {num_columns}; build masks with from_slices, which checks this"
        )
