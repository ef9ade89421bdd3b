"""DeepSeek's sparse attention (DSA): latent attention to the keys that an index picks, over the whole context.

    input -> compressed queries q_c, latent rows (c, rotary part of the key)        Megatron's projections and norms
    queries x up-projection of keys -> queries in the space of latent rows
    index of input and q_c picks the keys of each query, or that of a layer before  cp_sparse_attention
    out in that space x up-projection of values -> projection

Parameters, their names and checkpoints are those of Megatron-Core's latent attention with `DSAttention`. What travels
are latent rows and keys of the index, as they are: 704 numbers a token in DeepSeek-V3.2, however many heads.
"""

# s rows of this rank, b batch; of one tensor rank: n heads; r width of latent rows, p of the rotary part

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import is_checkpointing
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_cp.api import cp_sparse_attention
from megatron_cp.mcore import layers
from megatron_cp.mcore.documents.micro_batch import PlanFinder, Rows, group_of, prepare_layer
from megatron_cp.mcore.mixing.indexer import Indexer, attach_indexer_loss, rotated
from megatron_cp.mcore.mixing.layer_calls import refuse_inference, weight_of
from megatron_cp.mcore.settings.sparse_settings import layers_that_pick
from megatron_cp.runtime.sparse_attention import PickedKeys, SparseResult


