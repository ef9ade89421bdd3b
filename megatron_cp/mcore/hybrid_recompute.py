"""Full recompute of a hybrid model's layers, for a Megatron-Core whose stack knows none (before 0.18).

There the stack leaves `recompute_granularity="full"` aside without a word: the same results, all activations kept.
Source: which layers are recomputed together is that of Megatron-Core 0.20 (`megatron/core/recompute.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import make_viewless_tensor

from megatron_cp.mcore.versions import hybrid_classes

_PARTS = hybrid_classes.hybrid_parts()


class RecomputedStack(_PARTS.stack):  # type: ignore[name-defined]
    """A hybrid model's decoder that keeps the inputs of its layers alone where `config` asks for full recompute."""

    def __init__(self, config: Any, *parts: Any, **megatrons: Any) -> None:
        """Builds Megatron's stack; raises NotImplementedError for full recompute in fp8 or fp4, another one."""
        if config.recompute_granularity == "full" and (config.fp8 or getattr(config, "fp4", None)):
            raise NotImplementedError(
                "--recompute-granularity full of a hybrid model in fp8 or fp4 needs megatron-core 0.18 or later; give "
                "--recompute-granularity selective, the same results"
            )
        super().__init__(config, *parts, **megatrons)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        inference_context: Any = None,
        rotary_pos_emb: torch.Tensor | None = None,
        **streams: Any,
    ) -> torch.Tensor:
        """Returns the rows `[s, b, h]` of this stage. Collective over context ranks, as its layers are."""
        config = self.config
        if config.recompute_granularity != "full" or not self.training:
            rows: torch.Tensor = super().forward(
                hidden_states, attention_mask, inference_context, rotary_pos_emb, **streams
            )
            return rows
        streams |= {"attention_mask": attention_mask, "rotary_pos_emb": rotary_pos_emb}
        rows = hidden_states if self.pre_process else self.input_tensor
        if torch.is_grad_enabled() and not rows.requires_grad:
            # Embeddings are frozen. A checkpoint of rows without gradients would give the layers' weights none.
            rows = rows.detach().requires_grad_()
        # Of a view, as embeddings of one sample are, `distribute_saved_activations` keeps no part.
        rows = make_viewless_tensor(inp=rows, requires_grad=rows.requires_grad, keep_graph=True)
        for first, stop, is_recomputed in self._groups():
            run = _Layers(self.layers[first:stop], streams)
            if is_recomputed:
                rows = tensor_parallel.checkpoint(run, config.distribute_saved_activations, rows)
            else:
                rows = run(rows)
        if self.post_process and self.post_layer_norm:
            rows = self.final_norm(rows)
        return rows

    def _groups(self) -> list[tuple[int, int, bool]]:
        """Returns first layer, the one behind the last, and whether they are recomputed, of each group of layers."""
        size, num_layers = self.config.recompute_num_layers, len(self.layers)
        if self.config.recompute_method == "uniform":
            return [(i, min(i + size, num_layers), True) for i in range(0, num_layers, size)]
        return [(i, i + 1, i < size) for i in range(num_layers)]


class _Layers:
    """Layers one behind the other, as a function of the rows."""

    def __init__(self, layers: torch.nn.ModuleList, streams: dict[str, Any]) -> None:
        self._layers, self._streams = layers, streams

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the rows `[s, b, h]` behind the last layer."""
        for layer in self._layers:
            streams = dict(self._streams)
            if not isinstance(layer, TransformerLayer):  # Mamba-2 attends to nothing
                del streams["rotary_pos_emb"]
                streams.pop("padding_mask", None)
            result = layer(hidden_states=rows, **streams)
            rows = result[0] if isinstance(result, tuple) else result
        return rows
