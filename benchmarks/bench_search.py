"""What every number of SearchBudget does: plans at half and at double, on masks of their own.

python benchmarks/bench_search.py --output benchmarks/results/search_<hardware>_<date>     a quarter of an hour
python benchmarks/bench_search.py --only effort far

Times of passes are predicted (forward plus backward of one layer, head dim 128, bf16, topology h100); they were
measured nowhere. Planning times are bench_plan.py's.
"""

import argparse
import os
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before NumPy: planning is measured on one thread

from search_cells import SearchCell, large_cells, search_cells
from timing import Cell, Table, environment, publish

from megatron_cp.config import CPConfig
from megatron_cp.plan.hardware.makespan import makespan_seconds
from megatron_cp.plan.schema import PASSES
from megatron_cp.plan.search.budget import BUDGET, SearchBudget
from megatron_cp.plan.search.choose import best_family
from megatron_cp.plan.study.compare import geometric_mean

ROUNDING = 1e-9
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
        found.append(sum(makespan_seconds(plan, name) for name in PASSES))
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


def _half_and_double(name: str, value: object) -> tuple[object, object]:
    """Returns half and double; of a factor just above 1 what it is above 1, of stage counts one less and one more."""
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
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, help="path of the result without suffix")
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
    note = f"{len(cells)} cells; times over those of the budget that is used, geometric mean; below 1 is faster."
    command = "python benchmarks/bench_search.py" + " --large" * arguments.large
    command += " --held-out" * arguments.held_out + f" --every {arguments.every}"
    facts = environment() | {
        "what": "predicted times of plans; no GPU was used",
        "command": command,
    }
    publish("Search budget", facts, [Table("Numbers", COLUMNS, rows, note)], arguments.output)


if __name__ == "__main__":
    main()
