"""Plans of cross attention on masks drawn at random: over both sides in order, and without what the search tries.

python benchmarks/bench_cross.py --output benchmarks/results/cross_<hardware>_<date>     a quarter of an hour

The numbers of the search were set on masks of other draws. Each mask has documents of queries that see documents of
keys in full. Times are predicted (forward plus backward of one layer, head dim 128, bf16, topology h100);
they were measured nowhere.
"""

import os
import statistics
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before NumPy: planning is measured on one thread

import numpy as np
from timing import Cell, Table, argument_parser, environment, publish

from megatron_cp import mask as masks
from megatron_cp.config import CPConfig
from megatron_cp.mask import AttentionMask
from megatron_cp.plan.hardware.makespan import layer_seconds
from megatron_cp.plan.price.pairs_move import stay_at_home
from megatron_cp.plan.schemes.gather import plan_contiguous_cross
from megatron_cp.plan.search import cross, strategies
from megatron_cp.plan.search.budget import BUDGET, SearchBudget
from megatron_cp.plan.study.compare import geometric_mean

SEEDS = {"first draw": 20261125, "second draw": 20261126}
NUM_DRAWN = 60
RANKS = (4, 6, 8, 9, 11, 12, 16, 17, 23, 24, 32, 40, 48, 64)
HEADS = ((32, 32), (64, 8), (32, 4))


@dataclass(frozen=True)
class CrossCell:
    """One mask on some ranks."""

    ranks: int
    num_documents: int
    heads: tuple[int, int]
    mask: AttentionMask

    def __str__(self) -> str:
        mask, heads = self.mask, ":".join(map(str, self.heads))
        return (
            f"{mask.num_queries:,} queries, {mask.num_keys:,} keys, {self.num_documents} documents, "
            f"{self.ranks} ranks, {heads}"
        )

    @property
    def config(self) -> CPConfig:
        """Returns the settings of its plans."""
        return CPConfig(num_heads=self.heads[0], num_kv_heads=self.heads[1], topology="h100")


def draw(seed: int) -> list[CrossCell]:
    """Returns cells: ranks, rows of each side per rank, documents and where they end, heads."""
    rng, cells = np.random.default_rng(seed), []
    for _ in range(NUM_DRAWN):
        ranks, count = int(rng.choice(RANKS)), int(rng.choice((1, 4, 16, 64)))
        queries = ranks * int(rng.choice((64, 256, 1024, 4096)))
        keys = ranks * int(rng.choice((256, 1024, 4096, 16384)))
        (q, q_end), (k, k_end) = (_documents(rng, size, count) for size in (queries, keys))
        rows = [(*one, None, None) for one in zip(q, q_end, k, k_end, strict=True)]
        heads = HEADS[rng.integers(len(HEADS))]
        cells.append(CrossCell(ranks, count, heads, masks.from_slices(queries, keys, rows)))
    return cells


def _documents(rng: np.random.Generator, size: int, count: int) -> tuple[list[int], list[int]]:
    """Returns where documents begin and end."""
    cuts = np.sort(rng.choice(np.arange(1, size), count - 1, replace=False)).tolist()
    return [0, *cuts], [*cuts, size]


def planned(cells: list[CrossCell], budget: SearchBudget = BUDGET) -> tuple[list[float], float]:
    """Returns the predicted seconds of every cell, and the mean processor time of planning in ms."""
    started, found = time.process_time(), []
    for cell in cells:
        plan = cross.best_cross(cell.mask, cell.ranks, cell.config, {}, budget)
        found.append(layer_seconds(plan))
    return found, (time.process_time() - started) / len(cells) * 1e3


def variants() -> Iterator[tuple[str, SearchBudget, AbstractContextManager[object]]]:
    """Yields (what is changed, the budget, the change of code that goes with it)."""
    yield "nothing", BUDGET, nullcontext()
    for name, values in (
        ("moved_starts", (0, 2, 8)),
        ("near_starts", (0, 1, 4)),
        ("most_near_groups", (16, 64)),
    ):
        for value in values:
            yield f"{name} {value}", replace(BUDGET, **{name: value}), nullcontext()
    at_home = mock.patch.object(strategies, "go_to_keys", stay_at_home)
    yield "never with the keys", BUDGET, at_home
    yield "keys never placed first", BUDGET, mock.patch.object(cross, "SIDES", ("q",))


def numbers(cells: dict[str, list[CrossCell]]) -> tuple[list[list[Cell]], dict[str, list[float]]]:
    """Returns a row for each variant, and the seconds of the search as it is, which is the first of them.

    A row has times over these, and the mean planning time.
    """
    base: dict[str, list[float]] = {}
    rows: list[list[Cell]] = []
    for name, budget, change in variants():
        row: list[Cell] = [name]
        milliseconds = []
        with change:
            for draw_name, some in cells.items():
                found, took = planned(some, budget)
                milliseconds.append(took)
                before = base.setdefault(draw_name, found)
                ratios = [new / old for old, new in zip(before, found, strict=True)]
                row += [f"{geometric_mean(ratios):.3f}", f"{max(ratios):.2f}", f"{min(ratios):.3f}"]
        rows.append([*row, statistics.mean(milliseconds)])
        print(*rows[-1], sep=" | ", flush=True)
    return rows, base


def over_in_order(
    cells: dict[str, list[CrossCell]], base: dict[str, list[float]]
) -> list[list[Cell]]:
    """Returns a row for each cell: time, and over the plan that leaves both sides in order."""
    rows: list[list[Cell]] = []
    for draw_name, some in cells.items():
        for cell, ours in zip(some, base[draw_name], strict=True):
            in_order = plan_contiguous_cross(cell.mask, cell.ranks, cell.config, {})
            ratio = ours / layer_seconds(in_order)
            rows.append([str(cell), draw_name, ours * 1e3, f"{ratio:.3f}"])
    return rows


def main() -> None:
    """Prints the tables and writes them."""
    arguments = argument_parser(__doc__).parse_args()
    facts = environment() | {
        "what": "predicted times of plans, and processor time of planning; no GPU was used",
        "command": "python benchmarks/bench_cross.py",
    }
    cells = {name: draw(seed) for name, seed in SEEDS.items()}
    columns = [f"{name}: {what}" for name in SEEDS for what in ("time", "worst", "best")]
    tried, base = numbers(cells)
    every = over_in_order(cells, base)
    mean = geometric_mean([float(str(row[-1])) for row in every])
    tables = [
        Table("What the search tries", ("changed", *columns, "planning, ms"), tried),
        Table("Every mask", ("mask", "drawn", "ms", "over in order"), every, f"Geometric mean {mean:.3f}."),
    ]  # fmt: skip
    publish("Cross attention", facts, tables, arguments.output)


if __name__ == "__main__":
    main()
