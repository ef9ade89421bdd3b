"""A gated delta net as Qwen3-Next has it in `transformers`, with Megatron's weights: the oracle of our layer."""

import torch

SECTIONS = ("query", "key", "value", "z", "beta", "alpha")


def layer_of_transformers(weights, *, hidden, key_heads, value_heads, key_dim, value_dim, eps):
    """Returns the float64 module of `transformers` that holds these weights of Megatron's layer, by their names."""
    from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    config = Qwen3NextConfig(
        hidden_size=hidden,
        linear_num_key_heads=key_heads,
        linear_num_value_heads=value_heads,
        linear_key_head_dim=key_dim,
        linear_value_head_dim=value_dim,
        linear_conv_kernel_dim=weights["conv1d.weight"].shape[-1],
        rms_norm_eps=eps,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
    )
    module = Qwen3NextGatedDeltaNet(config, 0).double()
    ours = {name: weight.double() for name, weight in weights.items()}
    sizes = [key_heads * key_dim] * 2 + [value_heads * value_dim] * 2 + [value_heads] * 2
    parts = dict(zip(SECTIONS, ours["in_proj.weight"].split(sizes), strict=True))
    by_group = {name: part.reshape(key_heads, -1, hidden) for name, part in parts.items()}
    state = {
        "in_proj_qkvz.weight": torch.cat([by_group[name] for name in SECTIONS[:4]], 1).flatten(
            0, 1
        ),
        "in_proj_ba.weight": torch.cat([by_group[name] for name in SECTIONS[4:]], 1).flatten(0, 1),
        "norm.weight": ours["out_norm.weight"],
        **{name: ours[name] for name in ("conv1d.weight", "dt_bias", "A_log", "out_proj.weight")},
    }
    module.load_state_dict(state)
    return module


def gradient_of_in_proj(module):
    """Returns the gradient of `in_proj` in Megatron's order of rows."""
    heads, value_heads = module.num_k_heads, module.num_v_heads
    keys, values = module.head_k_dim, value_heads // heads * module.head_v_dim
    both = (
        (module.in_proj_qkvz.weight.grad, (keys, keys, values, values)),
        (module.in_proj_ba.weight.grad, (value_heads // heads,) * 2),
    )
    parts = [
        part.flatten(0, 1)
        for gradient, sizes in both
        for part in gradient.unflatten(0, (heads, -1)).split(sizes, dim=1)
    ]
    return torch.cat(parts)


def outputs_of_documents(module, hidden_states, lengths):
    """Returns the outputs `[tokens, hidden]` of each document by itself, as if there were no other."""
    parts = hidden_states.split(list(lengths))
    return torch.cat([module(part[None])[0] for part in parts if len(part)])
