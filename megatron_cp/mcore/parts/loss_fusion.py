"""Cross entropy that holds no logits in fp32, in the place of Megatron-Core's own fused one.

Megatron-Core's losses copy the logits to fp32 and keep them as probabilities until the backward pass: 8.6 GB
for 32K tokens and 64K words, read and written a dozen times. Nothing of that is needed: a row of logits and its
log-sum-exp give its probabilities again. `torch.compile` makes one kernel of each pass; both read the logits
as the output layer left them, compute in fp32, and round the gradient once. Together they took 4 ms there, and the
step 46 ms less with Adam in one kernel (benchmarks/results/h200_second_2026-11-27.md). Transformer Engine's loss is
taken where it is asked for (`--cross-entropy-fusion-impl te`).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist


def cross_entropy(logits: torch.Tensor, target: torch.Tensor, group: Any) -> torch.Tensor:
    """Returns the loss of each token, fp32; Megatron calls it as it does its own fused one.

    Args:
        logits: `[S, B, V]`, of each token, the words of this tensor rank.
        target: int64 `[S, B]`, the right word, counted over all ranks.
        group: the tensor-parallel ranks, which hold equally many words each. Collective if there are several.
    """
    losses: torch.Tensor = _CrossEntropy.apply(logits, target, group)
    return losses


def install() -> None:
    """Gives Megatron-Core our loss as its fused one; then `cross_entropy_loss_fusion=True` takes it."""
    from megatron.core.models.common.language_module import language_module

    language_module.fused_vocab_parallel_cross_entropy = cross_entropy


class _CrossEntropy(torch.autograd.Function):
    """Keeps the logits for the backward, and one number of each token."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor, group: Any) -> torch.Tensor:
        column = target - group.rank() * logits.shape[-1]
        lse, own = _compiled(_of_rows)(logits.detach(), column)
        if group.size() > 1:
            lse, own = _over_ranks(lse, own, group)
        ctx.save_for_backward(logits, column, lse)
        return lse - own

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _compiled(_gradient)(*ctx.saved_tensors, grads[0]), None, None


def _over_ranks(
    lse: torch.Tensor, own: torch.Tensor, group: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns both over the words of all ranks, the same bits on each of them."""
    mine = torch.stack([lse, own])
    parts = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(parts, mine, group=group)
    lses, owns = torch.stack(parts).unbind(1)
    return torch.logsumexp(lses, 0), owns.sum(0)


@functools.cache
def _compiled(function: Any) -> Any:
    return torch.compile(function)


def _of_rows(logits: torch.Tensor, column: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the log-sum-exp of each row, and the logit in its column, 0 where that is another rank's."""
    num_columns = logits.shape[-1]
    is_here = (column >= 0) & (column < num_columns)
    own = logits.gather(-1, column.clamp(0, num_columns - 1).unsqueeze(-1)).squeeze(-1)
    return torch.logsumexp(logits.float(), -1), torch.where(is_here, own.float(), 0.0)


def _gradient(
    logits: torch.Tensor, column: torch.Tensor, lse: torch.Tensor, grad: torch.Tensor
) -> torch.Tensor:
    """Returns the gradient of the logits, in their dtype."""
    probs = (logits.float() - lse.unsqueeze(-1)).exp()
    is_right = torch.arange(logits.shape[-1], device=logits.device) == column.unsqueeze(-1)
    return ((probs - is_right.float()) * grad.unsqueeze(-1)).to(logits.dtype)
