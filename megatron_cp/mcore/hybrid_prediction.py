"""Predictions of further tokens in a hybrid model, for a Megatron-Core whose hybrid models have none (0.16).

    rows of the decoder, embedding of each row's next token
        -> enorm, hnorm, eh_proj -> a stack of the pattern's layers -> final_layernorm -> the model's output layer

Since 0.17 Megatron's own classes do it. These compute the same, under the names and in the checkpoints of 0.20:
`mtp.layers.0.mtp_model_layer.layers.0.mixer.in_proj.weight`. Only training predicts.

Source: Megatron-Core 0.20, `HybridModel`, `MultiTokenPredictionBlock` and `process_mtp_loss`.
"""

# s rows of this rank, b batch, h hidden size

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

from megatron_cp.mcore import model_hooks
from megatron_cp.mcore.mixing.layer_calls import refuse_inference
from megatron_cp.mcore.parts.mtp import count_per_rank, mark_prediction
from megatron_cp.mcore.settings.hybrid_pattern import ATTENTION, EXPERTS, MAMBA, MLP
from megatron_cp.mcore.versions import hybrid_classes
from megatron_cp.mcore.versions.wrapping import put_hook

_PARTS = hybrid_classes.hybrid_parts()
_LAYERS = {
    MAMBA: "mamba_layer",
    ATTENTION: "attention_layer",
    MLP: "mlp_layer",
    EXPERTS: "moe_layer",
}


@dataclass(frozen=True, kw_only=True)
class PredictionParts:
    """What predictions are made of."""

    letters: str
    """Layers of one prediction."""
    norm: Any
    projection: Any
    """Of embedding and row, `[s, b, 2 h]` to `[s, b, h]`, its columns over the tensor ranks."""
    layers: Any
    """Submodules of the decoder's stack."""


class PredictionStack(_PARTS.stack):  # type: ignore[name-defined]
    """The layers of one prediction, numbered from 1, without a final norm."""

    def __init__(self, config: Any, parts: PredictionParts, pg_collection: Any) -> None:
        MegatronModule.__init__(self, config=config)
        self.pre_process, self.post_process, self.post_layer_norm = True, True, False
        self.pp_group, self.tp_group = pg_collection.pp, pg_collection.tp
        self.input_tensor = None
        self.layer_type_list = list(parts.letters)
        # Layers of Megatron but Mamba-2 add it to the number that they are given.
        offset = get_transformer_layer_offset(config, None, pg_collection.pp.rank())
        self.layers = torch.nn.ModuleList()
        for i, letter in enumerate(parts.letters):
            with get_fp8_context(config, i, is_init=True):
                layer = build_module(
                    getattr(parts.layers, _LAYERS[letter]),
                    config=config,
                    layer_number=i + 1 - (0 if letter == MAMBA else offset),
                    pg_collection=pg_collection,
                )
            self.layers.append(layer)
        self.num_layers_per_pipeline_rank = len(self.layers)


class HybridPrediction(multi_token_prediction.MultiTokenPredictionLayer):
    """One prediction: Megatron's, with a stack where that has one layer."""

    def __init__(
        self, config: Any, parts: PredictionParts, number: int, pg_collection: Any
    ) -> None:
        MegatronModule.__init__(self, config=config)
        self.sequence_parallel, self.layer_number = config.sequence_parallel, number
        self.vp_stage, self.cp_group = None, pg_collection.cp
        self.offload_context = nullcontext()
        norm = {
            "config": config,
            "hidden_size": config.hidden_size,
            "eps": config.layernorm_epsilon,
        }
        self.enorm, self.hnorm = build_module(parts.norm, **norm), build_module(parts.norm, **norm)
        self.eh_proj = build_module(
            parts.projection,
            config.hidden_size * 2,
            config.hidden_size,
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
        )
        self.mtp_model_layer = PredictionStack(config, parts, pg_collection)
        self.final_layernorm = build_module(parts.norm, **norm)
        mark_prediction(self.mtp_model_layer, config, number)

    @property
    def transformer_layer(self) -> Any:
        """The stack, under the name by which Megatron's schedule tells it the micro-batch."""
        return self.mtp_model_layer

    def _proj_and_transformer_layer(
        self,
        hidden_states: torch.Tensor,
        decoder_input: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        rotary_pos_emb: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        **unused: Any,
    ) -> torch.Tensor:
        """Returns the rows `[s, b, h]` that predict, of those before them and of embeddings. Collective."""
        fp8 = bool(self.config.fp8)
        is_split = self.config.sequence_parallel
        with tensor_parallel.get_cuda_rng_tracker().fork() if is_split else nullcontext():
            with get_fp8_context(self.config) if fp8 else nullcontext():
                hidden_states = self._concat_embeddings(hidden_states, decoder_input)
            with get_fp8_context(self.config) if fp8 else nullcontext():
                hidden_states = self.mtp_model_layer(
                    hidden_states,
                    attention_mask,
                    rotary_pos_emb=rotary_pos_emb,
                    packed_seq_params=packed_seq_params,
                )
        rows: torch.Tensor = self._postprocess(hidden_states)
        return rows


