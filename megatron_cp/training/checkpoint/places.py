"""Where a checkpoint's bytes are, and whether its files reach that far: for checkpoints without sizes of their own.

    torch_dist   .metadata ──> file, offset, length of every piece ──> the file is there and as long
                 common.pt, where it has one ──> its directory, at its end
    torch        *.pt      ──> the same

Megatron-LM writes no sizes beside its files. A cut one is found here, before a tensor is read, and named.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

from megatron_cp.errors import ANOTHER_CHECKPOINT, DamagedCheckpointError, unreadable
from megatron_cp.mcore.checkpoint import safe_load
from megatron_cp.mcore.checkpoint.checkpoint_objects import (
    COMMON_FILE,
    holds_common_file,
    short_files,
)
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
    for file, state, end in short_files(folder, index):
        raise DamagedCheckpointError(
            f"{file} is {state}; the index .metadata beside it names {end} bytes of it; {ANOTHER_CHECKPOINT}"
        )
    if holds_common_file(folder, index):
        _check_archive(folder / COMMON_FILE)


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
