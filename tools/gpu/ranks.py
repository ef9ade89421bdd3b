"""Ranks on one GPU: are the results right, and does communication run under attention?

    python -m tools.gpu.ranks --backend gloo --rank 0 --ranks 2 --store FILE --trace rank0.json.gz     (and rank 1)

Each rank runs `cp_attention` forward and backward, compares rows of the whole result with float64, and writes a
trace of torch.profiler (open it in chrome://tracing or Perfetto). How long transfers ran, and how long of that
attention ran beside them, is read from the trace. Then it runs the plan of every planner that takes the mask,
and compares results and gradients with those of one rank.

gloo moves rows through the host's memory. NCCL refuses two ranks of one machine on one GPU, so each rank says that it
is a machine of its own (NCCL_HOSTID), and rows go through sockets: right or wrong is found so, speed is not.
On a CPU it runs with `--device cpu --attention reference` and finds no transfers.
"""

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
Interval = tuple[float, float]
MAX_DIFFERENCE = 1e-2  # relative norm: partial results are rounded, and summed in another order


@dataclass(frozen=True)
class Overlap:
    """Milliseconds of one rank's device: attention, transfers, and both at once."""

    attention_ms: float
    transfer_ms: float
    both_ms: float

    def __str__(self) -> str:
        """Returns the sentence of the report."""
        share = f"{self.both_ms / self.transfer_ms:.0%}" if self.transfer_ms else "none"
        return (
            f"attention {self.attention_ms:.2f} ms, transfers {self.transfer_ms:.2f} ms, "
            f"{share} of them under attention"
        )


def overlap(events: Iterable[Mapping[str, Any]]) -> Overlap:
    """Returns how the device spent its time, from the events of a Chrome trace (`ts` and `dur` in microseconds).

    Attention are our kernels by name; transfers NCCL's kernels and copies between host and device.
    """
    attention: list[Interval] = []
    transfers: list[Interval] = []
    for event in events:
        if event.get("ph") != "X" or "dur" not in event:
            continue
        interval = (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        name, kind = str(event.get("name", "")), str(event.get("cat", ""))
        if kind == "kernel" and name.startswith("mcp_attention"):
            attention.append(interval)
        elif (kind == "kernel" and "nccl" in name.lower()) or (
            kind == "gpu_memcpy" and "DtoD" not in name
        ):
            transfers.append(interval)
    one, other = _union(attention), _union(transfers)
    both = sum(
        max(0.0, min(b, d) - max(a, c)) for a, b in one for c, d in other
    )  # few intervals each
    return Overlap(_length(one) / 1e3, _length(other) / 1e3, both / 1e3)


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def run_all(
    backend: str, traces: Path, seconds: float, more: Sequence[str] = (), num_ranks: int = 2
) -> tuple[str, str]:
    """Returns (ok, FAILED or "not run", words) of ranks as processes; their traces are `<traces>_rank<r>.json.gz`.

    A wrong result is FAILED; ranks that cannot start are "not run".
    """
    traces.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mcp-ranks-") as room, ExitStack() as logs:
        processes = []
        for rank in range(num_ranks):
            command = [sys.executable, "-m", "tools.gpu.ranks", "--backend", backend]
            command += ["--rank", str(rank), "--ranks", str(num_ranks), "--store", f"{room}/store"]
            command += ["--trace", f"{traces}_rank{rank}.json.gz", *more]
            log = logs.enter_context(Path(room, f"log{rank}").open("w"))
            alone = {"NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo"}
            processes.append(
                subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=os.environ | alone)
            )
        codes = _wait(processes, seconds)
        said = [
            _last_line(Path(room, f"log{rank}"), "Error" if codes and codes[rank] else "")
            for rank in range(num_ranks)
        ]
    if codes is None:
        return "not run", f"{backend}: not done after {seconds:.0f} s"
    if any(codes):
        wrong = [text for text in said if "AssertionError" in text]
        failed = [text for code, text in zip(codes, said, strict=True) if code]
        return ("FAILED" if wrong else "not run"), f"{backend}: {(wrong or failed)[0]}"
    found = [json.loads(text) for text in said]
    each = [f"rank {rank}: {Overlap(**one['overlap'])}" for rank, one in enumerate(found)]
    return "ok", "; ".join([*each, f"plans with the results of one rank: {found[0]['plans']}"])


