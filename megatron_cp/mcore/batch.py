"""Cuts this rank's tensors out of a planned micro-batch, which is NumPy and the same on every rank.

Megatron hands `packed_seq_params` from the model's forward to every layer, through recomputation and
pipeline stages. `ContextParallelParams` rides in that channel: plans for attention, positions for RoPE.
Its `qkv_format` stays "sbhd", so that Megatron neither squeezes the batch nor rotates each document by
itself.
"""

# T tokens on this rank, S tokens of the whole micro-batch

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_cp.data.batch import PlannedBatch
from megatron_cp.device_memory import copy_to


@dataclass
class ContextParallelParams(PackedSeqParams):
    """Holds what attention and RoPE must know about one micro-batch; all its layers share it."""

    qkv_format: str = "sbhd"
    plans: Mapping[str, Any] = field(default_factory=dict)
    """Plan of each kind of layer: "full" always, "window" where the model has sliding-window layers."""
    positions: torch.Tensor | None = None
    """RoPE position of each of this rank's rows: int64 `[T]` on the device of the model."""
    num_samples: int = 1
    """Samples that Megatron keeps side by side: b. The rows `[T]` of this rank lie in the model as `[T / b, b]`,
    the first column holding the first T / b of them."""
    tapes: dict[int, list[Any]] = field(default_factory=dict, repr=False, compare=False)
    """Attention results that recomputed layers wait for; the layers fill and empty it."""


@dataclass(frozen=True)
class LocalBatch:
    """Holds one rank's share of a micro-batch in dispatched order: tensors `[1, T]` for GPTModel."""

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    params: ContextParallelParams
    num_loss_tokens: int
    """Tokens that count in the loss, over all ranks of the context group."""


def context_group(planned: PlannedBatch) -> Any:
    """Returns the group over which a micro-batch is planned: this replica's context ranks, or those of all replicas.

    Every rank of a group has one of the same kind. No collective.
    """
    if planned.spans_replicas:
        return parallel_state.get_data_parallel_group(with_context_parallel=True)
    return parallel_state.get_context_parallel_group()


def local_batch(
    planned: PlannedBatch, cp_rank: int, device: torch.device | str, *, cp_group: Any = None
) -> LocalBatch:
    """Returns the rows that rank `cp_rank` owns; labels and loss mask are dispatched like the tokens.

    Labels are shifted in the pack, before dispatch, so no neighbour's token is needed at the edge of a shard.
    Padding at the tail gets token, label, position and loss mask 0. Attention runs over `cp_group`; None means the
    layer's own. No collective: each rank cuts its own share.
    """
    batch, plan = planned.batch, planned.plans["full"]
    rows = np.asarray(plan.global_from_local)[cp_rank]
    return LocalBatch(
        tokens=_rows_of(batch.tokens, rows, device),
        labels=_rows_of(batch.labels, rows, device),
        loss_mask=_rows_of(batch.loss_mask, rows, device),
        position_ids=_rows_of(batch.position_ids, rows, device),
        params=context_parallel_params(
            planned.plans,
            cp_rank,
            device,
            position_ids=batch.rope_positions,
            cp_group=cp_group,
        ),
        num_loss_tokens=int(batch.loss_mask.sum()),
    )


def context_parallel_params(
    plans: Mapping[str, Any],
    cp_rank: int,
    device: torch.device | str,
    *,
    position_ids: np.ndarray | torch.Tensor | None = None,
    cp_group: Any = None,
) -> ContextParallelParams:
    """Returns what goes into `packed_seq_params` for these plans, which share the placement of "full".

    `position_ids`, int `[S]` on the CPU, is the position of each global token; None counts through the pack. Positions
    go to `device`. Attention runs over `cp_group`; None means the layer's own.
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


def _rows_of(values_S: Any, rows: np.ndarray, device: torch.device | str) -> torch.Tensor:
    """Returns the values of these global rows, `[1, T]`; 0 for the padding behind the last token."""
    values_S = np.asarray(values_S)
    is_token = rows < values_S.shape[0]
    values_T = np.where(is_token, values_S[np.where(is_token, rows, 0)], 0).astype(values_S.dtype)
    return copy_to(torch.from_numpy(values_T)[None], torch.device(device))
