"""More tiny models, in the words of ``tiny_configs.py``: windows in some layers, neighbours that rotate."""

from tests.models.hugging_face.tiny_configs import Tiny

_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_EXPERTS = {
    "head_dim": 32,
    "num_hidden_layers": 3,
    "moe_intermediate_size": 48,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7],
    "long_factor": [1.1, 1.6, 2.5, 4.0, 9.0, 30.0],
}
MORE = {
    # The shortest document is longer than what the model was pretrained with: transformers takes the long factors too.
    "phi3_long": Tiny(
        "Phi3",
        {
            "pad_token_id": None,
            "original_max_position_embeddings": 5,
            "rope_parameters": _LONGROPE,
        },
        is_dense=True,
    ),
    "phi3_short": Tiny(
        "Phi3",
        {
            "pad_token_id": None,
            "original_max_position_embeddings": 256,
            "rope_parameters": {**_LONGROPE, "attention_factor": 1.2},
        },
        is_dense=True,
    ),
    "cwm": Tiny(
        "Cwm",
        {
            "head_dim": 32,
            "num_hidden_layers": 3,
            "sliding_window": 8,
            "rope_parameters": _LLAMA3,
        },
        is_dense=True,
    ),
    "ministral": Tiny(
        "Ministral",
        {
            "head_dim": 32,
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention"],
        },
        is_dense=True,
    ),
    "dots1": Tiny(
        "Dots1",
        {
            **_EXPERTS,
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "sliding_window": 8,
            "max_window_layers": 1,
        },
    ),
    "exaone_moe": Tiny(
        "ExaoneMoe",
        {
            **_EXPERTS,
            "num_experts": 8,
            "num_shared_experts": 2,
            "sliding_window": 8,
            "sliding_window_pattern": 3,
        },
    ),
    "glm": Tiny("Glm", {"head_dim": 32, "pad_token_id": None}, is_dense=True),
    "ernie4_5": Tiny(
        "Ernie4_5",
        {"head_dim": 32, "tie_word_embeddings": True, "rope_parameters": _LLAMA3},
        is_dense=True,
    ),
    "nemotron": Tiny("Nemotron", {"head_dim": 32, "norm_eps": 1e-4}, is_dense=True),
    "youtu": Tiny(
        "Youtu",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "tie_word_embeddings": True,
        },
        is_dense=True,
    ),
}
