"""Every planner on a grid of workloads, masks, heads, ranks and lengths; then the goals of the planner.

python benchmarks/bench_plan.py --output benchmarks/results/plan_<hardware>_<date>     half an hour
python benchmarks/bench_plan.py --only-drawn --output benchmarks/results/plan_drawn_<hardware>_<date>     ten minutes
python benchmarks/bench_plan.py --full --output ...                                      many hours

Times of passes are predicted by the cost model (forward plus backward of one layer, head dim 128, bf16) and
simulated; they were measured nowhere. Planning times are processor times of one thread on this machine.
Cells that we lose stay in the table and are marked. A scheme with a stage per rank is priced from below beyond
128 ranks (its best case); so the comparison is never unfair to it. MagiAttention's gradients travel in 16 bits, its
default, ours in fp32; it stands twice, straight and with its hierarchical group-cast.

The grid was written by hand, and some numbers of the search were judged on it. So there are cells besides that were
drawn by a seed, which stood here before any of them had been planned. They are reported apart. What the first draw
(seed 20261125) showed was mended: compute did not move where ranks do not divide into nodes. So there was a second
(seed 20261126). Two of its cells became slow when the search was made one for all kinds of attention; that was mended,
so there is a third.
"""

import argparse
import itertools
import os
import resource
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before NumPy: planning is measured on one thread

import numpy as np
from plan_goals import goals_table
from timing import Cell, Table, argument_parser, environment, publish

from megatron_cp.config import CPConfig
from megatron_cp.plan import PLANNERS
from megatron_cp.plan.study.compare import Outcome, best_other, compare, geometric_mean
from megatron_cp.plan.study.rival import in_16_bits
from megatron_cp.plan.study.workloads import TRAINING_MASKS, named_mask

HEADS = ("64:8", "32:8", "32:32")
WORKLOADS = tuple(f"W{number}" for number in range(1, 9))
DENSE = ("full", "causal", "prefix_lm_causal", "global_sliding_window")
SPARSE = (
    "sliding_window",
    "sliding_window_causal",
    "block_causal_document",
    "uniform_block_sparse",
    "variable_block_sparse",
    "strided",
    "global_local",
    "star",
    "streaming",
)
MEMORY_LIMIT = 8 << 30  # a plan that needs more is a refusal, not the end of the run
LOSS = 1 + 1e-6  # rounding of sums in another order


@dataclass(frozen=True)
class GridCell:
    """One comparison."""

    mask: str
    workload: str
    ranks: int
    tokens: int
    heads: str
    seed: int = 0

    @property
    def group(self) -> str:
        """Returns "dense", "documents" or "sparse"; one whole document is dense."""
        if self.mask in DENSE or (self.workload == "W6" and self.mask.endswith("_document")):
            return "dense"
        return "sparse" if self.mask in SPARSE else "documents"

    @property
    def name(self) -> str:
        """Returns the mask, with the documents that it is made of."""
        return f"{self.mask} {self.workload}" if self.workload else self.mask


SIZES = ((8, 1 << 18), (16, 1 << 17), (64, 1 << 18), (64, 1 << 20))  # ranks, tokens
LARGE = ((256, 1 << 22), (1024, 1 << 22))
LARGEST = ((8, 1 << 15), (1024, 1 << 24), (4096, 1 << 24))  # and smallest: in the whole grid only


def whole_grid() -> Iterator[GridCell]:
    """Yields every workload under every mask of packed training, and every other mask."""
    for size, heads in itertools.product((*SIZES, *LARGE, *LARGEST), HEADS):
        for workload, mask in itertools.product(WORKLOADS, TRAINING_MASKS):
            yield GridCell(mask, workload, *size, heads)
        for mask in (*DENSE, *SPARSE):
            yield GridCell(mask, "", *size, heads)


