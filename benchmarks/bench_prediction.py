"""Predicted against executed time of plans on CPU ranks (gloo): how far the cost model can be trusted.

python benchmarks/bench_prediction.py --output benchmarks/results/prediction_<hardware>_<date>

In every round each number of ranks measures itself, all ranks at once (local attention by slice shape, all-to-all
by size), and executes every plan through `cp_attention`, forward and backward; of each the least time over the
rounds counts. The calibration becomes a profile file as a user would write it, and every plan is compared with
the time that the profile predicts: by the cost model, and by the simulation with and without overlap.

Two clocks: the wall, and the processor time of a rank (all its threads), which other work on the machine adds less
to; the latter knows no waiting and no overlap, so it is compared with the plain sum of compute and transfers.
"""

import contextlib
import datetime
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from timing import Cell, Table, argument_parser, environment, publish

from megatron_cp import mask as masks
from megatron_cp.api import cp_attention
from megatron_cp.config import CPConfig, Topology
from megatron_cp.mask import AttentionMask
from megatron_cp.measure.links import fitted
from megatron_cp.measure.rates import Heads, kernel_calls, rate_table
from megatron_cp.plan import PLANNERS, AttentionPlan, make_plan
from megatron_cp.plan.hardware.simulate import simulate_pass
from megatron_cp.plan.hardware.topology import load_profile
from megatron_cp.plan.schema import PassName
from megatron_cp.plan.study.workloads import document_lengths

HEADS, KV_HEADS, DIM = 4, 4, 64
SHAPE = Heads(HEADS, KV_HEADS, DIM, torch.float32, torch.device("cpu"))
SHAPES = (64, 256, 1024, 2048)
MESSAGE_BYTES = (1 << 12, 1 << 18, 1 << 22)
PASSES: tuple[PassName, PassName] = ("forward", "backward")
WALL, PROCESSOR = 0, 1
Clocks = list[float]  # wall and processor seconds
CHOSEN = (
    "auto", "contiguous", "zigzag", "allgather", "ulysses", "double_ring", "distflashattn", "magi",
)  # fmt: skip


def tensors(rows: int, heads: int, seed: int) -> torch.Tensor:
    """Returns fp32 rows `[rows, heads, DIM]`."""
    return torch.randn(rows, heads, DIM, generator=torch.Generator().manual_seed(seed))


def slowest(call: Callable[[], object]) -> Clocks:
    """Returns wall and processor seconds of the slowest rank."""
    dist.barrier()
    started = time.perf_counter(), time.process_time()
    call()
    worst = torch.tensor([time.perf_counter() - started[0], time.process_time() - started[1]])
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.tolist()


class Least:
    """Named calls, each with the least wall and processor time so far."""

    def __init__(self, calls: dict[Any, Callable[[], object]]):
        self.calls = calls
        self.clocks: dict[Any, Clocks] = {name: [np.inf, np.inf] for name in calls}

    def run(self) -> None:
        """Runs every call once, in order."""
        for name, call in self.calls.items():
            self.clocks[name] = list(map(min, self.clocks[name], slowest(call)))


# ---------------------------------------------------------------------- calibration


def link_calls(world_size: int) -> dict[Any, Callable[[], object]]:
    """Returns all-to-alls by bytes that a rank sends to others."""

    def exchange(size: int) -> Callable[[], object]:
        sent = torch.zeros(size * world_size, dtype=torch.uint8)
        received = torch.zeros_like(sent)
        return lambda: dist.all_to_all_single(received, sent)

    return {size * (world_size - 1): exchange(size) for size in MESSAGE_BYTES}


def profile_of(kernels: Least, links: Least, clock: int, world_size: int) -> dict[str, Any]:
    """Returns the profile that one clock gives."""
    kernel_seconds, link_seconds = (
        {name: clocks[clock] for name, clocks in one.clocks.items()} for one in (kernels, links)
    )
    link = fitted(link_seconds)
    return {
        "name": f"gloo, {world_size} ranks",
        "node_size": world_size,
        "inner_gbytes_per_s": link.gbytes_per_s,
        "outer_gbytes_per_s": link.gbytes_per_s,
        "latency_us": link.latency_us,
        "kernel": rate_table(kernel_seconds, SHAPE),
    }


