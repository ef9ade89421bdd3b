"""A GPTModel of Megatron-Core from Megatron-LM's arguments, with our attention in every layer.

    config = transformer_config(PRESETS["tiny"], layout=Layout(context=2))
    model = build_gpt(config, PRESETS["tiny"], vocab_size=4096)

One builder serves presets, converted checkpoints and the training loop: each of them describes a
model by a mapping of Megatron-LM's names. Install the CPU stand-ins (`megatron_cp.mcore.cpu.install`)
before importing this module on a machine without CUDA.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.activations import squared_relu
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.utils import init_method_normal

from megatron_cp.mcore.parts import longrope, loss_fusion, rope_fusion
from megatron_cp.mcore.parts.rope import install_position_rotary
from megatron_cp.mcore.settings import sparse_settings
from megatron_cp.mcore.spec import gpt_block_spec, mtp_block_spec
from megatron_cp.mcore.versions import compat

Arguments = Mapping[str, Any]
"""Megatron-LM's arguments of a model by their names; what is absent or None has Megatron's default."""

# Argument -> field of the configuration, where the names differ.
_RENAMED = {
    "num_experts": "num_moe_experts",
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
    "fp8_param_gather": "fp8_param",
}
# What `build_model` does in the place of Megatron.
_OURS = frozenset({"mlp_chunks_for_training"})

# GPTModel reads these of its configuration, which has no fields for them in every version: the argument
# that says each, and its default. Source: Megatron-LM 0.20.
_YARN = {
    "yarn_rotary_scaling_factor": ("rotary_scaling_factor", 1.0),
    "yarn_original_max_position_embeddings": ("yarn_original_max_position_embeddings", 4096),
    "yarn_beta_fast": ("yarn_beta_fast", 32.0),
    "yarn_beta_slow": ("yarn_beta_slow", 1.0),
    "yarn_mscale": ("mscale", 1.0),
    "yarn_mscale_all_dim": ("mscale_all_dim", 0.0),
    "yarn_correction_range_round_to_int": ("yarn_correction_range_round_to_int", True),
    "llama_4_scaling_beta": ("llama_4_scaling_beta", None),  # read by our attention
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a model is spread over ranks."""

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int | None = None
    context: int = 1
    expert: int = 1
    sequence_parallel: bool = False


def transformer_config(
    arguments: Arguments,
    *,
    layout: Layout | None = None,
    dtype: torch.dtype = torch.float32,
    **extra: Any,
) -> TransformerConfig:
    """Returns Megatron's configuration of this model; `extra` are further fields of it and win.

    Args:
        arguments: the model. What they say of ranks wins over `layout`.
        layout: ranks; by default one.
        dtype: of parameters and activations.
        extra: further fields.
    """
    is_latent = arguments.get("multi_latent_attention")
    kind = MLATransformerConfig if is_latent else TransformerConfig
    names = {field.name for field in dataclasses.fields(kind)} - _OURS
    named = {_RENAMED.get(name, name): value for name, value in arguments.items()}
    given = {name: v for name, v in named.items() if name in names and v is not None}
    fields = {**_running_fields(layout or Layout(), dtype), **given, **_activation(arguments)}
    if is_latent:  # here None means none, and the configuration's own default is 512
        fields["q_lora_rank"] = arguments.get("q_lora_rank")
        if arguments.get("rope_type") == "none":  # no kind of Megatron's; see `latent_rotates`
            fields["rope_type"] = "rope"
    fields.update(_drawn(arguments) | fusions_of(arguments) | _stream(arguments))
    if fields["apply_rope_fusion"]:
        rope_fusion.install()
    if fields["cross_entropy_loss_fusion"]:
        loss_fusion.install()
        if not arguments.get("cross_entropy_loss_fusion"):
            fields["cross_entropy_fusion_impl"] = "native"
    # Megatron would refuse context parallelism with linear layers (0.16), or want heads that it divides (0.20).
    variant = fields.pop("experimental_attention_variant", None)
    with warnings.catch_warnings():  # 0.16.1 warns of its own default
        warnings.filterwarnings("ignore", message="full scope is deprecated")
        config = kind(**{**fields, **extra})
    config.experimental_attention_variant = variant
    for name, usual in sparse_settings.LATER.items():
        found = arguments.get(name)
        setattr(config, name, usual if found is None else found)
    config.latent_rotates = arguments.get("rope_type") != "none"
    config.hybrid_layer_pattern = arguments.get("hybrid_layer_pattern")  # no field in any version
    config.mtp_use_repeated_layer = bool(arguments.get("mtp_use_repeated_layer"))  # none in 0.16
    if arguments.get("position_embedding_type") == "yarn" and not is_latent:
        for name, (argument, default) in _YARN.items():
            value = arguments.get(argument)
            setattr(config, name, default if value is None else value)
    longrope.scale_angles(config, arguments)
    return config


def _running_fields(layout: Layout, dtype: torch.dtype) -> dict[str, Any]:
    """Returns what a configuration says of ranks, precision and engine, whatever the model."""
    return {
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.virtual_pipeline,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "sequence_parallel": layout.sequence_parallel,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "use_cpu_initialization": not torch.cuda.is_available(),
        "calculate_per_token_loss": True,
        "transformer_impl": "transformer_engine" if compat.has_transformer_engine() else "local",
    }


def _drawn(arguments: Arguments) -> dict[str, Any]:
    """Returns how weights are drawn where not from one normal distribution for each kind of them."""
    if not arguments.get("init_method_xavier_uniform"):
        return {}
    xavier = dict.fromkeys(
        ("init_method", "output_layer_init_method"), torch.nn.init.xavier_uniform_
    )
    deviation = arguments.get("embedding_init_method_std")
    if deviation is None:
        return xavier
    # Megatron-Core takes one that equals `init_method_std` for not given.
    return {**xavier, "embedding_init_method": init_method_normal(deviation)}