def small_grid() -> Iterator[GridCell]:
    """Yields what a short run can hold: documents first, then whole masks, then many ranks."""
    for size, workload in itertools.product((SIZES[0], SIZES[1], SIZES[3]), WORKLOADS):
        for heads in HEADS if size[0] == 64 else ("64:8", "32:32"):
            yield GridCell("causal_document", workload, *size, heads)
    for mask in (*TRAINING_MASKS[1:], "causal_blockwise", "prefix_lm_document"):
        yield GridCell(mask, "W1", *SIZES[1], "64:8")
        yield GridCell(mask, "W1", *SIZES[3], "32:32")
    for size, mask in itertools.product(SIZES[1:3], (*DENSE, *SPARSE)):
        for heads in ("64:8", "32:32"):
            yield GridCell(mask, "", *size, heads)
    for heads in ("64:8", "32:32"):
        for workload in WORKLOADS:
            yield GridCell("causal_document", workload, *LARGE[0], heads)
        for mask in ("causal", "strided"):
            yield GridCell(mask, "", *LARGE[0], heads)
    for workload in WORKLOADS:
        yield GridCell("causal_document", workload, *LARGE[1], "64:8")
    yield GridCell("causal", "", *LARGE[1], "32:32")


DRAWN_SEED, NUM_DRAWN = 20261127, 60
# Heads of published models.
DRAWN_HEADS = ("64:8", "32:8", "32:32", "40:8", "28:4", "16:16", "48:4", "96:8")
DRAWN_RANKS, DRAWN_TOKENS = (4, 128), (1 << 14, 1 << 20)


def drawn_grid() -> Iterator[GridCell]:
    """Yields cells drawn at random: no number of the search was, or is to be, set or judged on them."""
    draw = np.random.default_rng(DRAWN_SEED)
    every = (*TRAINING_MASKS, "causal_blockwise", "prefix_lm_document", *DENSE, *SPARSE)
    for seed in range(1, NUM_DRAWN + 1):
        mask = every[draw.integers(len(every))]
        has_documents = mask not in (*DENSE, *SPARSE)
        workload = WORKLOADS[draw.integers(len(WORKLOADS))] if has_documents else ""
        ranks, tokens = (
            round(float(np.exp(draw.uniform(*np.log(limits)))))
            for limits in (DRAWN_RANKS, DRAWN_TOKENS)
        )
        heads = DRAWN_HEADS[draw.integers(len(DRAWN_HEADS))]
        yield GridCell(mask, workload, ranks, tokens, heads, seed)


def measure(cell: GridCell, planners: list[str]) -> list[Outcome]:
    """Returns what every planner makes of a cell."""
    num_heads, num_kv_heads = map(int, cell.heads.split(":"))
    config = CPConfig(num_heads=num_heads, num_kv_heads=num_kv_heads, topology="h100")
    mask = named_mask(cell.mask, cell.tokens, workload=cell.workload or "longca", seed=cell.seed)
    return [in_16_bits(one) for one in compare(mask, cell.ranks, config, planners)]


CELL_COLUMNS = (
    "mask",
    "ranks",
    "tokens",
    "heads",
    "ours ms",
    "best other",
    "its ms",
    "times faster",
    "simulated ms",
    "times faster there",
    "x bound",
    "imbalance",
    "volume mean",
    "max",
    "slices",
    "sends",
    "planning ms",
)


def cell_row(cell: GridCell, outcomes: list[Outcome]) -> list[Cell]:
    """Returns the line of a cell: ours, and the best of the others."""
    ours, other = outcomes[0], best_other(outcomes)
    in_simulation = simulated_ratio(outcomes)
    where: list[Cell] = [cell.name, cell.ranks, _tokens(cell.tokens), cell.heads]
    if ours.refusal:
        return [*where, *[ours.refusal] * (len(CELL_COLUMNS) - len(where))]
    baseline: list[Cell] = ["none", "", ""]
    if other is not None:
        ratio = other.predicted_ms / ours.predicted_ms
        lost = " LOST" if is_lost(outcomes) else ""
        least = ">= " if other.is_best_case else ""
        baseline = [other.planner, f"{least}{_ms(other.predicted_ms)}", f"{ratio:.2f}{lost}"]
    return [
        *where,
        _ms(ours.predicted_ms),
        *baseline,
        _ms(ours.simulated_ms),
        f"{in_simulation:.2f}{' LOST' if is_lost(outcomes, is_simulated=True) else ''}",
        f"{ours.gap:.2f}",
        f"{ours.imbalance:.3f}",
        f"{ours.volume_mean:.2f}",
        f"{ours.volume_max:.2f}",
        int(ours.slices_max),
        int(ours.messages_max),
        f"{ours.plan_ms:.0f}",
    ]


