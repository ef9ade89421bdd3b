"""Attention over ranges of the keys by the raw passes, put together as the distributed runtime does it."""

import itertools

import torch

from megatron_cp.attn import attend_backward, attend_forward, merge_partials, resolve_options


def attend_in_parts(inputs, mask, arguments, cuts, backend, **settings):
    """Returns (out, lse, dq, dk, dv) from one call per range of keys, merged and added."""
    q, k, v = inputs
    options = resolve_options(q, k, v, backend=backend, **settings)
    bounds = [0, *sorted(cuts), k.shape[0]]
    parts = [(k[a:b], v[a:b], mask.crop(k=(a, b))) for a, b in itertools.pairwise(bounds)]
    results = [attend_forward(q, k_, v_, mask_, options) for k_, v_, mask_ in parts]
    out, lse = results[0]
    for part_out, part_lse in results[1:]:
        out, lse = merge_partials(out, lse, part_out, part_lse)
    dout, dlse = arguments["dout"], arguments["dlse"].to(lse.dtype)
    delta = (dout.to(out.dtype) * out).sum(dim=-1) - dlse
    gradients = [
        attend_backward(dout, q, k_, v_, lse, delta, mask_, options) for k_, v_, mask_ in parts
    ]
    dq = torch.stack([part[0] for part in gradients]).sum(dim=0)
    dk, dv = (torch.cat([part[i] for part in gradients]) for i in (1, 2))
    return out, lse, dq, dk, dv
