"""What Megatron's recurrent layers share where they run over the whole context, on the rows of this rank.

    projected rows -> plan, documents, rows of a stream      the same for every kind of layer
    weights of several sections                              drawn alike at every tensor-parallel size

The kinds are in `gated_delta_net.py`, `kimi_delta.py` and `mamba_mixer.py`.
"""

# s rows of this rank, b batch

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)

from megatron_cp.mask.linked import causal_document_lengths
from megatron_cp.mcore.documents.micro_batch import PlanFinder, Rows, group_of
from megatron_cp.plan import AttentionPlan


@dataclass(frozen=True)
class Stream:
    """A micro-batch as recurrent layers see it: documents in a row, samples that share them side by side."""

    rows: Rows
    plan: AttentionPlan
    group: Any
    document_lengths: tuple[int, ...]
    folded: torch.Tensor
    """What was projected, `[s * b, 1, C]`, or `[s, b, C]` where samples share the plan."""


class Recurrence:
    """Mixed into a layer of Megatron; it needs `config`, `pg_collection`, `tp_size` and `_plans` of that layer."""

    follows_plans = True

    config: Any
    pg_collection: Any
    tp_size: int
    in_proj_dim: int
    """Rows of `in_proj` on all tensor ranks together."""
    in_proj_split_sections: tuple[int, ...]
    """Rows of each of its sections on one of them."""
    _plans: PlanFinder

    def _built_in_proj(self, part: Any, width: int) -> Any:
        """Returns the projection of rows `width` wide into all sections, from the module that a spec names."""
        return build_module(
            part,
            width,
            self.in_proj_dim,
            init_method=self._draw_by_sections,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="fc1",
            **self._of_linear_layers(),
        )

    def _built_out_proj(self, part: Any, inner: int, width: int) -> Any:
        """Returns the projection of all heads' `inner` channels back to rows `width` wide."""
        return build_module(
            part,
            inner,
            width,
            init_method=self.config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="fc2",
            **self._of_linear_layers(),
        )

    def _of_linear_layers(self) -> dict[str, Any]:
        group = self.pg_collection.tp
        return {"config": self.config, "bias": False, "is_expert": False, "tp_group": group}

    def _stream(
        self, projected: torch.Tensor, attention_mask: torch.Tensor | None, params: Any
    ) -> Stream:
        """Returns the micro-batch of `projected` `[s, b, C]`; `params` is its `packed_seq_params`.

        Raises ValueError where a token of a document does not see all before it: a state would show it to it.
        """
        num_rows, batch, _ = projected.shape
        group = group_of(params, self.pg_collection.cp)
        plan = self._plans.plan(num_rows, group, AttnMaskType.causal, attention_mask, params)
        rows = Rows.of(num_rows, batch, params)
        lengths = causal_document_lengths(plan.mask)
        return Stream(rows, plan, group, lengths, rows.fold(projected.unsqueeze(2)))

    def _draw_by_sections(self, weight: torch.Tensor) -> torch.Tensor:
        """Draws `in_proj`: where all rows are drawn at once, in one order at every tensor-parallel size."""
        self.config.init_method(weight)
        if len(weight) == self.in_proj_dim:
            with torch.no_grad():
                weight.copy_(self._by_rank(weight.clone(), self.in_proj_split_sections))
        return weight

    def _by_rank(self, rows: torch.Tensor, own_sections: tuple[int, ...]) -> torch.Tensor:
        """Returns rows of all heads, section by section, in the order of tensor ranks: each has its part of each."""
        parts = rows.split([size * self.tp_size for size in own_sections])
        by_rank = zip(*(part.chunk(self.tp_size) for part in parts), strict=True)
        return torch.cat([own for parts_of_rank in by_rank for own in parts_of_rank])

    def _own_part(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns this tensor rank's part of rows that lie in the order of tensor ranks."""
        return rows.chunk(self.tp_size)[self.pg_collection.tp.rank()]

    def _drawn_like(self, own: torch.Tensor, low: float, high: float) -> torch.Tensor:
        """Returns uniform numbers in the shape of all tensor ranks' parts, the same on each of them."""
        return own.new_empty(len(own) * self.tp_size, *own.shape[1:]).uniform_(low, high)

    def _sharded(
        self,
        prefix: str,
        sharded_offsets: tuple[Any, ...],
        metadata: dict[str, Any] | None,
        *,
        by_rank: tuple[str, ...],
        sections: Mapping[str, tuple[tuple[str, ...], tuple[int, ...]]],
    ) -> dict[str, Any]:
        """Returns the sharded tensors of the layer.

        Args:
            prefix: in front of every key.
            sharded_offsets: those of what holds the layer.
            metadata: Megatron's.
            by_rank: modules without a sharding of their own, of whose weights each tensor rank has other rows.
            sections: names of the sections of a tensor, and their rows; each is saved by itself.
        """
        # Its name is private: where it goes, checkpoints alone shall miss it.
        from megatron.core.ssm.mamba_mixer import _split_tensor_factory

        metadata, group = ensure_metadata_has_dp_cp_group(metadata), self.pg_collection.tp
        groups = {"tp_group": group, "dp_cp_group": metadata["dp_cp_group"]}
        layer: Any = self
        own: dict[str, Any] = {}
        layer._save_to_state_dict(own, "", keep_vars=True)
        tensors: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            own, prefix, dict.fromkeys(own, 0), sharded_offsets, **groups
        )
        for name, module in layer.named_children():
            if name in by_rank:
                weights = module.state_dict(prefix="", keep_vars=True)
                tensors |= make_sharded_tensors_for_checkpoint(
                    weights,
                    f"{prefix}{name}.",
                    dict.fromkeys(weights, 0),
                    sharded_offsets,
                    **groups,
                )
            else:
                tensors |= sharded_state_dict_default(
                    module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=group
                )
        for name, (names, sizes) in sections.items():
            key = f"{prefix}{name}"
            tensors[key] = _split_tensor_factory(tensors[key], list(sizes), list(names), 0)
        return tensors


def split_over_tensor_ranks(*parameters: Any) -> None:
    """Says to Megatron that each tensor rank holds other heads of these: all count in the gradient norm."""
    for parameter in parameters:
        parameter.tensor_model_parallel = True
        parameter.partition_dim, parameter.partition_stride = 0, 1
