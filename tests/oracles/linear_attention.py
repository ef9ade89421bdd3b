"""Linear attention and the short convolution token by token, as their definitions read. No code of the package."""

import torch


def recurrence(q, k, v, lengths, g=None, beta=None, scale=None):
    """Returns out `[S, H, V]` in global order, in the dtype of the inputs; differentiable."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    rows, token = [], 0
    for length in lengths:
        state = v.new_zeros(v.shape[1], k.shape[2], v.shape[2])
        for _ in range(length):
            if g is not None:
                decay = g[token].exp()
                state = state * (decay[:, :, None] if g.dim() == 3 else decay[:, None, None])
            value = v[token]
            if beta is not None:
                held = (k[token][:, :, None] * state).sum(1)
                value = beta[token][:, None] * (value - held)
            state = state + k[token][:, :, None] * value[:, None, :]
            rows.append(scale * (q[token][:, :, None] * state).sum(1))
            token += 1
    return torch.stack(rows)


def convolution(x, weight, lengths, bias=None, silu=False):
    """Returns the causal depthwise convolution `[S, D]` in global order; differentiable."""
    rows, start = [], 0
    num_taps = weight.shape[1]
    for length in lengths:
        for token in range(start, start + length):
            y = torch.zeros_like(x[token]) if bias is None else bias
            for tap in range(num_taps):
                source = token - (num_taps - 1 - tap)
                if source >= start:
                    y = y + weight[:, tap] * x[source]
            rows.append(y / (1 + torch.exp(-y)) if silu else y)
        start += length
    return torch.stack(rows)
