"""One entry per model family: its weights, its settings, and the values it must have.

Names and shapes are those of the families' published checkpoints as `transformers` saves them;
Megatron's are the sharded keys of megatron-core's layer specs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_cp.models.hugging_face import rope_settings as rope
from megatron_cp.models.hugging_face import settings as s
from megatron_cp.models.hugging_face.rows import Place, Row, by_group, evens_then_odds

Tables = Mapping[Place, tuple[Row, ...]]


@dataclass(frozen=True, kw_only=True)
class Family:
    """What is particular to the models of one `model_type`."""

    model_type: str
    architecture: str
    weights: Tables
    settings: tuple[s.Setting, ...]
    constants: Mapping[str, Any]
    """Arguments of Megatron-LM that every model of the family has."""
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys of config.json whose other values are not served; an absent key is none of them."""


def _row(megatron: str, *hf: tuple[str, str], **properties: Any) -> Row:
    return Row(megatron=megatron, hf=hf, **properties)


OUTER = (
    _row("embedding.word_embeddings.weight", ("model.embed_tokens.weight", "VH"), padded=True),
    _row("decoder.final_layernorm.weight", ("model.norm.weight", "H")),
    _row(
        "output_layer.weight",
        ("lm_head.weight", "VH"),
        padded=True,
        needs=("untie_embeddings_and_output_weights", True),
    ),
)
ATTENTION = (
    _row("self_attention.linear_qkv.layer_norm_weight", ("input_layernorm.weight", "H")),
    _row(
        "self_attention.linear_qkv.weight",
        ("self_attn.q_proj.weight", "QH"),
        ("self_attn.k_proj.weight", "KH"),
        ("self_attn.v_proj.weight", "KH"),
        order=by_group,
    ),
    _row("self_attention.linear_proj.weight", ("self_attn.o_proj.weight", "HQ")),
)
QKV_BIAS = (
    _row(
        "self_attention.linear_qkv.bias",
        ("self_attn.q_proj.bias", "Q"),
        ("self_attn.k_proj.bias", "K"),
        ("self_attn.v_proj.bias", "K"),
        order=by_group,
    ),
)
QK_NORM = (
    _row("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight", "D")),
    _row("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight", "D")),
)
SINKS = (
    _row("self_attention.linear_proj.bias", ("self_attn.o_proj.bias", "H")),
    _row("self_attention.core_attention.softmax_offset", ("self_attn.sinks", "N")),
)
LATENT_ATTENTION = (
    _row("input_layernorm.weight", ("input_layernorm.weight", "H")),
    _row(
        "self_attention.linear_q_proj.weight",
        ("self_attn.q_proj.weight", "UH"),
        needs=("q_lora_rank", False),
    ),
    _row(
        "self_attention.linear_q_down_proj.weight",
        ("self_attn.q_a_proj.weight", "AH"),
        needs=("q_lora_rank", True),
    ),
    _row(
        "self_attention.q_layernorm.weight",
        ("self_attn.q_a_layernorm.weight", "A"),
        needs=("q_lora_rank", True),
        fused="self_attention.linear_q_up_proj.layer_norm_weight",
    ),
    _row(
        "self_attention.linear_q_up_proj.weight",
        ("self_attn.q_b_proj.weight", "UA"),
        needs=("q_lora_rank", True),
    ),
    _row(
        "self_attention.linear_kv_down_proj.weight",
        ("self_attn.kv_a_proj_with_mqa.weight", "BH"),
    ),
    _row(
        "self_attention.kv_layernorm.weight",
        ("self_attn.kv_a_layernorm.weight", "C"),
        fused="self_attention.linear_kv_up_proj.layer_norm_weight",
    ),
    _row("self_attention.linear_kv_up_proj.weight", ("self_attn.kv_b_proj.weight", "TC")),
    _row("self_attention.linear_proj.weight", ("self_attn.o_proj.weight", "HO")),
)
DENSE_NORM = (_row("mlp.linear_fc1.layer_norm_weight", ("post_attention_layernorm.weight", "H")),)
DENSE = (
    _row(
        "mlp.linear_fc1.weight",
        ("mlp.gate_proj.weight", "FH"),
        ("mlp.up_proj.weight", "FH"),
    ),
    _row("mlp.linear_fc2.weight", ("mlp.down_proj.weight", "HF")),
)
# The local layer spec stores the norm before experts under the name that a dense layer has with
# Transformer Engine; Transformer Engine's spec does not fuse it there.
EXPERT_NORM = (
    _row(
        "mlp.linear_fc1.layer_norm_weight",
        ("post_attention_layernorm.weight", "H"),
        fused="pre_mlp_layernorm.weight",
    ),
)