def _stream(arguments: Arguments) -> dict[str, Any]:
    """Returns the format in which stages send the residual stream where it is not that of the layers."""
    if not arguments.get("fp32_residual_connection"):
        return {}
    compat.keep_wide_residual()
    return {"pipeline_dtype": torch.float32}


def _activation(arguments: Arguments) -> dict[str, Any]:
    """Returns the activation of the MLP, and whether it is gated."""
    function: Callable[[torch.Tensor], torch.Tensor] = F.gelu
    if arguments.get("swiglu"):
        function = F.silu
    elif arguments.get("quick_geglu"):
        function = quick_gelu
    elif arguments.get("squared_relu"):
        function = squared_relu
    is_gated = bool(arguments.get("swiglu") or arguments.get("quick_geglu"))
    return {"activation_func": function, "gated_linear_unit": is_gated}


def fusions_of(arguments: Arguments) -> dict[str, bool]:
    """Returns Megatron's fusions as this machine can run them: its defaults on CUDA, none on a CPU.

    None of them changes a result beyond rounding but GELU, which Megatron's fused kernel takes by tanh (measured: 3e-5
    of the gradient norm of a small model). Each is on only where it is wanted and what it needs is installed, because
    Megatron would stop otherwise. On a GPU this ran without Transformer Engine and apex; with them it never did.
    """
    wants, on_cuda = arguments.get, torch.cuda.is_available()
    has_engine = compat.has_transformer_engine()
    is_plain_gelu = not any(wants(name) for name in ("swiglu", "quick_geglu", "squared_relu"))
    has_biases, has_experts = wants("add_bias_linear", True), bool(wants("num_experts"))
    # Megatron fuses a bias with GELU, and SwiGLU with or without one; its fused SwiGLU knows no bound and no offset.
    # In experts it knows SwiGLU without a bias alone, and stops at the first forward of any other.
    is_plain_swiglu = wants("swiglu") and not (
        wants("activation_func_clamp_value")
        or wants("glu_linear_offset")
        or (has_experts and has_biases)
    )
    fused_activation = (is_plain_swiglu and wants("bias_swiglu_fusion", True)) or (
        is_plain_gelu and has_biases and not has_experts and wants("bias_gelu_fusion", True)
    )
    is_apex_norm = wants("normalization", "LayerNorm") == "LayerNorm" and compat.has_apex_norm()
    # Latent attention takes its positions unfused.
    has_rope = wants("position_embedding_type") == "rope" and not wants("multi_latent_attention")
    return {
        "masked_softmax_fusion": False,  # softmax is part of the attention kernel
        "gradient_accumulation_fusion": on_cuda
        and compat.has_apex_weight_gradients()
        and wants("gradient_accumulation_fusion", True),
        "bias_activation_fusion": on_cuda and bool(fused_activation),
        "bias_dropout_fusion": on_cuda and wants("bias_dropout_fusion", True),
        "apply_rope_fusion": on_cuda
        and has_rope
        and wants("apply_rope_fusion", True)
        and not wants("rotary_interleaved")
        and not wants("longrope_attention_factor"),
        "persist_layer_norm": on_cuda
        and is_apex_norm
        and not has_engine
        and not wants("no_persist_layer_norm"),
        "cross_entropy_loss_fusion": on_cuda or bool(wants("cross_entropy_loss_fusion")),
        "moe_permute_fusion": has_engine and bool(wants("moe_permute_fusion")),
        "moe_router_fusion": has_engine and bool(wants("moe_router_fusion")),
    }


def embedding_options(arguments: Arguments) -> dict[str, Any]:
    """Returns what the constructor of `GPTModel` is told of embeddings, positions and output."""
    options = {
        "share_embeddings_and_output_weights": not arguments.get(
            "untie_embeddings_and_output_weights"
        ),
        "position_embedding_type": arguments.get("position_embedding_type", "learned_absolute"),
        "rotary_percent": arguments.get("rotary_percent", 1.0),
        "rotary_base": arguments.get("rotary_base", 10000),
        "seq_len_interpolation_factor": arguments.get("rotary_seq_len_interpolation_factor"),
        "rope_scaling": bool(arguments.get("use_rope_scaling")),
    }
    factor = arguments.get("rope_scaling_factor")
    return options if factor is None else {**options, "rope_scaling_factor": factor}


def build_gpt(
    config: TransformerConfig,
    arguments: Arguments,
    *,
    vocab_size: int,
    spec: Any = None,
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    **attention_options: Any,
) -> Any:
    """Returns one pipeline stage of a `GPTModel` whose attention and RoPE follow the plans.

    Args:
        config: of `transformer_config`.
        arguments: what the configuration was made from.
        vocab_size: the padded one.
        spec: replaces our decoder block.
        pre_process: whether the stage holds the embedding.
        post_process: whether it holds the output layer and the loss.
        vp_stage: the virtual pipeline stage, where interleaving is on.
        attention_options: of our attention in our decoder block, e.g. `backend="cpu"`.
    """
    if spec is None:
        spec = gpt_block_spec(config, vp_stage=vp_stage, **attention_options)
    model = GPTModel(
        config,
        spec,
        vocab_size,
        arguments["max_position_embeddings"],
        pre_process=pre_process,
        post_process=post_process,
        mtp_block_spec=mtp_block_spec(config, vp_stage=vp_stage, **attention_options),
        vp_stage=vp_stage,
        **embedding_options(arguments),
    )
    longrope.divide_frequencies(model, arguments)
    install_position_rotary(model)
    return model
