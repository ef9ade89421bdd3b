"""What it gains to know the machine: ranks of different speed, levels beyond nodes, shared network ports.

python benchmarks/bench_machines.py --output benchmarks/results/machines_<hardware>_<date>     a minute

Times are predicted (forward plus backward of one layer, 32 query and 8 key heads of 128, bf16, rates of h100); they
were measured nowhere. "Unaware": the plan for ranks of speed 1, two levels and a port per rank, priced on the machine
as it is.
"""

import os
from dataclasses import replace

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before NumPy

from timing import Cell, Table, argument_parser, environment, publish

from megatron_cp import mask as masks
from megatron_cp.config import CPConfig, Level
from megatron_cp.mask import AttentionMask
from megatron_cp.plan import AttentionPlan, make_plan
from megatron_cp.plan.hardware.cost import load_bound_seconds
from megatron_cp.plan.hardware.makespan import layer_seconds
from megatron_cp.plan.hardware.topology import get_topology
from megatron_cp.plan.schema import PASSES
from megatron_cp.plan.study.workloads import document_lengths

PLAIN = CPConfig(num_heads=32, num_kv_heads=8, topology=get_topology("h100"))
SIZES = ((8, 128 << 10), (16, 128 << 10), (64, 512 << 10))  # ranks, tokens
MACHINES = {
    "racks of 16, 15 GB/s out of them": {"outer_levels": (Level(16, 15.0, 30.0),)},
    "4 ports per node of 8": {"nics_per_node": 4},
}


def named_masks(num_tokens: int) -> dict[str, AttentionMask]:
    """Returns the masks of every table."""
    packs = {
        f"documents {name}": masks.documents(document_lengths(name, num_tokens, 1))
        for name in ("W1", "W2", "W3", "W4")
    }
    window = masks.sliding_window(num_tokens, 4096)
    return {
        "causal": masks.causal(num_tokens),
        "full": masks.full(num_tokens),
        "window 4K": window,
        **packs,
    }


def seconds(plan: AttentionPlan, config: CPConfig) -> float:
    """Returns the predicted time of a plan on a machine."""
    return layer_seconds(replace(plan, config=config))


def slow_rank(num_ranks: int, num_tokens: int) -> list[list[Cell]]:
    """Returns a row for each mask: the last rank computes half as fast."""
    rows: list[list[Cell]] = []
    config = replace(PLAIN, rank_speeds=(1.0,) * (num_ranks - 1) + (0.5,))
    for name, mask in named_masks(num_tokens).items():
        plan, unaware = make_plan(mask, num_ranks, config), make_plan(mask, num_ranks, PLAIN)
        fair = sum(load_bound_seconds(mask, num_ranks, config, one) for one in PASSES)
        ours, theirs = seconds(plan, config), seconds(unaware, config)
        alike = seconds(unaware, PLAIN) / sum(
            load_bound_seconds(mask, num_ranks, PLAIN, one) for one in PASSES
        )
        row = f"{name}, {num_ranks} ranks, {num_tokens >> 10}K"
        rows.append([row, ours * 1e3, f"{ours / fair:.3f}", f"{alike:.3f}", f"{theirs / ours:.3f}"])
    return rows


def other_machines(num_ranks: int, num_tokens: int) -> list[list[Cell]]:
    """Returns a row for each machine and mask."""
    rows: list[list[Cell]] = []
    for machine, changes in MACHINES.items():
        config = replace(PLAIN, topology=replace(get_topology("h100"), name=machine, **changes))
        for name, mask in named_masks(num_tokens).items():
            plan, unaware = make_plan(mask, num_ranks, config), make_plan(mask, num_ranks, PLAIN)
            ours, theirs = seconds(plan, config), seconds(unaware, config)
            row = f"{name}, {num_ranks} ranks, {num_tokens >> 10}K"
            rows.append([f"{machine}: {row}", ours * 1e3, f"{theirs / ours:.3f}"])
    return rows


def main() -> None:
    """Prints the tables and writes them."""
    arguments = argument_parser(__doc__).parse_args()
    facts = environment() | {
        "what": "predicted times of plans; no GPU was used",
        "command": "python benchmarks/bench_machines.py",
    }
    slow = [row for size in SIZES for row in slow_rank(*size)]
    fair = "Fair: the time of all pairs at the sum of speeds, nothing moved."
    columns = ("mask", "ms", "over fair", "over fair, all ranks alike", "unaware over aware")
    tables = [
        Table("One rank at half speed", columns, slow, fair),
        Table(
            "Levels and ports", ("machine", "ms", "unaware over aware"), other_machines(*SIZES[-1])
        ),
    ]
    publish("Machines", facts, tables, arguments.output)


if __name__ == "__main__":
    main()
