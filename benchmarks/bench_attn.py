"""Times and memory of the `cpu` attention backend against PyTorch's own CPU operator.

python benchmarks/bench_attn.py --threads 2 --output benchmarks/results/attn_<hardware>_<date>

Three questions: is dense causal attention as fast as F.scaled_dot_product_attention, does a mask cost in
proportion to its area, and how much memory is held beside inputs. Ratios are of the same column.
"""

import argparse
import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from timing import Table, Timing, argument_parser, environment, interleaved, publish
from torch import Tensor

from megatron_cp import mask as masks
from megatron_cp.attn import attend
from megatron_cp.mask import AttentionMask

NUM_TOKENS = 4096
HEADS = {
    "8 heads of 64": (8, 8, 64),
    "8 over 2 kv heads of 64": (8, 2, 64),
    "4 heads of 128": (4, 4, 128),
}
MASKS = {
    "causal": masks.causal(NUM_TOKENS),
    "documents 512 x 8": masks.documents([512] * 8),
    "documents 512 to 1200": masks.documents([700, 1200, 513, 600, 1083]),
    "documents 600 to 2200": masks.documents([2200, 600, 1296]),
    "documents 100 x 41": masks.documents([100] * 40 + [96]),
    "window of 1024": masks.sliding_window(NUM_TOKENS, 1023),
    "window of 128": masks.sliding_window(NUM_TOKENS, 127),
    "full": masks.full(NUM_TOKENS),
}
DENSE = "causal"


