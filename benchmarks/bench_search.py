"""What every number of planner "auto" does: plans at half and at double, on masks of their own.

First those of SearchBudget, then those that stand inside a step of the search, in the file of that step.

python benchmarks/bench_search.py --output benchmarks/results/search_<hardware>_<date>     a quarter of an hour
python benchmarks/bench_search.py --only effort far

Times of passes are predicted (forward plus backward of one layer, head dim 128, bf16, topology h100); they were
measured nowhere. Planning times are bench_plan.py's.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from types import ModuleType
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before NumPy: planning is measured on one thread

from search_cells import SearchCell, large_cells, search_cells
from timing import Cell, Table, argument_parser, environment, publish

from megatron_cp.config import CPConfig
from megatron_cp.plan.compute import bisection, local_search, staging
from megatron_cp.plan.hardware.makespan import layer_seconds
from megatron_cp.plan.placement import by_area, by_documents, placement
from megatron_cp.plan.search.budget import BUDGET, SearchBudget
from megatron_cp.plan.search.choose import best_family
from megatron_cp.plan.study.compare import geometric_mean

ROUNDING = 1e-9
WITHOUT = {
    "most_near": 1 << 40,
    "hub": math.inf,
    "straight": math.inf,
    "near_starts": 0,
    "moved_starts": 0,
}
# Tried besides: no limit, never a tree, never straight, no local search, compute never moved.
INSIDE_STEPS: dict[ModuleType, tuple[str, ...]] = {
    bisection: ("PARTS_PER_GROUP", "CHUNKS_PER_RANK"),
    local_search: ("CHUNKS_PER_RANK", "ROUNDS", "STEPS", "IN_VAIN", "SHARE", "LEAST_PRICE", "LEAST_GAIN"),
    staging: ("PIECES", "LEAST_PIECES_PER_RANK", "MOST_PIECES_PER_RANK"),
    by_area: ("MAX_EXCHANGES_PER_RANK", "PARTNERS", "USEFUL_SHARE"),
    by_documents: ("LIGHT", "WIDEST", "STEP", "MOST_PLACED"),
    placement: ("MAX_CHUNKS_PER_RANK", "MIN_CHUNKS_PER_RANK", "MAX_PADDING", "TARGET_CHUNKS", "MIN_CHUNK_TOKENS"),
}  # fmt: skip
COLUMNS = (
    "number",
    "value",
    "tried",
    "time",
    "worst",
    "where",
    "best",
    "cells that change",
)


def predicted(cells: list[SearchCell], budget: SearchBudget) -> list[float]:
    """Returns the predicted seconds of every cell's plan."""
    found = []
    for cell in cells:
        mask = cell.build()
        config = CPConfig(num_heads=cell.heads[0], num_kv_heads=cell.heads[1])
        plan = best_family({"mask": (mask, 1.0)}, cell.ranks, config, budget)["mask"]
        found.append(layer_seconds(plan))
    return found


def variants(only: list[str]) -> Iterator[tuple[str, object, object, SearchBudget]]:
    """Yields (number, its value, another, the budget with that one): half and double of every number."""
    for one in fields(BUDGET):
        value = getattr(BUDGET, one.name)
        if is_dataclass(value):
            for inner in fields(value):
                old = getattr(value, inner.name)
                for new in _half_and_double(inner.name, old):
                    changed = replace(value, **{inner.name: new})
                    yield inner.name, old, new, replace(BUDGET, **{one.name: changed})
        else:
            for new in _half_and_double(one.name, value):
                yield one.name, value, new, replace(BUDGET, **{one.name: new})


def inside_steps() -> Iterator[tuple[str, str, ModuleType, object, object]]:
    """Yields (number, its file, module, its value, another) for every number inside a step."""
    for module, names in INSIDE_STEPS.items():
        for name in names:
            old = getattr(module, name)
            for new in _half_and_double(name, old):
                yield name, module.__name__.split("megatron_cp.plan.")[1], module, old, new


def _half_and_double(name: str, value: object) -> tuple[object, ...]:
    """Returns half and double; of a factor just above 1 what it is above 1, of stage counts one less and one more."""
    if name in WITHOUT:
        assert isinstance(value, int | float)
        return (*_half_and_double("", value), WITHOUT[name])
    if isinstance(value, tuple):
        return value[:-1], (*value, 2 * value[-1])
    if isinstance(value, int):
        return max(1, value // 2), 2 * value
    assert isinstance(value, float)
    if 1 < value < 2:
        return 1 + (value - 1) / 2, 1 + (value - 1) * 2
    return value / 2, value * 2


def row(
    label: list[Cell], cells: list[SearchCell], base: list[float], new: list[float]
) -> list[Cell]:
    """Returns how a budget's plans compare with those of the budget that is used."""
    ratios = [after / before for before, after in zip(base, new, strict=True)]
    worst = ratios.index(max(ratios))
    changed = sum(abs(ratio - 1) > ROUNDING for ratio in ratios)
    return [
        *label,
        f"{geometric_mean(ratios):.4f}",
        f"{max(ratios):.3f}",
        str(cells[worst]) if max(ratios) > 1 + ROUNDING else "",
        f"{min(ratios):.3f}",
        changed,
    ]


def _short(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def main() -> None:
    """Prints the table and writes it."""
    parser = argument_parser(__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="numbers with these names")
    parser.add_argument("--held-out", action="store_true", help="the other half of the cells")
    parser.add_argument("--large", action="store_true", help="40 to 256 ranks, held out")
    parser.add_argument("--every", type=int, default=1, help="one of so many cells")
    arguments = parser.parse_args()
    cells = large_cells() if arguments.large else search_cells()[arguments.held_out :: 2]
    cells = cells[:: arguments.every]
    base = predicted(cells, BUDGET)
    rows: list[list[Cell]] = []
    for name, old, new, budget in variants(arguments.only):
        if arguments.only and name not in arguments.only:
            continue
        rows.append(row([name, _short(old), _short(new)], cells, base, predicted(cells, budget)))
        print(*rows[-1], sep=" | ", flush=True)
    steps: list[list[Cell]] = []
    for name, file, module, old, new in inside_steps():
        if arguments.only and name not in arguments.only:
            continue
        with mock.patch.object(module, name, new):
            found = predicted(cells, BUDGET)
        steps.append(row([f"{file}: {name}", _short(old), _short(new)], cells, base, found))
        print(*steps[-1], sep=" | ", flush=True)
    note = f"{len(cells)} cells; times over those of the budget that is used, geometric mean; below 1 is faster."
    command = "python benchmarks/bench_search.py" + " --large" * arguments.large
    command += " --held-out" * arguments.held_out + f" --every {arguments.every}"
    facts = environment() | {
        "what": "predicted times of plans; no GPU was used",
        "command": command,
    }
    tables = [
        Table("Numbers", COLUMNS, rows, note),
        Table("Numbers inside steps", COLUMNS, steps, note),
    ]
    publish("Search budget", facts, tables, arguments.output)


if __name__ == "__main__":
    main()
