"""Known models as data: Megatron-LM's arguments of each, with the source of the numbers.

A preset becomes flags (`flags_of(PRESETS["tiny"])` of `megatron_cp.training.arguments`, for a
script) or a model (`models.build.build_model`); it knows nothing of ranks, batches or data.
"""

from __future__ import annotations

from typing import Any

Preset = dict[str, Any]


def _grouped(num_heads: int, num_groups: int, head_size: int) -> Preset:
    """Returns the arguments of attention whose query heads share key/value heads."""
    return {
        "num_attention_heads": num_heads,
        "group_query_attention": True,
        "num_query_groups": num_groups,
        "kv_channels": head_size,
    }


_NO_DROPOUT: Preset = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
_LLAMA_LIKE: Preset = {
    **_NO_DROPOUT,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}

# A few million parameters: trains on two CPU cores in minutes. Ours.
TINY: Preset = {
    **_LLAMA_LIKE,
    **_grouped(6, 2, 32),
    "num_layers": 4,
    "hidden_size": 192,
    "ffn_hidden_size": 512,
    "vocab_size": 4096,
    "max_position_embeddings": 8192,
    "untie_embeddings_and_output_weights": False,
}

# The same with eight experts of which two are active. Ours.
TINY_MOE: Preset = {
    **TINY,
    "num_experts": 8,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 256,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 1e-2,
}

_HYBRID: Preset = {
    **_NO_DROPOUT,
    "position_embedding_type": "none",
    "normalization": "RMSNorm",
    "squared_relu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "is_hybrid_model": True,
}

# Mamba-2, attention and MLPs of a few million parameters. Ours.
TINY_HYBRID: Preset = {
    **_HYBRID,
    **_grouped(6, 2, 32),
    "hybrid_layer_pattern": "M-M*-M-",
    "num_layers": 7,
    "hidden_size": 192,
    "ffn_hidden_size": 512,
    "mamba_num_heads": 12,
    "mamba_head_dim": 32,
    "mamba_num_groups": 2,
    "mamba_state_dim": 32,
    "vocab_size": 4096,
    "max_position_embeddings": 8192,
    "untie_embeddings_and_output_weights": False,
}

# A few million parameters, of whose 1,024 keys an index picks 64. Ours.
TINY_SPARSE: Preset = {
    **_LLAMA_LIKE,
    "num_layers": 3,
    "hidden_size": 192,
    "ffn_hidden_size": 512,
    "num_attention_heads": 6,
    "kv_channels": 32,
    "vocab_size": 4096,
    "max_position_embeddings": 8192,
    "untie_embeddings_and_output_weights": False,
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_head_dim": 32,
    "qk_pos_emb_head_dim": 16,
    "v_head_dim": 32,
    "rope_type": "rope",
    "experimental_attention_variant": "dsa",
    "dsa_indexer_n_heads": 8,
    "dsa_indexer_head_dim": 32,
    "dsa_indexer_topk": 64,
    "dsa_indexer_loss_coeff": 0.01,
}

# The smallest GPT-3. Source: Brown et al. 2020, table 2.1 (12 layers, width 768, 12 heads of 64,
# context 2048); vocabulary of GPT-2. With GPT-2's own 1024 positions this is GPT-2 small.
GPT_125M: Preset = {
    **_NO_DROPOUT,
    "num_layers": 12,
    "hidden_size": 768,
    "ffn_hidden_size": 3072,
    "num_attention_heads": 12,
    "kv_channels": 64,
    "vocab_size": 50257,
    "max_position_embeddings": 2048,
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
}

# Source: Llama Team 2024 (arXiv 2407.21783), table 3; config.json of meta-llama/Meta-Llama-3-8B.
LLAMA3_8B: Preset = {
    **_LLAMA_LIKE,
    **_grouped(32, 8, 128),
    "num_layers": 32,
    "hidden_size": 4096,
    "ffn_hidden_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rotary_base": 500000,
}

