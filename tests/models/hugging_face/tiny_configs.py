"""What the tiny models of every family are, in the words of ``transformers``, pure data."""

from dataclasses import dataclass, field

VOCABULARY = 131  # no multiple of anything
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 64,
}
_DEEPSEEK = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
_INDEX = {"index_n_heads": 16, "index_head_dim": 12, "index_topk": 9}
_GLM_5 = {
    **_DEEPSEEK,
    **_INDEX,
    "q_lora_rank": 24,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}

HYBRID = [*["linear_attention"] * 3, "full_attention"]
_DELTA_NETS = {
    "head_dim": 32,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}
_GATED_EXPERTS = {
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 40,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
_QWEN3_5 = {**_DELTA_NETS, "pad_token_id": None}


def _layers(pattern: str) -> list[str]:
    words = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
    return [words[letter] for letter in pattern]


_NEMOTRON = {
    "layers_block_type": _layers("M-M*-M"),
    "num_hidden_layers": 6,
    "head_dim": 32,
    "ssm_state_size": 16,
    "mamba_num_heads": 6,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "time_step_min": 1e-9,  # transformers holds steps above it, Megatron and the models' own code do not
}


@dataclass(frozen=True)
class Tiny:
    """A model of ``transformers``: its class name without ForCausalLM, and what differs."""

    kind: str
    options: dict = field(default_factory=dict)
    is_dense: bool = False
    model_type: str | None = None
    """What config.json calls it, where transformers has no class of that name."""


MODELS = {
    "llama3": Tiny("Llama", {"rope_parameters": _LLAMA3}, is_dense=True),
    "llama_tied": Tiny("Llama", {"tie_word_embeddings": True}, is_dense=True),
    "llama_linear": Tiny(
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e5, "factor": 4.0}},
        is_dense=True,
    ),
    "mistral": Tiny("Mistral", {"head_dim": 32, "sliding_window": 8}, is_dense=True),
    "mistral_full": Tiny("Mistral", {"sliding_window": None}, is_dense=True),
    "ministral3": Tiny(
        "Ministral3",
        {
            "head_dim": 32,
            "rope_parameters": {
                **_YARN,
                "original_max_position_embeddings": 8,
                "mscale": 0.7,
                "mscale_all_dim": 0.5,
                "llama_4_scaling_beta": 0.1,
            },
        },
        is_dense=True,
    ),
    "ministral3_unscaled": Tiny(
        "Ministral3",
        {
            "head_dim": 16,
            "tie_word_embeddings": True,
            "rope_parameters": {
                **_YARN,
                "original_max_position_embeddings": 8,
                "beta_fast": 4.0,
                "mscale": 1.0,
                "mscale_all_dim": 0.0,
                "llama_4_scaling_beta": 0.0,
            },
        },
        is_dense=True,
    ),
    "phi3": Tiny(
        "Phi3",
        {
            "pad_token_id": None,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.75,
            },
        },
        is_dense=True,
    ),
    "smollm3": Tiny(
        "SmolLM3",
        {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 1], "pad_token_id": None},
        is_dense=True,
    ),
    "seed_oss": Tiny("SeedOss", {"head_dim": 32, "pad_token_id": None}, is_dense=True),
    "arcee": Tiny("Arcee", {"rope_parameters": _YARN, "eos_token_id": 2}, is_dense=True),
    "qwen2": Tiny("Qwen2", {"tie_word_embeddings": True}, is_dense=True),
    "qwen2_moe": Tiny(
        "Qwen2Moe", {**_GATED_EXPERTS, "decoder_sparse_step": 2, "num_hidden_layers": 3}
    ),
    "qwen2_moe_plain": Tiny(
        "Qwen2Moe", {**_GATED_EXPERTS, "qkv_bias": False, "norm_topk_prob": True}
    ),
    "qwen3": Tiny("Qwen3", {"head_dim": 32}, is_dense=True),
    "qwen3_yarn": Tiny("Qwen3", {"head_dim": 32, "rope_parameters": _YARN}, is_dense=True),
    "qwen3_tied": Tiny("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}, is_dense=True),
    "qwen3_moe": Tiny(
        "Qwen3Moe",
        {
            "head_dim": 32,
            "moe_intermediate_size": 48,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
    ),
    "qwen3_moe_some_dense": Tiny(
        "Qwen3Moe",
        {
            "head_dim": 16,
            "moe_intermediate_size": 48,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
            "num_hidden_layers": 3,
        },
    ),
    "qwen3_next": Tiny("Qwen3Next", {**_DELTA_NETS, **_GATED_EXPERTS, "norm_topk_prob": True}),
    "qwen3_5": Tiny("Qwen3_5", _QWEN3_5, is_dense=True),
    "qwen3_5_tied": Tiny("Qwen3_5", {**_QWEN3_5, "tie_word_embeddings": True}, is_dense=True),
    "qwen3_5_moe": Tiny("Qwen3_5Moe", {**_QWEN3_5, **_GATED_EXPERTS}),
    "nemotron_h": Tiny("NemotronH", _NEMOTRON, is_dense=True),
    "nemotron_h_moe": Tiny(
        "NemotronH",
        {
            **_NEMOTRON,
            "layers_block_type": _layers("MEM*EM-*E"),
            "num_hidden_layers": 9,
            "n_routed_experts": 8,
            "moe_intermediate_size": 48,
            "moe_shared_expert_intermediate_size": 40,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
        },
    ),
    "nemotron_h_latent": Tiny(
        "NemotronH",
        {
            **_NEMOTRON,
            "layers_block_type": _layers("ME*EM-"),
            "n_routed_experts": 4,
            "moe_intermediate_size": 48,
            "moe_shared_expert_intermediate_size": 40,
            "moe_latent_size": 24,
            "num_experts_per_tok": 2,
        },
    ),
    "glm4_moe": Tiny(
        "Glm4Moe",
        {
            "head_dim": 32,
            "num_hidden_layers": 3,
            "moe_intermediate_size": 48,
            "n_routed_experts": 8,
            "num_experts_per_tok": 4,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
            "attention_bias": True,
            "use_qk_norm": True,
            "num_nextn_predict_layers": 0,
        },
    ),
    "solar_open": Tiny(
        "SolarOpen",
        {
            "head_dim": 32,
            "moe_intermediate_size": 48,
            "n_routed_experts": 8,
            "num_experts_per_tok": 4,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "rope_parameters": {**_YARN, "factor": 2.0},
        },
    ),
    "hy_v3": Tiny(
        "HYV3",
        {
            "head_dim": 32,
            "num_hidden_layers": 3,
            "moe_intermediate_size": 48,
            "num_experts": 8,
            "num_experts_per_tok": 4,
            "num_shared_experts": 2,
        },
    ),
    "mixtral": Tiny("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": Tiny(
        "GptOss",
        {
            "head_dim": 32,
            "intermediate_size": 48,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "swiglu_limit": 0.75,  # so that it is reached
            "rope_parameters": {**_YARN, "truncate": False},
        },
    ),
    "deepseek_v2": Tiny(
        "DeepseekV2",
        {
            **_DEEPSEEK,
            "q_lora_rank": None,
            "routed_scaling_factor": 1.5,
            "rope_parameters": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek_v2_groups": Tiny(
        "DeepseekV2",
        {
            **_DEEPSEEK,
            "q_lora_rank": 24,
            "num_experts_per_tok": 3,  # with as many groups as experts, groups limit nothing
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    "deepseek_v3": Tiny(
        "DeepseekV3",
        {
            **_DEEPSEEK,
            "q_lora_rank": 24,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.5},
        },
    ),
    "deepseek_v3_plain": Tiny(
        "DeepseekV3",
        {
            **_DEEPSEEK,
            "num_hidden_layers": 2,
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "glm4_moe_lite": Tiny(
        "Glm4MoeLite",
        {
            **{k: v for k, v in _DEEPSEEK.items() if k != "first_k_dense_replace"},
            "q_lora_rank": 24,
            "n_shared_experts": 1,
            "routed_scaling_factor": 1.8,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
    "glm4_moe_lite_groups": Tiny(
        "Glm4MoeLite",
        {
            **{k: v for k, v in _DEEPSEEK.items() if k != "first_k_dense_replace"},
            "q_lora_rank": None,
            "n_group": 4,
            "topk_group": 2,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "deepseek_v32": Tiny(
        "DeepseekV32",
        {
            **_DEEPSEEK,
            **_INDEX,
            "q_lora_rank": 24,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.5},
        },
    ),
    "glm_moe_dsa": Tiny("GlmMoeDsa", _GLM_5),
    "glm_moe_dsa_shared": Tiny(
        "GlmMoeDsa",
        {**_GLM_5, "indexer_types": ["full", "shared", "full"]},
    ),
    "kimi_linear": Tiny(
        "KimiLinear",
        {
            **{
                k: v
                for k, v in _DEEPSEEK.items()
                if k not in ("n_routed_experts", "first_k_dense_replace")
            },
            "num_hidden_layers": 4,
            "num_local_experts": 8,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.8,
            "layer_types": [*["linear_attention"] * 2, "full_attention", "linear_attention"],
            "linear_head_dim": 16,
            "linear_num_heads": 4,
            "pad_token_id": None,
            "bos_token_id": None,
            "eos_token_id": None,
        },
    ),
    "kimi_k2": Tiny(
        "DeepseekV3",
        {
            **_DEEPSEEK,
            "n_shared_experts": 1,
            "q_lora_rank": 24,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.827,
            "rope_parameters": {
                **_YARN,
                "rope_theta": 50000.0,
                "beta_fast": 1.0,
                "original_max_position_embeddings": 512,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
        model_type="kimi_k2",
    ),
}
