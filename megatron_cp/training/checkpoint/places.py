"""Where a checkpoint's bytes are, and whether its files reach that far: for checkpoints without sizes of their own.

    torch_dist   .metadata ──> file, offset, length of every piece ──> the file is there and as long
                 common.pt, where it has one ──> its directory, at its end
    torch        *.pt      ──> the same

Megatron-LM writes no sizes beside its files. A cut one is found here, before a tensor is read, and named.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata

from megatron_cp.errors import ANOTHER_CHECKPOINT, DamagedCheckpointError, unreadable
from megatron_cp.mcore import safe_load
from megatron_cp.mcore.checkpoint_objects import COMMON_FILE, holds_common_file
from megatron_cp.training.checkpoint import formats

_PLAIN_PICKLE = b"\x80"  # torch before 1.6 wrote them; `safe_load` judges what it reads


def check_reach(folder: Path) -> None:
    """Raises DamagedCheckpointError for the first file that is missing or shorter than the checkpoint says.

    Reads the index and the ends of files, and no tensor.
    """
    if formats.detect(folder) == "torch":
        for path in sorted(folder.glob("mp_rank_*/*.pt")):
            _check_archive(path)
        return
    index = safe_load.read_index(folder / ".metadata")
    _check_pieces(folder, index)
    if holds_common_file(folder, index):
        _check_archive(folder / COMMON_FILE)


def _check_pieces(folder: Path, index: Metadata) -> None:
    """Raises DamagedCheckpointError unless every piece of the index lies within its file."""
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
            state = "missing" if found is None else f"{found} bytes"
            raise DamagedCheckpointError(
                f"{file} is {state}; the index .metadata beside it names {end} bytes of it; {ANOTHER_CHECKPOINT}"
            )


def _check_archive(path: Path) -> None:
    """Raises DamagedCheckpointError unless a file of `torch.save` has its directory, which stands at its end."""
    try:
        with path.open("rb") as file:
            if file.read(1) == _PLAIN_PICKLE:
                return
            zipfile.ZipFile(file).close()
    except OSError as problem:
        raise unreadable(path, problem) from None
    except Exception as problem:  # a damaged archive raises nearly anything
        raise DamagedCheckpointError(
            f"{path} is damaged: it does not end as it was written ({problem}); {ANOTHER_CHECKPOINT}"
        ) from None