def _experts(gate: str, up: str, down: str) -> tuple[Row, ...]:
    """Experts that are stored one by one."""
    return (
        _row("linear_fc1.weight", (gate, "MH"), (up, "MH")),
        _row("linear_fc2.weight", (down, "HM")),
    )


QWEN_EXPERTS = _experts(
    *(f"mlp.experts.{{e}}.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj"))
)
MIXTRAL_EXPERTS = _experts(
    *(f"block_sparse_moe.experts.{{e}}.{name}.weight" for name in ("w1", "w3", "w2"))
)
GPT_OSS_EXPERTS = (
    _row(
        "linear_fc1.weight",
        ("mlp.experts.gate_up_proj", "HG"),
        order=evens_then_odds,
        transposed=True,
    ),
    _row("linear_fc1.bias", ("mlp.experts.gate_up_proj_bias", "G"), order=evens_then_odds),
    _row("linear_fc2.weight", ("mlp.experts.down_proj", "MH"), transposed=True),
    _row("linear_fc2.bias", ("mlp.experts.down_proj_bias", "H")),
)
GPT_OSS_ROUTER = (
    _row("mlp.router.weight", ("mlp.router.weight", "EH")),
    _row("mlp.router.bias", ("mlp.router.bias", "E")),
)
DEEPSEEK_ROUTER = (
    _row("mlp.router.weight", ("mlp.gate.weight", "EH")),
    _row("mlp.router.expert_bias", ("mlp.gate.e_score_correction_bias", "E")),
)
SHARED_EXPERTS = (
    _row(
        "mlp.shared_experts.linear_fc1.weight",
        ("mlp.shared_experts.gate_proj.weight", "SH"),
        ("mlp.shared_experts.up_proj.weight", "SH"),
    ),
    _row("mlp.shared_experts.linear_fc2.weight", ("mlp.shared_experts.down_proj.weight", "HS")),
)

