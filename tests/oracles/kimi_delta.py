"""Kimi delta attention (arXiv 2510.26692), token by token in float64, with the weights of our layer."""

import torch
import torch.nn.functional as F


def layer_by_recurrence(weights, hidden_states, lengths, *, heads, key_dim, value_dim, eps):
    """Returns the outputs `[tokens, hidden]` of each document by itself; `weights` by the names of our layer."""
    parts = hidden_states.split(list(lengths))
    sizes = (heads, key_dim, value_dim)
    return torch.cat([_document(weights, part, sizes, eps) for part in parts if len(part)])


def _document(weights, x, sizes, eps):
    heads, key_dim, value_dim = sizes
    rows = x @ weights["in_proj.weight"].T
    widths = [heads * key_dim] * 2 + [heads * value_dim, heads, value_dim, value_dim]
    q, k, v, beta, forget, gate = rows.split(widths, dim=1)
    taps = weights["conv1d.weight"][:, 0]
    padded = F.pad(torch.cat([q, k, v], dim=1), (0, 0, taps.shape[1] - 1, 0))
    mixed = sum(padded[i : i + len(x)] * taps[:, i] for i in range(taps.shape[1]))
    q, k, v = F.silu(mixed).split(widths[:3], dim=1)
    q, k = (_of_length_one(y.view(len(x), heads, key_dim)) for y in (q, k))
    v = v.view(len(x), heads, value_dim)
    steps = F.softplus(forget @ weights["forget_up.weight"].T + weights["dt_bias"])
    decays = (-weights["A_log"].exp()[:, None] * steps.view(len(x), heads, key_dim)).exp()
    beta = beta.sigmoid()
    state, outs = x.new_zeros(heads, key_dim, value_dim), []
    for t in range(len(x)):
        state = state * decays[t, :, :, None]
        seen = torch.einsum("nk,nkv->nv", k[t], state)
        state = state + torch.einsum("nk,nv->nkv", k[t], beta[t, :, None] * (v[t] - seen))
        outs.append(torch.einsum("nk,nkv->nv", q[t], state) * key_dim**-0.5)
    out = torch.stack(outs)
    out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + eps) * weights["out_norm.weight"]
    gate = (gate @ weights["gate_up.weight"].T).sigmoid().view_as(out)
    return (out * gate).flatten(1) @ weights["out_proj.weight"].T


def _of_length_one(y):
    return y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6)


def layer_of_transformers(weights, *, hidden, heads, head_dim, eps):
    """Returns the module of `transformers` with these weights; inside it computes in float32."""
    from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

    config = KimiLinearConfig(
        hidden_size=hidden,
        linear_num_heads=heads,
        linear_head_dim=head_dim,
        linear_conv_kernel_dim=weights["conv1d.weight"].shape[-1],
        rms_norm_eps=eps,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        mlp_layer_types=["dense"],
    )
    module = KimiLinearDeltaAttention(config, 0)
    width = heads * head_dim
    names = ("q_proj", "k_proj", "v_proj", "b_proj", "forget_gate.f_a_proj", "g_a_proj")
    parts = weights["in_proj.weight"].split([width] * 3 + [heads, head_dim, head_dim])
    state = {f"{name}.weight": part for name, part in zip(names, parts, strict=True)} | {
        "conv1d.weight": weights["conv1d.weight"],
        "forget_gate.f_b_proj.weight": weights["forget_up.weight"],
        "forget_gate.dt_bias": weights["dt_bias"],
        "forget_gate.A_log": weights["A_log"].view(1, 1, heads, 1),
        "g_b_proj.weight": weights["gate_up.weight"],
        "o_norm.weight": weights["out_norm.weight"],
        "o_proj.weight": weights["out_proj.weight"],
    }
    module.load_state_dict(state)
    return module
