"""Whether a run draws the samples that Megatron-LM would have drawn next, where it goes on from its checkpoint.

Under `--packing megatron` the order of samples follows from corpora, seed, split, length and how many samples are asked
for. Our own checkpoints hold a digest of it; Megatron-LM's hold its arguments, of which the order is made once more.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_cp.mcore.documents.gpt_dataset import outside_process_groups
from megatron_cp.training.config import TrainConfig
from megatron_cp.training.corpora import RunData, open_corpora

_PATHS = (
    "data_path",
    "data_args_path",
    "per_split_data_args_path",
    "train_data_path",
    "valid_data_path",
    "test_data_path",
)
_OF_THE_ORDER = (
    "seed",
    "split",
    "seq_length",
    "train_iters",
    "train_samples",
    "global_batch_size",
    "mid_level_dataset_surplus",
    *_PATHS,
)
# Of Megatron-LM's run: with another value its samples are none of GPTDataset's, or drawn by another sampler.
_SERVED: dict[str, tuple[Any, ...]] = {
    "dataloader_type": (None, "single"),
    "fim_data": (None, False),
    "sft": (None, False),
}


def check_same_samples(config: TrainConfig, data: RunData, saved: Mapping[str, Any]) -> None:
    """Raises ValueError where the arguments of Megatron-LM's checkpoint give the training samples another order.

    Files that have moved are looked for where this run says.
    """
    _check_served(saved)
    others = {
        name: saved[name]
        for name in _OF_THE_ORDER
        if name in saved and _plain(saved[name]) != _plain(config.arguments.get(name))
    }
    if all(name in _PATHS and not _exists(saved[name]) for name in others):
        return
    wanted = {name: value for name, value in others.items() if name not in _PATHS or _exists(value)}
    if _order_with(config, wanted) != _order(data):
        said = ", ".join(
            f"--{name.replace('_', '-')} was {_plain(value)}, and is {_plain(config.arguments.get(name))}"
            for name, value in wanted.items()
        )
        raise ValueError(
            f"--packing megatron would go on with other samples than Megatron-LM: {said}; give the checkpoint's "
            "values, or begin anew with its weights (--finetune)"
        )


def _check_served(saved: Mapping[str, Any]) -> None:
    """Raises ValueError for samples that no order of ours is that of."""
    found = [name for name, served in _SERVED.items() if saved.get(name) not in served]
    if found:
        said = ", ".join(f"--{name.replace('_', '-')} {_plain(saved[name])}" for name in found)
        raise ValueError(
            f"--packing megatron goes on with samples of --dataloader-type single, and Megatron-LM's run had {said}; "
            "give another --packing, which goes on behind as many packs of its own, or begin anew with its weights "
            "(--finetune)"
        )


def _order_with(config: TrainConfig, arguments: dict[str, Any]) -> Any:
    """Returns the order that a run with these arguments has, None where there is none."""
    try:
        with outside_process_groups():
            return _order(open_corpora(config.with_arguments(**arguments)))
    except (ValueError, OSError):
        return None


def _order(data: RunData) -> Any:
    return data.samples["train"].identity()["index"]


def _exists(value: Any) -> bool:
    """Returns whether all that the words of a path name is there; weights are no files."""
    words = [value] if isinstance(value, str) else value or []
    return all(
        _is_number(word) or Path(word).exists() or Path(f"{word}.idx").exists() for word in words
    )


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _plain(value: Any) -> Any:
    """Returns a value as the words of a command line give it."""
    return json.loads(json.dumps(value, default=str))
