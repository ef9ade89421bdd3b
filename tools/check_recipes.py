#!/usr/bin/env python
"""Which published launch commands pretrain_gpt.py accepts, and what blocks the others.

    python tools/check_recipes.py recipes.json [--world-size 8]

The file holds {"recipes": [{"name": ..., "world_size": 8, "argv": ["--num-layers", "2", ...]}, ...]}.
Flags are judged as pretrain_gpt.py judges them before it opens any file, so a path in a recipe need not exist.
They are judged for a GPU machine with Transformer Engine; --here judges them for this one. A recipe is tried on
its own number of ranks, and on 2, 4 and 8 times as many where its experts or optimizer instances need more.
Every reason of every recipe is printed, then a table of what blocks most recipes.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_cp.command_line import ToolParser
from megatron_cp.training.arguments import judge_arguments
from megatron_cp.training.arguments.machine import GPU_MACHINE, Machine

_TIMES = (1, 2, 4, 8)
_NO_DROPOUT = ("--attention-dropout", "0.0")


@dataclass(frozen=True)
class Recipe:
    """A launch command: the flags of every rank."""

    name: str
    world_size: int
    """Ranks of its tensor, context and pipeline sizes at least."""
    argv: tuple[str, ...]

    @property
    def has_default_dropout(self) -> bool:
        """Whether attention keeps Megatron-LM's default dropout of .1."""
        return _NO_DROPOUT[0] not in {word.partition("=")[0] for word in self.argv}


@dataclass(frozen=True)
class Verdict:
    """What pretrain_gpt.py says of a recipe; it is accepted if there is no reason to refuse it."""

    recipe: Recipe
    world_size: int
    reasons: tuple[str, ...]
    notes: tuple[str, ...]


def read_recipes(path: Path) -> list[Recipe]:
    """Returns the recipes of a file. Raises ValueError or OSError for a file that holds none."""
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


def judge(
    recipe: Recipe, world_size: int | None = None, machine: Machine | None = GPU_MACHINE
) -> Verdict:
    """Returns the verdict on a recipe without attention dropout.

    Args:
        recipe: what is judged.
        world_size: ranks; None tries its own number and a few multiples.
        machine: what it is judged for; None is this machine.
    """
    extra = _NO_DROPOUT if recipe.has_default_dropout else ()
    argv = [*map(expanded, recipe.argv), *extra]
    sizes = [world_size] if world_size else [recipe.world_size * times for times in _TIMES]
    verdicts = []
    for size in sizes:
        args, reasons = judge_arguments(argv, {"RANK": "0", "WORLD_SIZE": str(size)}, machine)
        verdicts.append(Verdict(recipe, size, tuple(reasons), tuple(args.notes)))
    return min(verdicts, key=lambda verdict: len(verdict.reasons))


def expanded(word: str) -> str:
    """Returns a word as the shell of a test harness gives it to the program.

    A list of YAML loses its brackets, and the repetition of a test is its seed.
    """
    if word == "${REPEAT}":
        return "1"
    return word.strip("[]") if re.fullmatch(r"\[?[a-z_]+\]?", word) else word


def describe(verdict: Verdict) -> str:
    """Returns the lines about one recipe."""
    word = "refused" if verdict.reasons else "accepted with notes" if verdict.notes else "accepted"
    lines = verdict.reasons or verdict.notes
    head = f"{verdict.recipe.name}: {word} on {verdict.world_size} ranks"
    return "\n".join([head, *(f"    {line}" for line in lines)])


def blockers(verdicts: Iterable[Verdict]) -> list[tuple[int, int, str]]:
    """Returns what blocks most recipes: (recipes, recipes that nothing else blocks, one reason).

    Reasons that differ in numbers alone count as one.
    """
    found: dict[str, list[tuple[str, bool]]] = defaultdict(list)
    for verdict in verdicts:
        kinds = {re.sub(r"\d+(\.\d+)?", "N", reason): reason for reason in verdict.reasons}
        for kind, reason in kinds.items():
            found[kind].append((reason, len(kinds) == 1))
    rows = [(len(hits), sum(only for _, only in hits), hits[0][0]) for hits in found.values()]
    return sorted(rows, key=lambda row: (-row[0], -row[1], row[2]))


def summary(verdicts: Sequence[Verdict]) -> str:
    """Returns the table of blockers and the totals."""
    lines = ["recipes  alone  reason"]
    lines += [f"{count:7d}  {only:5d}  {reason}" for count, only, reason in blockers(verdicts)]
    accepted = [verdict for verdict in verdicts if not verdict.reasons]
    noted = sum(bool(verdict.notes) for verdict in accepted)
    changed = [verdict for verdict in verdicts if verdict.recipe.has_default_dropout]
    by_dropout = sum(not verdict.reasons for verdict in changed)
    lines += [
        "",
        f"{len(accepted)} of {len(verdicts)} recipes accepted, {noted} of them with notes; "
        f"{len(verdicts) - len(accepted)} refused.",
    ]
    if changed:
        lines.append(
            f"{len(changed)} recipes leave Megatron-LM's attention dropout at its default .1; "
            f"{' '.join(_NO_DROPOUT)} was appended to them. {by_dropout} of those were accepted, "
            f"{len(accepted) - by_dropout} recipes as they stand."
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the verdicts and returns the exit code: 2 for bad input, 0 otherwise."""
    parser = ToolParser(prog="check_recipes.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("file", type=Path, help="JSON file of recipes")
    parser.add_argument("--world-size", type=int, metavar="N", help="ranks; default the recipe's")
    parser.add_argument("--here", action="store_true", help="judge for this machine")
    arguments = parser.parse_args(argv)
    if arguments.world_size is not None and arguments.world_size < 1:
        parser.error(f"--world-size {arguments.world_size} must be positive")
    try:
        recipes = read_recipes(arguments.file)
    except (OSError, ValueError) as problem:
        parser.error(str(problem))
    machine = None if arguments.here else GPU_MACHINE
    verdicts = [judge(recipe, arguments.world_size, machine) for recipe in recipes]
    print("\n".join(map(describe, verdicts)), summary(verdicts), sep="\n\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
