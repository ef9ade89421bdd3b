"""The loss, normalised over the context group: the same value and gradients at every CP size.

A rank sees some tokens of a micro-batch, perhaps none that count. Dividing by its own count would weigh
tokens by where they were dispatched. Megatron's schedule has two protocols, and each is exact in one way
only:

    --calculate-per-token-loss    return (sum, count, report)
        Gradients are summed over data and context ranks and divided once, by the count of the global batch.
    otherwise                     return (loss, report)
        The schedule multiplies by cp_size and divides by the micro-batches; DDP averages over data x context
        ranks. The loss returned is the local sum / count over the context group, and cp_size cancels.

Without context parallelism both equal what Megatron-LM computes. A mask without any token gives loss 0 and
gradients of exactly 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

LOSS_NAME = "lm loss"


def make_loss_function(
    loss_mask: torch.Tensor,
    *,
    per_token: bool,
    cp_group: Any,
    num_loss_tokens: int | None = None,
) -> Callable[[torch.Tensor], tuple[Any, ...]]:
    """Returns the `loss_func` that a forward step gives to Megatron's schedule.

    `loss_mask` has a 0 or 1 for each token of this rank, in any shape. `per_token` is
    `calculate_per_token_loss` of the model's configuration. `num_loss_tokens` counts the tokens in the loss
    over the whole group (`LocalBatch.num_loss_tokens`); with None the ranks of `cp_group` add it up, one
    all-reduce per micro-batch, which all of them must reach. The report is `{"lm loss": tensor([sum,
    count])}` of this rank; `reduce_report` adds it up over ranks and micro-batches.
    """
    mask = loss_mask.reshape(-1).float()

    def loss_function(losses: torch.Tensor) -> tuple[Any, ...]:
        loss_sum = torch.sum(losses.float().reshape(-1) * mask)
        local_count = mask.sum()
        report = {LOSS_NAME: torch.stack((loss_sum.detach(), local_count))}
        if per_token:
            return loss_sum, local_count.to(torch.int), report
        group_count = _count_over_group(local_count, num_loss_tokens, cp_group)
        return loss_sum / group_count.clamp(min=1), report

    return loss_function


def _count_over_group(local_count: torch.Tensor, known: int | None, cp_group: Any) -> torch.Tensor:
    if known is not None:
        return torch.full_like(local_count, known)
    total = local_count.clone()
    if cp_group.size() > 1:
        dist.all_reduce(total, group=cp_group)
    return total


def reduce_report(reports: list[dict[str, torch.Tensor]], *, dp_cp_group: Any) -> dict[str, float]:
    """Returns the step's mean loss per token over all ranks.

    `reports` is what the schedule's forward-backward function returned on this rank; `dp_cp_group` is
    `get_data_parallel_group(with_context_parallel=True)`. Collective: every rank of `dp_cp_group` on the last
    pipeline stage calls it once per step.
    """
    total = torch.stack([report[LOSS_NAME].double() for report in reports]).sum(dim=0)
    dist.all_reduce(total, group=dp_cp_group)
    loss_sum, count = total.tolist()
    return {LOSS_NAME: loss_sum / max(count, 1.0)}
