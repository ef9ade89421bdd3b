"""Launch commands that others published: the functional tests of a Megatron-LM checkout, or a JSON file of recipes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # comes with wandb

_CASES = Path("tests") / "functional_tests" / "test_cases"
_KINDS = ("gpt", "mixtral", "moe", "hybrid", "nemotron")
_NOT_TRAINING = ("inference", "grpo")
_SIZES = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--context-parallel-size",
)


@dataclass(frozen=True)
class Recipe:
    """A launch command: the flags of every rank."""

    name: str
    world_size: int
    """Ranks of its tensor, context and pipeline sizes at least."""
    argv: tuple[str, ...]


def read_recipes(path: Path) -> list[Recipe]:
    """Returns the recipes of a checkout or a file. Raises ValueError or OSError for one that holds none."""
    if path.is_dir():
        return _of_checkout(path)
    return _of_file(path)


def _of_checkout(checkout: Path) -> list[Recipe]:
    """Returns what the functional tests of Megatron-LM launch to train GPT."""
    folders = [
        file.parent
        for kind in _KINDS
        for file in sorted((checkout / _CASES / kind).glob("*/model_config.yaml"))
    ]
    wanted = [f for f in folders if not any(word in f.name for word in _NOT_TRAINING)]
    if not wanted:
        raise ValueError(
            f"{checkout} has no {_CASES}/gpt/*/model_config.yaml; give a checkout of Megatron-LM or a JSON file"
        )
    return [_of_test(folder) for folder in wanted]


def _of_test(folder: Path) -> Recipe:
    path = folder / "model_config.yaml"
    try:
        flags = yaml.safe_load(path.read_text(encoding="utf-8"))["MODEL_ARGS"]
        argv = tuple(word for flag, value in flags.items() for word in _words(str(flag), value))
        ranks = math.prod(int(flags.get(flag, 1)) for flag in _SIZES)
    except (yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError) as problem:
        raise ValueError(f"{path} has no MODEL_ARGS that can be read ({problem})") from None
    return Recipe(f"{folder.parent.name}/{folder.name}", ranks, argv)


def _words(flag: str, value: Any) -> Iterator[str]:
    """Yields a flag as a shell would pass it: a switch alone, words of a value one by one."""
    if value is False:
        return
    yield flag
    if value is not True:
        yield from map(str, value) if isinstance(value, list) else str(value).split()


def _of_file(path: Path) -> list[Recipe]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as problem:
        raise ValueError(f"{path} is not JSON: {problem}") from None
    rows = content.get("recipes") if isinstance(content, dict) else None
    if not isinstance(rows, list) or not rows:
        raise ValueError(f'{path} must hold {{"recipes": [...]}} with one recipe or more')
    return [_read_recipe(path, place, row) for place, row in enumerate(rows)]


def _read_recipe(path: Path, place: int, row: Any) -> Recipe:
    """Returns one recipe, or raises ValueError that says which one has another shape."""
    row = row if isinstance(row, dict) else {}
    name, world_size, argv = (row.get(key) for key in ("name", "world_size", "argv"))
    is_complete = isinstance(name, str) and isinstance(argv, list)
    if not is_complete or type(world_size) is not int or world_size < 1:
        raise ValueError(
            f"{path}: recipe {place} must hold a name, a positive world_size and argv, a list of words"
        )
    return Recipe(name, world_size, tuple(map(str, argv)))
