"""The same training with Megatron-Core's own attention and a dense mask: what recipes are compared with.

Model and micro-batch for the loop of megatron_cp/training, on one context rank. Samples lie in rows `[b, S]`, as
Megatron-LM lays them, and the mask is built from the documents' lengths. No plan, no dispatch, no attention and no
rotary embedding of ours takes part:

    core_attention     Megatron-Core's DotProductAttention, which lacks two things that are added here: heads of
                       latent attention, and a document mask in a layer with a window
    rotary positions   Megatron's own; they run on through a sample, and differences are all that rotation sees
    prediction         a token's successor is that of its document, here by a mask
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel, gpt_model
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.dot_product_attention import DotProductAttention

from megatron_cp.data.batch import PlannedBatch
from megatron_cp.mcore.versions import compat
from megatron_cp.models.gpt import embedding_options, transformer_config
from megatron_cp.training.config import TrainConfig

# b samples, S tokens of a sample


class DenseMaskAttention(DotProductAttention):
    """Megatron-Core's attention; it takes the sizes of latent heads, and windows inside documents."""

    def __init__(
        self,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition
        # Given a window, Megatron-Core builds a mask of it and forgets the one that it was given.
        self.window = self.scale_mask_softmax.window_size
        self.scale_mask_softmax.window_size = None

    def forward(
        self, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Returns attention over what `attention_mask` (True is hidden) and the window leave."""
        if self.window is not None:
            place_S = torch.arange(attention_mask.shape[-1])
            too_far = place_S[:, None] - place_S[None, :] > self.window[0]
            attention_mask = attention_mask | too_far
        return super().forward(query, key, value, attention_mask, *args, **kwargs)


def model_provider(
    config: TrainConfig,
    *,
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
) -> Any:
    """Returns the GPT of the arguments, built from Megatron-Core's own specs. On one rank alone."""
    arguments = config.arguments
    if config.model.hybrid_layer_pattern is not None:
        raise NotImplementedError(
            "--hybrid-layer-pattern: Megatron-Core's own mixer needs kernels of a GPU; compare the other runs"
        )
    settings = transformer_config(arguments, dtype=config.model.dtype, use_cpu_initialization=True)
    block = compat.decoder_block_spec(settings, use_transformer_engine=False, vp_stage=vp_stage)
    block = copy.deepcopy(block)
    for layer in block.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = DenseMaskAttention
    prediction = None
    if settings.mtp_num_layers:
        prediction = get_gpt_mtp_block_spec(
            settings, block.layer_specs[-1], use_transformer_engine=False, vp_stage=vp_stage
        )
    return GPTModel(
        settings,
        block,
        config.data.padded_vocab_size,
        arguments["max_position_embeddings"],
        pre_process=pre_process,
        post_process=post_process,
        mtp_block_spec=prediction,
        vp_stage=vp_stage,
        **embedding_options(arguments),
    )


def forward_step(
    config: TrainConfig, planned: PlannedBatch, model: Any, device: torch.device
) -> tuple[Any, Any]:
    """Runs one micro-batch with a dense mask; returns the output and the loss function."""
    batch, size = planned.batch, config.data.seq_length
    documents = _documents(planned, config)
    rows = {
        name: torch.from_numpy(getattr(batch, name)).view(-1, size)
        for name in ("tokens", "labels", "loss_mask", "position_ids")
    }
    _roll_inside(documents)
    output = model(
        rows["tokens"],
        rows["position_ids"],
        _hidden(documents),
        labels=rows["labels"],
        loss_mask=rows["loss_mask"],
    )
    assert parallel_state.get_context_parallel_world_size() == 1
    per_token = config.model.calculate_per_token_loss

    def loss_function(losses_bS: torch.Tensor) -> tuple[Any, ...]:
        """Returns what Megatron-LM's own loss function does."""
        mask = rows["loss_mask"].view(-1).float()
        total, count = (losses_bS.view(-1).float() * mask).sum(), mask.sum()
        report = {"lm loss": torch.stack((total.detach(), count))}
        if per_token:
            return total, count.to(torch.int), report
        return total / count.clamp(min=1), report

    return output, loss_function


def _documents(planned: PlannedBatch, config: TrainConfig) -> torch.Tensor:
    """Returns int `[b, S]`: the number of the document that each token sees itself in; -1 is padding."""
    size, lengths = config.data.seq_length, planned.batch.document_lengths
    numbers = np.full(len(planned.batch.tokens), -1)
    numbers[: sum(lengths)] = np.repeat(np.arange(len(lengths)), lengths)
    if not config.data.reset_attention_mask:
        numbers[:] = 0
    return torch.from_numpy(numbers).view(-1, size)


def _hidden(documents_bS: torch.Tensor) -> torch.Tensor:
    """Returns Megatron's dense mask, bool `[b, 1, S, S]`: True where a query does not see a key."""
    others = documents_bS[:, :, None] != documents_bS[:, None, :]
    later = torch.ones(others.shape[1:], dtype=torch.bool).triu(1)
    return (others | later)[:, None]


def _roll_inside(documents_bS: torch.Tensor) -> None:
    """Makes Megatron's `roll_tensor` end at documents; it does so itself for packed sequences alone."""
    is_last = torch.ones_like(documents_bS, dtype=torch.bool)
    is_last[:, :-1] = documents_bS[:, :-1] != documents_bS[:, 1:]

    def roll_tensor(
        values_bS: torch.Tensor, shifts: int = -1, dims: int = -1, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rolled = values_bS.roll(shifts, dims).masked_fill(is_last, 0)
        return rolled, rolled.sum()

    for module in (multi_token_prediction, gpt_model):
        module.roll_tensor = roll_tensor
