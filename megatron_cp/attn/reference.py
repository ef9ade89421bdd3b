"""Attention on slices as plain torch: the executable definition that every other backend must equal.

    s = softmax_scale * q.k                 x = softcap * tanh(s / softcap)       p = exp(x - lse)
    out = (m * p) v                         dv = (m * p)' dout
    dx = p * (m * dout.v - delta)           ds = dx * (1 - (x / softcap)^2)
    dq = softmax_scale * ds k               dk = softmax_scale * ds' q

`m` is 1; with dropout 1/(1 - dropout_p) where a pair is kept, else 0. It builds the whole Q x K matrix: for tests and
small sizes, on any device, in any floating dtype.
"""

# Q query rows, K key rows, N query heads, G kv heads, R = N/G query heads per kv head, H head dim, Hv value head dim

import torch
from torch import Tensor

from megatron_cp.attn.logits import raise_to_
from megatron_cp.attn.options import AttendOptions, accumulation_dtype
from megatron_cp.mask import AttentionMask


def forward(
    q_QNH: Tensor,
    k_KGH: Tensor,
    v_KGH: Tensor,
    mask: AttentionMask,
    options: AttendOptions,
    max_logits_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns `(out [Q, N, Hv], lse [Q, N])` in the accumulation dtype; rows without keys are `(0, -inf)`.

    `max_logits` is raised, in place, to the largest score of each head.
    """
    allowed_QK = _dense(mask, q_QNH.device)
    q_QGRH, k_KGH, v_KGH = _clean_inputs(q_QNH, k_KGH, v_KGH, allowed_QK)
    x_GRQK = _capped_scores(q_QGRH, k_KGH, options)
    allowed_x_GRQK = x_GRQK.masked_fill(~allowed_QK, -torch.inf)
    lse_GRQ = torch.logsumexp(allowed_x_GRQK, dim=-1)
    if max_logits_N is not None and allowed_QK.numel():
        raise_to_(max_logits_N, allowed_x_GRQK.amax(dim=(2, 3)).flatten())
    p_GRQK = _probabilities(x_GRQK, lse_GRQ, allowed_QK)
    out_QGRH = torch.einsum("grqk,kgh->qgrh", _dropped(p_GRQK, options), v_KGH)
    return out_QGRH.flatten(1, 2), lse_GRQ.flatten(0, 1).t().contiguous()


def backward(
    dout_QNH: Tensor,
    q_QNH: Tensor,
    k_KGH: Tensor,
    v_KGH: Tensor,
    lse_QN: Tensor,
    delta_QN: Tensor,
    mask: AttentionMask,
    options: AttendOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns `(dq, dk, dv)` in the accumulation dtype for a given global `lse` and `delta`."""
    num_kv_heads = k_KGH.shape[1]
    allowed_QK = _dense(mask, q_QNH.device)
    q_QGRH, k_KGH, v_KGH = _clean_inputs(q_QNH, k_KGH, v_KGH, allowed_QK)
    silent_QN = (lse_QN == -torch.inf) | ~allowed_QK.any(dim=1, keepdim=True)
    dout_QGRH = _heads_by_group(dout_QNH.to(q_QGRH.dtype), num_kv_heads)
    dout_QGRH = dout_QGRH.masked_fill(_heads_by_group(silent_QN.unsqueeze(-1), num_kv_heads), 0.0)
    delta_QN = delta_QN.to(q_QGRH.dtype).masked_fill(silent_QN, 0.0)
    lse_GRQ = lse_QN.to(q_QGRH.dtype).t().unflatten(0, (num_kv_heads, -1))
    x_GRQK = _capped_scores(q_QGRH, k_KGH, options)
    p_GRQK = _probabilities(x_GRQK, lse_GRQ, allowed_QK)
    dp_GRQK = torch.einsum("qgrh,kgh->grqk", dout_QGRH, v_KGH)
    dp_GRQK = _dropped(dp_GRQK, options)
    ds_GRQK = p_GRQK * (dp_GRQK - delta_QN.t().unflatten(0, (num_kv_heads, -1)).unsqueeze(-1))
    if options.softcap:
        ds_GRQK = ds_GRQK * (1 - (x_GRQK / options.softcap) ** 2)
    dq_QGRH = options.softmax_scale * torch.einsum("grqk,kgh->qgrh", ds_GRQK, k_KGH)
    dk_KGH = options.softmax_scale * torch.einsum("grqk,qgrh->kgh", ds_GRQK, q_QGRH)
    dv_KGH = torch.einsum("grqk,qgrh->kgh", _dropped(p_GRQK, options), dout_QGRH)
    return dq_QGRH.flatten(1, 2), dk_KGH, dv_KGH


def _dense(mask: AttentionMask, device: torch.device) -> Tensor:
    """Returns the mask as bool `[Q, K]`."""
    allowed = torch.zeros(mask.num_queries, mask.num_keys, dtype=torch.bool, device=device)
    for q0, q1, k0, k1, lo, hi in mask.array.tolist():
        distance = (
            torch.arange(k0, k1, device=device) - torch.arange(q0, q1, device=device)[:, None]
        )
        allowed[q0:q1, k0:k1] |= (lo <= distance) & (distance <= hi)
    return allowed


def _clean_inputs(
    q_QNH: Tensor, k_KGH: Tensor, v_KGH: Tensor, allowed_QK: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q by kv head, k and v in the accumulation dtype, rows outside every slice zeroed (0 * nan is nan)."""
    dtype = accumulation_dtype(q_QNH.dtype)
    unused_q, unused_k = (
        ~allowed_QK.any(dim=1)[:, None, None],
        ~allowed_QK.any(dim=0)[:, None, None],
    )
    q_QNH = q_QNH.to(dtype).masked_fill(unused_q, 0.0)
    k_KGH, v_KGH = (x.to(dtype).masked_fill(unused_k, 0.0) for x in (k_KGH, v_KGH))
    return _heads_by_group(q_QNH, k_KGH.shape[1]), k_KGH, v_KGH


def _heads_by_group(x_QNH: Tensor, num_kv_heads: int) -> Tensor:
    return x_QNH.unflatten(1, (num_kv_heads, -1))


def _capped_scores(q_QGRH: Tensor, k_KGH: Tensor, options: AttendOptions) -> Tensor:
    scores = options.softmax_scale * torch.einsum("qgrh,kgh->grqk", q_QGRH, k_KGH)
    return options.softcap * torch.tanh(scores / options.softcap) if options.softcap else scores


def _probabilities(x_GRQK: Tensor, lse_GRQ: Tensor, allowed_QK: Tensor) -> Tensor:
    """Returns `exp(x - lse)` on allowed pairs of rows with keys, exactly 0 elsewhere; nan for an `lse` of nan."""
    allowed = allowed_QK & (lse_GRQ != -torch.inf).unsqueeze(-1)
    return torch.exp(x_GRQK - lse_GRQ.unsqueeze(-1)).masked_fill(~allowed, 0.0)


def _dropped(x_GRQK: Tensor, options: AttendOptions) -> Tensor:
    """Returns `x` of the pairs that dropout keeps, scaled, and 0 of the others."""
    if options.dropout is None:
        return x_GRQK
    factors_NQK = options.dropout.factors(slice(None), slice(None), x_GRQK.dtype)
    return x_GRQK * factors_NQK.view(x_GRQK.shape)
