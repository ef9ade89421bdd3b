"""More published models, in the words of ``published.py``."""

_LONG_FACTORS = """
    1 1.118320672 1.250641126 1.398617824 1.564103225 1.74916897 1.956131817 2.187582649 2.446418898 2.735880826
    3.059592084 3.421605075 3.826451687 4.279200023 4.785517845 5.351743533 5.984965424 6.693110555 7.485043894
    8.370679318 9.36110372 10.4687158 11.70738129 13.09260651 14.64173252 16.37415215 18.31155283 20.47818807
    22.90118105 25.61086418 28.64115884 32.03 32.1 32.13 32.23 32.6 32.61 32.64 32.66 32.7 32.71 32.93 32.97 33.28
    33.49 33.5 44.16 47.77
"""
LATER = {
    "Phi-4-mini-instruct": {
        "model_type": "phi3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "embd_pdrop": 0.0,
        "full_attn_mod": 1,
        "hidden_act": "silu",
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "interpolate_factor": 1,
        "lm_head_bias": False,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_attention_heads": 24,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 0.75,
        "resid_pdrop": 0.0,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "long_factor": [float(factor) for factor in _LONG_FACTORS.split()],
            "short_factor": [1.0] * 48,
            "type": "longrope",
        },
        "rope_theta": 10000.0,
        "sliding_window": 262144,
        "tie_word_embeddings": True,
        "vocab_size": 200064,
    },
    "dots.llm1.inst": {
        "model_type": "dots1",
        "attention_bias": False,
        "first_k_dense_replace": 1,
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "max_position_embeddings": 32768,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "n_shared_experts": 2,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 62,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "vocab_size": 152064,
    },
}
