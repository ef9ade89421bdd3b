"""What most families have in common: arguments of every model, and values of config.json that alone are served."""

from __future__ import annotations

from megatron_cp.models.hugging_face import expert_settings as experts
from megatron_cp.models.hugging_face import settings as s

LLAMA_LIKE = {
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
LLAMA_LIKE_BUT_WINDOWS = {k: v for k, v in LLAMA_LIKE.items() if not k.startswith("window_")}
PLAIN = {
    "hidden_act": ("silu",),
    "attention_dropout": (0, None),
    "quantization_config": (None,),
    "partial_rotary_factor": (1, None),
    "pretraining_tp": (1, None),
}
NO_WINDOW = {
    "use_sliding_window": (False, None),
    "layer_types": (None, "full_attention"),
    "use_mrope": (False, None),
}
NO_BIAS = {"attention_bias": (False, None), "mlp_bias": (False, None)}
SHAPE = (*s.SIZES, s.TIED)
AS_DEEPSEEK_CHOOSES = {"scoring_func": ("sigmoid", None), "topk_method": ("noaux_tc", None)}
EXPERTS_BEHIND_DENSE_LAYERS = (
    experts.ROUTED_EXPERTS,
    experts.TOP_K,
    experts.EXPERT_WIDTH,
    experts.FIRST_DENSE_LAYERS,
    experts.SHARED_WIDTH,
    experts.GROUPS,
    experts.ROUTED_SCALING,
    s.PREDICTION_LAYERS,
)
ANY_SHARE_ROTATES = {k: v for k, v in PLAIN.items() if k != "partial_rotary_factor"}
EXPERTS_AFTER_SOFTMAX = {"moe_router_score_function": "softmax"}
EXPERTS_BY_SIGMOID = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_pre_softmax": False,
    "moe_router_dtype": "fp32",
}
