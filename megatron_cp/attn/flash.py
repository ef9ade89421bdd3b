"""One piece of attention by PyTorch's CPU flash operator, forward and backward, in float32 or float64.

Half-precision inputs are computed in float32: the operator would round `out` of every piece and every partial sum of
the gradients to 16 bits, and on the CPUs we measured it is not faster for it (docs/numerics.md).

The operator's backward takes the *forward's* `out` only to form `delta = rowsum(dout * out)`. We have the delta of the
globally merged result, so we hand it a stand-in for `out` with that very row sum: `dout * delta / |dout|^2`.
"""

# B = 1 or kv heads, R = query heads per batch item, Q rows, K keys, H head dim padded to max(H, Hv)

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_cp.attn.options import AttendOptions, accumulation_dtype
from megatron_cp.attn.pieces import BLOCK_ROWS, MAX_BAND_KEYS, TALL_BLOCK_ROWS, Piece

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# Below this |dout|^2 the quotient delta / |dout|^2 loses digits in float32.
_SMALLEST_SQUARE = 1e-30


def forward(
    q_QNH: Tensor, k_KGH: Tensor, v_KGH: Tensor, piece: Piece, options: AttendOptions
) -> tuple[Tensor, Tensor]:
    """Returns `(out [Q, N, Hv], lse [Q, N])` of the piece's rows over the piece's keys."""
    q, k, v = _prepare(q_QNH, k_KGH, v_KGH)
    out_BRQH, lse_BRQ = _forward(
        q,
        k,
        v,
        0.0,
        False,
        attn_mask=_additive_mask(piece, q.dtype),
        scale=options.softmax_scale,
    )
    out_QNH = out_BRQH.permute(2, 0, 1, 3).flatten(1, 2)[..., : v_KGH.shape[-1]]
    return out_QNH, lse_BRQ.permute(2, 0, 1).flatten(1, 2)


def backward(
    dout_QNH: Tensor,
    q_QNH: Tensor,
    k_KGH: Tensor,
    v_KGH: Tensor,
    lse_QN: Tensor,
    delta_QN: Tensor,
    piece: Piece,
    options: AttendOptions,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Returns `(dq, dk, dv)` of the piece, or None where delta cannot be handed over.

    `lse` must be free of -inf (+inf makes a row's probabilities 0). None: a row has a gradient of `lse` but (nearly)
    none of `out`, so no stand-in has the right row sum.
    """
    dout_QNH = dout_QNH.to(accumulation_dtype(q_QNH.dtype)).contiguous()
    square_QN = torch.linalg.vecdot(dout_QNH, dout_QNH)
    too_small = square_QN < _SMALLEST_SQUARE
    if bool((too_small & (delta_QN != 0)).any()):
        return None
    ratio_QN = (delta_QN / square_QN).masked_fill_(too_small, 0.0)
    q, k, v = _prepare(q_QNH, k_KGH, v_KGH)
    num_batches = q.shape[0]
    dout = _to_heads(_pad(dout_QNH, q.shape[-1]), num_batches)
    stand_in = _to_heads(_pad(dout_QNH * ratio_QN.unsqueeze(-1), q.shape[-1]), num_batches)
    lse = lse_QN.unflatten(1, (num_batches, -1)).permute(1, 2, 0)
    dq, dk, dv = _backward(
        dout,
        q,
        k,
        v,
        stand_in,
        lse,
        0.0,
        False,
        attn_mask=_additive_mask(piece, q.dtype),
        scale=options.softmax_scale,
    )
    dq_QNH = dq.permute(2, 0, 1, 3).flatten(1, 2)[..., : q_QNH.shape[-1]]
    dk_KGH = _sum_group(dk, k_KGH.shape[1])[..., : k_KGH.shape[-1]]
    return dq_QNH, dk_KGH, _sum_group(dv, k_KGH.shape[1])[..., : v_KGH.shape[-1]]


def _prepare(q_QNH: Tensor, k_KGH: Tensor, v_KGH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k, v as `[B, R, rows, H]` views without repeated keys: with GQA every kv head is a batch item."""
    num_heads, num_kv_heads = q_QNH.shape[1], k_KGH.shape[1]
    head_dim = max(q_QNH.shape[-1], v_KGH.shape[-1])
    dtype = accumulation_dtype(q_QNH.dtype)
    q, k, v = (_pad(x.to(dtype).contiguous(), head_dim) for x in (q_QNH, k_KGH, v_KGH))
    if num_heads == num_kv_heads:
        return _to_heads(q, 1), _to_heads(k, 1), _to_heads(v, 1)
    repeats = num_heads // num_kv_heads
    k, v = (_to_heads(x, num_kv_heads).expand(-1, repeats, -1, -1) for x in (k, v))
    return _to_heads(q, num_kv_heads), k, v


def _to_heads(x_QNH: Tensor, num_batches: int) -> Tensor:
    return x_QNH.unflatten(1, (num_batches, -1)).permute(1, 2, 0, 3)


def _pad(x: Tensor, head_dim: int) -> Tensor:
    return x if x.shape[-1] == head_dim else F.pad(x, (0, head_dim - x.shape[-1]))


def _sum_group(x_BRKH: Tensor, num_kv_heads: int) -> Tensor:
    """Returns `[K, G, H]`: the gradients of the query heads that share a kv head, added."""
    if x_BRKH.shape[0] == num_kv_heads and x_BRKH.shape[1] > 1:
        return x_BRKH.sum(dim=1).transpose(0, 1)
    return x_BRKH.permute(2, 0, 1, 3).flatten(1, 2)


def _additive_mask(piece: Piece, dtype: torch.dtype) -> Tensor | None:
    """Returns 0 on the piece's pairs and -inf elsewhere, `[Q, K]`; None for a full box.

    It is a view: a band depends on `column - row` alone, so all blocks along one diagonal share one matrix, whose left
    column is the piece's column `start`. A side that cuts nothing is moved out to a fixed width, to share more.
    """
    if not (piece.cuts_lower or piece.cuts_upper):
        return None
    width = piece.hi - piece.lo
    start = piece.lo
    if not (piece.cuts_lower and piece.cuts_upper):
        width = MAX_BAND_KEYS + TALL_BLOCK_ROWS
        start = piece.hi - width if piece.cuts_upper else piece.lo
    max_rows = BLOCK_ROWS if piece.num_rows <= BLOCK_ROWS else TALL_BLOCK_ROWS
    band = _additive_band(max_rows, width, dtype)
    return band[: piece.num_rows, -start : piece.num_keys - start]


@lru_cache(maxsize=8)  # at most 4.6 MB each (float32), never written to
def _additive_band(num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Returns `[num_rows, num_rows + width]`, 0 where `0 <= column - row <= width`, else -inf."""
    distance = torch.arange(num_rows + width) - torch.arange(num_rows)[:, None]
    outside = (distance < 0) | (distance > width)
    return torch.zeros(outside.shape, dtype=dtype).masked_fill_(outside, -torch.inf)
