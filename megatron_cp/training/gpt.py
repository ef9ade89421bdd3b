"""What is particular to a GPT in the training loop.

How one stage is built, and what one micro-batch does.
"""

from __future__ import annotations

import importlib
from argparse import Namespace
from typing import Any, Literal

import torch
from megatron.core import parallel_state

from megatron_cp.data.batch import PlannedBatch
from megatron_cp.mcore.batch import local_batch
from megatron_cp.mcore.loss import make_loss_function
from megatron_cp.mcore.spec import gpt_block_spec
from megatron_cp.models.gpt import Layout, build_gpt, transformer_config
from megatron_cp.models.presets import GPTShape
from megatron_cp.training.config import TrainConfig
from megatron_cp.training.logging.flops import ModelFlops, gpt_flops


def shape_from_arguments(args: Namespace) -> GPTShape:
    """The model that the arguments describe."""
    activation: Literal["swiglu", "gelu", "squared_relu"] = "gelu"
    if args.swiglu or args.squared_relu:
        activation = "swiglu" if args.swiglu else "squared_relu"
    every = args.window_attn_skip_freq
    return GPTShape(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_heads=args.num_attention_heads,
        num_kv_heads=args.num_query_groups,
        head_dim=args.kv_channels,
        vocab_size=args.vocab_size,
        max_positions=args.max_position_embeddings,
        position=args.position_embedding_type,
        rotary_base=args.rotary_base,
        rope_scaling_factor=args.rope_scaling_factor if args.use_rope_scaling else None,
        normalization=args.normalization,
        norm_epsilon=args.layernorm_epsilon,
        activation=activation,
        linear_bias=args.add_bias_linear,
        qkv_bias=args.add_qkv_bias,
        qk_norm=args.qk_layernorm,
        tied_embeddings=not args.untie_embeddings_and_output_weights,
        window=args.window_size,
        full_attention_every=every if isinstance(every, int) else None,
        softmax=args.softmax_type,
    )


def flops_from_arguments(config: TrainConfig) -> ModelFlops:
    """The operation count of the model that the arguments describe."""
    model = config.model
    return gpt_flops(
        num_layers={name: count for name, count in model.layers_by_mask().items() if count},
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_heads=model.num_attention_heads,
        num_kv_heads=model.num_query_groups,
        head_dim=model.kv_channels,
        vocab_size=config.data.padded_vocab_size,
        gated_mlp=model.swiglu,
    )


def model_provider(
    config: TrainConfig,
    *,
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
) -> Any:
    """One pipeline stage of the GPT that the arguments describe."""
    args = config.namespace()
    shape = shape_from_arguments(args)
    layout = Layout(
        tensor=args.tensor_model_parallel_size,
        pipeline=args.pipeline_model_parallel_size,
        virtual_pipeline=args.virtual_pipeline_model_parallel_size,
        context=args.context_parallel_size,
        sequence_parallel=args.sequence_parallel,
    )
    extra: dict[str, Any] = {
        "window_attn_skip_freq": args.window_attn_skip_freq,
        "hidden_dropout": args.hidden_dropout,
        "init_method_std": args.init_method_std,
        "apply_query_key_layer_scaling": args.apply_query_key_layer_scaling,
        "calculate_per_token_loss": args.calculate_per_token_loss,
        "deterministic_mode": args.deterministic_mode,
        "overlap_p2p_comm": args.overlap_p2p_comm and layout.virtual_pipeline is not None,
        "batch_p2p_comm": not (args.overlap_p2p_comm and layout.virtual_pipeline is not None),
        "recompute_granularity": args.recompute_granularity,
        "recompute_method": args.recompute_method,
        "recompute_num_layers": args.recompute_num_layers,
    }
    extra.update(_engine_fields(config))
    if args.recompute_modules is not None:
        extra["recompute_modules"] = args.recompute_modules
    if args.use_cpu_initialization:
        extra["use_cpu_initialization"] = True
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    settings = transformer_config(shape, layout=layout, dtype=dtype, **extra)
    return build_gpt(
        settings,
        shape,
        vocab_size=args.padded_vocab_size,
        spec=_layer_spec(config, settings, vp_stage),
        pre_process=pre_process,
        post_process=post_process,
        vp_stage=vp_stage,
        rotary_percent=args.rotary_percent,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
    )


def _engine_fields(config: TrainConfig) -> dict[str, Any]:
    """Fields of the configuration that choose kernels: engine, fp8 and fusions switched off."""
    args = config.namespace()
    fields: dict[str, Any] = {
        "transformer_impl": args.transformer_impl,
        "layernorm_zero_centered_gamma": args.layernorm_zero_centered_gamma,
        "cross_entropy_loss_fusion": args.cross_entropy_loss_fusion,
        "cross_entropy_fusion_impl": args.cross_entropy_fusion_impl,
    }
    if args.fp8 is not None:  # never run on a GPU yet
        names = ("fp8", "fp8_recipe", "fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo")
        fields.update({name: getattr(args, name) for name in (*names, "fp8_wgrad")})
    is_wanted = {
        "bias_activation_fusion": args.bias_swiglu_fusion if args.swiglu else args.bias_gelu_fusion,
        "bias_dropout_fusion": args.bias_dropout_fusion,
        "apply_rope_fusion": args.apply_rope_fusion,
        "gradient_accumulation_fusion": args.gradient_accumulation_fusion,
        "persist_layer_norm": not args.no_persist_layer_norm,
    }
    return {**fields, **{name: False for name, wanted in is_wanted.items() if not wanted}}


def _layer_spec(config: TrainConfig, settings: Any, vp_stage: int | None) -> Any:
    """Our decoder block with the backend that was asked for, or the object that --spec names."""
    spec, backend = config.model.spec, config.model.cp_backend
    if spec is None or spec[0] == "megatron_cp.mcore.spec":
        options = {} if backend is None else {"backend": backend}
        return gpt_block_spec(settings, vp_stage=vp_stage, **options)
    module, name = spec
    return getattr(importlib.import_module(module), name)


def forward_step(
    config: TrainConfig, batch: PlannedBatch, model: Any, device: torch.device
) -> tuple[Any, Any]:
    """This rank's part of one micro-batch through one stage.

    The output, and the loss function for the last stage.
    """
    group = parallel_state.get_context_parallel_group()
    local = local_batch(batch, group.rank(), device)
    output = model(
        local.tokens, local.position_ids, None, labels=local.labels, packed_seq_params=local.params
    )
    loss = make_loss_function(
        local.loss_mask,
        per_token=config.model.calculate_per_token_loss,
        cp_group=group,
        num_loss_tokens=local.num_loss_tokens,
    )
    return output, loss
