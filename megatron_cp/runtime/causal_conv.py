"""The short causal convolution in front of linear attention, over a whole context, tokens where the plan put them.

A token sees the W - 1 tokens before it in its document; those that lie on other ranks travel in one all-to-all.
"""

# T tokens of this rank, D channels, W taps

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp.attn.eager import eager
from megatron_cp.attn.options import accumulation_dtype
from megatron_cp.comm.row_exchange import RowExchange
from megatron_cp.comm.upload import Uploaded, upload
from megatron_cp.plan import AttentionPlan
from megatron_cp.plan.schema import PlanData
from megatron_cp.plan.segments import check_document_lengths, wanted_tokens
from megatron_cp.runtime.linear_attention import check_tensors, describe_call
from megatron_cp.runtime.linear_layout import MAX_LAYOUTS
from megatron_cp.runtime.session import check_plan, open_session


@eager
def cp_causal_conv1d(
    x: Tensor,
    weight: Tensor,
    plan: AttentionPlan,
    group: dist.ProcessGroup | None,
    *,
    document_lengths: Sequence[int],
    bias: Tensor | None = None,
    activation: Literal["silu"] | None = None,
) -> Tensor:
    """Returns the depthwise causal convolution inside each document, in the plan's local order.

    x `[T, D]`, weight `[D, W]`, bias `[D]` -> `[T, D]` in x's dtype

        out_t = activation(sum_w weight[:, w] x_{t - W + 1 + w} + bias)

    so that `weight[:, W - 1]` is of the token itself; tokens before a document's first are zero. Padding rows give 0
    and zero gradients. Sums are fp32 (fp64 for fp64 inputs). Differentiable in x, weight and bias; the gradients of the
    last two are this rank's share, to be summed over the group like those of any replicated parameter. Plain torch on
    every device; **it has never been checked on a GPU**.

    Collective over `group` (None for cp_size 1) where a token sees one of another rank, forward and backward: every
    rank calls it with the same plan, lengths, dtypes, options and `requires_grad`.

    Source: causal_conv1d of Mamba and flash-linear-attention (shapes, order of taps).

    Raises:
        ValueError, TypeError: wrong input, before any collective.
        PlanMismatchError: on every rank, when the ranks' plans or calls differ.
    """
    check_plan(plan)
    check_tensors({"x": x, "weight": weight, "bias": bias})
    lengths = check_document_lengths(document_lengths, plan)
    _check(x, weight, bias, activation, plan.tokens_per_rank)
    call = f"causal conv1d {describe_call((x, weight, bias), lengths)} {activation}"
    session = open_session(plan, group, x.device, call)
    rank = 0 if group is None else dist.get_rank(group)
    layout = _conv_layout(plan, lengths, weight.shape[1], rank, x.device).here()
    exact = accumulation_dtype(x.dtype)
    own, taps_WD = x.to(exact), weight.to(exact).T
    received = layout.exchange.receive(own, session.group)
    held = torch.cat([own, received, own.new_zeros((1, own.shape[1]))])
    y = own.new_zeros((len(layout.rows), own.shape[1])) if bias is None else bias.to(exact)
    for tap_D, seen in zip(taps_WD, layout.seen, strict=True):
        y = y + tap_D * held.index_select(0, seen)
    if activation == "silu":
        y = torch.nn.functional.silu(y)
    return torch.zeros_like(own).index_copy(0, layout.rows, y).to(x.dtype)


@dataclass(frozen=True)
class _ConvLayout:
    rows: Tensor
    """Own rows of tokens, padding left out."""
    seen: tuple[Tensor, ...]
    """Per tap, what each of these sees in [own rows | received rows | a row of zeros]."""
    exchange: RowExchange


@lru_cache(maxsize=MAX_LAYOUTS)
@torch.inference_mode(False)  # kept: a later call may want gradients
def _conv_layout(
    plan: PlanData,
    document_lengths: tuple[int, ...],
    num_taps: int,
    rank: int,
    device: torch.device,
) -> Uploaded[_ConvLayout]:
    owner, row = plan.local_from_global
    wanted, seen = wanted_tokens(plan, document_lengths, num_taps - 1)
    exchange, arriving = RowExchange.compile(
        wanted.reader, owner[wanted.item], row[wanted.item], rank, plan.cp_size
    )
    place = np.where(owner == rank, row, -1)
    place[wanted.item[arriving]] = plan.tokens_per_rank + np.arange(len(arriving))
    ids = plan.global_from_local[rank]
    rows = np.flatnonzero(ids < plan.num_tokens)
    held = seen[::-1, ids[rows]]
    zeros = plan.tokens_per_rank + len(arriving)
    seen_places = np.where(held < 0, zeros, place[held])
    tensors = tuple(torch.from_numpy(tap.copy()) for tap in seen_places)
    return upload(_ConvLayout(torch.from_numpy(rows), tensors, exchange), device)


def _check(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, num_rows: int
) -> None:
    if x.dim() != 2 or x.shape[0] != num_rows:
        raise ValueError(
            f"x has shape {tuple(x.shape)}, the plan gives every rank [{num_rows}, channels]; "
            "dispatch(x, plan, group) makes the local rows"
        )
    channels = x.shape[1]
    if weight.dim() != 2 or weight.shape[0] != channels or weight.shape[1] < 1:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}, x has {channels} channels; weight must be [{channels}, taps]: "
            "squeeze the middle dimension of a Conv1d's"
        )
    if bias is not None and tuple(bias.shape) != (channels,):
        raise ValueError(
            f"bias has shape {tuple(bias.shape)}, it must be ({channels},); give one number for each channel"
        )
    if activation not in (None, "silu"):
        raise ValueError(
            f"activation={activation!r} must be None or 'silu'; apply another one to the result"
        )