class SparseCore(MegatronModule):
    """Attention to picked keys, on the rows of this rank: core attention of `SparseLatentAttention`.

    The constructor takes Megatron's arguments; `config` has the sizes of the index. `thd_split` is that of
    `ContextParallelAttention`.
    """

    follows_plans = True

    def __init__(
        self,
        config: Any,
        layer_number: int,
        softmax_scale: float,
        pg_collection: Any,
        thd_split: str | None = None,
        **unneeded: Any,
    ) -> None:
        super().__init__(config=config)
        prepare_layer(config, thd_split, pg_collection.cp)
        self.softmax_scale, self.groups = softmax_scale, pg_collection
        self.layer_number = layer_number
        picks = [*layers_that_pick(config), True]  # predictions, numbered behind the decoder, do
        self.indexer = Indexer(config) if picks[min(layer_number, len(picks)) - 1] else None
        self._picker = weakref.ref(self)
        self._has_sharing = not all(picks)
        if self._has_sharing:
            config.hetereogenous_dist_checkpoint = True  # layers have other tensors
        sizes = layers.attention_sizes(config, pg_collection.tp.size())
        self._plans = PlanFinder(config, max(1, layer_number), sizes, thd_split=thd_split)
        layers.register(config, sizes)

    def follow(self, before: SparseCore | None) -> None:
        """Takes the picks of the layer that picks for the one before, where this one has no index.

        Raises ValueError where that is another than the layer before: this one's is on another pipeline stage.
        """
        if self.indexer is not None:
            return
        config = self.config
        is_of_model = before is not None and before.config is config
        if before is None or not is_of_model or before.layer_number != self.layer_number - 1:
            raise ValueError(
                f"layer {self.layer_number} takes the keys that a layer before it has picked, on another pipeline "
                f"stage (dsa_indexer_topk_freq={config.dsa_indexer_topk_freq}, dsa_indexer_skip_topk_offset="
                f"{getattr(config, 'dsa_indexer_skip_topk_offset', 0)}); let every stage begin with a layer that picks"
            )
        self._picker = before._picker

    def forward(
        self,
        query: torch.Tensor,
        latent: torch.Tensor,
        index: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
        attention_mask: torch.Tensor | None,
        packed_seq_params: Any,
    ) -> torch.Tensor:
        """Returns out `[s, b, n, r]` of queries `[s, b, n, r + p]` in the space of latent rows `[s, b, r + p]`.

        `index` are its queries `[s, b, J, I]`, keys `[s, b, I]` and weights `[s, b, J]`; None in a layer that has no
        index, behind the one that picks for it, with the same `packed_seq_params`. `attention_mask` and
        `packed_seq_params` are those of `ContextParallelAttention`. Collective: every rank of the context group calls
        it, and every rank of heads.
        """
        config = self.config
        num_rows, batch = query.shape[:2]
        group = group_of(packed_seq_params, self.groups.cp)
        plan = self._plans.plan(
            num_rows, group, AttnMaskType.causal, attention_mask, packed_seq_params
        )
        has_loss = self.training and torch.is_grad_enabled() and bool(config.dsa_indexer_loss_coeff)
        has_loss &= index is not None
        tensors = (query, latent, *(index or ()))
        rows = Rows.of(num_rows, batch, packed_seq_params)
        if rows.are_one_stream:
            streams = [tuple(x.transpose(0, 1).flatten(0, 1) for x in tensors)]
        else:  # samples share the plan
            streams = [tuple(x[:, sample] for x in tensors) for sample in range(batch)]
        given: Sequence[PickedKeys | None] = [None] * len(streams)
        if index is None:
            given = self._taken_picks(packed_seq_params)
        results = [
            self._attend(stream, picked, plan, group, has_loss=has_loss)
            for stream, picked in zip(streams, given, strict=True)
        ]
        outs, divergences, picks = zip(*results, strict=True)
        if index is not None:
            self._share(list(picks), packed_seq_params)
        if rows.are_one_stream:
            out = outs[0].unflatten(0, (batch, num_rows)).transpose(0, 1)
        else:
            out = torch.stack(outs, dim=1)
        if has_loss:
            divergence = torch.cat(divergences)
            num_tokens = plan.num_tokens * len(streams)
            out = attach_indexer_loss(out, divergence, num_tokens, group.size(), config)
        return out

    def _attend(
        self,
        stream: tuple[torch.Tensor, ...],
        picked: PickedKeys | None,
        plan: Any,
        group: Any,
        *,
        has_loss: bool,
    ) -> SparseResult:
        """Returns out `[T, n, r]` of the rows of one plan, the divergence `[T]` of the index, and what was picked."""
        config = self.config
        compared: Literal["picked", "visible"] = (
            "picked" if getattr(config, "dsa_indexer_use_sparse_loss", False) else "visible"
        )
        query, latent, *index = (x.contiguous() for x in stream)
        index_q, index_k, index_weights = index or (None, None, None)
        return cp_sparse_attention(
            query,
            latent,
            index_q,
            index_k,
            index_weights,
            plan,
            group,
            topk=config.dsa_indexer_topk,
            value_dim=config.kv_lora_rank,
            softmax_scale=self.softmax_scale,
            index_loss=compared if has_loss else None,
            index_relu=bool(getattr(config, "dsa_indexer_scoring_relu", True)),
            head_group=self.groups.tp,
            picked=picked,
        )

    def _share(self, picks: list[PickedKeys], params: Any) -> None:
        """Keeps what was picked for the layers behind."""
        if not self._has_sharing:
            return
        kept = _picks_of(params, self.config)
        self._of_first_run(picks, kept)
        kept[id(self)] = picks

    def _taken_picks(self, params: Any) -> list[PickedKeys]:
        """Returns what the layer that picks for this one has picked in this micro-batch."""
        if params is None and is_checkpointing():
            raise NotImplementedError(
                "recomputed layers that share picked keys (dsa_indexer_topk_freq) need packed_seq_params, which tell "
                "micro-batches apart; recompute no layers (the same results), or give documents "
                "(--reset-attention-mask, another mask)"
            )
        kept = _picks_of(params, self.config)
        picks = kept.get(id(self._picker()))
        if picks is None:
            raise RuntimeError(
                f"layer {self.layer_number} takes the keys that a layer before it picks, which has not run with these "
                "packed_seq_params"
            )
        return self._of_first_run(picks, kept)

    def _of_first_run(
        self, picks: list[PickedKeys], kept: dict[Any, list[PickedKeys]]
    ) -> list[PickedKeys]:
        """Returns `picks`, or those of the first run of this layer where it is recomputed.

        Megatron runs a checkpointed layer without gradients first, and with them in backward: layers behind before
        those that pick for them, with the same `packed_seq_params`.
        """
        if not is_checkpointing():
            return picks
        waits = (id(self), "waits")
        if torch.is_grad_enabled():
            return kept.pop(waits, picks)
        if kept.setdefault(waits, picks) is not picks:
            raise RuntimeError(
                f"layer {self.layer_number} runs checkpointed twice with one packed_seq_params before its backward "
                "pass; make new ContextParallelParams for every micro-batch"
            )
        return picks


