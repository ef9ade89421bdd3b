#!/usr/bin/env python
"""Which published launch commands pretrain_gpt.py accepts, and what blocks the others.

    python tools/check_recipes.py recipes.json [--world-size 8]

The file holds {"recipes": [{"name": ..., "world_size": 8, "argv": ["--num-layers", "2", ...]}, ...]}.
Flags are judged as pretrain_gpt.py judges them on this machine, before it opens any file: a path in a recipe
need not exist. Every reason of every recipe is printed, then a table of what blocks most recipes.
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

_NO_DROPOUT = ("--attention-dropout", "0.0")


@dataclass(frozen=True)
class Recipe:
    """A launch command: the flags of every rank."""

    name: str
    world_size: int
    argv: tuple[str, ...]

    @property
    def has_default_dropout(self) -> bool:
        """Whether attention keeps Megatron-LM's default dropout of .1."""
        return _NO_DROPOUT[0] not in {word.partition("=")[0] for word in self.argv}


@dataclass(frozen=True)
class Verdict:
    """What pretrain_gpt.py says of a recipe; it is accepted if there is no reason to refuse it."""

    recipe: Recipe
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


def judge(recipe: Recipe, world_size: int | None = None) -> Verdict:
    """Returns the verdict on a recipe without attention dropout, on its own number of ranks or another."""
    extra = _NO_DROPOUT if recipe.has_default_dropout else ()
    launcher = {"RANK": "0", "WORLD_SIZE": str(world_size or recipe.world_size)}
    args, reasons = judge_arguments([*recipe.argv, *extra], launcher)
    return Verdict(recipe, tuple(reasons), tuple(args.notes))


def describe(verdict: Verdict) -> str:
    """Returns the lines about one recipe."""
    word = "refused" if verdict.reasons else "accepted with notes" if verdict.notes else "accepted"
    lines = verdict.reasons or verdict.notes
    return "\n".join([f"{verdict.recipe.name}: {word}", *(f"    {line}" for line in lines)])


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
    arguments = parser.parse_args(argv)
    if arguments.world_size is not None and arguments.world_size < 1:
        parser.error(f"--world-size {arguments.world_size} must be positive")
    try:
        recipes = read_recipes(arguments.file)
    except (OSError, ValueError) as problem:
        parser.error(str(problem))
    verdicts = [judge(recipe, arguments.world_size) for recipe in recipes]
    print("\n".join(map(describe, verdicts)), summary(verdicts), sep="\n\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