def main() -> None:
    """Prints the tables and writes them when asked to."""
    parser = argument_parser(__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--measure-memory", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.measure_memory:
        print(json.dumps(extra_memory_mb(**json.loads(arguments.measure_memory))))
        return
    facts = environment(("torch", "numpy"))
    facts["threads"] = str(arguments.threads)
    facts["protocol"] = f"{arguments.rounds} interleaved rounds after two warm-up rounds"
    facts["command"] = f"python benchmarks/bench_attn.py --threads {arguments.threads}"
    tables = [memory_table()]
    tables += [dense_table(dtype, arguments.rounds) for dtype in (torch.float32, torch.bfloat16)]
    tables += [mask_table(dtype, arguments.rounds) for dtype in (torch.float32, torch.bfloat16)]
    publish("Attention on a CPU", facts, tables, arguments.output)


def _inputs(heads: tuple[int, int, int], dtype: torch.dtype, num_tokens: int) -> list[Tensor]:
    num_heads, num_kv_heads, head_dim = heads
    torch.manual_seed(0)
    counts = (num_heads, num_kv_heads, num_kv_heads)
    shapes = [(num_tokens, count, head_dim) for count in counts]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def _steps(
    function: Callable[[], Tensor], inputs: list[Tensor], dout: Tensor
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Returns forward, and forward with backward."""
    return function, lambda: torch.autograd.grad(function(), inputs, dout)


def dense_table(dtype: torch.dtype, rounds: int) -> Table:
    """Returns dense causal attention of both, forward and with backward."""
    rows = []
    for name, heads in HEADS.items():
        inputs = _inputs(heads, dtype, NUM_TOKENS)
        dout = torch.randn(NUM_TOKENS, heads[0], heads[2], dtype=dtype)
        # PyTorch's operator wants heads outside; it gets its favourite memory layout.
        theirs = [x.detach().transpose(0, 1)[None].contiguous().requires_grad_() for x in inputs]
        their_dout = dout.transpose(0, 1)[None].contiguous()

        def torch_attention(theirs: list[Tensor] = theirs) -> Tensor:
            return F.scaled_dot_product_attention(*theirs, is_causal=True, enable_gqa=True)

        def our_attention(inputs: list[Tensor] = inputs) -> Tensor:
            return attend(*inputs, MASKS[DENSE])[0]

        steps = (
            *_steps(torch_attention, theirs, their_dout),
            *_steps(our_attention, inputs, dout),
        )
        labels = ("torch forward", "torch both", "our forward", "our both")
        times = interleaved(dict(zip(labels, steps, strict=True)), rounds)
        for what in ("forward", "both"):
            a, b = times[f"torch {what}"], times[f"our {what}"]
            label = what if what == "forward" else "forward and backward"
            rows.append((f"{name}, {label}", a.wall_ms, b.wall_ms, *_ratios(b, a)))
    columns = ("case", "torch ms", "ours ms", "ratio, median clock", "best clock", "processor")
    return Table(f"Dense causal, {NUM_TOKENS} tokens, {dtype}", columns, rows)


def _ratios(a: Timing, b: Timing, area: float = 1.0) -> tuple[float, float, float]:
    pairs = ((a.wall_ms, b.wall_ms), (a.best_ms, b.best_ms), (a.cpu_ms, b.cpu_ms))
    return tuple(x / y / area for x, y in pairs)  # type: ignore[return-value]


def mask_table(dtype: torch.dtype, rounds: int) -> Table:
    """Returns the time of each mask over (time of dense causal x ratio of areas)."""
    heads = HEADS["8 heads of 64"]
    inputs = _inputs(heads, dtype, NUM_TOKENS)
    dout = torch.randn(NUM_TOKENS, heads[0], heads[2], dtype=dtype)
    steps: dict[str, Callable[[], object]] = {}
    for name, mask in MASKS.items():

        def function(mask: AttentionMask = mask) -> Tensor:
            return attend(*inputs, mask)[0]

        steps[f"{name} f"], steps[f"{name} b"] = _steps(function, inputs, dout)
    times = interleaved(steps, rounds)
    rows = []
    for name, mask in MASKS.items():
        area = mask.area() / MASKS[DENSE].area()
        row: list[str | float] = [name, area]
        for step in ("f", "b"):
            timing = times[f"{name} {step}"]
            wall, _, cpu = _ratios(timing, times[f"{DENSE} {step}"], area)
            row += [timing.wall_ms, wall, cpu]
        rows.append(row)
    columns = ["mask", "area / causal"]
    for step in ("forward", "forward and backward"):
        columns += [f"{step} ms", "cost / area, clock", "cost / area, processor"]
    note = "8 heads of 64. cost / area: time over (time of dense causal x area / causal area)."
    return Table(f"Masks, {NUM_TOKENS} tokens, {dtype}", columns, rows, note)


def memory_table() -> Table:
    """Returns the peak memory beside q, k, v and dout, each case in a process of its own."""
    rows = []
    for dtype in ("float32", "bfloat16"):
        for head_dim in (64, 128):
            for backward in (False, True):
                case = {"dtype": dtype, "head_dim": head_dim, "backward": backward}
                command = [sys.executable, __file__, "--measure-memory", json.dumps(case)]
                run = subprocess.run(command, check=True, capture_output=True, text=True)
                label = "forward and backward" if backward else "forward"
                peak, results = json.loads(run.stdout)
                rows.append((f"{dtype}, head dim {head_dim}, {label}", peak, results))
    columns = ("case", "peak MB beside inputs", "of these out, lse and gradients MB")
    note = (
        "The last 1,024 rows see all keys, the others a window: the largest piece of dense causal."
    )
    return Table("Memory, 32,768 tokens, 4 heads", columns, rows, note)


def extra_memory_mb(dtype: str, head_dim: int, backward: bool) -> tuple[float, float]:
    """Returns (peak resident memory of a call beside its inputs, that of its results), in MB."""
    num_tokens, num_heads = 32_768, 4
    torch_dtype = getattr(torch, dtype)
    small = _inputs((num_heads, num_heads, head_dim), torch_dtype, 256)
    attend(*small, masks.causal(256))[0].sum().backward()  # starts threads, loads libraries
    inputs = _inputs((num_heads, num_heads, head_dim), torch_dtype, num_tokens)
    dout = torch.randn(num_tokens, num_heads, head_dim, dtype=torch_dtype)
    before = _resident_mb()
    peak_before = _peak_mb()
    # The peak is that of the largest piece; the other rows of dense causal would only add time.
    late = num_tokens - 1024
    slices = [(0, late, 0, num_tokens, -1023, 0), (late, num_tokens, 0, num_tokens, None, 0)]
    out, lse = attend(*inputs, masks.from_slices(num_tokens, num_tokens, slices))
    results = [out, lse]
    if backward:
        results += torch.autograd.grad(out, inputs, dout)
    peak = _peak_mb()
    if peak <= peak_before:
        raise RuntimeError(f"peak {peak} MB was reached before the call; measure larger calls")
    return peak - before, sum(x.numel() * x.element_size() for x in results) / 1e6


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def _peak_mb() -> float:
    # Not getrusage: its maximum survives exec, and would be that of the process that started this one.
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e6


if __name__ == "__main__":
    main()
