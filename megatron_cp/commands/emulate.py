"""`emulate`: one case of the attention kernels on the CPU.

Prints the distance to float64 beside that of the plain formula, what was executed, and on request every event
of the kernel's mbarriers. Nothing it prints says anything about the speed of a GPU.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_cp import mask as masks
from megatron_cp.command_line import Progress, prepare_outputs
from megatron_cp.commands.arguments import (
    SEED,
    WORKLOAD,
    add_heads,
    add_mask,
    count,
    key_heads,
    lengths,
    seed,
    tokens,
)
from megatron_cp.kernels import build
from megatron_cp.mask import AttentionMask
from megatron_cp.report.sources import MaskChoice, source_of_lengths, source_of_workload

if TYPE_CHECKING:
    from torch import Tensor

    Compute = Callable[[Tensor, Tensor, Tensor], Tensor]

DTYPES = ("bf16", "fp16")
MOST_SCORES = 1 << 28  # 2 GiB in float64, of which reference and plain formula hold a few


def _mixed_slices(length: int) -> AttentionMask:
    """Full, causal, inverse causal and windowed slices, and rows without keys."""
    third = max(1, length // 3)
    return masks.from_slices(
        length,
        length,
        [
            (0, third, 0, length, None, None),
            (third, 2 * third, third, 2 * third, None, 0),
            (third, 2 * third, 2 * third, length, third, None),
            (2 * third + 5, length, 0, length, -40, 7),
        ]
        if length >= 24
        else [(0, length, 0, length, None, 0)],
    )


KERNEL_SHAPES: dict[str, Callable[[int], AttentionMask]] = {
    "inverse_causal": lambda n: masks.from_slices(n, n, [(0, n, 0, n, 0, None)]),
    "mixed_slices": _mixed_slices,
    "empty": lambda n: masks.from_slices(n, n, []),
}
"""Shapes that no training uses and a kernel must serve, beside the masks of `plan` and `simulate`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    add_mask(parser, KERNEL_SHAPES)
    parser.add_argument(
        "--seq-length", type=tokens, default=300, metavar="N", help="queries and keys"
    )
    parser.add_argument(
        "--lengths", type=lengths, metavar="N,N,...",
        help=f"document lengths: 137,2041,89; default: drawn from workload {WORKLOAD}",
    )  # fmt: skip
    add_heads(parser, num_heads=2)
    parser.add_argument(
        "--v-head-dim",
        type=count,
        metavar="N",
        help="size of a value head; default: --kv-channels",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="dtype of the inputs")
    parser.add_argument(
        "--softcap", type=softcap, default=0.0, metavar="X", help="cap of the scores; 0 is none"
    )
    parser.add_argument(
        "--seed", type=seed, default=SEED, metavar="N",
        help="seed of the inputs, the documents and the order of what is asynchronous; 0 is program order",
    )  # fmt: skip
    parser.add_argument("--blocks", type=count, default=2, metavar="N", help="CTAs of the grid")
    parser.add_argument(
        "--host-threads",
        type=count,
        default=1,
        metavar="N",
        help="threads that run CTAs; with 1 a seed always gives the same run",
    )
    parser.add_argument(
        "--backward", action="store_true", help="the backward kernels too, with a random gradient"
    )
    parser.add_argument(
        "--history", type=Path, metavar="FILE", help="write every event of the mbarriers here"
    )