# Source: Yang et al. 2025 (arXiv 2505.09388), table 1; config.json of Qwen/Qwen3-8B-Base.
QWEN3_8B: Preset = {
    **_LLAMA_LIKE,
    **_grouped(32, 8, 128),
    "num_layers": 36,
    "hidden_size": 4096,
    "ffn_hidden_size": 12288,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rotary_base": 1000000,
    "layernorm_epsilon": 1e-6,
    "qk_layernorm": True,
}

# Source: Yang et al. 2025, table 2; config.json of Qwen/Qwen3-30B-A3B-Base.
QWEN3_30B_A3B: Preset = {
    **QWEN3_8B,
    **_grouped(32, 4, 128),
    "num_layers": 48,
    "hidden_size": 2048,
    "ffn_hidden_size": 6144,
    "num_experts": 128,
    "moe_router_topk": 8,
    "moe_ffn_hidden_size": 768,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 1e-3,
}

# Source: Jiang et al. 2024 (arXiv 2401.04088), table 1; config.json of mistralai/Mixtral-8x7B-v0.1.
MIXTRAL_8X7B: Preset = {
    **_LLAMA_LIKE,
    **_grouped(32, 8, 128),
    "num_layers": 32,
    "hidden_size": 4096,
    "ffn_hidden_size": 14336,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "rotary_base": 1000000,
    "num_experts": 8,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 14336,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 1e-2,
}

# Alternating 128-token windows and full layers, learned sinks, 32 experts with 4 active, clamped
# and shifted gated activation, YaRN from 4096 positions.
# Source: OpenAI 2025 (arXiv 2508.10925), section 2; config.json of openai/gpt-oss-20b.
GPT_OSS_20B: Preset = {
    **_LLAMA_LIKE,
    **_grouped(64, 8, 64),
    "num_layers": 24,
    "hidden_size": 2880,
    "ffn_hidden_size": 2880,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "rotary_base": 150000,
    "position_embedding_type": "yarn",
    "rotary_scaling_factor": 32.0,
    "yarn_original_max_position_embeddings": 4096,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_correction_range_round_to_int": False,
    "swiglu": False,
    "quick_geglu": True,
    "glu_linear_offset": 1.0,
    "activation_func_clamp_value": 7.0,
    "add_bias_linear": True,
    "add_qkv_bias": True,
    "window_size": (127, 0),
    "window_attn_skip_freq": 2,
    "softmax_type": "learnable",
    "num_experts": 32,
    "moe_router_topk": 4,
    "moe_ffn_hidden_size": 2880,
    "moe_router_load_balancing_type": "none",
}

# Latent attention, 256 fine-grained experts in 8 groups with one shared, biases instead of
# auxiliary losses, one layer of multi-token prediction.
# Source: DeepSeek-AI 2024 (arXiv 2412.19437), section 4.2; config.json of deepseek-ai/DeepSeek-V3.
DEEPSEEK_V3: Preset = {
    **_LLAMA_LIKE,
    "num_layers": 61,
    "hidden_size": 7168,
    "ffn_hidden_size": 18432,
    "num_attention_heads": 128,
    "kv_channels": 128,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "layernorm_epsilon": 1e-6,
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "rope_type": "yarn",
    "rotary_scaling_factor": 40.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "num_experts": 256,
    "moe_layer_freq": [0] * 3 + [1] * 58,
    "moe_ffn_hidden_size": 2048,
    "moe_shared_expert_intermediate_size": 2048,
    "moe_router_topk": 8,
    "moe_router_num_groups": 8,
    "moe_router_group_topk": 4,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_score_function": "sigmoid",
    "moe_router_pre_softmax": True,
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 1e-3,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 1e-4,
    "moe_router_dtype": "fp32",
    "mtp_num_layers": 1,
    "mtp_loss_scaling_factor": 0.1,
}

