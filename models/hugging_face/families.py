"""One entry per model family: its weights, its settings, and the values it must have."""

from __future__ import annotations

from dataclasses import replace

from megatron_cp.models.hugging_face import expert_settings as experts
from megatron_cp.models.hugging_face import rope_settings as rope
from megatron_cp.models.hugging_face import settings as s
from megatron_cp.models.hugging_face import weights as w
from megatron_cp.models.hugging_face.family import Family, Tables
from megatron_cp.models.hugging_face.nemotron import NEMOTRON_H

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
_LLAMA_LIKE_BUT_WINDOWS = {k: v for k, v in _LLAMA_LIKE.items() if not k.startswith("window_")}
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
_EXPERTS_BEHIND_DENSE_LAYERS = (
    experts.ROUTED_EXPERTS,
    experts.TOP_K,
    experts.EXPERT_WIDTH,
    experts.FIRST_DENSE_LAYERS,
    experts.SHARED_WIDTH,
    experts.GROUPS,
    experts.ROUTED_SCALING,
    s.PREDICTION_LAYERS,
)
_ANY_SHARE_ROTATES = {k: v for k, v in _PLAIN.items() if k != "partial_rotary_factor"}
_EXPERTS_AFTER_SOFTMAX = {"moe_router_score_function": "softmax"}
_EXPERTS_BY_SIGMOID = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_pre_softmax": False,
    "moe_router_dtype": "fp32",
}

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    weights={"model": w.OUTER, "layer": w.ATTENTION, "dense layer": (*w.DENSE_NORM, *w.DENSE)},
    settings=(*_SHAPE, rope.ROPE),
    constants=_LLAMA_LIKE,
    only=_PLAIN | _NO_BIAS,
)
MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    weights=LLAMA.weights,
    settings=(*_SHAPE, rope.ROPE, s.window_everywhere(4096)),
    constants=_LLAMA_LIKE_BUT_WINDOWS,
    only=_PLAIN | _NO_BIAS | {"layer_types": (None,)},
)
PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    weights={
        "model": w.OUTER,
        "layer": w.JOINED_ATTENTION,
        "dense layer": (*w.DENSE_NORM, *w.JOINED_DENSE),
    },
    settings=(*_SHAPE, rope.partial_rope(1.0), s.window_everywhere(None)),
    constants=_LLAMA_LIKE_BUT_WINDOWS,
    only=_ANY_SHARE_ROTATES
    | _NO_BIAS
    | {"layer_types": (None,), "resid_pdrop": (0, None), "embd_pdrop": (0, None)},
)
SMOLLM3 = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    weights=LLAMA.weights,
    settings=(*_SHAPE[:-1], s.TIED_UNLESS_SAID, rope.ROPE, s.UNROTATED_LAYERS),
    constants=_LLAMA_LIKE,
    only=_PLAIN | _NO_BIAS | _NO_WINDOW,
)
QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    weights={
        "model": w.OUTER,
        "layer": (*w.ATTENTION, *w.QKV_BIAS),
        "dense layer": (*w.DENSE_NORM, *w.DENSE),
    },
    settings=(*_SHAPE, rope.ROPE),
    constants=_LLAMA_LIKE | {"add_qkv_bias": True},
    only=_PLAIN | _NO_WINDOW,
)
QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    weights={
        "model": w.OUTER,
        "layer": (*w.ATTENTION, *w.QK_NORM),
        "dense layer": (*w.DENSE_NORM, *w.DENSE),
    },
    settings=(*_SHAPE, rope.ROPE),
    constants=_LLAMA_LIKE | {"qk_layernorm": True},
    only=_PLAIN | _NO_WINDOW | _NO_BIAS,
)
QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    weights={
        "model": w.OUTER,
        "layer": (*w.ATTENTION, *w.QK_NORM),
        "dense layer": (*w.DENSE_NORM, *w.DENSE),
        "expert layer": (*w.EXPERT_NORM, w.row("mlp.router.weight", ("mlp.gate.weight", "EH"))),
        "expert": w.QWEN_EXPERTS,
    },
    settings=(
        *_SHAPE,
        rope.ROPE,
        experts.NUM_EXPERTS,
        experts.TOP_K,
        experts.EXPERT_WIDTH,
        experts.SPARSE_LAYERS,
        experts.RENORMALISED,
    ),
    constants=_LLAMA_LIKE | _EXPERTS_AFTER_SOFTMAX | {"qk_layernorm": True},
    only=_PLAIN | _NO_WINDOW | _NO_BIAS,
)
_QWEN_LINEAR: Tables = {
    "model": w.OUTER_ALONE,
    "layer": w.GATED_ATTENTION,
    "linear layer": w.GATED_DELTA_NET_BY_KIND,
    "dense layer": (*w.DENSE_NORM, *w.DENSE),
    "expert layer": (
        *w.EXPERT_NORM,
        w.row("mlp.router.weight", ("mlp.gate.weight", "EH")),
        *w.GATED_SHARED_EXPERT,
    ),
    "expert": w.QWEN_EXPERTS,
    "stacked expert": w.STACKED_EXPERTS,
    "prediction layer": w.QWEN_PREDICTION,
}
_QWEN_PREDICTIONS = ("mtp.", "mtp.layers.{number}.")
_GATED_DELTA_NETS = {
    "qk_layernorm": True,
    "layernorm_zero_centered_gamma": True,
    "attention_output_gate": True,
    "experimental_attention_variant": "gated_delta_net",
}
QWEN3_NEXT = Family(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    weights={**_QWEN_LINEAR, "linear layer": w.GATED_DELTA_NET},
    predictions_at=_QWEN_PREDICTIONS,
    settings=(
        *_SHAPE,
        rope.partial_rope(0.25),
        *s.LINEAR_LAYERS,
        experts.NUM_EXPERTS_ALONE,
        experts.TOP_K,
        experts.EXPERT_WIDTH,
        experts.GATED_SHARED_WIDTH,
        experts.SPARSE_LAYERS,
        experts.RENORMALISED_UNLESS_SAID,
        s.A_PREDICTION_LAYER,
    ),
    constants=_LLAMA_LIKE
    | _EXPERTS_AFTER_SOFTMAX
    | _GATED_DELTA_NETS
    | {"moe_shared_expert_gate": True},
    only=_ANY_SHARE_ROTATES | _NO_BIAS | {"use_sliding_window": (False, None)},
)
_ONLY_OF_QWEN3_5 = (
    _ANY_SHARE_ROTATES
    | _NO_BIAS
    | {
        "attn_output_gate": (True, None),
        "output_gate_type": ("swish", None),
        "mamba_ssm_dtype": ("float32", None),
        "mlp_only_layers": (None,),
        "mtp_use_dedicated_embeddings": (False, None),
    }
)
QWEN3_5 = Family(
    model_type="qwen3_5_text",
    wrapper="qwen3_5",
    architecture="Qwen3_5ForCausalLM",
    weights=_QWEN_LINEAR,
    predictions_at=_QWEN_PREDICTIONS,
    settings=(*_SHAPE, rope.PARTIAL_ROPE_OF_TEXTS, *s.LINEAR_LAYERS, s.MTP_LAYERS),
    constants=_LLAMA_LIKE | _GATED_DELTA_NETS,
    only=_ONLY_OF_QWEN3_5,
)
QWEN3_5_MOE = Family(
    model_type="qwen3_5_moe_text",
    wrapper="qwen3_5_moe",
    architecture="Qwen3_5MoeForCausalLM",
    weights=_QWEN_LINEAR,
    predictions_at=_QWEN_PREDICTIONS,
    settings=(
        *s.SIZES_OF_EXPERTS_ALONE,
        s.TIED,
        experts.NO_DENSE_LAYERS,
        rope.PARTIAL_ROPE_OF_TEXTS,
        *s.LINEAR_LAYERS,
        experts.NUM_EXPERTS_ALONE,
        experts.TOP_K,
        experts.EXPERT_WIDTH,
        experts.GATED_SHARED_WIDTH,
        s.MTP_LAYERS,
    ),
    constants=_LLAMA_LIKE
    | _EXPERTS_AFTER_SOFTMAX
    | _GATED_DELTA_NETS
    | {"moe_layer_freq": 1, "moe_router_pre_softmax": False, "moe_shared_expert_gate": True},
    only=_ONLY_OF_QWEN3_5,
)
GLM4_MOE = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    weights={
        "model": w.OUTER,
        "layer": (
            *w.ATTENTION,
            *w.where("add_qkv_bias", w.QKV_BIAS),
            *w.where("qk_layernorm", w.QK_NORM),
        ),
        "dense layer": (*w.DENSE_NORM, *w.DENSE),
        "expert layer": (*w.EXPERT_NORM, *w.DEEPSEEK_ROUTER, *w.SHARED_EXPERTS),
        "expert": w.QWEN_EXPERTS,
        "prediction layer": w.PREDICTION,
    },
    settings=(
        *_SHAPE,
        rope.partial_rope(0.5),
        s.QKV_BIASES,
        s.QK_NORMS,
        *_EXPERTS_BEHIND_DENSE_LAYERS,
    ),
    constants=_LLAMA_LIKE | _EXPERTS_BY_SIGMOID,
    only=_ANY_SHARE_ROTATES | {"norm_topk_prob": (True, None)},
)
MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    weights={
        "model": w.OUTER,
        "layer": w.ATTENTION,
        "expert layer": (
            *w.EXPERT_NORM,
            w.row("mlp.router.weight", ("block_sparse_moe.gate.weight", "EH")),
        ),
        "expert": w.MIXTRAL_EXPERTS,
    },
    settings=(
        *_SHAPE,
        rope.ROPE,
        experts.NUM_EXPERTS,
        experts.TOP_K,
        experts.EXPERTS_AS_WIDE_AS_MLP,
    ),
    constants=_LLAMA_LIKE
    | _EXPERTS_AFTER_SOFTMAX
    | {"moe_layer_freq": 1, "moe_router_pre_softmax": False},
    only=_PLAIN | {"sliding_window": (None,), "router_jitter_noise": (0, None)},
)
GPT_OSS = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    weights={
        "model": w.OUTER,
        "layer": (*w.ATTENTION, *w.QKV_BIAS, *w.SINKS),
        "expert layer": (*w.EXPERT_NORM, *w.GPT_OSS_ROUTER),
        "expert": w.GPT_OSS_EXPERTS,
    },
    settings=(
        *_SHAPE,
        rope.YARN,
        experts.NUM_EXPERTS,
        experts.TOP_K,
        experts.EXPERTS_AS_WIDE_AS_MLP,
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
        "model": w.OUTER,
        "layer": w.LATENT_ATTENTION,
        "dense layer": (
            w.row(
                "pre_mlp_layernorm.weight",
                ("post_attention_layernorm.weight", "H"),
                fused="mlp.linear_fc1.layer_norm_weight",
            ),
            *w.DENSE,
        ),
        "expert layer": (
            w.row("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight", "H")),
            *w.DEEPSEEK_ROUTER,
            *w.SHARED_EXPERTS,
        ),
        "expert": w.QWEN_EXPERTS,
        "prediction layer": w.PREDICTION,
    },
    settings=(
        *s.LATENT_SIZES,
        s.TIED,
        rope.LATENT_ROPE,
        *_EXPERTS_BEHIND_DENSE_LAYERS,
    ),
    constants=_LLAMA_LIKE
    | _EXPERTS_BY_SIGMOID
    | {"multi_latent_attention": True, "qk_layernorm": True},
    only=_PLAIN
    | _NO_BIAS
    | {
        "rope_interleave": (True,),
        "norm_topk_prob": (True,),
        "scoring_func": ("sigmoid", None),
        "topk_method": ("noaux_tc", None),
        "moe_layer_freq": (1, None),
        # The norms inside the attention have 1e-6 whatever the configuration says.
        "rms_norm_eps": (1e-6,),
    },
)
# Published under a name of its own, so that programs tell it from DeepSeek-V3; transformers has no class for the name.
KIMI_K2 = replace(DEEPSEEK_V3, model_type="kimi_k2")

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        LLAMA,
        MISTRAL,
        PHI3,
        SMOLLM3,
        QWEN2,
        QWEN3,
        QWEN3_MOE,
        QWEN3_NEXT,
        QWEN3_5,
        QWEN3_5_MOE,
        GLM4_MOE,
        MIXTRAL,
        GPT_OSS,
        DEEPSEEK_V3,
        KIMI_K2,
        NEMOTRON_H,
    )
}