def run(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Prints what was found; returns 1 if the emulator found a defect."""
    key_heads(args)  # what can be refused without torch is
    check_head_dims(args)
    check_scores(args)
    mask = mask_of(args)
    prepare_outputs(args.history)
    progress = Progress("emulate")
    progress("compiling the kernel for this CPU where it is not in the cache, then emulating")
    lines, status = _emulated(args, mask)
    progress.clear()
    print(*lines, sep="\n", file=sys.stderr if status else sys.stdout)
    return status


def mask_of(args: argparse.Namespace) -> AttentionMask:
    """Returns the mask that the arguments name; ValueError names the nearest of an unknown one."""
    length = args.seq_length if args.lengths is None else sum(args.lengths)
    args.seq_length = length
    if args.mask in KERNEL_SHAPES:
        mask = KERNEL_SHAPES[args.mask](length)
        return (
            mask
            if args.window_size is None
            else mask & masks.sliding_window(length, *args.window_size)
        )
    source = source_of_lengths(args.lengths) if args.lengths else source_of_workload(WORKLOAD)
    choice = MaskChoice(args.mask, args.window_size)
    return choice.build(length, source.documents(length, args.seed), args.seed)


def check_head_dims(args: argparse.Namespace) -> None:
    """Raises ValueError where no kernel is built for --kv-channels and --v-head-dim."""
    built = {
        (int(variant.value("MCP_HEAD_DIM")), int(variant.value("MCP_VALUE_DIM")))
        for variant in build.variants().values()
        if variant.kernel_pass == "forward" and variant.value("MCP_TYPE") == args.dtype
    }
    if (args.kv_channels, args.v_head_dim or args.kv_channels) in built:
        return
    asked = f"--kv-channels {args.kv_channels}"
    if args.v_head_dim is not None:
        asked = f"{asked} --v-head-dim {args.v_head_dim}"
    alone = ", ".join(str(dim) for dim, value_dim in sorted(built) if dim == value_dim)
    both = [f"{a} with --v-head-dim {b}" for a, b in sorted(built) if a != b]
    raise ValueError(
        f"{asked} must be what a kernel is built for: --kv-channels {', or '.join([alone, *both])}; give one of these"
    )


def check_scores(args: argparse.Namespace) -> None:
    """Raises ValueError for more scores than fit: the formula beside the kernel computes all of them."""
    length = args.seq_length if args.lengths is None else sum(args.lengths)
    num_scores = args.num_attention_heads * length**2
    if num_scores > MOST_SCORES:
        most = math.isqrt(MOST_SCORES // args.num_attention_heads)
        raise ValueError(
            f"{args.num_attention_heads} heads of {length} x {length} scores are more than {MOST_SCORES}, which the "
            f"comparison holds in float64; give at most {most} tokens, or fewer heads"
        )


def softcap(text: str) -> float:
    """Returns a softcap, 0 or more; ArgumentTypeError for any other text."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of at least 0; 0 is none")
    return value


def _emulated(args: argparse.Namespace, mask: AttentionMask) -> tuple[list[str], int]:
    """Returns the lines to print and the exit code."""
    import torch

    from megatron_cp.attn import attend, resolve_options
    from megatron_cp.attn.emulated import backend as emulated
    from megatron_cp.kernels.emulator.library import EmulatorBuildError, EmulatorError

    q, k, v = _inputs(args)
    options = resolve_options(q, k, v, softcap=args.softcap, backend="emulated")
    out, lse = (
        torch.empty(args.seq_length, args.num_attention_heads, v.shape[-1]),
        torch.empty(q.shape[:2]),
    )
    how = emulated.Settings(args.seed, args.blocks, args.host_threads, args.history is not None)
    exact_out, exact_lse = attend(
        q.double(), k.double(), v.double(), mask, softcap=args.softcap, backend="reference"
    )
    plain = _plain(q, k, v, mask, options.softmax_scale, args.softcap)
    has_keys = torch.isfinite(exact_lse)
    started, gradients = time.perf_counter(), []
    try:
        with emulated.running(how) as session:
            emulated.run_forward(q, k, v, mask, options, into=(out, lse))
            if args.backward:
                gradients = _gradient_lines(args, q, k, v, mask)
    except (EmulatorError, EmulatorBuildError) as defect:
        return [f"{args.mask}: {defect}"], 1
    seconds = time.perf_counter() - started
    counts = sum((Counter(run.counts) for run in session.runs), Counter())
    lse_error = (lse - exact_lse)[has_keys].abs().max().item() if has_keys.any() else 0.0
    lines = [
        f"{args.mask}: {args.seq_length} queries and keys, {mask.area():,} pairs, "
        f"{q.shape[1]}:{k.shape[1]} heads, head dim {q.shape[-1]} ({v.shape[-1]}), {args.dtype}, "
        f"seed {args.seed}, {args.blocks} CTAs",
        _error_line("out", out, plain, exact_out, args.dtype),
        f"lse  max error against float64 {lse_error:.2e}",
        *gradients,
        f"emulated in {seconds:.2f} s, compilation included where needed; this says nothing about a GPU",
        "instructions, counted per thread:",
        *(f"{count:>12,}  {name}" for name, count in counts.most_common()),
    ]
    if args.history is not None:
        history = "".join(run.history for run in session.runs)
        args.history.write_text(history, encoding="utf-8")
        lines.append(f"wrote {history.count(chr(10)):,} events of mbarriers to {args.history}")
    return lines, 0


