"""The core attention that Megatron is given: its own constructor and `forward`, over the whole context.

    SelfAttention -> core_attention(query, key, value, attention_mask, packed_seq_params=...) -> [s, b, n * h]

Every rank brings the rows that it holds. The plan of the micro-batch says which query sees which key
(micro_batch.py).

The module has no parameters, so checkpoints go to Megatron's attention and back. A learnable sink
(`softmax_type="learnable"`) is called `softmax_offset` and sharded as there.
"""

# s rows of this rank, b batch, n query heads, g key/value heads, h head dim (hv of values); all of one
# tensor-parallel rank

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import is_checkpointing
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import (
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)

from megatron_cp.api import cp_attention
from megatron_cp.attn.dropout import check_rate
from megatron_cp.mcore import layers
from megatron_cp.mcore.batch import ContextParallelParams
from megatron_cp.mcore.documents import split
from megatron_cp.mcore.documents.micro_batch import PlanFinder, Rows, group_of, prepare_layer
from megatron_cp.mcore.parts.dropout import draw_head_seeds
from megatron_cp.mcore.parts.query_scale import scaled_queries
from megatron_cp.runtime.checkpoint import AttentionTape


class ContextParallelAttention(MegatronModule):
    """Computes softmax attention over the whole context, on the rows of this rank.

    The constructor takes Megatron's arguments: `config`, `layer_number` (from 1), `attn_mask_type`,
    `attention_type` ("self"), `attention_dropout` (None: as in `config`), `softmax_scale`, `k_channels`, `v_channels`,
    `num_splits` (None), `cp_comm_type` (the plan decides instead) and `pg_collection` with `tp` and `cp`.
    `backend` is a backend of `megatron_cp.attend`; None chooses by device. `thd_split="per_document"` says that
    batches with thd parameters were cut zigzag in each document; None knows no cut and takes them on one
    context rank only.

    Raises NotImplementedError for settings that it cannot honour; validation.py lists them.
    """

    follows_plans = True
    tensor_model_parallel, partition_dim = True, 0
    """How tensor ranks split what it holds: Megatron-FSDP and conversions of weights ask a class they do not know."""
    num_calls = 1
    """How often a micro-batch calls it: more than once in a prediction that is repeated."""

    def __init__(  # noqa: PLR0913  Megatron's constructor
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        num_splits: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        backend: str | None = None,
        thd_split: str | None = None,
    ) -> None:
        super().__init__(config=config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(
            required_pgs=["tp", "cp"]
        )
        self.tp_group, self.cp_group = groups.tp, groups.cp
        prepare_layer(config, thd_split, self.cp_group)
        rate = config.attention_dropout if attention_dropout is None else attention_dropout
        check_rate(rate, "attention_dropout")
        self.dropout_p = float(rate)
        if attention_type != "self":
            raise NotImplementedError(
                f"attention_type={attention_type!r}; Megatron's layers have context parallelism for 'self' attention; "
                "train cross attention with --context-parallel-size 1 and Megatron's own module, or call "
                "megatron_cp.cp_attention in a layer of yours"
            )
        if num_splits is not None:
            raise NotImplementedError(
                f"num_splits={num_splits} is for inference kernels; leave it None"
            )
        self.layer_number = max(1, layer_number)
        self.attn_mask_type = attn_mask_type
        self.backend = backend
        # apply_query_key_layer_scaling divides before and multiplies inside the fp32 softmax: no
        # change in value here.
        head_dim = k_channels or config.kv_channels
        self.softmax_scale = 1.0 / math.sqrt(head_dim) if softmax_scale is None else softmax_scale
        windowed = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        )
        window: tuple[int, int] | None = tuple(config.window_size) if windowed else None
        sizes = layers.attention_sizes(config, self.tp_group.size(), k_channels, v_channels)
        self._plans = PlanFinder(config, self.layer_number, sizes, window, thd_split)
        self._wants_rows_compared = layer_number == 1  # in its first call: where tokens come in
        self._wants_max_logits = bool(
            getattr(config, "qk_clip", False) or getattr(config, "log_max_attention_logit", False)
        )
        # Megatron's QK-Clip reads it after the optimizer's step and sets it back to None.
        self.current_max_attn_logits: torch.Tensor | None = None
        self._make_softmax_offset(sizes.num_heads)
        layers.register(config, sizes)

    def _make_softmax_offset(self, num_heads: int) -> None:
        """Makes the sink logit of each head as Megatron does: none, zero ("off-by-one") or a parameter."""
        if self.config.softmax_type == "vanilla":
            self.softmax_offset = None
            return
        where = {"device": torch.cuda.current_device(), "dtype": self.config.params_dtype}
        if self.config.softmax_type == "off-by-one":
            self.softmax_offset = torch.zeros(num_heads, **where)
            return
        drawn = torch.zeros(num_heads * self.tp_group.size(), **where)
        if self.config.perform_initialization:
            # All heads on every rank: one start, and the same later draws, at every tensor-parallel size.
            self.config.init_method(drawn)
        own = drawn[num_heads * self.tp_group.rank() :][:num_heads]
        offset = torch.nn.Parameter(own.clone())
        # Each tensor-parallel rank holds other heads: count them all in the gradient norm.
        offset.tensor_model_parallel = True  # type: ignore[attr-defined]
        offset.partition_dim, offset.partition_stride = 0, 1  # type: ignore[attr-defined]
        self.softmax_offset = offset

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        **variant_inputs: Any,
    ) -> torch.Tensor:
        """Returns the attention output `[s, b, n * hv]` of this rank's rows.

        `query` is `[s, b, n, h]`, `key` `[s, b, g, h]` and `value` `[s, b, g, hv]`; without the batch dimension
        under thd, where the result is `[s, n * hv]` as Transformer Engine's: newer latent attention pads values to the
        width of queries and cuts the result by its axes. `attention_mask` is None or the causal mask of this rank's
        rows: any other is refused, never ignored. `attn_mask_type` overrides the constructor's; with
        ContextParallelParams the plan alone says who sees whom. `attention_bias` and the inputs of Megatron's
        attention variants must be None.

        Collective: every rank of the context group calls it, forward and backward.
        """
        _refuse_extras(attention_bias, variant_inputs)
        batch = query.shape[1] if query.dim() == 4 else 1
        if query.shape[0] != key.shape[0]:
            raise NotImplementedError(
                f"query has {query.shape[0]} rows, key {key.shape[0]}; training needs equal counts "
                "(a key-value cache is inference); run inference with Megatron's own attention"
            )
        mask_type = attn_mask_type or self.attn_mask_type
        group, num_rows = group_of(packed_seq_params, self.cp_group), query.shape[0]
        plan = self._plans.plan(num_rows, group, mask_type, attention_mask, packed_seq_params)
        if self._wants_rows_compared and packed_seq_params is None:
            self._wants_rows_compared = False
            split.tell_of_uncut_rows(value, group)
        rows = Rows.of(num_rows, batch, packed_seq_params)
        sink = self.softmax_offset
        if sink is not None:
            sink = sink.to(device=query.device, dtype=torch.float32)
            sink = sink if rows.are_one_stream else sink.repeat(batch)
        seeds, dropout_p = None, self.dropout_p if self.training else 0.0
        if dropout_p:
            sets = 1 if rows.are_one_stream else batch
            num_heads = self._plans.sizes.num_heads
            seeds = draw_head_seeds(num_heads, sets, self.tp_group, query.device)
        with self._results_kept(packed_seq_params):
            out, _, *max_logits = cp_attention(
                rows.fold(scaled_queries(query, self.config, packed_seq_params)),
                rows.fold(key),
                rows.fold(value),
                plan,
                group,
                softmax_scale=self.softmax_scale,
                sink=sink,
                backend=self.backend,
                deterministic=bool(getattr(self.config, "deterministic_mode", False)),
                return_max_logits=self._wants_max_logits and self.training,
                dropout_p=dropout_p,
                dropout_seed=seeds,
            )
        if max_logits:
            self._keep_max_logits(rows.of_heads(max_logits[0]))
        result = rows.unfold(out)
        is_thd = getattr(packed_seq_params, "qkv_format", None) == "thd"
        return result.flatten(0, 1) if is_thd else result

    def _keep_max_logits(self, found: torch.Tensor) -> None:
        """Keeps the largest logit of each head, `[n]`, over the micro-batches of a step."""
        before = self.current_max_attn_logits
        self.current_max_attn_logits = found if before is None else torch.maximum(before, found)

    def _results_kept(self, params: Any) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which a recomputed layer takes its attention from the first forward.

        Megatron runs a checkpointed layer without gradients first and with them in backward, with the same
        `packed_seq_params`: the tape lies there, one for each layer and micro-batch. Under another library's
        checkpoint attention is computed again.
        """
        if not is_checkpointing() or not isinstance(params, ContextParallelParams):
            return contextlib.nullcontext()
        if not torch.is_grad_enabled():
            tapes = params.tapes.setdefault(id(self), [])
            if len(tapes) == self.num_calls:
                raise RuntimeError(
                    f"layer {self.layer_number} runs checkpointed twice with one packed_seq_params "
                    "before its backward pass; make new ContextParallelParams for every micro-batch"
                )
            tapes.append(AttentionTape())
            return tapes[-1].recording()
        # Of several calls the last is recomputed first: it was made from what the others gave.
        tapes = params.tapes.get(id(self), [])
        return tapes.pop().replaying() if tapes else contextlib.nullcontext()

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Returns nothing, or the sharded learnable sink, under the keys of Megatron's attention."""
        state = (
            self.state_dict(prefix="", keep_vars=True)
            if self.config.softmax_type == "learnable"
            else {}
        )
        groups: dict[str, Any] = {}
        if metadata and "dp_cp_group" in metadata:
            groups = {"tp_group": self.tp_group, "dp_cp_group": metadata["dp_cp_group"]}
        return make_sharded_tensors_for_checkpoint(
            state, prefix, {"softmax_offset": 0}, sharded_offsets, **groups
        )


def _refuse_extras(attention_bias: torch.Tensor | None, variant_inputs: dict[str, Any]) -> None:
    given = [name for name, value in variant_inputs.items() if value is not None]
    if attention_bias is not None:
        given.append("attention_bias")
    if given:
        raise NotImplementedError(
            f"core attention was given {', '.join(given)}; only query, key, value and a mask are served; use "
            "Megatron's own attention for this variant"
        )
