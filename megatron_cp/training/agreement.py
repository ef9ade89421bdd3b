"""Ranks that were started differently stop before the first parallel group, and say where."""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from megatron_cp.errors import PlanMismatchError
from megatron_cp.training.config import TrainConfig
from megatron_cp.training.together import gather

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


Recorded = Sequence[tuple[str, str | None]]
"""Token files of a rank, each with the SHA-256 that its manifest has of it, None without a manifest."""


def check_agreement(config: TrainConfig, identity: dict[str, Any], files: Recorded) -> None:
    """Returns if all ranks hold the same token files, arguments, `identity` (corpora) and versions.

    Collective over the whole job. Raises PlanMismatchError on every rank alike, with the first
    file or entry that differs and the ranks that differ from most.
    """
    arguments = config.namespace()
    own = {"--" + k.replace("_", "-"): v for k, v in vars(arguments).items() if k not in _PER_RANK}
    text = json.dumps(
        {**own, **identity, "installed versions": versions()}, sort_keys=True, default=repr
    )
    told = gather((text, files))
    difference = differing_file([recorded for _, recorded in told])
    difference = difference or first_difference([json.loads(other) for other, _ in told])
    if difference is not None:
        raise PlanMismatchError(difference)


def differing_file(told: Sequence[Recorded]) -> str | None:
    """Returns one line on the first token file that is not the same on all ranks, None where all are.

    As their manifests say; ranks whose file has none are left out.
    """
    for place in range(min(map(len, told))):
        files = {rank: files[place] for rank, files in enumerate(told)}
        known = Counter(sha for _, sha in files.values() if sha is not None)
        if len(known) < 2:
            continue
        common = known.most_common(1)[0][0]
        odd = [rank for rank, (_, sha) in files.items() if sha not in (None, common)]
        like = next(rank for rank, (_, sha) in files.items() if sha == common)
        (path, sha), (other, _) = files[odd[0]], files[like]
        return (
            f"token file {path} of ranks {odd} is not {other} of rank {like}: the SHA-256 in their manifests "
            f"are {str(sha)[:12]} and {common[:12]}; all {len(told)} ranks must read the same tokens: copy "
            "the right file, its index and its manifest to the other nodes"
        )
    return None


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