def _gradient_lines(
    args: argparse.Namespace, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask
) -> list[str]:
    """Returns the errors of dq, dk and dv: a forward and a backward pass by the kernels."""
    import torch

    from megatron_cp.attn import attend

    dout = torch.randn(*q.shape[:2], v.shape[2], generator=torch.Generator().manual_seed(args.seed))
    dout = dout.to(q.dtype)

    def gradients(dtype: torch.dtype, compute: Compute) -> Sequence[Tensor]:
        a, b, c = (x.to(dtype).requires_grad_() for x in (q, k, v))
        return torch.autograd.grad(compute(a, b, c), (a, b, c), dout.to(dtype))

    def by(backend: str) -> Compute:
        return lambda a, b, c: attend(a, b, c, mask, softcap=args.softcap, backend=backend)[0]

    scale = q.shape[-1] ** -0.5
    made = gradients(q.dtype, by("emulated"))
    exact = gradients(torch.float64, by("reference"))
    plain = gradients(q.dtype, lambda a, b, c: _plain(a, b, c, mask, scale, args.softcap))
    return [
        _error_line(name, x, y, z, args.dtype)
        for name, x, y, z in zip(("dq", "dk", "dv"), made, plain, exact, strict=True)
    ]


def _error_line(name: str, made: Tensor, plain: Tensor, exact: Tensor, dtype: str) -> str:
    errors = [float((x.double() - exact).abs().nan_to_num(0.0).max()) for x in (made, plain)]
    return f"{name:4} max error against float64 {errors[0]:.2e}, of the plain {dtype} formula {errors[1]:.2e}"


def _inputs(args: argparse.Namespace) -> list[Tensor]:
    import torch

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[args.dtype]
    kv_heads, value_dim = key_heads(args), args.v_head_dim or args.kv_channels
    generator = torch.Generator().manual_seed(args.seed)
    shapes = (
        (args.num_attention_heads, args.kv_channels),
        (kv_heads, args.kv_channels),
        (kv_heads, value_dim),
    )
    return [torch.randn(args.seq_length, *shape, generator=generator).to(dtype) for shape in shapes]


def _plain(
    q_QNH: Tensor, k_KGH: Tensor, v_KGH: Tensor, mask: AttentionMask, scale: float, softcap: float
) -> Tensor:
    """Returns attention in the dtype of the inputs, all of it: the error that the dtype costs."""
    import torch

    repeats = q_QNH.shape[1] // k_KGH.shape[1]
    k, v = (x.repeat_interleave(repeats, dim=1) for x in (k_KGH, v_KGH))
    scores = torch.einsum("qnh,knh->nqk", q_QNH, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~torch.from_numpy(mask.to_dense()), -torch.inf)
    return torch.einsum("nqk,knv->qnv", scores.softmax(dim=-1).nan_to_num(0.0), v)
