"""Sparse latent attention of one document, by its definition and as `transformers` has it: oracles of our layer."""

import math

import torch


def turned(x, positions, *, is_interleaved):
    """Returns rows `[tokens, heads, D]` turned by RoPE with base 10000."""
    half = x.shape[-1] // 2
    speeds = 10000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    angles = positions[:, None].to(x.dtype) * speeds
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    if is_interleaved:
        first, second = x[..., 0::2], x[..., 1::2]
    else:
        first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


def rms_norm(x, weight, epsilon=1e-6):
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight


def layer_norm(x, weight, bias, epsilon=1e-6):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight + bias


def attended_by_definition(w, x, sizes, *, index_interleaved=False, has_relu=True, over="visible"):
    """Returns the layer's output `[tokens, hidden]` of one document, and the sum of its tokens' divergences.

    `w`: Megatron's weights by name. Keys and values are made of latent rows, as in dense latent attention. The index
    sees its inputs and its target without gradients.
    """
    heads, nope, rope, rank, value = (
        sizes[name] for name in ("heads", "qk_head_dim", "rope", "kv_lora_rank", "v_head_dim")
    )
    size, positions = len(x), torch.arange(len(x))
    compressed = rms_norm(x @ w["linear_q_down_proj.weight"].T, w["q_layernorm.weight"])
    q = (compressed @ w["linear_q_up_proj.weight"].T).view(size, heads, nope + rope)
    rows = x @ w["linear_kv_down_proj.weight"].T
    latent = rms_norm(rows[:, :rank], w["kv_layernorm.weight"])
    kv = (latent @ w["linear_kv_up_proj.weight"].T).view(size, heads, nope + value)
    key_rope = turned(rows[:, None, rank:], positions, is_interleaved=True)
    q = torch.cat([q[..., :nope], turned(q[..., nope:], positions, is_interleaved=True)], dim=-1)
    k = torch.cat([kv[..., :nope], key_rope.expand(-1, heads, -1)], dim=-1)
    logits = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(nope + rope)

    index = {name: w[f"core_attention.indexer.{name}"] for name in INDEX_WEIGHTS}
    x, compressed = x.detach(), compressed.detach()
    index_heads, width = sizes["index_heads"], sizes["index_head_dim"]
    iq = (compressed @ index["linear_wq_b.weight"].T).view(size, index_heads, width)
    ik = layer_norm(x @ index["linear_wk.weight"].T, index["k_norm.weight"], index["k_norm.bias"])
    iq, ik = (
        torch.cat(
            [
                turned(part[..., :rope], positions, is_interleaved=index_interleaved),
                part[..., rope:],
            ],
            -1,
        )
        for part in (iq, ik[:, None])
    )
    products = torch.einsum("qjd,kd->qjk", iq, ik[:, 0])
    if has_relu:
        products = products.clamp(min=0)
    head_weights = x @ index["linear_weights_proj.weight"].T / math.sqrt(index_heads * width)
    scores = (products * head_weights[:, :, None]).sum(1)
    visible = torch.ones(size, size, dtype=torch.bool).tril()
    scores = scores.masked_fill(~visible, -math.inf)
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, : sizes["topk"]]
    picked = torch.zeros_like(visible).scatter(1, order, True) & visible
    weights = logits.masked_fill(~picked, -math.inf).softmax(-1)
    out = torch.einsum("hqk,khv->qhv", weights, kv[..., nope:]).flatten(1)
    compared = picked if over == "picked" else visible
    target = logits.detach().masked_fill(~compared, -math.inf).softmax(-1).mean(0)
    guess = scores.masked_fill(~compared, -math.inf).log_softmax(-1).masked_fill(~compared, 0)
    divergence = (torch.special.xlogy(target, target) - target * guess).sum()
    return out @ w["linear_proj.weight"].T, divergence


INDEX_WEIGHTS = (
    "linear_wq_b.weight",
    "linear_wk.weight",
    "k_norm.weight",
    "k_norm.bias",
    "linear_weights_proj.weight",
)
_NAMES = {
    "linear_q_down_proj.weight": "q_a_proj.weight",
    "q_layernorm.weight": "q_a_layernorm.weight",
    "linear_q_up_proj.weight": "q_b_proj.weight",
    "linear_kv_down_proj.weight": "kv_a_proj_with_mqa.weight",
    "kv_layernorm.weight": "kv_a_layernorm.weight",
    "linear_kv_up_proj.weight": "kv_b_proj.weight",
    "linear_proj.weight": "o_proj.weight",
    "core_attention.indexer.linear_wq_b.weight": "indexer.wq_b.weight",
    "core_attention.indexer.linear_wk.weight": "indexer.wk.weight",
    "core_attention.indexer.k_norm.weight": "indexer.k_norm.weight",
    "core_attention.indexer.k_norm.bias": "indexer.k_norm.bias",
    "core_attention.indexer.linear_weights_proj.weight": "indexer.weights_proj.weight",
}


def attended_by_transformers(w, x, sizes, *, index_interleaved=False):
    """Returns the output of `transformers`' layer of DeepSeek-V3.2, or of GLM-5, whose index turns neighbours."""
    from transformers.models.deepseek_v32 import modeling_deepseek_v32 as deepseek
    from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm

    options = {
        "hidden_size": x.shape[1],
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes["heads"],
        "q_lora_rank": sizes["q_lora_rank"],
        "kv_lora_rank": sizes["kv_lora_rank"],
        "qk_nope_head_dim": sizes["qk_head_dim"],
        "qk_rope_head_dim": sizes["rope"],
        "v_head_dim": sizes["v_head_dim"],
        "index_n_heads": sizes["index_heads"],
        "index_head_dim": sizes["index_head_dim"],
        "index_topk": sizes["topk"],
        "num_hidden_layers": 1,
        "attn_implementation": "eager",
    }
    if index_interleaved:
        config, module = glm.GlmMoeDsaConfig(**options), glm.GlmMoeDsaAttention
        rotary = glm.GlmMoeDsaRotaryEmbedding(config)
    else:
        config, module = deepseek.DeepseekV32Config(**options), deepseek.DeepseekV32Attention
        rotary = deepseek.DeepseekV32RotaryEmbedding(config)
    layer = module(config, 0).double()
    layer.load_state_dict({_NAMES[name]: weight.double() for name, weight in w.items()})
    hidden = torch.full((len(x), len(x)), -math.inf, dtype=torch.float64).triu(1)
    angles = rotary(x[None], torch.arange(len(x))[None])
    return layer(x[None], angles, hidden[None, None])[0][0]
