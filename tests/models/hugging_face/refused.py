"""What later families do not serve: a model, what of its config.json is otherwise, and what is said of it."""

_LONG = "Phi-4-mini-instruct"


def _longrope(**change: object) -> dict:
    factors = [1.0] * 48
    said = {"type": "longrope", "short_factor": factors, "long_factor": factors}
    return {"rope_scaling": said | change}


_TWO_KINDS = ["sliding_attention", "full_attention"]

MORE_REFUSED = [
    ("phi-4", {"rope_scaling": {"type": "su", "short_factor": [1.0]}}, "long_factor is missing"),
    (
        _LONG,
        _longrope(type="yarn"),
        "rope_type='yarn' in config.json is not served; this family",
    ),
    (_LONG, _longrope(short_factor=[1.0] * 47), "short_factor of 47 in config.json must be 48 pos"),
    (_LONG, _longrope(long_factor=[0.0] * 48), "long_factor of 48 in config.json must be 48 posit"),
    (_LONG, _longrope(long_mscale=1.1), "long_mscale=1.1 of rope type 'longrope'"),
    (_LONG, {"partial_rotary_factor": 0.5}, "short_factor of 48 in config.json must be 32 posit"),
    (_LONG, {"full_attn_mod": 2}, "full_attn_mod=2"),
    (_LONG, {"lm_head_bias": True}, "lm_head_bias=True"),
    (
        _LONG,
        _longrope(original_max_position_embeddings=8192),
        "and 8192 in its rope_parameters say",
    ),
    ("cwm", {"layer_types": _TWO_KINDS}, "layer_types of 2 in config.json must have a kind for"),
    ("cwm", {"layer_types": ["chunked_attention"] * 64}, "layer_types=['chunked_attention']"),
    ("cwm", {"sliding_window": None}, "'sliding_window': None"),
    ("cwm", {"attention_bias": True}, "attention_bias=True"),
    ("ministral", {"layer_types": ["linear_attention"] * 32}, "layer_types=['linear_attention']"),
    ("dots1", {"norm_topk_prob": False}, "norm_topk_prob=False"),
    ("dots1", {"norm_topk_prob": None}, "norm_topk_prob=False"),
    ("dots1", {"n_shared_experts": None}, "n_shared_experts=None"),
    ("dots1", {"topk_group": 2, "n_group": 8}, "num_experts_per_tok=6 with topk_group=2"),
    ("dots1", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
    ("dots1", {"attention_bias": True}, "attention_bias=True"),
    ("exaone_moe", {"layer_types": ["full_attention"] * 24}, "sliding_window=128 in config.json"),
    ("exaone_moe", {"norm_topk_prob": False}, "norm_topk_prob=False"),
    ("exaone_moe", {"first_k_dense_replace": 2}, "first_k_dense_replace=2"),
    ("glm", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type='yarn'"),
    ("glm", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    (
        "ernie4_5",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
        "rope_type='yarn'",
    ),
    ("ernie4_5", {"use_bias": True}, "use_bias=True"),
    ("ernie4_5", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ("nemotron", {"hidden_act": "silu"}, "hidden_act='silu'"),
    ("nemotron", {"mlp_bias": True}, "mlp_bias=True"),
    ("nemotron", {"attention_bias": True}, "attention_bias=True"),
    ("nemotron", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "say different things"),
    ("youtu", {"rms_norm_eps": 1e-5}, "rms_norm_eps=1e-05"),
    ("youtu", {"rope_interleave": False}, "rope_interleave=False"),
    ("youtu", {"attention_bias": True}, "attention_bias=True"),
    ("youtu", {"n_routed_experts": 8}, "n_routed_experts=8"),
]
