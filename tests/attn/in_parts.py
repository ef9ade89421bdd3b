"""Attention over ranges of the keys by the raw passes, put together as the distributed runtime does it."""

import itertools

import torch

from megatron_cp import mask as masks
from megatron_cp.attn import attend_backward, attend_forward, merge_partials, resolve_options
from tests.attn.formula import random_case


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


def assert_silent_rows_get_and_give_zeros(backend, dtype, softcap=0.0):
    """Rows whose lse over all keys is -inf: what their dout and delta hold changes nothing, and their dq is 0."""
    (q, k, v), arguments = random_case(30, 30, (4, 2), (8, 8), dtype)
    mask, dout = masks.full(30), arguments["dout"]
    options = resolve_options(q, k, v, backend=backend, softcap=softcap)
    out, lse = attend_forward(q, k, v, mask, options)
    delta = (dout * out).sum(dim=-1)
    silent = torch.zeros(30, 4, dtype=torch.bool)
    silent[::3] = True
    lse = lse.masked_fill(silent, -torch.inf)
    noisy_dout = torch.where(silent[..., None], 1e30, dout)
    noisy_delta = torch.where(silent, torch.nan, delta)
    actual = attend_backward(noisy_dout, q, k, v, lse, noisy_delta, mask, options)
    quiet = attend_backward(dout, q, k, v, lse, delta, mask, options)
    for a, b in zip(actual, quiet, strict=True):
        assert torch.equal(a, b)
    assert not actual[0][silent].any()
