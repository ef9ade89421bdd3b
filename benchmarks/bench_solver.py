"""Processor time of planning: our search beside MagiAttention's own solver, in one process.

MAGI_ATTENTION=<checkout> python benchmarks/bench_solver.py --output benchmarks/results/solver_<hardware>_<date>

The solver is theirs, unchanged and in Python (MAGI_ATTENTION_CPP_BACKEND=0; its compiled ranges need CUDA to be built).
Its compiled modules and triton are stood in for, because planning calls neither. The ranks of a job are threads here,
which take turns. What they gather from each other is handed over in memory, and a rank's time is that of its own
thread, waiting left out; so its two gathers cost it nothing. Counted are dealing chunks (eight a rank) and solving with
overlap degree 2. The arguments of its kernels and transfers, which it makes of that on a GPU, are not. Ours is one call
of `make_plan`, which every rank makes, transfers and checks included.

Masks are those of `search_cells.py` that its four types of slices can say, on tokens that its chunks divide.
"""

import importlib.abc
import importlib.machinery
import os
import statistics
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before NumPy: planning is measured on one thread
os.environ["MAGI_ATTENTION_CPP_BACKEND"] = "0"

import torch
import torch.distributed as dist
from search_cells import SearchCell, search_cells
from timing import Cell, Table, argument_parser, environment, publish

from megatron_cp.config import CPConfig
from megatron_cp.mask import AttentionMask
from megatron_cp.plan import forget_plans, make_plan
from megatron_cp.plan.study.compare import geometric_mean

CHUNKS_PER_RANK, OVERLAP_DEGREE = 8, 2
ROUNDS = 2  # the quicker one counts
COMPILED = ("magi_attention.magi_attn_ext", "magi_attention.magi_attn_comm")
NOT_NEEDED = (
    "triton",
    "nvtx",
    "debugpy",
    "rich",
    "pandas",
    "tvm_ffi",
    "cutlass",
    "flash_attn_cute",
)


class _Anything:
    """Stands in for whatever a module that planning never calls would hold."""

    def __init__(self, *args: object, **options: object):
        pass

    def __call__(self, *args: Any, **options: object) -> Any:
        return args[0] if args and callable(args[0]) else _Anything()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()


class _StandIn(types.ModuleType):
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything if name.lstrip("_")[:1].isupper() else _Anything()


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: object, target: object = None) -> Any:
        if name in COMPILED or name.split(".")[0] in NOT_NEEDED:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _Ranks:
    """Ranks as threads that run one at a time: `torch.distributed` as far as the solver calls it."""

    def __init__(self, count: int):
        self.count, self.here = count, threading.local()
        self.barrier, self.turn = threading.Barrier(count), threading.Lock()
        self.given: list[Any] = [None] * count

    def all_gather_object(self, found: list[Any], mine: Any, group: object = None) -> None:
        self.given[self.here.rank] = mine
        self.turn.release()
        try:
            self.barrier.wait()
            found[:] = self.given
            self.barrier.wait()
        finally:
            self.turn.acquire()

    def seconds(self, of_rank: Callable[[int], None]) -> list[float]:
        """Returns the processor time of each rank's thread."""
        took, problems = [0.0] * self.count, []

        def run(rank: int) -> None:
            self.here.rank = rank
            with self.turn:
                started = time.thread_time()
                try:
                    of_rank(rank)
                except Exception as problem:
                    problems.append(problem)
                    self.barrier.abort()
                took[rank] = time.thread_time() - started

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if problems:
            raise problems[0]
        return took


def their_seconds(mask: AttentionMask, cell: SearchCell, kinds: Sequence[int]) -> float:
    """Returns the mean processor time of a rank."""
    from magi_attention.common import AttnRanges
    from magi_attention.common.enum import AttnMaskType
    from magi_attention.meta._make_dispatch_meta import make_dispatch_meta_from_qk_ranges
    from magi_attention.meta.solver.dispatch_solver import DispatchConfig
    from magi_attention.meta.solver.dist_attn_solver import DistAttnSolver
    from magi_attention.meta.solver.overlap_solver import OverlapConfig

    ranks, slices = _Ranks(cell.ranks), mask.array.tolist()
    # The solver asks for its rank and size by the group that it was given.
    dist.get_rank = lambda group=None: ranks.here.rank
    dist.get_world_size = lambda group=None: ranks.count
    dist.all_gather_object = ranks.all_gather_object

    def plan(rank: int) -> None:
        q_ranges = AttnRanges.from_ranges([(row[0], row[1]) for row in slices])
        k_ranges = AttnRanges.from_ranges([(row[2], row[3]) for row in slices])
        types_ = [AttnMaskType.from_int_type(kind) for kind in kinds]
        queries, keys = make_dispatch_meta_from_qk_ranges(
            q_ranges, k_ranges, types_, cell.tokens, cell.tokens,
            chunk_size=cell.tokens // (CHUNKS_PER_RANK * cell.ranks), cp_size=cell.ranks, cp_rank=rank,
            dispatch_config=DispatchConfig(), is_same_source=True, is_q_permutable=True,
            is_k_permutable=True,
        )  # fmt: skip
        overlap = OverlapConfig(degree=OVERLAP_DEGREE)
        solver = DistAttnSolver(*cell.heads, 128, overlap_config=overlap, cp_group=ranks)
        solver.solve(q_ranges, k_ranges, types_, queries, keys)

    return statistics.mean(ranks.seconds(plan))