_LLAMA_LIKE = {
    "swiglu": True,
    "quick_geglu": False,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "qk_layernorm": False,
    "multi_latent_attention": False,
    "softmax_type": "vanilla",
    "window_size": None,
    "window_attn_skip_freq": None,
    "num_experts": None,
}
_PLAIN = {
    "hidden_act": ("silu",),
    "attention_dropout": (0, None),
    "quantization_config": (None,),
    "partial_rotary_factor": (1, None),
    "pretraining_tp": (1, None),
}
_NO_WINDOW = {
    "use_sliding_window": (False, None),
    "layer_types": (None, "full_attention"),
    "use_mrope": (False, None),
}
_NO_BIAS = {"attention_bias": (False, None), "mlp_bias": (False, None)}
_SHAPE = (*s.SIZES, s.TIED)
_EXPERTS_AFTER_SOFTMAX = {"moe_router_score_function": "softmax"}

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    weights={"model": OUTER, "layer": ATTENTION, "dense layer": (*DENSE_NORM, *DENSE)},
    settings=(*_SHAPE, rope.ROPE),
    constants=_LLAMA_LIKE,
    only=_PLAIN | _NO_BIAS,
)
QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    weights={
        "model": OUTER,
        "layer": (*ATTENTION, *QKV_BIAS),
        "dense layer": (*DENSE_NORM, *DENSE),
    },
    settings=(*_SHAPE, rope.ROPE),
    constants=_LLAMA_LIKE | {"add_qkv_bias": True},
    only=_PLAIN | _NO_WINDOW,
)
QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    weights={
        "model": OUTER,
        "layer": (*ATTENTION, *QK_NORM),
        "dense layer": (*DENSE_NORM, *DENSE),
    },
    settings=(*_SHAPE, rope.ROPE),
    constants=_LLAMA_LIKE | {"qk_layernorm": True},
    only=_PLAIN | _NO_WINDOW | _NO_BIAS,
)
QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    weights={
        "model": OUTER,
        "layer": (*ATTENTION, *QK_NORM),
        "dense layer": (*DENSE_NORM, *DENSE),
        "expert layer": (*EXPERT_NORM, _row("mlp.router.weight", ("mlp.gate.weight", "EH"))),
        "expert": QWEN_EXPERTS,
    },
    settings=(
        *_SHAPE,
        rope.ROPE,
        s.NUM_EXPERTS,
        s.TOP_K,
        s.EXPERT_WIDTH,
        s.SPARSE_LAYERS,
        s.RENORMALISED,
    ),
    constants=_LLAMA_LIKE | _EXPERTS_AFTER_SOFTMAX | {"qk_layernorm": True},
    only=_PLAIN | _NO_WINDOW | _NO_BIAS,
)
MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    weights={
        "model": OUTER,
        "layer": ATTENTION,
        "expert layer": (
            *EXPERT_NORM,
            _row("mlp.router.weight", ("block_sparse_moe.gate.weight", "EH")),
        ),
        "expert": MIXTRAL_EXPERTS,
    },
    settings=(*_SHAPE, rope.ROPE, s.NUM_EXPERTS, s.TOP_K, s.EXPERTS_AS_WIDE_AS_MLP),
    constants=_LLAMA_LIKE
    | _EXPERTS_AFTER_SOFTMAX
    | {"moe_layer_freq": 1, "moe_router_pre_softmax": False},
    only=_PLAIN | {"sliding_window": (None,), "router_jitter_noise": (0, None)},
)
GPT_OSS = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    weights={
        "model": OUTER,
        "layer": (*ATTENTION, *QKV_BIAS, *SINKS),
        "expert layer": (*EXPERT_NORM, *GPT_OSS_ROUTER),
        "expert": GPT_OSS_EXPERTS,
    },
    settings=(
        *_SHAPE,
        rope.YARN,
        s.NUM_EXPERTS,
        s.TOP_K,
        s.EXPERTS_AS_WIDE_AS_MLP,
        s.WINDOWS,
        s.SWIGLU_LIMIT,
    ),
    constants=_LLAMA_LIKE
    | _EXPERTS_AFTER_SOFTMAX
    | {
        "swiglu": False,
        "quick_geglu": True,
        "glu_linear_offset": 1.0,
        "add_bias_linear": True,
        "add_qkv_bias": True,
        "softmax_type": "learnable",
        "moe_layer_freq": 1,
        "moe_router_pre_softmax": False,
    },
    only=_PLAIN | {"attention_bias": (True, None), "swiglu_alpha": (1.702, None)},
)
DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    weights={
        "model": OUTER,
        "layer": LATENT_ATTENTION,
        "dense layer": (
            _row(
                "pre_mlp_layernorm.weight",
                ("post_attention_layernorm.weight", "H"),
                fused="mlp.linear_fc1.layer_norm_weight",
            ),
            *DENSE,
        ),
        "expert layer": (
            _row("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight", "H")),
            *DEEPSEEK_ROUTER,
            *SHARED_EXPERTS,
        ),
        "expert": QWEN_EXPERTS,
    },
    settings=(
        *s.LATENT_SIZES,
        s.TIED,
        rope.LATENT_ROPE,
        s.ROUTED_EXPERTS,
        s.TOP_K,
        s.EXPERT_WIDTH,
        s.FIRST_DENSE_LAYERS,
        s.SHARED_WIDTH,
        s.GROUPS,
        s.ROUTED_SCALING,
    ),
    constants=_LLAMA_LIKE
    | {
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_pre_softmax": False,
        "moe_router_dtype": "fp32",
    },
    only=_PLAIN
    | _NO_BIAS
    | {
        "rope_interleave": (True, None),
        "norm_topk_prob": (True,),
        "scoring_func": ("sigmoid", None),
        "topk_method": ("noaux_tc", None),
        "moe_layer_freq": (1, None),
        # The norms inside the attention have 1e-6 whatever the configuration says.
        "rms_norm_eps": (1e-6,),
    },
)

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (LLAMA, QWEN2, QWEN3, QWEN3_MOE, MIXTRAL, GPT_OSS, DEEPSEEK_V3)
}