# ---------------------------------------------------------------------- execution


def plan_calls(plan: AttentionPlan) -> tuple[Callable[[], object], Callable[[], object]]:
    """Returns calls of a plan's forward pass, and of the backward pass of the last forward."""
    q, k, v = (
        tensors(plan.tokens_per_rank, heads, seed).requires_grad_()
        for seed, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))
    )
    result: list[torch.Tensor] = []

    def forward() -> None:
        result[:] = [cp_attention(q, k, v, plan, dist.group.WORLD)[0]]

    def backward() -> None:
        torch.autograd.grad(result[0], (q, k, v), torch.ones_like(result[0]))

    return forward, backward


def cases() -> list[tuple[str, str, AttentionMask]]:
    """Returns (mask name, planner, mask) of all plans."""
    documents = masks.documents(document_lengths("W1", 4096, 1))
    named = {
        "causal 2K": masks.causal(2048),
        "causal 4K": masks.causal(4096),
        "full 2K": masks.full(2048),
        "documents 4K": documents,
        "window 256 of 4K": masks.sliding_window(4096, 255),
    }
    known = [planner for planner in CHOSEN if planner in PLANNERS]
    return [(name, planner, mask) for name, mask in named.items() for planner in known]


def worker(rank: int, world_size: int, folder: str, rounds: int) -> None:
    """One rank: calibrates, then executes every plan; rank 0 writes what was measured."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store{world_size}", rank=rank,
        world_size=world_size, timeout=datetime.timedelta(seconds=300),
    )  # fmt: skip
    calls: dict[Any, Callable[[], object]] = {}
    for name, planner, mask in cases():
        with contextlib.suppress(ValueError, NotImplementedError):  # what a scheme does not serve
            plan = make_plan(mask, world_size, config(planner))
            for pass_name, call in zip(PASSES, plan_calls(plan), strict=True):
                calls[name, planner, pass_name] = call
    kernels, links = Least(kernel_calls(SHAPE, SHAPES)), Least(link_calls(world_size))
    plans = Least(calls)
    for _ in range(rounds):  # interleaved: a busy moment hits different calls in each round
        for one in (kernels, links, plans):
            one.run()
    if rank == 0:
        profiles = [profile_of(kernels, links, clock, world_size) for clock in (WALL, PROCESSOR)]
        path = Path(folder) / f"measured{world_size}.json"
        measured = [[*key, *clocks] for key, clocks in plans.clocks.items()]
        path.write_text(json.dumps({"profiles": profiles, "measured": measured}))
    dist.destroy_process_group()


def config(planner: str) -> CPConfig:
    """Returns the settings of all plans; rows travel in fp32."""
    return CPConfig(
        planner=planner, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, topology="cpu",
        element_bytes=4,
    )  # fmt: skip


# ---------------------------------------------------------------------- comparison


def predictions(
    plan: AttentionPlan, name: PassName, profiles: list[Topology]
) -> dict[str, tuple[int, float]]:
    """Returns the clock and the predicted milliseconds of one pass, by model."""
    wall, processor = (replace(plan, config=replace(plan.config, topology=p)) for p in profiles)
    spent = simulate_pass(processor, name, overlap=False)
    hops = sum(len(transfer.hops) for _, transfer in plan.get_pass(name).transfers())
    hops *= 1 if name == "forward" else 2
    total = spent.computing + np.maximum(*(spent.busy[f"node link {way}"] for way in ("in", "out")))
    return {
        "cost model": (WALL, wall.stats(name)["makespan_ms"]),
        "simulation": (WALL, simulate_pass(wall, name).seconds * 1e3),
        "without overlap": (WALL, simulate_pass(wall, name, overlap=False).seconds * 1e3),
        "sum, processor time": (
            PROCESSOR,
            float(total.max()) * 1e3 + hops * profiles[PROCESSOR].latency_us / 1e3,
        ),
    }


def compare(found: dict[str, Any], world_size: int, folder: Path) -> list[dict[str, Any]]:
    """Returns a record per plan and pass: executed and predicted."""
    profiles = []
    for content in found["profiles"]:
        (folder / "profile.json").write_text(json.dumps(content))
        profiles.append(load_profile(folder / "profile.json"))
    by_name = {(name, planner): mask for name, planner, mask in cases()}
    records = []
    for mask_name, planner, name, *clocks in found["measured"]:
        plan = make_plan(by_name[mask_name, planner], world_size, config(planner))
        records.append(
            {
                "ranks": world_size,
                "mask": mask_name,
                "planner": planner,
                "pass": name,
                "executed": [seconds * 1e3 for seconds in clocks],
                "predicted": predictions(plan, name, profiles),
            }
        )
    return records


def agreement(records: list[dict[str, Any]]) -> list[list[Cell]]:
    """Returns R2, its logarithmic form, median and worst error of each model, per number of ranks."""
    lines: list[list[Cell]] = []
    for world_size in sorted({record["ranks"] for record in records}):
        kept = [record for record in records if record["ranks"] == world_size]
        for model, (clock, _) in kept[0]["predicted"].items():
            executed = np.array([record["executed"][clock] for record in kept])
            predicted = np.array([record["predicted"][model][1] for record in kept])
            errors = np.abs(predicted / executed - 1)
            worst = kept[int(errors.argmax())]
            lines.append(
                [
                    world_size, model, len(kept), f"{r2(predicted, executed):.3f}",
                    f"{r2(np.log(predicted), np.log(executed)):.3f}", f"{np.median(errors):.0%}",
                    f"{errors.max():.0%}", f"{worst['mask']}, {worst['planner']}, {worst['pass']}",
                ]
            )  # fmt: skip
    return lines


def detail_rows(records: list[dict[str, Any]]) -> list[list[Cell]]:
    """Returns a line per plan and pass."""
    return [
        [
            record["ranks"], record["mask"], record["planner"], record["pass"],
            *record["executed"], *(ms for _, ms in record["predicted"].values()),
        ]
        for record in records
    ]  # fmt: skip


def r2(predicted: np.ndarray, executed: np.ndarray) -> float:
    """Returns the share of the variance of what was executed that the prediction explains."""
    return float(
        1 - ((executed - predicted) ** 2).sum() / ((executed - executed.mean()) ** 2).sum()
    )


def main() -> None:
    """Measures, compares, prints and writes."""
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    arguments = parser.parse_args()
    facts = environment(("numpy", "torch"))
    records: list[dict[str, Any]] = []
    profiles = []
    with tempfile.TemporaryDirectory() as folder:
        for world_size in arguments.ranks:
            mp.spawn(worker, (world_size, folder, arguments.rounds), nprocs=world_size)
            found = json.loads((Path(folder) / f"measured{world_size}.json").read_text())
            records += compare(found, world_size, Path(folder))
            profiles.append(found["profiles"])
    facts |= {
        "what": f"one call of cp_attention, {HEADS} heads of {DIM}, fp32, one thread per rank, gloo",
        "protocol": f"slowest rank, least of {arguments.rounds} interleaved rounds; calibration likewise",
        "load of the machine at the end": f"{os.getloadavg()[0]:.1f}",
        "caution": f"{os.cpu_count()} cores for all ranks: more ranks than cores take turns, which predictions "
        "do not know; processor time is the surer column then",
        "yardstick": "UltraAttn (SC'25) reports R2 .993 inside a node and .918 between nodes",
        "command": "python benchmarks/bench_prediction.py",
    }
    columns = (
        "ranks",
        "model",
        "passes",
        "R2",
        "R2 of logs",
        "median error",
        "worst error",
        "where",
    )
    details = (
        "ranks", "mask", "planner", "pass", "executed ms", "its processor ms", *records[0]["predicted"]
    )  # fmt: skip
    tables = [
        Table("Agreement", columns, agreement(records)),
        Table("Passes", details, detail_rows(records), "Milliseconds."),
    ]
    publish(
        "Predicted against executed time", facts, tables, arguments.output, {"profiles": profiles}
    )


if __name__ == "__main__":
    main()
