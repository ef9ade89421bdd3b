"""From a planned micro-batch (NumPy, the same on every rank) to this rank's tensors, in one place.

Megatron hands `packed_seq_params` from the model's forward to every layer, through recomputation
and pipeline stages. `ContextParallelParams` rides in that channel: the plans for attention, the
positions for RoPE.  Its `qkv_format` stays "sbhd", so that Megatron neither squeezes the batch
dimension nor slices RoPE per document by itself.
"""

# T tokens on this rank, S tokens of the whole micro-batch

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams


@dataclass
class ContextParallelParams(PackedSeqParams):
    """What attention and RoPE must know about one micro-batch; shared by all its layers."""

    qkv_format: str = "sbhd"
    plans: Mapping[str, Any] = field(default_factory=dict)
    """Attention plan per kind of layer: "full" always, "window" where the model has sliding-window
    layers.
    """
    positions: torch.Tensor | None = None
    """int64 [T]: RoPE position of each of this rank's rows, on the device of the model."""
    tapes: dict[int, Any] = field(default_factory=dict, repr=False, compare=False)
    """Attention results that recomputed layers wait for; filled and emptied by the layers."""


@dataclass(frozen=True)
class LocalBatch:
    """One rank's share of a micro-batch, in dispatched order; tensors [1, T] for GPTModel."""

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    params: ContextParallelParams
    num_loss_tokens: int
    """Tokens that count in the loss over *all* ranks of the context-parallel group."""


def local_batch(
    planned: Any, cp_rank: int, device: torch.device | str, *, cp_group: Any = None
) -> LocalBatch:
    """The rows that rank `cp_rank` owns, labels and loss mask dispatched like the tokens.

    Labels are shifted before dispatch (in the pack), so no neighbour's token is needed at a shard's
    edge.  Tail padding gets token 0, label 0, position 0 and loss mask 0.  No collective: each rank
    cuts its own share.

    Args:
        planned: `data.batch.PlannedBatch` (or anything with its `batch` and `plans`).
        cp_rank: rank inside the context-parallel group.
        device: where the tensors go.
        cp_group: the group attention runs over; None means the layer's own.
    """
    batch, plan = planned.batch, planned.plans["full"]
    rows = np.asarray(plan.global_from_local)[cp_rank]
    return LocalBatch(
        tokens=_rows_of(batch.tokens, rows, device),
        labels=_rows_of(batch.labels, rows, device),
        loss_mask=_rows_of(batch.loss_mask, rows, device),
        position_ids=_rows_of(batch.position_ids, rows, device),
        params=context_parallel_params(
            planned.plans, cp_rank, device, position_ids=batch.position_ids, cp_group=cp_group
        ),
        num_loss_tokens=int(batch.loss_mask.sum()),
    )


def context_parallel_params(
    plans: Mapping[str, Any],
    cp_rank: int,
    device: torch.device | str,
    *,
    position_ids: np.ndarray | None = None,
    cp_group: Any = None,
) -> ContextParallelParams:
    """What goes into `packed_seq_params` for these plans.

    Args:
        plans: attention plan per kind of layer; all share one placement, that of "full".
        cp_rank: rank inside the context-parallel group.
        device: where `positions` goes.
        position_ids: int [S], position of each global token; None counts through the pack.
        cp_group: the group attention runs over; None means the layer's own.
    """
    plan = plans["full"]
    rows = np.asarray(plan.global_from_local)[cp_rank]
    if position_ids is None:
        position_ids = np.arange(plan.num_tokens)
    return ContextParallelParams(
        plans=dict(plans),
        positions=_rows_of(position_ids, rows, device)[0],
        cp_group=cp_group,
        max_seqlen_q=rows.size * plan.cp_size,
        max_seqlen_kv=rows.size * plan.cp_size,
    )


def _rows_of(values_S: np.ndarray, rows: np.ndarray, device: torch.device | str) -> torch.Tensor:
    """[1, T]: values of these global rows, 0 for the padding behind the last token."""
    values_S = np.asarray(values_S)
    is_token = rows < values_S.shape[0]
    values_T = np.where(is_token, values_S[np.where(is_token, rows, 0)], 0).astype(values_S.dtype)
    return torch.from_numpy(values_T)[None].to(device)
