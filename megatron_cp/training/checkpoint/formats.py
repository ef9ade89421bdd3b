"""Which format a checkpoint folder has: read from the folder, never believed from a flag.

torch_dist   metadata.json, .metadata, common.pt, *.distcp      any layout loads it
torch        mp_rank_00/model_optim_rng.pt                      tensor rank
             mp_rank_00_001/model_optim_rng.pt                  tensor and pipeline rank
             mp_rank_00/distrib_optim.pt                        with the distributed optimizer
"""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Literal

from megatron_cp.errors import ANOTHER_CHECKPOINT, DamagedCheckpointError
from megatron_cp.training.config import TrainConfig

Format = Literal["torch_dist", "torch"]
LEGACY_MODEL = "model_optim_rng.pt"
LEGACY_OPTIMIZER = "distrib_optim.pt"
_RANK_FOLDER = re.compile(r"mp_rank_(\d+)(?:_(\d+))?(_\d+)?")


def detect(folder: Path) -> Format:
    """Returns the format of a checkpoint folder.

    Raises ValueError for a folder that is incomplete, mixed, or in a format that is not served.
    """
    if not folder.is_dir():
        raise DamagedCheckpointError(f"{folder} does not exist; give another --ckpt-step or --load")
    has_config = (folder / "metadata.json").is_file()
    ranks = _rank_folders(folder)
    if has_config and ranks:
        raise ValueError(
            f"{folder} holds two formats: metadata.json (torch_dist) and {ranks[0].name} (torch); "
            "move the files of one format elsewhere"
        )
    if has_config:
        _check_backend(folder)
        return "torch_dist"
    if ranks:
        return "torch"
    if (folder / ".metadata").is_file():
        raise DamagedCheckpointError(
            f"{folder} is in the format torch_dcp or fsdp_dtensor, or was not finished; torch_dist "
            "and torch are served: give another --ckpt-step or --load"
        )
    raise DamagedCheckpointError(
        f"{folder} is not a complete checkpoint (no metadata.json, no mp_rank_00); give another "
        "--ckpt-step or --load"
    )


def legacy_folder(folder: Path, config: TrainConfig, tensor_rank: int, pipeline_rank: int) -> Path:
    """Returns where the format torch keeps what these model-parallel ranks own."""
    if config.parallel.pipeline_model_parallel_size > 1:
        return folder / f"mp_rank_{tensor_rank:02d}_{pipeline_rank:03d}"
    return folder / f"mp_rank_{tensor_rank:02d}"


def first_rank_file(folder: Path) -> Path:
    """Returns the file of the first model-parallel rank of a checkpoint in the format torch."""
    return _rank_folders(folder)[0] / LEGACY_MODEL


def check_legacy_layout(folder: Path, config: TrainConfig) -> None:
    """Raises ValueError if a checkpoint in the format torch is of another layout than the run's."""
    names = [path.name for path in _rank_folders(folder)]
    places = [place for name in names if (place := _RANK_FOLDER.fullmatch(name))]
    if any(place[3] for place in places):
        raise ValueError(
            f"{folder} was saved with expert parallelism ({names[-1]}): its experts are "
            "served in the format torch_dist alone; let Megatron-LM save it so, or give another --load"
        )
    experts = config.parallel.expert_model_parallel_size
    if experts > 1:
        raise ValueError(
            f"{folder} is in the format torch, which has no place for experts of --expert-model-parallel-size "
            f"{experts}: if it was saved with that flag it holds those of the first rank alone, the others are lost; "
            "if not, load it without that flag, save it with --ckpt-format torch_dist and go on from there"
        )
    tensor = 1 + max(int(place[1]) for place in places)
    pipeline = 1 + max(int(place[2] or 0) for place in places)
    layout = config.parallel
    wanted = (layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size)
    if (tensor, pipeline) != wanted:
        raise ValueError(
            f"{folder} is in the format torch, which loads into its own layout alone: "
            f"--tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {pipeline}; this "
            f"run has {wanted[0]} and {wanted[1]}: give those sizes, or load it with them, save it "
            "with --ckpt-format torch_dist and go on from there"
        )
    for rank, stage in itertools.product(range(tensor), range(pipeline)):
        file = legacy_folder(folder, config, rank, stage) / LEGACY_MODEL
        if not file.is_file():
            raise DamagedCheckpointError(
                f"{folder} is not a complete checkpoint (no {file.relative_to(folder)}); give "
                "another --ckpt-step or --load"
            )


def _rank_folders(folder: Path) -> list[Path]:
    """Returns the folders of model-parallel ranks, sorted."""
    return sorted(path for path in folder.iterdir() if _RANK_FOLDER.fullmatch(path.name))


def _check_backend(folder: Path) -> None:
    """Raises ValueError unless metadata.json names the one sharded backend that is served."""
    path = folder / "metadata.json"
    try:
        backend = json.loads(path.read_text(encoding="utf-8"))["sharded_backend"]
    except (ValueError, KeyError, TypeError, RecursionError) as problem:
        raise DamagedCheckpointError(
            f"{path} is damaged ({type(problem).__name__}); {ANOTHER_CHECKPOINT}"
        ) from None
    if backend != "torch_dist":
        raise ValueError(
            f"{folder} is in the format {str(backend)[:40]!r}; torch_dist and torch are served: give "
            "another --ckpt-step or --load"
        )