def _wait(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> list[int] | None:
    """Returns the exit codes, None if time ran out; a rank that fails ends the others, which would wait for it."""
    deadline = time.monotonic() + seconds
    try:
        while time.monotonic() < deadline:
            codes = [process.poll() for process in processes]
            if any(codes) or None not in codes:
                return [code or 0 for code in codes]
            time.sleep(0.05)
        return None
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _last_line(log: Path, part: str) -> str:
    """Returns the last line with `part` in it; where there is none, the last."""
    lines = [line for line in log.read_text().splitlines() if line.strip()]
    lines = [line for line in lines if part in line] or lines
    return lines[-1][:400] if lines else ""


def run_rank(options: argparse.Namespace) -> dict[str, Any]:
    """Runs this rank, writes its trace, returns what it found. Raises AssertionError for a wrong result."""
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile

    import megatron_cp as mcp
    from tools.gpu import values
    from tools.gpu.cases import Case

    on_gpu = options.device == "cuda"
    torch.set_num_threads(1)
    store = dist.FileStore(options.store, options.ranks)
    dist.init_process_group(
        options.backend, store=store, rank=options.rank, world_size=options.ranks
    )
    case = Case("causal_document", options.tokens, num_heads=options.heads, num_kv_heads=1)
    mask = case.mask()
    config = mcp.CPConfig(num_heads=case.num_heads, num_kv_heads=1, head_dim=case.head_dim)
    plan, group = mcp.make_plan(mask, options.ranks, config), dist.group.WORLD
    generator = torch.Generator().manual_seed(0)
    shapes = ((case.num_heads,), (1,), (1,))
    dtype = torch.bfloat16 if on_gpu else torch.float32
    whole = [
        torch.randn(plan.num_tokens, *heads, case.head_dim, generator=generator).to(
            options.device, dtype
        )
        for heads in shapes
    ]
    local = [mcp.dispatch(x, plan, group).requires_grad_() for x in whole]

    def step() -> torch.Tensor:
        out, _ = mcp.cp_attention(*local, plan, group, backend=options.attention)
        torch.autograd.grad(out.float().square().sum(), local)
        return out.detach()

    out = mcp.undispatch(step(), plan, group)  # the first step compiles and opens connections
    values.check_rows(out[: mask.num_queries], tuple(whole), mask)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler:
        step()
        if on_gpu:
            torch.cuda.synchronize()
    profiler.export_chrome_trace(options.trace)
    plans = check_plans(options, group)
    dist.barrier()
    dist.destroy_process_group()
    with gzip.open(options.trace, "rt") as trace:
        found = overlap(json.load(trace)["traceEvents"])
    return {"overlap": asdict(found), "plans": plans}


def check_plans(options: argparse.Namespace, group: Any) -> str:
    """Returns the planners whose plans give the results of one rank. Raises AssertionError for others."""
    import megatron_cp as mcp
    from megatron_cp.plan.planner import PLANNERS

    n = options.tokens // 8
    lengths = [n * 3 // 8, 1, n // 6, n - n * 3 // 8 - 1 - n // 6]
    own, checked = _OneRank(mcp.mask.documents(lengths, "causal"), options), []
    for planner in sorted(PLANNERS):
        config = mcp.CPConfig(planner=planner, num_heads=8, num_kv_heads=4, head_dim=128)
        try:
            plan = mcp.make_plan(own.mask, options.ranks, config)
        except (ValueError, NotImplementedError):
            continue  # the planner does not take this mask on so many ranks
        own.compare(plan, planner, group)
        checked.append(planner)
    config = mcp.CPConfig(num_heads=8, num_kv_heads=4, head_dim=128)
    for name, sizes in (
        ("cross attention to few keys", (n, n // 9)),
        ("cross attention of few queries", (n // 9, n)),
    ):
        cross = _OneRank(mcp.mask.full(*sizes), options)
        cross.compare(mcp.make_plan(cross.mask, options.ranks, config), name, group)
        checked.append(name)
    return ", ".join(checked)


class _OneRank:
    """Attention under a mask, and its gradients, on one rank: what plans must give."""

    def __init__(self, mask: Any, options: argparse.Namespace):
        import torch

        from megatron_cp.attn import attend

        self.mask, self.backend = mask, options.attention
        generator = torch.Generator().manual_seed(1)
        dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
        sizes = (mask.num_queries, 8), (mask.num_keys, 4), (mask.num_keys, 4), (mask.num_queries, 8)
        self.tensors = [
            torch.randn(*size, 128, generator=generator).to(options.device, dtype) for size in sizes
        ]
        whole = [x.clone().requires_grad_() for x in self.tensors[:3]]
        out, _ = attend(*whole, mask, backend=self.backend)
        self.wanted = (out.detach(), *torch.autograd.grad(out, whole, self.tensors[3]))

    def compare(self, plan: Any, name: str, group: Any) -> None:
        """Runs a plan on all ranks. Raises AssertionError where it gives another result."""
        import torch

        import megatron_cp as mcp

        *local, dout = (
            mcp.dispatch(x, plan, group, side=side)
            for x, side in zip(self.tensors, "qkkq", strict=True)
        )
        local = [x.requires_grad_() for x in local]
        mine, _ = mcp.cp_attention(*local, plan, group, backend=self.backend)
        found = (mine.detach(), *torch.autograd.grad(mine, local, dout))
        for what, side, x, y in zip(
            ("out", "dq", "dk", "dv"), "qqkk", found, self.wanted, strict=True
        ):
            got = mcp.undispatch(x, plan, group, side=side)
            difference = ((got - y).float().norm() / y.float().norm()).item()
            assert difference <= MAX_DIFFERENCE, f"{name}: {what} differs by {difference:.1e}"


def main() -> int:
    """Runs one rank; its last line of output is what it found, as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--backend", choices=("gloo", "nccl"), required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--store", required=True)
    parser.add_argument("--trace", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--attention", default="hopper", help="backend of attention")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--heads", type=int, default=16)
    print(json.dumps(run_rank(parser.parse_args())), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
