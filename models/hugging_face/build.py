"""A GPTModel of Megatron-Core with our attention, for the arguments of a converted checkpoint.

    arguments = arguments_of(read_config(folder), make_vocab_size_divisible_by=128)
    config = config_for(arguments, layout=Layout(context=2))
    model = build_model(arguments, config)

Install the CPU stand-ins (`megatron_cp.mcore.cpu.install`) before importing this module on a
machine without CUDA.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_cp.mcore.rope import install_position_rotary
from megatron_cp.mcore.spec import gpt_block_spec
from megatron_cp.models.gpt import Layout, default_fusions, running_fields
from megatron_cp.models.hugging_face.settings import Arguments


def config_for(
    arguments: Arguments,
    *,
    layout: Layout | None = None,
    expert_parallel: int = 1,
    dtype: torch.dtype = torch.float32,
    **extra: Any,
) -> TransformerConfig:
    """Megatron's configuration of the model; `extra` are further fields and win."""
    is_latent = arguments["multi_latent_attention"]
    kind = MLATransformerConfig if is_latent else TransformerConfig
    names = {field.name for field in dataclasses.fields(kind)}
    fields = {name: value for name, value in arguments.items() if name in names}
    fields |= {
        "num_moe_experts": arguments["num_experts"],
        "activation_func": F.silu if arguments["swiglu"] else quick_gelu,
        "gated_linear_unit": True,
        "expert_model_parallel_size": expert_parallel,
        **running_fields(layout or Layout(), dtype),
        **default_fusions(
            activation="swiglu" if arguments["swiglu"] else "quick_geglu",
            linear_bias=arguments["add_bias_linear"],
            normalization=arguments["normalization"],
            # Latent attention takes its positions unfused.
            position="none" if is_latent else arguments["position_embedding_type"],
        ),
    }
    with warnings.catch_warnings():  # 0.16.1 warns of its own default
        warnings.filterwarnings("ignore", message="full scope is deprecated")
        config = kind(**{**fields, **extra})
    # GPTModel reads these of its configuration, which has no fields for them in every version.
    for name in (name for name in arguments if name.startswith("yarn_")):
        setattr(config, name, arguments[name])
    return config


def build_model(
    arguments: Arguments,
    config: TransformerConfig,
    *,
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
) -> Any:
    """One pipeline stage: `GPTModel` whose attention and RoPE follow the plan of a batch."""
    model = GPTModel(
        config,
        gpt_block_spec(config, vp_stage=vp_stage),
        arguments["padded_vocab_size"],
        arguments["max_position_embeddings"],
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not arguments["untie_embeddings_and_output_weights"],
        position_embedding_type=arguments["position_embedding_type"],
        rotary_base=arguments["rotary_base"],
        rope_scaling=arguments["use_rope_scaling"],
        rope_scaling_factor=arguments.get("rope_scaling_factor", 1.0),
        vp_stage=vp_stage,
    )
    install_position_rotary(model)
    return model