def planner_table(
    title: str, results: list[tuple[GridCell, list[Outcome]]], planners: list[str]
) -> Table:
    """Returns each planner's predicted time over ours, per group of masks."""
    rows: list[list[Cell]] = []
    for place, planner in enumerate(planners):
        ratios: dict[str, list[float]] = {"dense": [], "documents": [], "sparse": []}
        imbalances, took = [], []
        for cell, outcomes in results:
            one, ours = outcomes[place], outcomes[0]
            if not one.refusal and not ours.refusal:
                ratios[cell.group].append(one.predicted_ms / ours.predicted_ms)
                if not one.is_best_case:
                    imbalances.append(one.imbalance)
                    took.append(one.plan_ms)
        count = sum(map(len, ratios.values()))
        means = [f"{geometric_mean(values):.2f}" if values else "" for values in ratios.values()]
        everything = geometric_mean(itertools.chain(*ratios.values()))
        rows.append(
            [
                planner,
                count,
                *means,
                everything,
                max(imbalances, default=0.0),
                max(took, default=0.0),
            ]
        )
    columns = ("planner", "cells", "dense", "documents", "sparse", "all", "worst imbalance",
               "longest planning ms")  # fmt: skip
    note = (
        "Geometric mean of predicted time over ours; cells that a planner serves. Gradients of magi and "
        "magi_hierarchical in 16 bits, its default."
    )
    return Table(title, columns, rows, note)


def is_lost(outcomes: list[Outcome], *, is_simulated: bool = False) -> bool:
    """Returns whether a plan of another planner is faster; a price from below is no plan."""
    built = [one for one in outcomes if not one.is_best_case]
    ours, other = outcomes[0], best_other(built, is_simulated=is_simulated)
    if other is None:
        return False
    if is_simulated:
        return ours.simulated_ms > LOSS * other.simulated_ms
    return ours.predicted_ms > LOSS * other.predicted_ms


def predicted_ratio(outcomes: list[Outcome]) -> float:
    """Returns the predicted time of the best other planner over ours."""
    other = best_other(outcomes)
    return other.predicted_ms / outcomes[0].predicted_ms if other else 1.0


def simulated_ratio(outcomes: list[Outcome]) -> float:
    """Returns the simulated time of the planner that is best in the simulation over ours."""
    other = best_other(outcomes, is_simulated=True)
    return other.simulated_ms / outcomes[0].simulated_ms if other else 1.0


def summary_table(title: str, results: list[tuple[GridCell, list[Outcome]]]) -> Table:
    """Returns how we stand against the best other planner and the bound, per group."""
    rows: list[list[Cell]] = []
    for group in ("dense", "documents", "sparse", "all"):
        kept = [
            outcomes
            for cell, outcomes in results
            if group in (cell.group, "all") and not outcomes[0].refusal and best_other(outcomes)
        ]
        if not kept:
            continue
        ratios = [predicted_ratio(outcomes) for outcomes in kept]
        simulated = [simulated_ratio(outcomes) for outcomes in kept]
        gaps = [outcomes[0].gap for outcomes in kept]
        rows.append(
            [
                group,
                len(kept),
                sum(map(is_lost, kept)),
                geometric_mean(ratios),
                min(ratios),
                max(ratios),
                sum(is_lost(outcomes, is_simulated=True) for outcomes in kept),
                geometric_mean(simulated),
                geometric_mean(gaps),
                max(gaps),
            ]
        )
    columns = (
        "masks", "cells", "lost", "times faster", "least", "most", "simulated: lost", "times faster",
        "x bound", "worst x bound",
    )  # fmt: skip
    note = "Against the best other planner in each cell, which may differ from cell to cell."
    return Table(title, columns, rows, note)


