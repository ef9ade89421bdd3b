"""The arguments that a checkpoint was saved with, read by one rank before any process group exists.

    torch_dist   common.pt, or the object common_state          args, checkpoint_version
    torch        mp_rank_00*/model_optim_rng.pt                  the same; its tensors stay on the disk

Every byte is read by `safe_load`: nothing of a checkpoint is executed.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_cp.errors import DamagedCheckpointError
from megatron_cp.mcore.checkpoint.checkpoint_objects import read_common
from megatron_cp.mcore.checkpoint.safe_load import load_trusted_types, read_index
from megatron_cp.training.checkpoint import choose, formats


@dataclass(frozen=True)
class SavedArguments:
    """What a checkpoint says of the run that saved it."""

    folder: Path
    arguments: dict[str, Any] | None
    """By Megatron-LM's names; None where the checkpoint holds none."""
    version: float
    """Of its layout: from 3.0 on, sizes of parallelism have their names of today."""


def saved_arguments(root: str, options: Namespace) -> SavedArguments | None:
    """Returns what the checkpoint to load from `root` was saved with; None where there is no checkpoint.

    Args:
        root: folder of checkpoints.
        options: `ckpt_step` and `ckpt_fallback`, which say what is loaded in place of a damaged one.

    Raises ValueError for one that cannot be read.
    """
    damage: DamagedCheckpointError | None = None
    goes_back = choose.falls_back(options)
    for folder in choose.candidates(root, options.ckpt_step, goes_back=goes_back):
        try:
            if isinstance(folder, DamagedCheckpointError):
                raise folder
            return _read(folder)
        except DamagedCheckpointError as problem:
            damage = damage or problem
    if damage is not None:
        raise damage
    return None


def _read(folder: Path) -> SavedArguments:
    if formats.detect(folder) == "torch_dist":
        entries = read_common(folder, read_index(folder / ".metadata"))
    else:
        file = formats.first_rank_file(folder)
        entries = load_trusted_types(file, maps_tensors=True)
        if not isinstance(entries, dict):
            raise DamagedCheckpointError(
                f"{file} holds no entries of a checkpoint; give another --load"
            )
    saved, version = entries.get("args"), entries.get("checkpoint_version", 0)
    return SavedArguments(
        folder,
        dict(vars(saved)) if isinstance(saved, Namespace) else None,
        float(version) if isinstance(version, (int, float)) else 0.0,
    )
