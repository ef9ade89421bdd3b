"""The words of `python -m megatron_cp emulate`, and what it does: one case of the attention kernels on the CPU.

Prints the distance to float64 beside that of the plain formula, what was executed, and on request every event
of the kernel's mbarriers. Nothing it prints says anything about the speed of a GPU.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_cp import mask as masks
from megatron_cp.mask import AttentionMask
from megatron_cp.report.arguments import count

if TYPE_CHECKING:
    from torch import Tensor

    Compute = Callable[[Tensor, Tensor, Tensor], Tensor]

DTYPES = ("bf16", "fp16")


def _documents(length: int) -> AttentionMask:
    generator, lengths = random.Random(length), [1]  # one token first
    while sum(lengths) < length:
        lengths.append(min(generator.randint(1, 200), length - sum(lengths)))
    return masks.documents(lengths if length > 1 else [length], within="causal")


def _mixed(length: int) -> AttentionMask:
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


MASKS: dict[str, Callable[[int], AttentionMask]] = {
    "full": masks.full,
    "causal": masks.causal,
    "inverse_causal": lambda n: masks.from_slices(n, n, [(0, n, 0, n, 0, None)]),
    "sliding_window": lambda n: masks.sliding_window(n, 100, num_sink=4),
    "chunked_causal": lambda n: masks.chunked_causal(n, 96),
    "prefix_lm": lambda n: masks.prefix_lm(n, n // 3),
    "documents": _documents,
    "mixed": _mixed,
    "empty": lambda n: masks.from_slices(n, n, []),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("--mask", choices=MASKS, default="causal")
    parser.add_argument("--length", type=count, default=300, help="queries and keys; default 300")
    parser.add_argument("--heads", type=count, default=2)
    parser.add_argument("--kv-heads", type=count, help="default: as many as heads")
    parser.add_argument("--head-dim", type=count, default=128)
    parser.add_argument("--value-dim", type=count, help="default: the head dim")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--softcap", type=float, default=0.0)
    parser.add_argument(
        "--seed", type=_seed, default=1,
        help="order of what is asynchronous, and the inputs; 0 is kind; default 1",
    )  # fmt: skip
    parser.add_argument("--blocks", type=count, default=2, help="CTAs of the grid; default 2")
    parser.add_argument(
        "--host-threads", type=count, default=1, help="1 (default): the same run for the same seed"
    )
    parser.add_argument(
        "--backward", action="store_true", help="the backward kernels too, with a random gradient"
    )
    parser.add_argument(
        "--history", type=Path, metavar="FILE", help="write every event of the mbarriers here"
    )


def _seed(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 0")
    return int(text)


def run(args: argparse.Namespace) -> tuple[list[str], int]:
    """Returns the lines to print and the exit code: 1 if the emulator found a defect."""
    import torch

    from megatron_cp.attn import attend, resolve_options
    from megatron_cp.attn.emulated import backend as emulated
    from megatron_cp.kernels.emulator.library import EmulatorBuildError, EmulatorError

    q, k, v = _inputs(args)
    mask = MASKS[args.mask](args.length)
    options = resolve_options(q, k, v, softcap=args.softcap, backend="emulated")
    out, lse = torch.empty(args.length, args.heads, v.shape[-1]), torch.empty(q.shape[:2])
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
        f"{args.mask}: {args.length} queries and keys, {mask.area():,} pairs, {args.heads}:{k.shape[1]} heads, head "
        f"dim {q.shape[-1]} ({v.shape[-1]}), {args.dtype}, seed {args.seed}, {args.blocks} CTAs",
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
    kv_heads, value_dim = args.kv_heads or args.heads, args.value_dim or args.head_dim
    generator = torch.Generator().manual_seed(args.seed)
    shapes = ((args.heads, args.head_dim), (kv_heads, args.head_dim), (kv_heads, value_dim))
    return [torch.randn(args.length, *shape, generator=generator).to(dtype) for shape in shapes]


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
