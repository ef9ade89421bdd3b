"""Plans of every planner on packed documents: balance, rows moved, predicted time, planning time.

python benchmarks/bench_plan.py --output benchmarks/results/plan_<hardware>_<date>

Writes `.md` and `.json` beside the table that it prints. Predicted milliseconds are those of the cost model
for one attention layer, forward plus backward, on the H100 row of `plan/topology.py`; they were measured
nowhere. Planning time is the median of the processor time of single-threaded planning, which other work on
the machine does not add to.
"""

import argparse
import json
import os
import platform
import statistics
import time
from datetime import datetime, timezone
from pathlib import Path

import numpy as np

from megatron_cp import mask as masks
from megatron_cp.config import CPConfig
from megatron_cp.mask import AttentionMask
from megatron_cp.plan import PLANNERS, AttentionPlan, make_plan
from megatron_cp.plan.schemes.ulysses import fits_heads

GROUPS = ((2, 1 << 13), (8, 1 << 18), (16, 1 << 19), (64, 1 << 20))  # ranks, tokens
HEADS = ((32, 32), (32, 8))  # query heads, key/value heads: rho = 1 and 1/4
COLUMNS = (
    "ranks",
    "tokens",
    "documents",
    "heads",
    "planner",
    "imbalance",
    "volume mean",
    "volume max",
    "predicted ms",
    "x load bound",
    "planning ms",
)


def draw_lengths(kind: str, num_tokens: int) -> list[int]:
    """Returns document lengths that fill `num_tokens`, the last one cut."""
    rng = np.random.default_rng(0)
    longest = num_tokens // 16
    draw = {
        "log-normal": lambda: int(rng.lognormal(8, 1.6)) + 1,
        "uniform": lambda: int(rng.integers(longest // 4, longest)),
        "short": lambda: int(rng.integers(64, 1024)),
        "one": lambda: num_tokens,
        "half in one": lambda: int(rng.integers(64, 4096)),
    }[kind]
    lengths = [num_tokens // 2] if kind == "half in one" else []
    while sum(lengths) < num_tokens:
        lengths.append(min(draw(), num_tokens - sum(lengths)))
    return lengths


def planning_ms(mask: AttentionMask, cp_size: int, config: CPConfig, rounds: int) -> float:
    """Returns the median processor time of `make_plan` after one warm-up call."""
    make_plan(mask, cp_size, config)
    times = []
    for _ in range(rounds):
        started = time.process_time()
        make_plan(mask, cp_size, config)
        times.append((time.process_time() - started) * 1e3)
    return statistics.median(times)


def row_of(plan: AttentionPlan, kind: str, took_ms: float) -> dict[str, object]:
    """Returns one line of the table: forward figures, and the predicted time of both passes."""
    forward, backward = plan.stats("forward"), plan.stats("backward")
    predicted = forward["makespan_ms"] + backward["makespan_ms"]
    values = (
        plan.cp_size,
        plan.num_tokens,
        kind,
        f"{plan.config.num_heads}/{plan.config.num_kv_heads}",
        plan.planner,
        round(forward["imbalance"], 3),
        round(forward["volume_mean"], 2),
        round(forward["volume_max"], 2),
        float(f"{predicted:.4g}"),
        round(predicted / (forward["bound_ms"] + backward["bound_ms"]), 2),
        round(took_ms, 1),
    )
    return dict(zip(COLUMNS, values, strict=True))


def measure(rounds: int, largest: int) -> list[dict[str, object]]:
    """Returns the table, our planner first in each block."""
    rows = []
    for cp_size, num_tokens in GROUPS:
        for kind in ("log-normal", "uniform", "short", "half in one", "one"):
            if cp_size > largest:
                continue
            mask = masks.documents(draw_lengths(kind, num_tokens))
            for heads, kv_heads in HEADS:
                for planner in sorted(PLANNERS, key=lambda name: (name != "auto", name)):
                    config = CPConfig(planner=planner, num_heads=heads, num_kv_heads=kv_heads)
                    if planner == "ulysses" and not fits_heads(cp_size, config):
                        continue
                    took_ms = planning_ms(mask, cp_size, config, rounds)
                    rows.append(row_of(make_plan(mask, cp_size, config), kind, took_ms))
                    print(*rows[-1].values(), sep=" | ", flush=True)
    return rows


def main() -> None:
    """Prints the table and writes it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, help="path of the result without suffix")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hardware", default=platform.processor() or platform.machine())
    parser.add_argument("--largest", type=int, default=64, help="largest number of ranks")
    arguments = parser.parse_args()
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    rows = measure(arguments.rounds, arguments.largest)
    facts = {
        "what": "packed causal documents; volumes forward, in units of one rank's query rows",
        "date": datetime.now(timezone.utc).date().isoformat(),
        "predicted": "one layer, forward + backward, head dim 128, bf16, topology h100; no GPU was used",
        "hardware": f"{arguments.hardware} (for planning ms: processor time, one thread)",
        "software": f"Python {platform.python_version()}, NumPy {np.__version__}",
        "protocol": f"median of {arguments.rounds} after one warm-up",
        "load of the machine": load,
        "command": "python benchmarks/bench_plan.py",
    }
    if arguments.output:
        lines = ["# Plans", "", *(f"- {name}: {value}" for name, value in facts.items()), ""]
        lines += [f"| {' | '.join(COLUMNS)} |", "|---:|---:|---|---|---|" + "---:|" * 6]
        lines += [f"| {' | '.join(str(value) for value in row.values())} |" for row in rows]
        arguments.output.with_suffix(".md").write_text("\n".join(lines) + "\n")
        text = json.dumps({"facts": facts, "rows": rows}, indent=1)
        arguments.output.with_suffix(".json").write_text(text + "\n")


if __name__ == "__main__":
    main()