# DeepSeek-V3 with sparse attention. Source: DeepSeek-AI 2025, section 2.1; config.json of
# deepseek-ai/DeepSeek-V3.2-Exp. The weight of the index's loss is that of Megatron-LM's test.
DEEPSEEK_V3_2: Preset = {
    **DEEPSEEK_V3,
    "experimental_attention_variant": "dsa",
    "dsa_indexer_n_heads": 64,
    "dsa_indexer_head_dim": 128,
    "dsa_indexer_topk": 2048,
    "dsa_indexer_k_norm_epsilon": 1e-6,
    "dsa_indexer_loss_coeff": 0.01,
}

# Kimi delta attention, and latent attention without positions in every fourth layer and the last.
# Source: Kimi Team 2025 (arXiv 2510.26692); config.json of moonshotai/Kimi-Linear-48B-A3B-Base. Routers are balanced as
# those of DeepSeek-V3, without the auxiliary loss.
KIMI_LINEAR: Preset = {
    **_LLAMA_LIKE,
    "num_layers": 27,
    "hidden_size": 2304,
    "ffn_hidden_size": 9216,
    "num_attention_heads": 32,
    "kv_channels": 72,
    "vocab_size": 163840,
    "max_position_embeddings": 1048576,
    "layernorm_epsilon": 1e-5,
    "experimental_attention_variant": "kimi_delta_attention",
    "linear_attention_freq": [int(layer % 4 != 0) for layer in range(1, 27)] + [0],
    "linear_num_key_heads": 32,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "rope_type": "none",
    "num_experts": 256,
    "moe_layer_freq": [0] + [1] * 26,
    "moe_ffn_hidden_size": 1024,
    "moe_shared_expert_intermediate_size": 1024,
    "moe_router_topk": 8,
    "moe_router_topk_scaling_factor": 2.446,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 1e-3,
    "moe_router_load_balancing_type": "none",
    "moe_router_dtype": "fp32",
}

# Source: NVIDIA 2025 (arXiv 2504.03624), table 1; config.json of nvidia/Nemotron-H-8B-Base-8K.
NEMOTRON_H_8B: Preset = {
    **_HYBRID,
    **_grouped(32, 8, 128),
    "hybrid_layer_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "num_layers": 52,
    "hidden_size": 4096,
    "ffn_hidden_size": 21504,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "mamba_num_groups": 8,
    "mamba_state_dim": 128,
    "vocab_size": 131072,
    "max_position_embeddings": 8192,
}

# Source: NVIDIA 2025 (arXiv 2512.20848); config.json of nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16, and Megatron-LM's
# script for it (examples/post_training/modelopt).
NEMOTRON_3_NANO: Preset = {
    **_HYBRID,
    **_grouped(32, 2, 128),
    "hybrid_layer_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "num_layers": 52,
    "hidden_size": 2688,
    "ffn_hidden_size": 1856,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "mamba_num_groups": 8,
    "mamba_state_dim": 128,
    "vocab_size": 131072,
    "max_position_embeddings": 262144,
    "num_experts": 128,
    "moe_ffn_hidden_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "moe_router_topk": 6,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 1e-4,
    "moe_router_dtype": "fp32",
}

PRESETS: dict[str, Preset] = {
    "tiny": TINY,
    "tiny-moe": TINY_MOE,
    "tiny-hybrid": TINY_HYBRID,
    "tiny-sparse": TINY_SPARSE,
    "gpt-125m": GPT_125M,
    "llama3-8b": LLAMA3_8B,
    "qwen3-8b": QWEN3_8B,
    "qwen3-30b-a3b": QWEN3_30B_A3B,
    "mixtral-8x7b": MIXTRAL_8X7B,
    "gpt-oss-20b": GPT_OSS_20B,
    "deepseek-v3": DEEPSEEK_V3,
    "deepseek-v3.2": DEEPSEEK_V3_2,
    "kimi-linear-48b-a3b": KIMI_LINEAR,
    "nemotron-h-8b": NEMOTRON_H_8B,
    "nemotron-3-nano-30b-a3b": NEMOTRON_3_NANO,
}
