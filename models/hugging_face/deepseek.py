"""DeepSeek's families and those built like them: latent attention, sparse or not, and experts behind dense layers."""

from __future__ import annotations

from dataclasses import replace

from megatron_cp.models.hugging_face import expert_settings as experts
from megatron_cp.models.hugging_face import rope_settings as rope
from megatron_cp.models.hugging_face import settings as s
from megatron_cp.models.hugging_face import weights as w
from megatron_cp.models.hugging_face.common import (
    AS_DEEPSEEK_CHOOSES,
    EXPERTS_AFTER_SOFTMAX,
    EXPERTS_BEHIND_DENSE_LAYERS,
    EXPERTS_BY_SIGMOID,
    LLAMA_LIKE,
    NO_BIAS,
    PLAIN,
)
from megatron_cp.models.hugging_face.family import Family, Wrapper

_KIMI_K25 = Wrapper(
    model_type="kimi_k25",
    names=(
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
        ("model.language_model.", "model."),
    ),
    images=("vision_tower.", "mm_projector.", "model.vision_tower.", "model.mm_projector."),
)
_DEEPSEEK = Family(
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
    | AS_DEEPSEEK_CHOOSES
    | {
        "rope_interleave": (True,),
        "norm_topk_prob": (True,),
        "moe_layer_freq": (1, None),
        # The norms inside the attention have 1e-6 whatever the configuration says.
        "rms_norm_eps": (1e-6,),
    },
)
DEEPSEEK_V3 = replace(_DEEPSEEK, wrapper=_KIMI_K25)
DEEPSEEK_V2 = replace(
    _DEEPSEEK,
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    weights={
        **{place: rows for place, rows in _DEEPSEEK.weights.items() if place != "prediction layer"},
        "expert layer": (
            *w.OWN_NORM_BEFORE_EXPERTS,
            w.DEEPSEEK_ROUTER[0],
            *w.SHARED_EXPERTS,
        ),
    },
    settings=(
        *s.LATENT_SIZES,
        s.TIED,
        rope.LATENT_ROPE,
        experts.ROUTED_EXPERTS,
        experts.TOP_K,
        experts.EXPERT_WIDTH,
        experts.FIRST_DENSE_LAYERS,
        experts.SHARED_WIDTH,
        experts.GREEDY_GROUPS,
        experts.ROUTED_SCALING,
    ),
    constants={
        **LLAMA_LIKE,
        **EXPERTS_AFTER_SOFTMAX,
        "moe_router_pre_softmax": True,
        "moe_router_dtype": "fp32",
        "multi_latent_attention": True,
        "qk_layernorm": True,
    },
    only={
        **{
            key: values
            for key, values in _DEEPSEEK.only.items()
            if key not in ("rope_interleave", "topk_method")
        },
        "norm_topk_prob": (False, None),
        "scoring_func": ("softmax", None),
    },
)
# Published under a name of its own, so that programs tell it from DeepSeek-V3; transformers has no class for the name.
KIMI_K2 = replace(DEEPSEEK_V3, model_type="kimi_k2")
# transformers takes 1e-6 for the norms inside its attention, other programs the configuration's, as Megatron-Core does.
GLM4_MOE_LITE = replace(
    _DEEPSEEK,
    model_type="glm4_moe_lite",
    architecture="Glm4MoeLiteForCausalLM",
    settings=_DEEPSEEK.settings_with({experts.FIRST_DENSE_LAYERS: experts.NAMED_LAYERS}),
    only={key: values for key, values in _DEEPSEEK.only.items() if key != "rms_norm_eps"},
)
# The attention alone, before dense MLPs.
YOUTU = replace(
    _DEEPSEEK,
    model_type="youtu",
    architecture="YoutuForCausalLM",
    weights={
        "model": w.OUTER,
        "layer": w.LATENT_ATTENTION,
        "dense layer": w.DENSE_BEHIND_OWN_NORM,
    },
    settings=(*s.LATENT_SIZES, s.TIED_UNLESS_SAID, rope.LATENT_ROPE),
    constants=LLAMA_LIKE | {"multi_latent_attention": True, "qk_layernorm": True},
    only=PLAIN
    | NO_BIAS
    | {name: _DEEPSEEK.only[name] for name in ("rope_interleave", "rms_norm_eps")},
    changes_nothing=frozenset({"embedding_initializer_range"}),
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
    _DEEPSEEK,
    model_type="deepseek_v32",
    architecture="DeepseekV32ForCausalLM",
    weights={**_DEEPSEEK.weights, "index": w.INDEX},
    settings=(
        *_DEEPSEEK.settings_with({experts.FIRST_DENSE_LAYERS: experts.COUNTED_LAYERS}),
        *s.INDEX_SIZES,
    ),
    constants={**_DEEPSEEK.constants, **_SPARSE},
    only={**_DEEPSEEK.only, **_EVERY_LAYER_PICKS, "rope_interleave": (True, None)},
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