def _picks_of(params: Any, config: Any) -> dict[Any, list[PickedKeys]]:
    """Returns what layers have picked in a micro-batch; without parameters, in the last one."""
    kept: dict[Any, list[PickedKeys]] = vars(config if params is None else params).setdefault(
        "_megatron_cp_picked", {}
    )
    return kept


class SparseLatentAttention(MLASelfAttention):
    """Megatron's layer of latent attention, its heads computed in the space of latent rows.

    On tensor ranks the gradient of the keys' rotary part is summed over them, with Megatron's local layers too.
    **It has never run on a GPU, nor with Transformer Engine.**

    Raises NotImplementedError for settings that it cannot honour.
    """

    squeezes_batch = False
    _built_last: weakref.ref[SparseCore] | None = None
    """Core attention of the last layer that was built in this process; layers of a stage are built in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        last = SparseLatentAttention._built_last
        self.core_attention.follow(None if last is None else last())
        SparseLatentAttention._built_last = weakref.ref(self.core_attention)
        if not self._cuts_rows:
            # Each tensor rank has the whole gradient of this norm. Megatron takes it for a part, as that of a norm of
            # heads would be, and adds the parts up; the mean over ranks leaves it as it is.
            for parameter in self.q_layernorm.parameters():
                parameter.average_gradients_across_tp_domain = True

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        packed_seq_params: Any = None,
        attention_bias: torch.Tensor | None = None,
        inference_context: Any = None,
        inference_params: Any = None,
        **unneeded: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the layer's output `[s, b, hidden]` and its bias.

        `hidden_states` is `[s, b, hidden]`, s divided by the tensor ranks under sequence parallelism. Positions come
        with `packed_seq_params`, as for other layers. Collective, as `SparseCore`.
        """
        refuse_inference(inference_context, inference_params)
        if attention_bias is not None:
            raise NotImplementedError("attention_bias with sparse attention; leave it None")
        config = self.config
        compressed = self._compressed_queries(hidden_states)
        latent, turning = self._latent_rows(hidden_states)
        angles, mscale = self._angles(hidden_states, packed_seq_params)
        query, _ = (self.linear_q_up_proj if config.q_lora_rank else self.linear_q_proj)(compressed)
        query = query.unflatten(-1, (self.num_attention_heads_per_partition, self.q_head_dim))
        content, query_turning = query.split([config.qk_head_dim, config.qk_pos_emb_head_dim], -1)
        up_keys, up_values = self._up_projections()
        query = torch.cat(
            [
                torch.einsum("sbnd,ndr->sbnr", content, up_keys),
                rotated(query_turning, angles, mscale, is_interleaved=True),
            ],
            dim=-1,
        )
        key = rotated(turning.unsqueeze(2), angles, mscale, is_interleaved=True).squeeze(2)
        index = None
        if self.core_attention.indexer is not None:
            rows = (self._whole_rows(x.detach()) for x in (hidden_states, compressed))
            index = self.core_attention.indexer(*rows, angles, mscale)
        out = self.core_attention(
            query, torch.cat([latent, key], dim=-1), index, attention_mask, packed_seq_params
        )
        out = torch.einsum("sbnr,nvr->sbnv", out, up_values).flatten(2)
        projected: tuple[torch.Tensor, torch.Tensor | None] = self.linear_proj(out)
        return projected

    @property
    def _cuts_rows(self) -> bool:
        """Whether a tensor rank is given its part of the rows alone."""
        return bool(self.config.sequence_parallel) and self.pg_collection.tp.size() > 1

    def _whole_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Returns all rows of a tensor that nobody wants a gradient of."""
        if not self._cuts_rows:
            return x
        return gather_from_sequence_parallel_region(x, False, group=self.pg_collection.tp)

    def _compressed_queries(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Returns the compressed queries after their norm; the input itself where none are compressed."""
        rank = self.config.q_lora_rank
        if not rank:
            return hidden_states
        rows, _ = self.linear_q_down_proj(hidden_states)
        return self.q_layernorm(self._own_rows_of(rows, rank))

    def _own_rows_of(self, columns: torch.Tensor, width: int) -> torch.Tensor:
        """Returns this rank's rows with all columns; a column-parallel layer gives all rows and some columns."""
        if columns.shape[-1] == width:
            return columns
        rows = gather_from_tensor_model_parallel_region(columns, group=self.pg_collection.tp)
        if self._cuts_rows:
            rows = scatter_to_sequence_parallel_region(rows, group=self.pg_collection.tp)
        return rows

    def _latent_rows(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns latent rows `[s, b, r]` after their norm and the keys' rotary part `[s, b, p]`, of all rows.

        Each tensor rank attends to them with other heads: their gradients are summed.
        """
        config, group = self.config, self.pg_collection.tp
        sizes = [config.kv_lora_rank, config.qk_pos_emb_head_dim]
        rows, _ = self.linear_kv_down_proj(hidden_states)
        latent, turning = self._own_rows_of(rows, sum(sizes)).split(sizes, dim=-1)
        rows = torch.cat([self.kv_layernorm(latent), turning], dim=-1)
        if self._cuts_rows:
            rows = gather_from_sequence_parallel_region(rows, group=group)
        elif group.size() > 1:
            rows = copy_to_tensor_model_parallel_region(rows, group=group)
        latent, turning = rows.split(sizes, dim=-1)
        return latent, turning

    def _up_projections(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the matrices that make keys `[n, d, r]` and values `[n, v, r]` of latent rows."""
        config = self.config
        sizes = [config.qk_head_dim, config.v_head_dim]
        heads = (self.num_attention_heads_per_partition, sum(sizes))
        keys, values = weight_of(self.linear_kv_up_proj).unflatten(0, heads).split(sizes, dim=1)
        return keys, values

    def _angles(self, hidden_states: torch.Tensor, params: Any) -> tuple[torch.Tensor, float]:
        """Returns the angles `[s, b or 1, 1, p]` of all rows, and YaRN's scale."""
        length = self.rotary_pos_emb.get_rotary_seq_len(
            None, None, hidden_states, self.config, params
        )
        found = self.rotary_pos_emb(length)
        return (found, 1.0) if torch.is_tensor(found) else found


def sparse_latent_layer(layer: Any, norm: Any, **core_options: Any) -> Any:
    """Returns the spec of a decoder layer with sparse attention in place of its latent attention.

    Args:
        layer: Megatron's spec of the layer, without norms of queries and keys inside of its projections.
        norm: module of the norms of compressed queries and latent rows; None for none.
        core_options: further arguments of `SparseCore`.
    """
    attention = layer.submodules.self_attention
    norm = IdentityOp if norm is None else norm
    own = replace(
        attention.submodules,
        core_attention=ModuleSpec(module=SparseCore, params=core_options),
        q_layernorm=norm,
        kv_layernorm=norm,
    )
    spec = ModuleSpec(
        module=SparseLatentAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=own
    )
    return replace(layer, submodules=replace(layer.submodules, self_attention=spec))
