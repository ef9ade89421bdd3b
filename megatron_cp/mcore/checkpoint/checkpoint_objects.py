"""What stands beside the tensors of a torch_dist checkpoint: objects inside its files, and what all ranks share.

    core 0.16 to 0.18   common.pt                              arguments, counters, schedule, groups of the optimizer
    core 0.19 and on    the object `common_state` in *.distcp  the same

Every byte is read by `safe_load`. A version of Megatron-Core writes its own form; both are read by all.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megatron_cp.errors import ANOTHER_CHECKPOINT, DamagedCheckpointError, unreadable
from megatron_cp.mcore.checkpoint.safe_load import load_trusted_types

COMMON_FILE = "common.pt"
COMMON_NAME = "common_state"
COMMON_KEY = f"{COMMON_NAME}/shard_0_1"


def places_of_objects(index: Metadata) -> dict[str, Any]:
    """Returns where the bytes of each saved object are, by its key."""
    kinds = index.state_dict_metadata
    return {
        entry.fqn: place
        for entry, place in index.storage_data.items()
        if not isinstance(kinds.get(entry.fqn), TensorStorageMetadata)
    }


def short_files(folder: Path, index: Metadata) -> Iterator[tuple[Path, str, int]]:
    """Yields the files that are missing or shorter than the index says: what each is, and the bytes it must have.

    Raises DamagedCheckpointError for a piece that the index does not place.
    """
    ends: dict[str, int] = {}
    try:
        for place in index.storage_data.values():
            end = int(place.offset) + int(place.length)
            ends[place.relative_path] = max(end, ends.get(place.relative_path, 0))
    except (AttributeError, TypeError, ValueError, OverflowError):
        raise DamagedCheckpointError(
            f"{folder / '.metadata'} is damaged: it has a piece without its place; {ANOTHER_CHECKPOINT}"
        ) from None
    for name, end in sorted(ends.items()):
        file = folder / name
        found = file.stat().st_size if file.is_file() else None
        if found is None or found < end:
            yield file, "missing" if found is None else f"{found} bytes", end


def object_bytes(folder: Path, place: Any) -> io.BytesIO:
    """Returns the bytes of one saved object. Raises DamagedCheckpointError, with the file, where it cannot."""
    path = folder / place.relative_path
    try:
        with path.open("rb") as file:
            file.seek(place.offset)
            return io.BytesIO(file.read(place.length))
    except OSError as problem:
        raise unreadable(path, problem) from None


def holds_common_file(folder: Path, index: Metadata) -> bool:
    """Returns whether what all ranks share stands, or has to stand, in a file of its own."""
    return (folder / COMMON_FILE).exists() or COMMON_KEY not in index.state_dict_metadata


def read_common(folder: Path, index: Metadata) -> dict[str, Any]:
    """Returns the entries that are equal on every rank. Raises ValueError as `load_trusted_types`."""
    if holds_common_file(folder, index):
        entries = load_trusted_types(folder / COMMON_FILE)
    else:
        raw = object_bytes(folder, places_of_objects(index)[COMMON_KEY])
        entries = load_trusted_types(raw, f"{folder}: {COMMON_NAME}")
        if isinstance(entries, list) and len(entries) == 1:  # Megatron-Core wraps every object so
            (entries,) = entries
    if not isinstance(entries, dict):
        raise DamagedCheckpointError(
            f"{folder} is damaged: what its ranks share is of type {type(entries).__name__}; {ANOTHER_CHECKPOINT}"
        )
    return entries
