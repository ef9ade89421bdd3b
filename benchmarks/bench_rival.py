"""Planner "auto" beside MagiAttention's planner in every form that it can be run in, on the held-out search cells.

python benchmarks/bench_rival.py --output benchmarks/results/rival_<hardware>_<date>     two minutes

Times of passes are predicted (forward plus backward of one layer, head dim 128, bf16, topology h100); they were
measured nowhere. The rival is planned by our own code after its published rules (`plan/schemes/magi.py`,
`plan/study/rival.py`).
"""

import argparse
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before NumPy: planning is measured on one thread

from search_cells import search_cells
from timing import Cell, Table, environment, publish

from megatron_cp.config import CPConfig
from megatron_cp.plan import make_plan
from megatron_cp.plan.hardware.makespan import makespan_seconds
from megatron_cp.plan.schema import PASSES
from megatron_cp.plan.study.compare import geometric_mean
from megatron_cp.plan.study.rival import FORMS, most_slices, rival_figures


def main() -> None:
    """Prints the tables and writes them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, help="path of the result without suffix")
    parser.add_argument("--every", type=int, default=1, help="one of so many cells")
    arguments = parser.parse_args()
    times: dict[str, list[float]] = {form.name: [] for form in FORMS}
    slices: dict[str, list[float]] = {form.name: [] for form in FORMS}
    rows: list[list[Cell]] = []
    for cell in search_cells()[1 :: 2 * arguments.every]:
        mask = cell.build()
        config = CPConfig(num_heads=cell.heads[0], num_kv_heads=cell.heads[1])
        plan = make_plan(mask, cell.ranks, config)
        ours_ms = sum(makespan_seconds(plan, name) for name in PASSES) * 1e3
        ours = most_slices(plan)
        figures = rival_figures(mask, cell.ranks, config)
        for one in figures:
            times[one.form.name].append(one.predicted_ms / ours_ms)
            slices[one.form.name].append(ours / max(1, one.slices_max))
        rows.append(
            [str(cell), f"{ours_ms:.4g}", *(f"{one.predicted_ms:.4g}" for one in figures), ours,
             most_slices(plan, is_in_global_order=True), *(one.slices_max for one in figures)]
        )  # fmt: skip
        print(*rows[-1], sep=" | ", flush=True)
    names = [form.name for form in FORMS]
    means: list[list[Cell]] = [
        [name, f"{geometric_mean(times[name]):.3f}", f"{min(times[name]):.3f}",
         f"{geometric_mean(slices[name]):.2f}"]
        for name in names
    ]  # fmt: skip
    columns = ("mask", "ours ms", *(f"{name} ms" for name in names), "our slices",
               "ours in global order", *(f"slices, {name}" for name in names))  # fmt: skip
    facts = environment() | {
        "what": "predicted times of plans; no GPU was used",
        "command": "python benchmarks/bench_rival.py",
    }
    note = f"{len(rows)} cells; geometric means. Slices: most in one stage of a rank, forward."
    summary = ("form", "its time over ours", "least", "our slices over its")
    tables = [Table("Forms", summary, means, note), Table("Cells", columns, rows, "")]
    publish("Rival", facts, tables, arguments.output)


if __name__ == "__main__":
    main()