class HybridPredictions(MegatronModule):
    """All predictions of a model; with `mtp_use_repeated_layer` one set of weights makes them, one after the other."""

    def __init__(self, config: Any, parts: PredictionParts, pg_collection: Any) -> None:
        super().__init__(config=config)
        num_sets = 1 if config.mtp_use_repeated_layer else config.mtp_num_layers
        self.layers = torch.nn.ModuleList(
            HybridPrediction(config, parts, i + 1, pg_collection) for i in range(num_sets)
        )

    def forward(self, hidden_states: torch.Tensor, **inputs: Any) -> list[torch.Tensor]:
        """Returns the rows `[s, b, h]` of each prediction. Collective: every rank of the last stage calls it.

        `inputs` are `input_ids` and `position_ids` `[b, s]`, `embedding`, `attention_mask`, `rotary_pos_emb` and
        `packed_seq_params`.
        """
        found = []
        for depth in range(self.config.mtp_num_layers):
            layer = self.layers[min(depth, len(self.layers) - 1)]
            hidden_states, inputs["input_ids"], inputs["position_ids"] = layer(
                hidden_states=hidden_states, **inputs
            )
            found.append(hidden_states)
        return found

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Returns the sharded tensors; a list of layers cannot shard its own."""
        tensors: dict[str, Any] = {}
        layer: Any
        for i, layer in enumerate(self.layers):
            tensors |= layer.sharded_state_dict(f"{prefix}layers.{i}.", sharded_offsets, metadata)
        return tensors


class PredictingModel(_PARTS.model):  # type: ignore[name-defined]
    """Megatron's hybrid model with predictions on its last stage."""

    def __init__(self, config: Any, *, prediction: PredictionParts, **megatrons: Any) -> None:
        """Builds Megatron's model, and predictions behind its decoder."""
        super().__init__(config, **megatrons)
        if self.mtp_process:
            self.mtp = HybridPredictions(config, prediction, self.pg_collection)

    mtp: HybridPredictions

    @property
    def mtp_process(self) -> bool:
        """Whether this stage predicts."""
        return bool(self.post_process)

    def setup_embeddings_and_output_layer(self) -> None:
        """Makes the last stage's copy of the embedding, and lets it start like the first stage's.

        Collective over both stages; Megatron's constructor calls it.
        """
        if self.mtp_process and not self.pre_process:
            self.embedding = LanguageModelEmbedding(
                config=self.config,
                vocab_size=self.vocab_size,
                max_sequence_length=self.max_sequence_length,
                position_embedding_type=self.position_embedding_type,
                tp_group=self.pg_collection.tp,
            )
            # The copies must learn at one rate, that of embeddings.
            self.embedding.word_embeddings.weight.is_embedding_or_output_parameter = True
        super().setup_embeddings_and_output_layer()

    def shared_embedding_or_output_weight(self) -> torch.Tensor | None:
        """Returns the embedding's weight, which first and last stage share; None on the others."""
        if self.pre_process or self.mtp_process:
            weight: torch.Tensor = self.embedding.word_embeddings.weight
            return weight
        return None

    def forward(  # noqa: PLR0913  Megatron's
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        decoder_input: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        inference_context: Any = None,
        runtime_gather_output: bool | None = None,
        *,
        inference_params: Any = None,
        loss_mask: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        padding_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the losses `[b, s]`, or without labels the logits; of stages before the last the rows `[s, b, h]`.

        Gradients of the predictions' losses hang on what is returned. Collective, as Megatron's.
        """
        refuse_inference(inference_context, inference_params)
        if decoder_input is None and self.pre_process:
            decoder_input = self.embedding(input_ids=input_ids, position_ids=position_ids)
        streams = {
            "attention_mask": attention_mask,
            "rotary_pos_emb": self._angles(decoder_input, packed_seq_params),
            "packed_seq_params": packed_seq_params,
        }
        rows: torch.Tensor = self.decoder(
            hidden_states=decoder_input, padding_mask=padding_mask, **streams
        )
        if not self.post_process:
            return rows
        weight = None
        if self.share_embeddings_and_output_weights:
            weight = self.shared_embedding_or_output_weight()
        if self.training and labels is not None:
            predicted = self.mtp(
                rows,
                input_ids=input_ids,
                position_ids=position_ids,
                embedding=self.embedding,
                **streams,
            )
            rows = self._with_losses(rows, predicted, labels, loss_mask, weight, packed_seq_params)
        logits, _ = self.output_layer(
            rows, weight=weight, runtime_gather_output=runtime_gather_output
        )
        if labels is None:
            return logits.transpose(0, 1).contiguous()
        losses: torch.Tensor = self.compute_language_model_loss(labels, logits)
        return losses

    def _angles(self, decoder_input: torch.Tensor | None, params: Any) -> Any:
        if self.position_embedding_type != "rope":
            return None
        length = self.rotary_pos_emb.get_rotary_seq_len(
            None, self.decoder, decoder_input, self.config, params
        )
        is_packed = params is not None and params.qkv_format == "thd"
        return self.rotary_pos_emb(length, packed_seq=is_packed)

    def _with_losses(
        self,
        rows: torch.Tensor,
        predicted: list[torch.Tensor],
        labels: torch.Tensor,
        loss_mask: torch.Tensor | None,
        weight: torch.Tensor | None,
        params: Any,
    ) -> torch.Tensor:
        """Returns `rows`, with which the gradients of the predictions' losses go back.

        A loss is a mean over the tokens that have one this far ahead. Under per-token loss it weighs as many tokens as
        the loss of the next token does. Collective over context ranks.
        """
        config, cp_group = self.config, self.pg_collection.cp
        if loss_mask is None:
            loss_mask = torch.ones_like(labels, dtype=torch.float32)
        num_tokens = count_per_rank(loss_mask, getattr(params, "cp_group", None) or cp_group)
        share = config.mtp_loss_scaling_factor / config.mtp_num_layers
        for depth, ahead in enumerate(predicted):
            logits, _ = self.output_layer(ahead, weight=weight)
            rolled = {"cp_group": cp_group, "packed_seq_params": params}
            labels, _ = multi_token_prediction.roll_tensor(labels, **rolled)
            loss_mask, num_ahead = multi_token_prediction.roll_tensor(loss_mask, **rolled)
            losses = loss_mask * self.compute_language_model_loss(labels, logits)
            multi_token_prediction.MTPLossLoggingHelper.save_loss_to_tracker(
                losses.sum() / num_ahead,
                depth,
                config.mtp_num_layers,
                avg_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
            )
            times = num_tokens if config.calculate_per_token_loss else 1
            rows = multi_token_prediction.MTPLossAutoScaler.apply(
                rows, share * losses * times / num_ahead
            )
        return rows

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Returns the sharded tensors; of the embedding's copies the first stage's is the one that is saved."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        tensors: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        if self.mtp_process and not self.pre_process:
            multi_token_prediction.tie_word_embeddings_state_dict(
                tensors,
                self.embedding.word_embeddings.weight,
                f"{prefix}embedding.word_embeddings.weight",
                tp_group=self.pg_collection.tp,
                dp_cp_group=metadata["dp_cp_group"],
            )
        return tensors


put_hook(PredictingModel, "forward", model_hooks.give_plan_to_layers)
