"""Sparse attention on a GPU: plain torch, right and how fast.

One context rank, the sizes of DeepSeek-V3.2 on one of eight tensor ranks, bf16, forward and backward. Each check raises
AssertionError, or returns what it found.
"""

import functools
import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

import megatron_cp as mcp
from megatron_cp import mask as masks
from tools.gpu.linear import ROUNDS

Loss = Literal["picked", "visible"]
SMALL, LONG = (70, 1, 130, 55), (16384,)
DEVICE = "cuda"
MAX_ERROR = {torch.bfloat16: 2e-2, torch.float32: 1e-4}  # of the largest number
MOST_MOVED = 0.02  # of the queries: rounding may pick another last key
SECONDS = 120.0


class Sizes(NamedTuple):
    """Heads, columns of a latent row and of its value, heads of the index and their columns."""

    heads: int = 16
    width: int = 576
    values: int = 512
    index_heads: int = 64
    index_width: int = 128


SIZES = Sizes()


def checks() -> dict[str, Callable[[], str]]:
    """Returns the checks by what they are called in the report."""
    return {
        "sparse attention, all keys, values": check_all_keys,
        "sparse attention, 16 keys, values": check_few_keys,
        **{
            f"sparse attention, index compared over keys {loss}, time and memory": functools.partial(
                time_and_memory, loss
            )
            for loss in ("picked", "visible")
        },
    }


def check_all_keys() -> str:
    """Compares out, divergence and all gradients with float64 where rounding can choose nothing."""
    tensors, given = _drawn(SMALL, torch.bfloat16)
    found, wanted = (
        run(tensors, given, sum(SMALL), "visible", dtype)
        for run, dtype in ((_by_us, torch.bfloat16), (_by_definition, torch.float64))
    )
    errors = [
        ((a.double() - b).abs().max() / b.abs().max()).item()
        for a, b in zip(found, wanted, strict=True)
    ]
    worst, most = torch.tensor(errors).max().item(), MAX_ERROR[torch.bfloat16]  # NaN if one is
    assert worst <= most, f"off by {worst:.1e}, at most {most:.0e}"
    return "relative errors " + ", ".join(f"{x:.1e}" for x in errors)


def check_few_keys() -> str:
    """Compares out with float64 where 16 keys are picked, query by query."""
    tensors, given = _drawn(SMALL, torch.float32)
    found = _by_us(tensors, given, 16, "picked", torch.float32)[0]
    wanted = _by_definition(tensors, given, 16, "picked", torch.float64)[0]
    off = (found.double() - wanted).flatten(1).abs().amax(1) / wanted.abs().max()
    moved = (~(off <= MAX_ERROR[torch.float32])).double().mean().item()
    assert moved <= MOST_MOVED, f"{moved:.1%} of the queries are off, at most {MOST_MOVED:.0%}"
    return f"{moved:.1%} of the queries are off, the others by {off.median().item():.1e} (median)"


def time_and_memory(loss: Loss) -> str:
    """Returns milliseconds of both passes together, the least of some, and the most memory they held."""
    tensors, given = _drawn(LONG, torch.bfloat16)
    best, topk = float("inf"), min(2048, LONG[0])
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        _by_us(tensors, given, topk, loss, torch.bfloat16, LONG)
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end))
    held = (torch.cuda.max_memory_allocated() - before) / 1e9
    return f"{LONG[0]} tokens, {SIZES.heads} heads, {topk} keys: {best:.1f} ms, {held:.1f} GB"


def _drawn(
    lengths: tuple[int, ...], dtype: torch.dtype
) -> tuple[list[Tensor], tuple[Tensor, Tensor]]:
    """Returns the five inputs, and gradients of out and divergence."""
    generator, tokens = torch.Generator(DEVICE).manual_seed(0), sum(lengths)
    s = SIZES
    shapes = ((s.heads, s.width), (s.width,), (s.index_heads, s.index_width), (s.index_width,))
    shapes = (*shapes, (s.index_heads,), (s.heads, s.values), ())

    def randn(*shape: int) -> Tensor:
        return torch.randn(tokens, *shape, generator=generator, device=DEVICE)

    *tensors, d_out, d_divergence = (randn(*shape) for shape in shapes)
    tensors[2] /= math.sqrt(s.index_heads * s.index_width)  # scores of about 1
    return [x.to(dtype) for x in tensors], (d_out.to(dtype), d_divergence)


def _by_us(
    tensors: list[Tensor],
    given: tuple[Tensor, Tensor],
    topk: int,
    loss: Loss,
    dtype: torch.dtype,
    lengths: tuple[int, ...] = SMALL,
) -> tuple[Tensor, ...]:
    plan = mcp.make_plan(masks.documents(list(lengths), within="causal"), 1)
    leaves = [x.detach().to(dtype).requires_grad_() for x in tensors]
    q, latent, *index = leaves
    results = mcp.cp_sparse_attention(
        q, latent, *index, plan, None, topk=topk, value_dim=SIZES.values, index_loss=loss
    )[:2]
    gradients = torch.autograd.grad(results, leaves, given)
    return *(x.detach() for x in results), *gradients


def _by_definition(
    tensors: list[Tensor],
    given: tuple[Tensor, Tensor],
    topk: int,
    loss: Loss,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """The same of all pairs at once."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in tensors]
    q, latent, index_q, index_k, weights = leaves
    owner = torch.repeat_interleave(torch.tensor(SMALL)).to(DEVICE)
    visible = (owner[:, None] == owner) & torch.ones_like(owner[:, None] == owner).tril()
    products = torch.einsum("tji,si->tjs", index_q, index_k).clamp(min=0)
    scores = torch.where(visible, (products * weights[:, :, None]).sum(1), -math.inf)
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :topk]
    picked = torch.zeros_like(visible).scatter(1, order, True) & visible
    logits = torch.einsum("tnl,sl->nts", q, latent) / math.sqrt(SIZES.width)
    attention = torch.where(picked, logits, -math.inf).softmax(-1)
    out = torch.einsum("nts,sv->tnv", attention, latent[:, : SIZES.values])
    seen = picked if loss == "picked" else visible
    target = torch.where(seen, logits.detach(), -math.inf).softmax(-1).mean(0)
    guess = torch.where(seen, torch.where(seen, scores, -math.inf).log_softmax(-1), 0)
    divergence = (torch.special.xlogy(target, target) - target * guess).sum(1)
    upstream = [x.to(dtype) for x in given]
    gradients = torch.autograd.grad((out, divergence), leaves, upstream)
    return out.detach(), divergence.detach(), *gradients
