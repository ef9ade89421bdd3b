"""One entry per model family: its weights, its settings, and the values it must have."""

from __future__ import annotations

from dataclasses import replace

from megatron_cp.models.hugging_face import expert_settings as experts
from megatron_cp.models.hugging_face import rope_settings as rope
from megatron_cp.models.hugging_face import settings as s
from megatron_cp.models.hugging_face import weights as w
from megatron_cp.models.hugging_face.common import (
    ANY_SHARE_ROTATES,
    EXPERTS_AFTER_SOFTMAX,
    EXPERTS_BEHIND_DENSE_LAYERS,
    EXPERTS_BY_SIGMOID,
    LLAMA_LIKE,
    LLAMA_LIKE_BUT_WINDOWS,
    NO_BIAS,
    NO_WINDOW,
    PLAIN,
    SHAPE,
)
from megatron_cp.models.hugging_face.family import Family, Wrapper
from megatron_cp.models.hugging_face.kimi import KIMI_LINEAR
from megatron_cp.models.hugging_face.nemotron import NEMOTRON_H
from megatron_cp.models.hugging_face.qwen import (
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_MOE,
    QWEN3_NEXT,
)

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    weights={"model": w.OUTER, "layer": w.ATTENTION, "dense layer": (*w.DENSE_NORM, *w.DENSE)},
    settings=(*SHAPE, rope.ROPE),
    constants=LLAMA_LIKE,
    only=PLAIN | NO_BIAS,
)
_MISTRAL3 = Wrapper(
    model_type="mistral3",
    names=(
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
        ("model.language_model.", "model."),
    ),
    images=(
        *("vision_tower.", "multi_modal_projector."),
        *("model.vision_tower.", "model.multi_modal_projector."),
    ),
)
MISTRAL = Family(
    model_type="mistral",
    wrapper=_MISTRAL3,
    architecture="MistralForCausalLM",
    weights=LLAMA.weights,
    settings=(*SHAPE, rope.ROPE, s.window_everywhere(4096)),
    constants=LLAMA_LIKE_BUT_WINDOWS,
    only=PLAIN | NO_BIAS | {"layer_types": (None,)},
)
MINISTRAL3 = replace(
    MISTRAL,
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    settings=(*SHAPE, rope.MISTRAL_YARN, s.window_everywhere(None)),
)
PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    weights={
        "model": w.OUTER,
        "layer": w.JOINED_ATTENTION,
        "dense layer": (*w.DENSE_NORM, *w.JOINED_DENSE),
    },
    settings=(*SHAPE, rope.partial_rope(1.0), s.window_everywhere(None)),
    constants=LLAMA_LIKE_BUT_WINDOWS,
    only=ANY_SHARE_ROTATES
    | NO_BIAS
    | {"layer_types": (None,), "resid_pdrop": (0, None), "embd_pdrop": (0, None)},
)
SMOLLM3 = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    weights=LLAMA.weights,
    settings=(*SHAPE[:-1], s.TIED_UNLESS_SAID, rope.ROPE, s.UNROTATED_LAYERS),
    constants=LLAMA_LIKE,
    only=PLAIN | NO_BIAS | NO_WINDOW,
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
        *SHAPE,
        rope.partial_rope(0.5),
        s.QKV_BIASES,
        s.QK_NORMS,
        *EXPERTS_BEHIND_DENSE_LAYERS,
    ),
    constants=LLAMA_LIKE | EXPERTS_BY_SIGMOID,
    only=ANY_SHARE_ROTATES | {"norm_topk_prob": (True,)},
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
        *SHAPE,
        rope.ROPE,
        experts.NUM_EXPERTS,
        experts.TOP_K,
        experts.EXPERTS_AS_WIDE_AS_MLP,
    ),
    constants=LLAMA_LIKE
    | EXPERTS_AFTER_SOFTMAX
    | {"moe_layer_freq": 1, "moe_router_pre_softmax": False},
    only=PLAIN | {"sliding_window": (None,), "router_jitter_noise": (0, None)},
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
        *SHAPE,
        rope.YARN,
        experts.NUM_EXPERTS,
        experts.TOP_K,
        experts.EXPERTS_AS_WIDE_AS_MLP,
        s.WINDOWS,
        s.SWIGLU_LIMIT,
    ),
    constants=LLAMA_LIKE
    | EXPERTS_AFTER_SOFTMAX
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
    only=PLAIN | {"attention_bias": (True, None), "swiglu_alpha": (1.702, None)},
)
DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    weights={
        "model": w.OUTER,
        "layer": w.LATENT_ATTENTION,
        "dense layer": w.DENSE_BEHIND_OWN_NORM,
        "expert layer": (
            *w.OWN_NORM_BEFORE_EXPERTS,
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
        *EXPERTS_BEHIND_DENSE_LAYERS,
    ),
    constants=LLAMA_LIKE
    | EXPERTS_BY_SIGMOID
    | {"multi_latent_attention": True, "qk_layernorm": True},
    only=PLAIN
    | NO_BIAS
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
# transformers takes 1e-6 for the norms inside its attention, other programs the configuration's, as Megatron-Core does.
GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    model_type="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    settings=tuple(
        experts.NAMED_LAYERS if setting is experts.FIRST_DENSE_LAYERS else setting
        for setting in DEEPSEEK_V3.settings
    ),
    only={key: values for key, values in DEEPSEEK_V3.only.items() if key != "rms_norm_eps"},
)
_SPARSE = {
    "experimental_attention_variant": "dsa",
    "dsa_indexer_scoring_relu": True,
    "dsa_indexer_rope_interleaved": False,
    "dsa_indexer_k_norm_epsilon": 1e-6,
}
_EVERY_LAYER_PICKS = {
    "layer_types": (None, "indexed_attention"),
    "indexer_types": (None, "full"),
    "index_topk_freq": (1, None),
    "index_topk_pattern": (None,),
}
DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    model_type="deepseek_v32",
    architecture="DeepseekV32ForCausalLM",
    weights={**DEEPSEEK_V3.weights, "index": w.INDEX},
    settings=(
        *(
            experts.COUNTED_LAYERS if setting is experts.FIRST_DENSE_LAYERS else setting
            for setting in DEEPSEEK_V3.settings
        ),
        *s.INDEX_SIZES,
    ),
    constants={**DEEPSEEK_V3.constants, **_SPARSE},
    only={**DEEPSEEK_V3.only, **_EVERY_LAYER_PICKS, "rope_interleave": (True, None)},
)
# Its norms as those of GLM-4.7-Flash.
GLM_MOE_DSA = replace(
    DEEPSEEK_V32,
    model_type="glm_moe_dsa",
    architecture="GlmMoeDsaForCausalLM",
    settings=(*DEEPSEEK_V32.settings, s.SHARED_PICKS),
    constants={**DEEPSEEK_V32.constants, "dsa_indexer_rope_interleaved": True},
    only={
        **{
            key: values
            for key, values in DEEPSEEK_V32.only.items()
            if key not in ("rms_norm_eps", *s.SHARED_PICKS.keys)
        },
        "indexer_rope_interleave": (True, None),
    },
)

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        LLAMA,
        MISTRAL,
        MINISTRAL3,
        PHI3,
        SMOLLM3,
        QWEN2,
        QWEN2_MOE,
        QWEN3,
        QWEN3_MOE,
        QWEN3_NEXT,
        QWEN3_5,
        QWEN3_5_MOE,
        GLM4_MOE,
        GLM4_MOE_LITE,
        MIXTRAL,
        GPT_OSS,
        DEEPSEEK_V3,
        DEEPSEEK_V32,
        GLM_MOE_DSA,
        KIMI_K2,
        KIMI_LINEAR,
        NEMOTRON_H,
    )
}
