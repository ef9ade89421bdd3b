#!/usr/bin/env python
"""Which published launch commands pretrain_gpt.py accepts, and what blocks the others.

    python tools/check_recipes.py MEGATRON_LM_CHECKOUT          its functional tests that train GPT
    python tools/check_recipes.py recipes.json [--world-size 8]

A file holds {"recipes": [{"name": ..., "world_size": 8, "argv": ["--num-layers", "2", ...]}, ...]}. Commands that are
equal are judged once. Flags are judged as pretrain_gpt.py judges them before it opens any file, so a path in a
recipe need not exist. They are judged for a GPU machine with Transformer Engine; --here judges them for this one. A
recipe is tried on its own number of ranks, and on 2 to 64 times as many where its experts or optimizer instances
need more. Every reason of every recipe is printed, then a table of what blocks most recipes.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_cp.command_line import ToolParser, answering
from megatron_cp.training.arguments import judge_arguments
from megatron_cp.training.arguments.machine import GPU_MACHINE, Machine
from tools.recipes.published import Recipe, read_recipes

_TIMES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Verdict:
    """What pretrain_gpt.py says of a recipe; it is accepted if there is no reason to refuse it."""

    recipe: Recipe
    world_size: int
    reasons: tuple[str, ...]
    notes: tuple[str, ...]


def judge(
    recipe: Recipe, world_size: int | None = None, machine: Machine | None = GPU_MACHINE
) -> Verdict:
    """Returns the verdict on a recipe.

    Args:
        recipe: what is judged.
        world_size: ranks; None tries its own number and a few multiples.
        machine: what it is judged for; None is this machine.
    """
    argv = [expanded(word) for word in recipe.argv]
    sizes = [world_size] if world_size else [recipe.world_size * times for times in _TIMES]
    verdicts = []
    for size in sizes:
        args, reasons = judge_arguments(argv, {"RANK": "0", "WORLD_SIZE": str(size)}, machine)
        verdicts.append(Verdict(recipe, size, tuple(reasons), tuple(args.notes)))
        if not reasons:
            break
    return min(verdicts, key=lambda verdict: len(verdict.reasons))


def expanded(word: str) -> str:
    """Returns a word as the shell of a test harness gives it to the program.

    A list of YAML loses its brackets, a word its backslashes, and the repetition of a test is its seed.
    """
    if word == "${REPEAT}":
        return "1"
    word = word.replace("\\", "")
    return word.strip("[]") if re.fullmatch(r"\[?[\w.]+\]?", word) else word


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
    lines += [
        "",
        f"{len(accepted)} of {len(verdicts)} recipes accepted, {noted} of them with notes; "
        f"{len(verdicts) - len(accepted)} refused.",
    ]
    return "\n".join(lines)


@answering("check_recipes.py")
def main(argv: Sequence[str] | None = None) -> int:
    """Prints the verdicts and returns the exit code: 2 for bad input, 0 otherwise."""
    parser = ToolParser(prog="check_recipes.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "source", type=Path, help="checkout of Megatron-LM, or JSON file of recipes"
    )
    parser.add_argument("--world-size", type=int, metavar="N", help="ranks; default the recipe's")
    parser.add_argument("--here", action="store_true", help="judge for this machine")
    arguments = parser.parse_args(argv)
    if arguments.world_size is not None and arguments.world_size < 1:
        parser.error(f"--world-size {arguments.world_size} must be positive")
    recipes = read_recipes(arguments.source)
    machine = None if arguments.here else GPU_MACHINE
    different: dict[tuple[str, ...], Recipe] = {}
    for recipe in recipes:
        different.setdefault(recipe.argv, recipe)
    verdicts = [judge(recipe, arguments.world_size, machine) for recipe in different.values()]
    print("\n".join(map(describe, verdicts)), summary(verdicts), sep="\n\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
