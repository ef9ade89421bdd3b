"""One entry per model family: its weights, its settings, and the values it must have."""

from __future__ import annotations

from dataclasses import replace

from megatron_cp.models.hugging_face import expert_settings as experts
from megatron_cp.models.hugging_face import rope_settings as rope
from megatron_cp.models.hugging_face import settings as s
from megatron_cp.models.hugging_face import weights as w
from megatron_cp.models.hugging_face import window_settings as windows
from megatron_cp.models.hugging_face.common import (
    ANY_SHARE_ROTATES,
    AS_DEEPSEEK_CHOOSES,
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
from megatron_cp.models.hugging_face.deepseek import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    GLM4_MOE_LITE,
    GLM_MOE_DSA,
    KIMI_K2,
    YOUTU,
)
from megatron_cp.models.hugging_face.family import Family, Wrapper, images_too
from megatron_cp.models.hugging_face.kimi import KIMI_LINEAR
from megatron_cp.models.hugging_face.longrope_settings import PARTIAL_OR_LONG_ROPE
from megatron_cp.models.hugging_face.neighbours import ERNIE4_5, GLM
from megatron_cp.models.hugging_face.nemotron import NEMOTRON_H
from megatron_cp.models.hugging_face.qwen import (
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_MOE,
    QWEN3_NEXT,
    QWEN3_VL,
    QWEN3_VL_MOE,
)
from megatron_cp.models.hugging_face.windowed import CWM, EXAONE_MOE, MINISTRAL

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
    settings=(*SHAPE, rope.ROPE, windows.window_everywhere(4096)),
    constants=LLAMA_LIKE_BUT_WINDOWS,
    only=PLAIN | NO_BIAS | {"layer_types": (None,)},
)
MINISTRAL3 = replace(
    MISTRAL,
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    settings=(*SHAPE, rope.MISTRAL_YARN, windows.window_everywhere(None)),
)
PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    weights={
        "model": w.OUTER,
        "layer": w.JOINED_ATTENTION,
        "dense layer": (*w.DENSE_NORM, *w.JOINED_DENSE),
    },
    settings=(*SHAPE, PARTIAL_OR_LONG_ROPE, windows.window_everywhere(None)),
    constants=LLAMA_LIKE_BUT_WINDOWS,
    only=ANY_SHARE_ROTATES
    | NO_BIAS
    | {"layer_types": (None,), "resid_pdrop": (0, None), "embd_pdrop": (0, None)}
    # Of Phi-4-mini.
    | {"full_attn_mod": (1, None), "interpolate_factor": (1, None), "lm_head_bias": (False, None)},
)
SMOLLM3 = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    weights=LLAMA.weights,
    settings=(*SHAPE[:-1], s.TIED_UNLESS_SAID, rope.ROPE, s.UNROTATED_LAYERS),
    constants=LLAMA_LIKE,
    only=PLAIN | NO_BIAS | NO_WINDOW,
)
SEED_OSS = Family(
    model_type="seed_oss",
    architecture="SeedOssForCausalLM",
    weights=QWEN2.weights,
    settings=(*SHAPE, rope.ROPE),
    constants=LLAMA_LIKE | {"add_qkv_bias": True},
    only={key: values for key, values in PLAIN.items() if key != "attention_dropout"}
    | {
        "attention_bias": (True, None),
        "attention_out_bias": (False, None),
        "mlp_bias": (False, None),
    },
    # What training drops is said by its flags.
    changes_nothing=frozenset({"attention_dropout", "residual_dropout"}),
)
ARCEE = Family(
    model_type="arcee",
    architecture="ArceeForCausalLM",
    weights={**LLAMA.weights, "dense layer": (*w.DENSE_NORM, *w.UNGATED_DENSE)},
    settings=(*SHAPE, rope.ROPE),
    constants=LLAMA_LIKE | {"swiglu": False, "squared_relu": True},
    only=PLAIN | NO_BIAS | {"hidden_act": ("relu2",)},
    always={"hidden_act": "relu2"},
)
NEMOTRON = replace(
    ARCEE,
    model_type="nemotron",
    architecture="NemotronForCausalLM",
    weights={
        "model": (*w.OUTER, w.NORM_BIASES["model"]),
        "layer": (*w.ATTENTION, w.NORM_BIASES["layer"]),
        "dense layer": (*ARCEE.weights["dense layer"], w.NORM_BIASES["dense layer"]),
    },
    settings=(*SHAPE, rope.HALF_ROPE),
    constants={
        **ARCEE.constants,
        "normalization": "LayerNorm",
        "layernorm_zero_centered_gamma": True,
    },
    only=ANY_SHARE_ROTATES | NO_BIAS | {"hidden_act": ("relu2",)},
    words={"norm_eps": "rms_norm_eps"},
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
        rope.HALF_ROPE,
        s.QKV_BIASES,
        s.QK_NORMS,
        *EXPERTS_BEHIND_DENSE_LAYERS,
    ),
    constants=LLAMA_LIKE | EXPERTS_BY_SIGMOID,
    only=ANY_SHARE_ROTATES | {"norm_topk_prob": (True,)},
)
GLM4V_MOE = replace(
    GLM4_MOE,
    model_type="glm4v_moe_text",
    wrapper=images_too("glm4v_moe"),
    alone=GLM4_MOE,
    settings=GLM4_MOE.settings_with(
        {
            rope.HALF_ROPE: rope.HALF_ROPE_OF_TEXTS,
            s.QKV_BIASES: s.ATTENTION_BIASES_UNLESS_SAID,
        }
    ),
)
DOTS1 = replace(
    GLM4_MOE,
    model_type="dots1",
    architecture="Dots1ForCausalLM",
    weights={
        **{place: rows for place, rows in GLM4_MOE.weights.items() if place != "prediction layer"},
        "layer": (*w.ATTENTION, *w.QK_NORM),
    },
    settings=(
        *SHAPE,
        rope.ROPE,
        windows.WINDOWS_OF_LAST_LAYERS,
        experts.ROUTED_EXPERTS,
        experts.TOP_K,
        experts.EXPERT_WIDTH,
        experts.FIRST_DENSE_LAYERS,
        experts.SHARED_WIDTH,
        experts.GROUPS_UNLESS_SAID,
        experts.ROUTED_SCALING,
        experts.SCALED_TO_ONE,
    ),
    constants=LLAMA_LIKE | EXPERTS_BY_SIGMOID | {"qk_layernorm": True},
    only=PLAIN | NO_BIAS | AS_DEEPSEEK_CHOOSES | {"moe_layer_freq": (1, None)},
)
SOLAR_OPEN = Family(
    model_type="solar_open",
    architecture="SolarOpenForCausalLM",
    weights={
        "model": w.OUTER,
        "layer": w.ATTENTION,
        "expert layer": (*w.EXPERT_NORM, *w.DEEPSEEK_ROUTER, *w.SHARED_EXPERTS),
        "expert": w.QWEN_EXPERTS,
    },
    settings=(
        *s.SIZES_OF_EXPERTS_ALONE,
        s.TIED,
        experts.NO_DENSE_LAYERS,
        rope.ROPE,
        experts.ROUTED_EXPERTS,
        experts.TOP_K,
        experts.EXPERT_WIDTH,
        experts.SHARED_WIDTH,
        experts.GROUPS,
        experts.ROUTED_SCALING,
    ),
    constants=LLAMA_LIKE | EXPERTS_BY_SIGMOID | {"moe_layer_freq": 1},
    only=PLAIN
    | NO_BIAS
    | {
        "norm_topk_prob": (True,),
        "first_k_dense_replace": (0, None),
        "use_qk_norm": (False, None),
    },
)
HY_V3 = Family(
    model_type="hy_v3",
    architecture="HYV3ForCausalLM",
    weights={
        "model": w.OUTER,
        "layer": (*w.ATTENTION, *w.QK_NORM),
        "dense layer": (*w.DENSE_NORM, *w.DENSE),
        "expert layer": (*w.EXPERT_NORM, *w.HUNYUAN_ROUTER, *w.HUNYUAN_SHARED_EXPERTS),
        "expert": w.QWEN_EXPERTS,
    },
    settings=(
        *SHAPE,
        rope.ROPE,
        experts.NUM_EXPERTS_ALONE,
        experts.TOP_K,
        experts.EXPERT_WIDTH,
        experts.NAMED_LAYERS,
        experts.SHARED_WIDTH,
        experts.ROUTED_SCALING,
    ),
    constants=LLAMA_LIKE | EXPERTS_BY_SIGMOID | {"qk_layernorm": True},
    only=PLAIN | NO_BIAS,
    words={
        "num_shared_experts": "n_shared_experts",
        "router_scaling_factor": "routed_scaling_factor",
    },
    changes_nothing=frozenset({"enable_moe_fp32_combine"}),  # a sum's precision
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
        windows.WINDOWS,
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
FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        LLAMA,
        MISTRAL,
        MINISTRAL,
        MINISTRAL3,
        CWM,
        PHI3,
        SMOLLM3,
        SEED_OSS,
        ARCEE,
        ERNIE4_5,
        QWEN2,
        QWEN2_MOE,
        QWEN3,
        QWEN3_MOE,
        QWEN3_VL,
        QWEN3_VL_MOE,
        QWEN3_NEXT,
        QWEN3_5,
        QWEN3_5_MOE,
        GLM,
        GLM4_MOE,
        GLM4_MOE_LITE,
        GLM4V_MOE,
        DOTS1,
        SOLAR_OPEN,
        HY_V3,
        EXAONE_MOE,
        MIXTRAL,
        GPT_OSS,
        DEEPSEEK_V2,
        DEEPSEEK_V3,
        DEEPSEEK_V32,
        GLM_MOE_DSA,
        KIMI_K2,
        KIMI_LINEAR,
        YOUTU,
        NEMOTRON,
        NEMOTRON_H,
    )
}
