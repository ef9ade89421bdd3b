"""What a layer that mixes tokens must know of its micro-batch: plan, group, and how samples lie in its rows.

The plan comes with the micro-batch, or follows from how Megatron has cut it:

    packed_seq_params        plan                                               made by
    ContextParallelParams    plans["full"]; plans["window"] in window layers    the data loader, for any mask
    PackedSeqParams (thd)    documents that Megatron has cut itself             split.py, cached
    None                     the sequence, which Megatron has cut itself        split.py, cached
"""

# s rows of this rank, b batch, n heads, h head dim

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from megatron.core.transformer.enums import AttnMaskType

from megatron_cp.attn.eager import eager
from megatron_cp.config import CPConfig
from megatron_cp.mcore import layers
from megatron_cp.mcore.batch import ContextParallelParams
from megatron_cp.mcore.documents import cut, split
from megatron_cp.mcore.parts.mtp import install_order_roll
from megatron_cp.mcore.settings.validation import check_padding, check_samples, validate_config
from megatron_cp.plan import AttentionPlan


@dataclass(frozen=True)
class PlanFinder:
    """Finds the plan of a micro-batch for one layer."""

    config: Any
    """Megatron's TransformerConfig."""
    layer_number: int
    sizes: CPConfig
    """What the layer plans with, where Megatron has cut the batch itself."""
    window: tuple[int, int] | None = None
    """Keys before and after the query that it sees; None: all."""
    thd_split: str | None = None
    """How batches with thd parameters were cut: "per_document", or None where that is unknown."""

    @eager
    def plan(
        self,
        num_rows: int,
        group: Any,
        mask_type: AttnMaskType,
        attention_mask: torch.Tensor | None,
        params: Any,
    ) -> AttentionPlan:
        """Returns the plan of a batch of `num_rows` rows on each rank of `group`.

        `attention_mask` is None or the causal mask of this rank's rows: any other is refused, never ignored.
        `params` is the batch's `packed_seq_params`.

        Raises ValueError, NotImplementedError or RuntimeError where rows and plan do not fit, or none is known.
        """
        if isinstance(params, ContextParallelParams):
            cut.claim(params)
            return self._plan_of_params(params, num_rows, group, attention_mask)
        cut.check_none_is_lost(num_rows, group.size())
        band = split.band_of(mask_type, self.window)
        documents = split.documents_of_batch(params, num_rows, group.size(), self.thd_split)
        plan = split.plan_of_split(*documents, group.size(), band, self.sizes)
        _check_rows(plan, num_rows, group)
        if attention_mask is not None:
            split.check_mask_is_causal(attention_mask, plan, group.rank(), band)
        return plan

    def _plan_of_params(
        self,
        params: ContextParallelParams,
        num_rows: int,
        group: Any,
        attention_mask: torch.Tensor | None,
    ) -> AttentionPlan:
        if attention_mask is not None:
            raise ValueError(
                f"attention_mask of shape {tuple(attention_mask.shape)} beside "
                "ContextParallelParams; the plan is the mask; pass attention_mask=None"
            )
        name = "full" if self.window is None else "window"
        if name not in params.plans:
            raise ValueError(
                f"packed_seq_params.plans={sorted(params.plans)} has no {name!r} plan for layer "
                f"{self.layer_number}; plans need 'full', and 'window' where the model has "
                "sliding-window layers; megatron_cp.mcore.plans_of_mask makes both"
            )
        plan: AttentionPlan = params.plans[name]
        num_rows *= params.num_samples
        _check_rows(plan, num_rows, group)
        check_padding(self.config, num_rows * plan.cp_size, plan.num_tokens)
        check_samples(self.config, params.num_samples, plan.cp_size)
        return plan


def prepare_layer(config: Any, thd_split: str | None, cp_group: Any) -> None:
    """Checks the settings of a layer that mixes tokens, and lets multi-token prediction follow the plans.

    Raises ValueError or NotImplementedError for what such a layer cannot honour.
    """
    split.check_thd_split(thd_split)
    if config.context_parallel_size == 1 < cp_group.size():
        # So Megatron's encoders say that each rank has the whole input, which would be taken for a part of one.
        raise NotImplementedError(
            f"config.context_parallel_size=1 of a layer in a context group of {cp_group.size()} ranks, over which ours "
            "attends; give the layer Megatron's own attention, or, if its program cuts its rows over these ranks, its "
            "configuration their number"
        )
    split.check_partition(config, "config", config.context_parallel_size)
    layers.note_thd_split(thd_split)
    validate_config(config)
    if getattr(config, "mtp_num_layers", None):
        install_order_roll()


def group_of(params: Any, own: Any) -> Any:
    """Returns the group over which a batch is planned: that of its `packed_seq_params`, else the layer's own."""
    return own if params is None or params.cp_group is None else params.cp_group


class Rows(NamedTuple):
    """Says how the samples of a batch lie in the rows and heads that a layer is given."""

    num_rows: int
    num_samples: int
    are_one_stream: bool
    """The samples follow one another in the plan; otherwise they share it, so they are more heads."""

    @classmethod
    def of(cls, num_rows: int, batch: int, params: Any) -> Rows:
        """Returns those of `[num_rows, batch, ...]` with these `packed_seq_params`."""
        return cls(num_rows, batch, getattr(params, "num_samples", 1) > 1)

    def fold(self, heads: torch.Tensor) -> torch.Tensor:
        """Returns `[b * s, n, h]` of one stream, else `[s, b * n, h]`: the heads of a group stay side by side."""
        if heads.dim() == 3:
            return heads
        return heads.transpose(0, 1).flatten(0, 1) if self.are_one_stream else heads.flatten(1, 2)

    def of_heads(self, numbers: torch.Tensor) -> torch.Tensor:
        """Returns the largest number of each of the n heads, `[n]`."""
        return numbers if self.are_one_stream else numbers.view(self.num_samples, -1).amax(dim=0)

    def unfold(self, out: torch.Tensor) -> torch.Tensor:
        """Returns Megatron's `[s, b, n * h]`."""
        if not self.are_one_stream:
            return out.reshape(self.num_rows, self.num_samples, -1)
        return out.reshape(self.num_samples, self.num_rows, -1).transpose(0, 1).contiguous()


def _check_rows(plan: AttentionPlan, num_rows: int, group: Any) -> None:
    if (plan.tokens_per_rank, plan.cp_size) != (num_rows, group.size()):
        raise ValueError(
            f"a layer has {num_rows} rows on each of {group.size()} context ranks; the plan is for "
            f"{plan.tokens_per_rank} rows on {plan.cp_size} ranks; build the batch and the plan from the same "
            "pack and context-parallel size"
        )
