"""A Mamba-2 mixer as Nemotron-H has it in `transformers`, with Megatron's weights: the oracle of our layer."""

import torch


def mixer_of_transformers(weights, *, hidden, heads, head_dim, groups, state_dim):
    """Returns the float64 module of `transformers` that holds these weights of Megatron's mixer, by their names.

    Their names and the order of rows are the same. Steps are not held above a least one there: Megatron's are not.
    """
    from transformers.models.nemotron_h.configuration_nemotron_h import NemotronHConfig
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

    config = NemotronHConfig(
        hidden_size=hidden,
        mamba_num_heads=heads,
        mamba_head_dim=head_dim,
        n_groups=groups,
        ssm_state_size=state_dim,
        conv_kernel=4,
        chunk_size=16,
        time_step_min=0.0,
        layer_norm_epsilon=1e-5,
        layers_block_type=["linear_attention"],
    )
    module = NemotronHMamba2Mixer(config, 0).double()
    module.load_state_dict({name: weight.double() for name, weight in weights.items()})
    return module


def mixed_by_recurrence(weights, x, *, heads, head_dim, groups, state_dim):
    """Returns the mixer's output `[tokens, hidden]` of one document, token by token, as the paper defines it."""
    inner, shared = heads * head_dim, groups * state_dim
    z, channels, dt = (x @ weights["in_proj.weight"].T).split(
        [inner, inner + 2 * shared, heads], dim=-1
    )
    taps, bias = weights["conv1d.weight"].squeeze(1), weights["conv1d.bias"]
    before = torch.cat([channels.new_zeros(len(taps[0]) - 1, len(taps)), channels])
    convolved = [
        (before[t : t + len(taps[0])].T * taps).sum(1) + bias for t in range(len(channels))
    ]
    channels = torch.nn.functional.silu(torch.stack(convolved))
    values, keys, queries = channels.split([inner, shared, shared], dim=-1)
    steps = torch.nn.functional.softplus(dt + weights["dt_bias"])
    decay = torch.exp(-weights["A_log"].exp() * steps)
    state = x.new_zeros(heads, head_dim, state_dim)
    group_of_head = torch.arange(heads) // (heads // groups)
    rows = []
    for t in range(len(x)):
        value = values[t].view(heads, head_dim)
        key = keys[t].view(groups, state_dim)[group_of_head]
        query = queries[t].view(groups, state_dim)[group_of_head]
        written = (steps[t][:, None] * value)[:, :, None] * key[:, None, :]
        state = decay[t][:, None, None] * state + written
        rows.append((state * query[:, None, :]).sum(-1) + weights["D"][:, None] * value)
    gated = torch.stack(rows).flatten(1) * torch.nn.functional.silu(z)
    by_group = gated.view(len(x), groups, -1)
    normed = by_group / (by_group.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return (normed.flatten(1) * weights["norm.weight"]) @ weights["out_proj.weight"].T