def our_seconds(mask: AttentionMask, cell: SearchCell) -> float:
    """Returns the processor time of a plan."""
    forget_plans()
    config = CPConfig(num_heads=cell.heads[0], num_kv_heads=cell.heads[1])
    started = time.process_time()
    make_plan(mask, cell.ranks, config)
    return time.process_time() - started


def kinds_of_slices(mask: AttentionMask) -> list[int] | None:
    """Returns the solver's number of each slice: full, causal, inverse causal, both; None if one is none of these."""
    q0, q1, k0, k1, lo, hi = mask.array.T
    is_open = lo <= k0 - q1 + 1, hi >= k1 - 1 - q0
    is_corner = lo == k0 - q0, hi == k1 - q1
    if not all((open_ | corner).all() for open_, corner in zip(is_open, is_corner, strict=True)):
        return None
    cuts_low, cuts_high = (~open_ for open_ in is_open)
    return (cuts_high + 2 * cuts_low).tolist()


def _summary(name: str, took: Sequence[tuple[float, float]]) -> list[Cell]:
    ratios = [ours / theirs for ours, theirs in took]
    medians = (statistics.median(one) for one in zip(*took, strict=True))
    factors = geometric_mean(ratios), min(ratios), max(ratios)
    return [name, len(took), *(f"{x:.1f}" for x in medians), *(f"{x:.2f}" for x in factors)]


def _commit_of(checkout: str) -> str:
    words = ["git", "-C", checkout, "rev-parse", "--short=10", "HEAD"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    """Prints the tables and writes them."""
    parser = argument_parser(__doc__)
    arguments = parser.parse_args()
    checkout = os.environ.get("MAGI_ATTENTION")
    if checkout is None:
        parser.error("MAGI_ATTENTION names no checkout of MagiAttention; set it to the folder")
    sys.meta_path.insert(0, _StandIns())
    sys.path.insert(0, checkout)
    torch.cuda.current_device = lambda: 0
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *said: 0
    rows: list[list[Cell]] = []
    took: dict[int, list[tuple[float, float]]] = {}
    left_out = []
    for cell in search_cells():
        mask = cell.build()
        kinds = kinds_of_slices(mask)
        if kinds is None or cell.tokens % (CHUNKS_PER_RANK * cell.ranks):
            left_out.append(str(cell))
            continue
        theirs = min(their_seconds(mask, cell, kinds) for _ in range(ROUNDS)) * 1e3
        ours = min(our_seconds(mask, cell) for _ in range(ROUNDS)) * 1e3
        took.setdefault(cell.ranks, []).append((ours, theirs))
        rows.append([str(cell), f"{ours:.1f}", f"{theirs:.1f}", f"{ours / theirs:.2f}"])
        print(*rows[-1], sep=" | ", flush=True)
    facts = environment() | {
        "what": "processor time of planning, ms: ours for a plan, theirs for one rank of it (mean)",
        "their solver": f"MagiAttention, commit {_commit_of(checkout)}",
        "left out": f"{len(left_out)} cells with other slices or lengths",
        "command": "MAGI_ATTENTION=<checkout> python benchmarks/bench_solver.py",
    }
    means = [_summary(str(ranks), found) for ranks, found in sorted(took.items())]
    means.append(_summary("all", [one for found in took.values() for one in found]))
    columns = (
        "ranks",
        "cells",
        "ours, median ms",
        "theirs, median ms",
        "ours over theirs",
        "least",
        "most",
    )
    note = "Ours over theirs: geometric mean."
    tables = [
        Table("Summary", columns, means, note),
        Table("Cells", ("mask", "ours ms", "theirs ms", "ours over theirs"), rows, ""),
    ]
    publish("Solver", facts, tables, arguments.output)


if __name__ == "__main__":
    main()
