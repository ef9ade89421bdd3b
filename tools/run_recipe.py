#!/usr/bin/env python
"""Runs a published training recipe of Megatron-LM on 1 to 4 CPU ranks, made small.

    python tools/run_recipe.py MEGATRON_LM_CHECKOUT NAME              its own layout, as far as 4 ranks hold it
    python tools/run_recipe.py MEGATRON_LM_CHECKOUT NAME --context-parallel-size 2
    python tools/run_recipe.py recipes.json NAME --compare [--documents]          the same losses at every layout?

Recipes are those of check_recipes.py; NAME is the name of a recipe, or an end of it that no other has. Sizes are cut
with their ratios, data are mock documents, what only a GPU can do is left out; each change is one line. --compare
runs one rank, two context ranks, those beside the recipe's other ranks, and Megatron-Core's own attention, from the
same weights (docs/recipes.md).
"""

from __future__ import annotations

import difflib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_cp.command_line import ToolParser, answering  # noqa: E402
from tools.check_recipes import expanded  # noqa: E402
from tools.recipes.compare import Run, Starter, compare  # noqa: E402
from tools.recipes.cut import Cut, cut  # noqa: E402
from tools.recipes.published import Recipe, read_recipes  # noqa: E402

MOST_RANKS = 4


def find(recipes: Sequence[Recipe], name: str) -> Recipe:
    """Returns the recipe of this name, or the only one that ends in it. Raises ValueError."""
    exact = [recipe for recipe in recipes if recipe.name == name]
    ending = exact or [recipe for recipe in recipes if recipe.name.endswith(name)]
    if len(ending) != 1:
        names = [recipe.name for recipe in ending or recipes]
        near = difflib.get_close_matches(name, names, n=3, cutoff=0)
        raise ValueError(f"{len(ending)} recipes are called {name}; nearest: {', '.join(near)}")
    return ending[0]


def run_with_torchrun(cut_recipe: Cut, folder: Path) -> int:
    """Returns the exit code of pretrain_gpt.py on the ranks of the recipe."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    ranks = ["--nproc-per-node", str(cut_recipe.ranks.world_size)]
    words = [*launcher, *ranks, str(ROOT / "pretrain_gpt.py"), *cut_recipe.argv]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*words, "--run-dir", str(folder)], env=environment, check=False)
    return done.returncode


def describe(runs: Sequence[Run]) -> str:
    """Returns a table of the runs: losses of each step, and how far they are from the first."""
    lines = []
    for run in runs:
        head = f"{run.name:9s} {run.ranks!s:14s}"
        if run.reason:
            word = "refused" if run.is_refused else "FAILED"
            lines.append(f"{head} {word}: {run.reason}")
            continue
        losses = " ".join(f"{loss:.7f}" for loss in run.losses)
        lines.append(f"{head} losses {losses}")
        if run is not runs[0]:
            loss, norm = run.differs_from(runs[0])
            lines[-1] += f"  differs from {runs[0].name}: loss {loss:.1e}, gradient norm {norm:.1e}"
    return "\n".join(lines)


def build_parser() -> ToolParser:
    """Returns the parser of this tool."""
    parser = ToolParser(prog="run_recipe.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "source", type=Path, help="checkout of Megatron-LM, or JSON file of recipes"
    )
    parser.add_argument("name", help="name of a recipe, or its end")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="steps to train")
    parser.add_argument("--context-parallel-size", type=int, metavar="N", help="default its own")
    parser.add_argument("--documents", action="store_true", help="tokens see their own document")
    parser.add_argument("--keep-precision", action="store_true", help="keep its bf16 or fp16")
    parser.add_argument("--compare", action="store_true", help="the same losses at every layout?")
    parser.add_argument("--keep", action="store_true", help="keep the folder of the runs")
    return parser


@answering("run_recipe.py")
def main(argv: Sequence[str] | None = None) -> int:
    """Cuts and runs one recipe; returns the exit code: 2 for bad input, 1 where a run failed."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if arguments.steps < 1:
        parser.error(f"--steps {arguments.steps} must be positive")
    context = 2 if arguments.compare else arguments.context_parallel_size
    if context is not None and not 1 <= context <= MOST_RANKS:
        parser.error(f"--context-parallel-size {context} must lie in [1, {MOST_RANKS}]")
    recipe = find(read_recipes(arguments.source), arguments.name)
    cut_recipe = cut(
        [expanded(word) for word in recipe.argv],
        MOST_RANKS,
        steps=arguments.steps,
        context=context,
        documents=arguments.documents,
        keep_precision=arguments.keep_precision,
    )
    print(f"{recipe.name} on {cut_recipe.ranks.world_size} ranks ({cut_recipe.ranks})")
    print("\n".join(f"    {change}" for change in cut_recipe.changes), flush=True)
    folder = Path(tempfile.mkdtemp(prefix="recipe_"))
    try:
        if not arguments.compare:
            return run_with_torchrun(cut_recipe, folder)
        with Starter() as starter:
            runs = compare(cut_recipe, folder, starter)
        print(describe(runs))
        return int(any(run.reason and not run.is_refused for run in runs))
    finally:
        print(f"runs are in {folder}") if arguments.keep else shutil.rmtree(folder)


if __name__ == "__main__":
    raise SystemExit(main())
