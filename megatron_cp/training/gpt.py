"""What is particular to a GPT in the training loop: one stage, one micro-batch, its operations."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_cp.data.batch import PlannedBatch
from megatron_cp.mcore.batch import context_group, local_batch
from megatron_cp.mcore.hybrid import hybrid_stack_spec_of
from megatron_cp.mcore.loss import make_loss_function
from megatron_cp.mcore.settings.validation import check_spec, validate_config
from megatron_cp.mcore.versions import compat
from megatron_cp.models.build import build_model
from megatron_cp.models.gpt import Arguments, transformer_config
from megatron_cp.training.config import TrainConfig
from megatron_cp.training.logging.flops import ModelFlops, gpt_flops
from megatron_cp.training.refused_model import built


def flops_provider(config: TrainConfig) -> ModelFlops:
    """Returns the operation count of the GPT that the arguments describe."""
    return gpt_flops(
        config.arguments,
        num_layers=config.model.layers_by_mask(),
        vocab_size=config.data.padded_vocab_size,
    )


def model_provider(
    config: TrainConfig,
    *,
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
) -> Any:
    """Returns one pipeline stage of the GPT that the arguments describe."""
    backend = config.model.cp_backend
    options: dict[str, Any] = {} if backend is None else {"backend": backend}
    return build_model(
        _settings(config, config.arguments),
        config.arguments,
        vocab_size=config.data.padded_vocab_size,
        spec=_custom_spec(config.model.spec),
        pre_process=pre_process,
        post_process=post_process,
        vp_stage=vp_stage,
        **options,
    )


def check_model(config: TrainConfig) -> None:
    """Returns if Megatron-Core and our attention can build this model; needs no process group.

    Raises ValueError or NotImplementedError with what stands against it.
    """
    settings = built(partial(_settings, config), config.arguments)
    validate_config(settings)
    check_spec(settings)
    built(partial(_layer_specs, config), config.arguments)


def _layer_specs(config: TrainConfig, arguments: Arguments) -> list[Any]:
    """Returns Megatron-Core's specs of the layers, made to see whether it has some."""
    settings = _settings(config, arguments)
    if config.model.hybrid_layer_pattern is not None:
        return [hybrid_stack_spec_of(settings)]
    uses_engine = settings.transformer_impl == "transformer_engine"
    return compat.decoder_layer_specs(settings, use_transformer_engine=uses_engine)


def _settings(config: TrainConfig, arguments: Arguments) -> TransformerConfig:
    """Returns Megatron-Core's configuration of the model of these arguments on these ranks."""
    # Megatron overlaps sends between virtual stages only; without, it sends in batches.
    is_interleaved = config.parallel.virtual_pipeline_model_parallel_size is not None
    overlaps = config.parallel.overlap_p2p_comm and is_interleaved
    return transformer_config(
        arguments,
        dtype=config.model.dtype,
        overlap_p2p_comm=overlaps,
        batch_p2p_comm=not overlaps,
        use_cpu_initialization=config.model.use_cpu_initialization or not torch.cuda.is_available(),
    )


def _custom_spec(words: list[str] | None) -> Any:
    """Returns the object that --spec names; None for ours, which build_gpt makes."""
    if words is None or words[0] == "megatron_cp.mcore.spec":
        return None
    module, name = words
    return getattr(importlib.import_module(module), name)


def forward_step(
    config: TrainConfig, batch: PlannedBatch, model: Any, device: torch.device
) -> tuple[Any, Any]:
    """Runs this rank's part of one micro-batch through one stage.

    Returns the output, and the loss function for the last stage.
    """
    group = context_group(batch)
    local = local_batch(batch, group.rank(), device, cp_group=group)
    output = model(
        local.tokens,
        local.position_ids,
        None,
        labels=local.labels,
        packed_seq_params=local.params,
        **({"loss_mask": local.loss_mask} if config.model.mtp_num_layers else {}),
    )
    loss = make_loss_function(
        local.loss_mask,
        per_token=config.model.calculate_per_token_loss,
        cp_group=group,
        num_loss_tokens=local.num_loss_tokens,
    )
    return output, loss


def logits_step(batch: PlannedBatch, model: Any, device: torch.device) -> torch.Tensor:
    """Returns the logits of this rank's rows of a micro-batch, `[T, V]`, from a model of one stage.

    Collective over context and tensor ranks.
    """
    group = context_group(batch)
    local = local_batch(batch, group.rank(), device, cp_group=group)
    logits: torch.Tensor = model(
        local.tokens,
        local.position_ids,
        None,
        packed_seq_params=local.params,
        runtime_gather_output=True,
    )
    return logits[0]