def _tokens(count: int) -> str:
    return f"{count >> 20}M" if count >= 1 << 20 else f"{count >> 10}K"


def _ms(value: float) -> str:
    return f"{value:.4g}"


def run(cells: list[GridCell], planners: list[str]) -> list[tuple[GridCell, list[Outcome]]]:
    """Returns all results, printing a line each."""
    results = []
    for cell in cells:
        outcomes = measure(cell, planners)
        print(*cell_row(cell, outcomes), sep=" | ", flush=True)
        kept = [Outcome(**{**vars(one), "plan": None}) for one in outcomes]
        results.append((cell, kept))
    return results


def main() -> None:
    """Prints the tables and writes them."""
    parser = argument_parser(__doc__)
    parser.add_argument("--full", action="store_true", help="the whole grid")
    parser.add_argument("--only", default="", help="cells whose name holds this")
    parser.add_argument("--ranks", type=int, nargs="*", help="cells with these numbers of ranks")
    parser.add_argument("--no-goals", action="store_true", help="the grid alone")
    parser.add_argument("--no-grid", action="store_true", help="the goals alone")
    parser.add_argument("--only-drawn", action="store_true", help="the drawn cells alone")
    arguments = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    started = time.perf_counter()
    planners = sorted(PLANNERS, key=lambda name: (name != "auto", name))
    grids = {
        "grid": whole_grid() if arguments.full else small_grid(),
        "drawn cells": drawn_grid(),
    }
    if arguments.only_drawn:
        del grids["grid"]
    facts = environment()
    results = {
        name: [] if arguments.no_grid else run(_chosen(cells, arguments), planners)
        for name, cells in grids.items()
    }
    has_goals = not (arguments.no_goals or arguments.only_drawn)
    tables = [goals_table(results["grid"])] if has_goals else []
    for name, found in results.items():
        if found:
            tables.append(summary_table(f"Summary, {name}", found))
            tables.append(planner_table(f"Planners, {name}", found, planners))
    facts |= {
        "what": "predicted and simulated times of plans; no GPU was used",
        "drawn cells": f"{NUM_DRAWN}, by seed {DRAWN_SEED}; nothing was set or judged on them",
        "times": "one layer, forward + backward, head dim 128, bf16, topology h100",
        "planning ms": "processor time of one thread, one call",
        "took": f"{(time.perf_counter() - started) / 60:.1f} minutes",
        "command": "python benchmarks/bench_plan.py"
        + " --full" * arguments.full
        + " --only-drawn" * arguments.only_drawn,
    }
    note = "Volumes forward, in units of a rank's query rows."
    for name, found in results.items():
        rows = [cell_row(cell, outcomes) for cell, outcomes in found]
        tables.append(Table(f"Cells, {name}", CELL_COLUMNS, rows, note))
    details = [
        {"grid": name, "cell": asdict(cell), "outcomes": [_plain(one) for one in outcomes]}
        for name, found in results.items()
        for cell, outcomes in found
    ]
    publish("Plans", facts, tables, arguments.output, details)


def _chosen(cells: Iterator[GridCell], arguments: argparse.Namespace) -> list[GridCell]:
    return [
        cell
        for cell in cells
        if arguments.only in cell.name and (not arguments.ranks or cell.ranks in arguments.ranks)
    ]


def _plain(one: Outcome) -> dict[str, object]:
    """Returns what JSON can hold: no plan, no NaN, six digits."""
    values = {name: value for name, value in vars(one).items() if name != "plan"}
    return {
        name: float(f"{value:.6g}") if isinstance(value, float) else value
        for name, value in values.items()
        if value == value and value != ""
    }


if __name__ == "__main__":
    main()
