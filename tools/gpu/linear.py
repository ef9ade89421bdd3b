"""Linear attention on a GPU: plain torch and flash-linear-attention, right and how fast.

One context rank, a decay for each head, with the gated delta rule and without (Mamba-2), bf16, forward and backward.
Each check raises AssertionError, or returns what it found.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import megatron_cp as mcp
from megatron_cp import mask as masks
from megatron_cp.attn import linear_fla

SMALL = (70, 1, 130, 55)
LONG = (16384,)
HEADS, DIM = 16, 128
DELTA = "linear attention"
DEVICE = "cuda"
MAX_ERROR = {
    "torch": 1e-2,
    "fla": 3e-2,
}  # of the largest number; results and gradients are rounded to 16 bits
ROUNDS = 5
SECONDS = 300.0  # of a check: flash-linear-attention tries many settings of each of its kernels


def checks() -> dict[str, Callable[[], str]]:
    """Returns the checks by what they are called in the report."""
    return {
        f"{rule}, {backend}, {what}": functools.partial(check, backend, rule == DELTA)
        for rule in (DELTA, "linear attention with decays")
        for backend in MAX_ERROR
        for what, check in (("values", check_values), ("time and memory", time_and_memory))
    }


def check_values(backend: str, is_delta: bool) -> str:
    """Compares output and gradients with the recurrence in float64."""
    if (reason := _why_not(backend, is_delta)) is not None:
        return reason
    tensors, dout = _drawn(SMALL, 2, is_delta)
    found = _results(backend, SMALL, tensors, dout)
    leaves = [x.double().requires_grad_() for x in tensors]
    q, k, v, g, beta = _with_beta(leaves)
    bounds = torch.tensor([0, *SMALL]).cumsum(0)
    nothing = q.new_zeros(len(SMALL), 2, DIM, DIM)
    out, _ = linear_fla.recurrence_of_runs(q, k, v, g, beta, bounds, nothing, DIM**-0.5)
    wanted = (out, *torch.autograd.grad(out, leaves, dout.double()))
    errors = [
        ((a.double() - b).abs().max() / b.abs().max()).item()
        for a, b in zip(found, wanted, strict=True)
    ]
    worst = torch.tensor(errors).max().item()  # NaN if one is
    assert worst <= MAX_ERROR[backend], f"off by {worst:.1e}, at most {MAX_ERROR[backend]:.0e}"
    return "relative errors " + ", ".join(f"{x:.1e}" for x in errors)


def time_and_memory(backend: str, is_delta: bool) -> str:
    """Returns milliseconds of both passes together, the least of some, and the most memory they held."""
    if (reason := _why_not(backend, is_delta)) is not None:
        return reason
    tensors, dout = _drawn(LONG, HEADS, is_delta)
    best = float("inf")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        _results(backend, LONG, tensors, dout)
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end))
    held = (torch.cuda.max_memory_allocated() - before) / 1e9
    return f"{LONG[0]} tokens, {HEADS} heads of {DIM}: {best:.1f} ms, {held:.1f} GB"


def _why_not(backend: str, is_delta: bool) -> str | None:
    if backend == "torch":
        return None
    tensors, _ = _drawn((1,), 1, is_delta)
    _, k, v, g, beta = _with_beta(tensors)
    reason = linear_fla.why_not(k, v, g, beta)
    assert reason is None or "not installed" in reason, reason
    return reason


def _with_beta(tensors: list[Tensor]) -> tuple[Any, ...]:
    """Returns q, k, v, g and beta, None where there is none."""
    return (*tensors, None)[:5]


def _drawn(lengths: tuple[int, ...], heads: int, is_delta: bool) -> tuple[list[Tensor], Tensor]:
    """Returns q, k, v, g and, under the delta rule, beta; and the gradient of the output."""
    generator, tokens = torch.Generator(DEVICE).manual_seed(0), sum(lengths)

    def randn(*shape: int) -> Tensor:
        return torch.randn(tokens, heads, *shape, generator=generator, device=DEVICE)

    q, v, dout = (randn(DIM).to(torch.bfloat16) for _ in range(3))
    k = torch.nn.functional.normalize(randn(DIM), dim=-1).to(torch.bfloat16)
    g, beta = -randn().abs() / 8, randn().sigmoid().to(torch.bfloat16)
    return [q, k, v, g, *([beta] if is_delta else [])], dout


def _results(
    backend: str, lengths: tuple[int, ...], tensors: list[Tensor], dout: Tensor
) -> tuple[Tensor, ...]:
    """Returns output and gradients of one call."""
    plan = mcp.make_plan(masks.documents(list(lengths)), 1)
    leaves = [x.detach().requires_grad_() for x in tensors]
    q, k, v, g, beta = _with_beta(leaves)
    out = mcp.cp_linear_attention(
        q, k, v, plan, None, document_lengths=lengths, g=g, beta=beta, backend=backend
    )  # type: ignore[arg-type]
    return out.detach(), *torch.autograd.grad(out, leaves, dout)
