"""Packs of several replicas on paper: fixed context groups beside --hybrid-context-parallel, and how packs are dealt.

python benchmarks/bench_replicas.py --output benchmarks/results/replicas_<hardware>_<date>     a quarter of an hour

Times are predicted and simulated (attention of one layer, forward plus backward, head dim 128, bf16, topology h100);
they were measured nowhere. Only what loader workers do is measured.
"""

import os
import pickle
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before NumPy: planning is measured on one thread

import numpy as np
from timing import Cell, Table, argument_parser, environment, publish

from megatron_cp.config import CPConfig
from megatron_cp.data.balance import assign_packs
from megatron_cp.data.batch import BatchConfig, PlanRequest, make_batch_plans
from megatron_cp.data.document_set import open_documents
from megatron_cp.data.hybrid import HybridBuilder
from megatron_cp.data.indexed_writer import IndexedWriter
from megatron_cp.data.pack_cost import least_seconds
from megatron_cp.data.packing import Packer, PackingConfig
from megatron_cp.data.worker import BatchBuilder
from megatron_cp.mask import AttentionMask, documents
from megatron_cp.plan.schema import PASSES
from megatron_cp.plan.study.compare import geometric_mean
from megatron_cp.plan.study.workloads import document_lengths
from megatron_cp.report.simulation.replicas import ReplicaStudy, study_replicas
from megatron_cp.report.sources import MaskChoice, source_of_workload

CP_SIZE, DP_SIZE, NUM_TOKENS = 8, 32, 128 << 10
CONFIG = CPConfig(num_heads=64, num_kv_heads=8, head_dim=128, topology="h100")
GOAL = ("W1", "W2", "W4", "W3")  # W3 is the heavy tail
OTHERS = ("W5", "W6", "W7", "W8", "prolong512k")
SEEDS = (0, 1000, 2000)
MICRO_BATCHES = (1, 2, 4, 8)
MIXED = ("W1", "W2", "W4", "W5", "W6", "W7")
WINDOW = {"num_window_layers": 5, "window": (1023, 0)}
DEALT: dict[str, tuple[PlanRequest, int]] = {
    "64:8 heads, CP 8, 128K": (PlanRequest(cp_size=8, config=CONFIG), NUM_TOKENS),
    "the same, 1 full layer, 5 of window 1024": (
        PlanRequest(cp_size=8, config=CONFIG, **WINDOW),
        NUM_TOKENS,
    ),
    "32:32 heads, CP 16, 64K": (
        PlanRequest(cp_size=16, config=CPConfig(num_heads=32, num_kv_heads=32, topology="h100")),
        64 << 10,
    ),
    "8:8 heads, CP 8, 32K": (
        PlanRequest(cp_size=8, config=CPConfig(num_heads=8, num_kv_heads=8, topology="h100")),
        32 << 10,
    ),
}


def main() -> None:
    """Prints the tables and writes them."""
    parser = argument_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="how many draws of each cell")
    arguments = parser.parse_args()
    tables = [_building(), *_layout_tables(SEEDS[: arguments.seeds]), _dealing()]
    facts = environment() | {
        "what": "predicted and simulated times of plans; no GPU was used",
        "command": "python benchmarks/bench_replicas.py",
    }
    publish("Replicas", facts, tables, arguments.output)


def _building() -> Table:
    """Returns what a loader worker does for a micro-batch: one pack, or those of all replicas in both layouts."""
    config = BatchConfig(seq_length=NUM_TOKENS, reset_attention_mask=True, reset_position_ids=True)
    request = PlanRequest(cp_size=CP_SIZE, config=CONFIG)
    rows: list[list[Cell]] = []
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "corpus"
        with IndexedWriter(prefix, dtype=np.int32) as writer:
            for seed in range(DP_SIZE + 8):
                for length in document_lengths("W1", NUM_TOKENS, seed):
                    writer.add_document(np.arange(length))
            writer.finish()
        texts = open_documents(prefix)
        packer = Packer(texts.lengths, PackingConfig(seq_length=NUM_TOKENS))
        packs = tuple(next(packer) for _ in range(DP_SIZE))
        fixed = BatchBuilder(texts, config, request)
        hybrid = HybridBuilder(texts, config, request, 0, DP_SIZE)
        for words, build, taken in (("fixed", fixed, packs[:1]), ("hybrid", hybrid, packs)):
            started = time.process_time()
            built = build(taken)
            seconds = time.process_time() - started
            size = len(pickle.dumps(built)) / 1e6
            rows.append([words, len(taken), f"{seconds:.2f}", f"{size:.1f}"])
            print(*rows[-1], sep=" | ", flush=True)
    columns = ("layout", "packs read", "processor s", "MB handed to the trainer")
    note = f"Measured, workload W1, packs of {NUM_TOKENS >> 10}K, {DP_SIZE} replicas of {CP_SIZE}; one micro-batch."
    return Table("In a loader worker", columns, rows, note)


