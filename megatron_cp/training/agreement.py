"""Ranks that were started differently stop before the first parallel group, and say where."""

from __future__ import annotations

import json
import platform
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch.distributed as dist

from megatron_cp.errors import PlanMismatchError
from megatron_cp.training.config import TrainConfig

# Of a rank or of a machine: the documents behind a path are compared by their digests.
_PER_RANK = frozenset(
    {
        "data_path",
        "data_args_path",
        "per_split_data_args_path",
        "data_cache_path",
        "train_data_path",
        "valid_data_path",
        "test_data_path",
        "tokenizer_model",
        "vocab_file",
        "merge_file",
    }
)
_LONGEST_VALUE = 200


def check_agreement(config: TrainConfig, identity: dict[str, Any]) -> None:
    """Returns if all ranks hold the same arguments and the same `identity` (corpora) and versions.

    Collective over the whole job. Raises PlanMismatchError on every rank alike, with the first
    entry that differs and the ranks that differ from most.
    """
    arguments = config.namespace()
    own = {"--" + k.replace("_", "-"): v for k, v in vars(arguments).items() if k not in _PER_RANK}
    text = json.dumps(
        {**own, **identity, "installed versions": versions()}, sort_keys=True, default=repr
    )
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    difference = first_difference([json.loads(other) for other in texts])
    if difference is not None:
        raise PlanMismatchError(difference)


def first_difference(entries: list[dict[str, Any]]) -> str | None:
    """Returns one line on the first entry (by name) in which ranks differ; None where all are equal."""
    for name in sorted({name for entry in entries for name in entry}):
        values = [json.dumps(entry.get(name)) for entry in entries]
        if len(set(values)) == 1:
            continue
        common = Counter(values).most_common(1)[0][0]
        odd = [rank for rank, value in enumerate(values) if value != common]
        shown = (values[odd[0]][:_LONGEST_VALUE], common[:_LONGEST_VALUE])
        return (
            f"ranks disagree on {name}: {shown[0]} on rank {odd[0]}, {shown[1]} on rank "
            f"{values.index(common)}; all {len(values)} ranks must be started alike; look at "
            f"ranks {odd}"
        )
    return None


def versions() -> dict[str, str]:
    """Returns versions of what decides results."""
    found = {"python": platform.python_version()}
    for name in ("megatron_cp", "megatron-core", "torch", "numpy", "wandb"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
