"""Dense attention in a dozen lines of torch, for any dtype: the measure of every other attention.

`plain_attention` computes everything in the dtype of its inputs, `exact_attention` in float64;
gradients come from autograd. The mask is a dense boolean matrix: no code of the package is used.

    # Q queries, K keys, N query heads, G key/value heads, H head dim, V value head dim
    q [Q, N, H], k [K, G, H], v [K, G, V], allowed bool [Q, K], sink [N]
    -> out [Q, N, V], lse [Q, N]
"""

from typing import NamedTuple

import torch


class AttentionResult(NamedTuple):
    """Outputs and gradients; `dsink` is None without a sink."""

    out: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dsink: torch.Tensor | None


def product(equation, a, b):
    """Returns torch.einsum of two tensors of one dtype.

    In half precision torch on a CPU sums products in float32 and rounds once, in up to ten times the time of float32:
    here the same is said in float32.
    """
    if a.dtype not in (torch.bfloat16, torch.float16):
        return torch.einsum(equation, a, b)
    return torch.einsum(equation, a.float(), b.float()).to(a.dtype)


def dense_attention(q, k, v, allowed, *, softmax_scale=None, softcap=0.0, sink=None, factors=None):
    """Returns (out, lse) in the dtype of `q`, differentiable; lse is a natural log, with the sink.

    `factors` [Q, N, K] multiply the probabilities: dropout.

    Rows without keys give 0 and -inf (lse = sink with a sink) and exactly zero gradients.
    Query head n uses key/value head n // (N // G). `softmax_scale` defaults to 1/sqrt(H).
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    repeats = q.shape[1] // k.shape[1]
    k_KNH = k.repeat_interleave(repeats, dim=1)
    v_KNV = v.repeat_interleave(repeats, dim=1)
    allowed = torch.as_tensor(allowed, dtype=torch.bool)

    scores_QNK = product("qnh,knh->qnk", q, k_KNH) * scale
    if softcap:
        scores_QNK = softcap * torch.tanh(scores_QNK / softcap)
    scores_QNK = scores_QNK.masked_fill(~allowed[:, None, :], float("-inf"))
    if sink is not None:
        column = sink[None, :, None].expand(q.shape[0], -1, 1)
        scores_QNK = torch.cat([scores_QNK, column], dim=-1)  # a key whose value is zero

    top_QN1 = _finite_row_maximum(scores_QNK)
    weights_QNK = torch.exp(scores_QNK - top_QN1)
    total_QN1 = weights_QNK.sum(dim=-1, keepdim=True)
    empty_QN1 = total_QN1 == 0
    safe_total_QN1 = torch.where(empty_QN1, torch.ones_like(total_QN1), total_QN1)
    probabilities_QNK = (weights_QNK / safe_total_QN1)[:, :, : k.shape[0]]
    if factors is not None:
        probabilities_QNK = probabilities_QNK * factors.to(probabilities_QNK.dtype)
    out_QNV = product("qnk,knv->qnv", probabilities_QNK, v_KNV)
    lse_QN1 = (top_QN1 + torch.log(safe_total_QN1)).masked_fill(empty_QN1, float("-inf"))
    return out_QNV, lse_QN1[..., 0]


def plain_attention(q, k, v, allowed, *, dout=None, dlse=None, sink=None, **options):
    """Returns the AttentionResult of the plain formula in the dtype of `q`.

    Args:
        dout: gradient of out; default: ones.
        dlse: gradient of lse; default: none flows through lse. Ignored in rows without keys.
        options: `softmax_scale`, `softcap`, `factors`.
    """
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    leaves = [q, k, v]
    if sink is not None:
        sink = sink.detach().to(q.dtype).clone().requires_grad_()
        leaves.append(sink)
    out, lse = dense_attention(q, k, v, allowed, sink=sink, **options)
    dout = torch.ones_like(out) if dout is None else dout.to(out.dtype)
    loss = (out * dout).sum()
    if dlse is not None:
        has_lse = torch.isfinite(lse)
        loss = loss + (lse.masked_fill(~has_lse, 0.0) * dlse.to(lse.dtype)).sum()
    gradients = list(torch.autograd.grad(loss, leaves))
    dsink = gradients[3] if sink is not None else None
    return AttentionResult(out.detach(), lse.detach(), *gradients[:3], dsink)


def exact_attention(q, k, v, allowed, *, dout=None, dlse=None, sink=None, **options):
    """Returns the AttentionResult in float64; arguments as in `plain_attention`, of any dtype."""
    dout, dlse, sink = (None if x is None else x.double() for x in (dout, dlse, sink))
    return plain_attention(
        q.double(), k.double(), v.double(), allowed, dout=dout, dlse=dlse, sink=sink, **options
    )


def _finite_row_maximum(scores_QNK: torch.Tensor) -> torch.Tensor:
    """Returns max over keys, 0 where a row has none. Detached: it cancels in every gradient."""
    if scores_QNK.shape[-1] == 0:
        return scores_QNK.new_zeros(*scores_QNK.shape[:-1], 1)
    top = scores_QNK.detach().amax(dim=-1, keepdim=True)
    return top.masked_fill(top == float("-inf"), 0.0)
