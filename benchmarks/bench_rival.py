"""Planner "auto" beside MagiAttention's planner in every form that it can be run in, on the held-out search cells.

python benchmarks/bench_rival.py --output benchmarks/results/rival_<hardware>_<date>     two minutes

Last, what it would save our kernels if received rows lay in the order of tokens, as the rival's do: key tiles of the
busiest rank, weighted as `attn/hopper/worklist.py` does; modelled. A pass over the rows to order them is not in
it. Times of passes are predicted (forward plus backward of one layer, head dim 128, bf16, topology h100); they were
measured nowhere. The rival is planned by our own code after its published rules (`plan/schemes/magi.py`,
`plan/study/rival.py`).
"""

import os
from collections.abc import Sequence

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before NumPy: planning is measured on one thread

from search_cells import search_cells
from timing import Cell, Table, argument_parser, environment, publish

from megatron_cp.attn.hopper.worklist import PARTIAL_COST, TILE_COST, forward_work
from megatron_cp.config import CPConfig
from megatron_cp.mask import AttentionMask
from megatron_cp.plan import make_plan
from megatron_cp.plan.hardware.makespan import layer_seconds
from megatron_cp.plan.study.compare import geometric_mean
from megatron_cp.plan.study.rival import (
    FORMS,
    most_slices,
    rival_figures,
    work_in_global_order,
)

TILE = 128


def main() -> None:
    """Prints the tables and writes them."""
    parser = argument_parser(__doc__)
    parser.add_argument("--every", type=int, default=1, help="one of so many cells")
    arguments = parser.parse_args()
    times: dict[str, list[float]] = {form.name: [] for form in FORMS}
    slices: dict[str, list[float]] = {form.name: [] for form in FORMS}
    rows: list[list[Cell]] = []
    reordered: list[float] = []
    for cell in search_cells()[1 :: 2 * arguments.every]:
        mask = cell.build()
        config = CPConfig(num_heads=cell.heads[0], num_kv_heads=cell.heads[1])
        plan = make_plan(mask, cell.ranks, config)
        ours_ms = layer_seconds(plan) * 1e3
        ours = most_slices(plan)
        figures = rival_figures(mask, cell.ranks, config)
        for one in figures:
            times[one.form.name].append(one.predicted_ms / ours_ms)
            slices[one.form.name].append(ours / max(1, one.slices_max))
        rows.append(
            [str(cell), f"{ours_ms:.4g}", *(f"{one.predicted_ms:.4g}" for one in figures), ours,
             most_slices(plan, is_in_global_order=True), *(one.slices_max for one in figures)]
        )  # fmt: skip
        as_planned = tile_work([stage.work for stage in plan.forward.stages])
        reordered.append(as_planned / tile_work(work_in_global_order(plan)))
        print(*rows[-1], f"{reordered[-1]:.3f}", sep=" | ", flush=True)
    names = [form.name for form in FORMS]
    means: list[list[Cell]] = [
        [name, f"{geometric_mean(times[name]):.3f}", f"{min(times[name]):.3f}",
         f"{geometric_mean(slices[name]):.2f}"]
        for name in names
    ]  # fmt: skip
    order: list[Cell] = [f"{geometric_mean(reordered):.3f}", f"{max(reordered):.3f}"]
    columns = ("mask", "ours ms", *(f"{name} ms" for name in names), "our slices",
               "ours in global order", *(f"slices, {name}" for name in names))  # fmt: skip
    facts = environment() | {
        "what": "predicted times of plans; no GPU was used",
        "command": "python benchmarks/bench_rival.py",
    }
    note = f"{len(rows)} cells; geometric means. Slices: most in one stage of a rank, forward."
    summary = ("form", "its time over ours", "least", "our slices over its")
    saved = (
        "Our kernel's tile work as planned, over that with received rows in the order of tokens."
    )
    tables = [
        Table("Forms", summary, means, note),
        Table("Order of received rows", ("geometric mean", "largest"), [order], saved),
        Table("Cells", columns, rows, ""),
    ]
    publish("Rival", facts, tables, arguments.output)


def tile_work(works: Sequence[Sequence[AttentionMask]]) -> float:
    """Returns what the forward kernel visits on the busiest rank, in full key tiles; `works` `[stages][ranks]`."""
    return max(sum(_tiles(mask) for mask in of_rank) for of_rank in zip(*works, strict=True))


def _tiles(mask: AttentionMask) -> float:
    if not mask.num_slices:
        return 0.0
    work = forward_work(mask, TILE, TILE)
    partial = work.num_visits - work.num_full
    return work.num_visits + PARTIAL_COST * partial + TILE_COST * len(work.tiles)


if __name__ == "__main__":
    main()