def _layout_tables(seeds: tuple[int, ...]) -> list[Table]:
    """Returns the geometric means over workloads and draws, and every cell."""
    rows: list[list[Cell]] = []
    gains: dict[tuple[str, int], list[float]] = {}
    for count in MICRO_BATCHES:
        for name in GOAL + OTHERS:
            for seed in seeds:
                shape = (CP_SIZE, DP_SIZE, NUM_TOKENS, DP_SIZE * count)
                started = time.process_time()
                study = study_replicas(
                    source_of_workload(name), MaskChoice(), shape, CONFIG, seed=seed
                )
                gains.setdefault((name, count), []).append(study.speedup)
                rows.append(_row(name, count, seed, study, time.process_time() - started))
                print(*rows[-1], sep=" | ", flush=True)
    means: list[list[Cell]] = []
    for count in MICRO_BATCHES:
        every = [gain for name in GOAL for gain in gains[name, count]]
        alone = [f"{geometric_mean(gains[name, count]):.2f}" for name in GOAL + OTHERS]
        means.append([count, f"{geometric_mean(every):.3f}", f"{min(every):.3f}", *alone])
    summary = ("micro-batches", f"mean of {', '.join(GOAL)}", "their least", *GOAL, *OTHERS)
    columns = (
        "workload", "micro-batches", "seed", "fixed by area ms", "by time ms", "hybrid ms", "hybrid predicted ms",
        "chosen", "gain", "busiest fixed ms", "busiest hybrid ms", "mean ms", "processor s of the cell",
    )  # fmt: skip
    note = (
        f"Simulated. {DP_SIZE} replicas of {CP_SIZE} context ranks, packs of {NUM_TOKENS >> 10}K tokens, causal "
        "documents, 64:8 heads. Time of fixed groups, packs dealt by area, over that of the layout which "
        "--hybrid-context-parallel takes; geometric means."
    )
    return [Table("Gain", summary, means, note), Table("Cells", columns, rows, "")]


def _row(name: str, count: int, seed: int, study: ReplicaStudy, seconds: float) -> list[Cell]:
    by_area, by_time, hybrid, chosen = study.layouts
    times = [f"{one.simulated_ms:.4g}" for one in (by_area, by_time, hybrid)]
    is_hybrid = chosen.simulated_ms == hybrid.simulated_ms
    return [
        name, count, seed, *times, f"{hybrid.predicted_ms:.4g}", "hybrid" if is_hybrid else "fixed",
        f"{study.speedup:.3f}", f"{by_area.busiest_ms:.4g}", f"{hybrid.busiest_ms:.4g}",
        f"{by_area.mean_ms:.4g}", f"{seconds:.1f}",
    ]  # fmt: skip


def _dealing() -> Table:
    """Returns how area and predicted time order packs, beside the times of their plans."""
    rows: list[list[Cell]] = []
    for words, (request, num_tokens) in DEALT.items():
        packs = [document_lengths(name, num_tokens, seed) for seed in range(12) for name in MIXED]
        started = time.process_time()
        pairs = [[(int(n), 0) for n in lengths] for lengths in packs]
        least = [least_seconds(one, num_tokens, request) for one in pairs]
        cost_ms = (time.process_time() - started) * 1e3 / len(packs)
        masks = [documents(lengths) for lengths in packs]
        area = [float(mask.area()) for mask in masks]
        started = time.process_time()
        planned = [_planned(mask, request) for mask in masks]
        plan_ms = (time.process_time() - started) * 1e3 / len(packs)
        ranks = [f"{_rank_correlation(cost, planned):.4f}" for cost in (area, least)]
        uneven = [f"{_uneven(cost, planned):.4f}" for cost in (area, least, planned)]
        rows.append([words, *ranks, *uneven, f"{cost_ms:.2f}", f"{plan_ms:.0f}"])
        print(*rows[-1], sep=" | ", flush=True)
    columns = (
        "packs", "rank correlation of area with planned time", "of predicted time", "dealt by area: slowest over mean",
        "by predicted time", "by the plans", "ms a prediction", "ms a plan",
    )  # fmt: skip
    note = (
        f"12 packs of each of {', '.join(MIXED)} on 6 replicas. Predicted time: the bound that the loader deals by. "
        "Slowest over mean: seconds of a replica's plans, the largest over the mean."
    )
    return Table("Dealing", columns, rows, note)


def _planned(mask: AttentionMask, request: PlanRequest) -> float:
    plans = make_batch_plans(mask, request)
    layers = {"full": request.num_full_layers, "window": request.num_window_layers}
    return sum(
        layers[kind] * plan.stats(name)["makespan_ms"]
        for kind, plan in plans.items()
        for name in PASSES
    )


def _rank_correlation(left: list[float], right: list[float]) -> float:
    places = [np.argsort(np.argsort(values)) for values in (left, right)]
    return float(np.corrcoef(*places)[0, 1])


def _uneven(costs: list[float], planned: list[float]) -> float:
    dealt = assign_packs(costs, dp_size=6, micro_batch_size=1)
    loads = [sum(planned[i] for packs in mine for i in packs) for mine in dealt]
    return max(loads) / (sum(loads) / len(loads))


if __name__ == "__main__":
    main()
