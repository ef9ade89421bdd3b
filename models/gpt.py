"""A GPTModel of Megatron-Core from a shape and a layout, with our attention in every layer.

    config = transformer_config(PRESETS["tiny"], layout=Layout(context=2))
    model = build_gpt(config, PRESETS["tiny"], vocab_size=4096)

Install the CPU stand-ins (`megatron_cp.mcore.cpu.install`) before importing this module on a machine
without CUDA.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.activations import squared_relu
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_cp.mcore import compat
from megatron_cp.mcore.rope import install_position_rotary
from megatron_cp.mcore.spec import gpt_block_spec
from megatron_cp.models.presets import GPTShape


def default_fusions(
    *, activation: str, linear_bias: bool, normalization: str, position: str
) -> dict[str, bool]:
    """Returns Megatron's fusions as this machine can run them: its defaults on CUDA, none on a CPU.

    None of them changes a result beyond rounding. Each is on only where what it needs is
    installed, because Megatron would stop otherwise. The CUDA side never ran on a GPU.
    """
    on_cuda = torch.cuda.is_available()
    # Megatron fuses a bias with GELU, and SwiGLU with or without one.
    has_fused_activation = activation == "swiglu" or (activation == "gelu" and linear_bias)
    is_apex_norm = normalization == "LayerNorm" and compat.has_apex_norm()
    return {
        "gradient_accumulation_fusion": on_cuda and compat.has_apex_weight_gradients(),
        "masked_softmax_fusion": False,  # softmax is part of the attention kernel
        "bias_activation_fusion": on_cuda and has_fused_activation,
        "bias_dropout_fusion": on_cuda,
        "apply_rope_fusion": on_cuda and position == "rope" and compat.has_transformer_engine(),
        "persist_layer_norm": on_cuda and is_apex_norm and not compat.has_transformer_engine(),
    }


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a model is spread over ranks."""

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int | None = None
    context: int = 1
    sequence_parallel: bool = False


def running_fields(layout: Layout, dtype: torch.dtype) -> dict[str, Any]:
    """Returns what a configuration says of ranks, precision and engine, whatever the model."""
    return {
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.virtual_pipeline,
        "context_parallel_size": layout.context,
        "sequence_parallel": layout.sequence_parallel,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "use_cpu_initialization": not torch.cuda.is_available(),
        "calculate_per_token_loss": True,
        "transformer_impl": "transformer_engine" if compat.has_transformer_engine() else "local",
    }


def transformer_config(
    shape: GPTShape,
    *,
    layout: Layout | None = None,
    dtype: torch.dtype = torch.float32,
    **extra: Any,
) -> TransformerConfig:
    """Returns Megatron's configuration of this shape; `extra` are further fields of it and win."""
    activations = {"swiglu": F.silu, "gelu": F.gelu, "squared_relu": squared_relu}
    fields: dict[str, Any] = {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "ffn_hidden_size": shape.ffn_hidden_size,
        "num_attention_heads": shape.num_heads,
        "num_query_groups": shape.num_kv_heads,
        "kv_channels": shape.head_dim,
        "normalization": shape.normalization,
        "layernorm_epsilon": shape.norm_epsilon,
        "activation_func": activations[shape.activation],
        "gated_linear_unit": shape.activation == "swiglu",
        "add_bias_linear": shape.linear_bias,
        "add_qkv_bias": shape.qkv_bias,
        "qk_layernorm": shape.qk_norm,
        "window_size": shape.window,
        "window_attn_skip_freq": shape.full_attention_every,
        "softmax_type": shape.softmax,
        **running_fields(layout or Layout(), dtype),
        **default_fusions(
            activation=shape.activation,
            linear_bias=shape.linear_bias,
            normalization=shape.normalization,
            position=shape.position,
        ),
    }
    with warnings.catch_warnings():  # 0.16.1 warns of its own default
        warnings.filterwarnings("ignore", message="full scope is deprecated")
        return TransformerConfig(**{**fields, **extra})


def build_gpt(
    config: TransformerConfig,
    shape: GPTShape,
    *,
    vocab_size: int,
    spec: Any = None,
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    **model_options: Any,
) -> Any:
    """Returns one pipeline stage of a `GPTModel` whose attention and RoPE follow the plans.

    Args:
        config: of `transformer_config`.
        shape: what the configuration was made from.
        vocab_size: the padded one.
        spec: replaces our decoder block.
        pre_process: whether the stage holds the embedding.
        post_process: whether it holds the output layer and the loss.
        vp_stage: the virtual pipeline stage, where interleaving is on.
        model_options: further arguments of `GPTModel`.
    """
    model = GPTModel(
        config,
        spec if spec is not None else gpt_block_spec(config, vp_stage=vp_stage),
        vocab_size,
        shape.max_positions,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=shape.tied_embeddings,
        position_embedding_type=shape.position,
        rotary_base=shape.rotary_base,
        rope_scaling=shape.rope_scaling_factor is not None,
        **({"rope_scaling_factor": shape.rope_scaling_factor} if shape.rope_scaling_factor else {}),
        vp_stage=vp_stage,
        **model_options,
    )
    if shape.position == "rope":
        install_position_rotary(model)
    return model
