"""The `cpu` backend: exact attention with memory O(rows), made of few large operations.

The mask's slices are cut into pieces (pieces.py); each is one call of PyTorch's flash operator
(flash.py) or, where that cannot, matrix products over tiles (tiles.py). Partial results are merged by
their lse, gradients are added, both in the order of the pieces: every run gives the same bits. Work
follows the mask's area, not its grid.
"""

# Q query rows, K key rows, N query heads, G kv heads, H head dim, Hv value head dim

import numpy as np
import torch
from torch import Tensor

from megatron_cp.attn import flash, tiles
from megatron_cp.attn.merge import merge_span_
from megatron_cp.attn.options import AttendOptions, accumulation_dtype
from megatron_cp.attn.pieces import Piece, pieces_of
from megatron_cp.mask import AttentionMask

# Larger pieces are computed a few kv heads at a time, which bounds what an operation holds beside its results.
MAX_PIECE_NUMEL = 1 << 22


def forward(
    q_QNH: Tensor, k_KGH: Tensor, v_KGH: Tensor, mask: AttentionMask, options: AttendOptions
) -> tuple[Tensor, Tensor]:
    """Returns `(out [Q, N, Hv], lse [Q, N])` in the accumulation dtype; rows without keys are `(0, -inf)`."""
    dtype = accumulation_dtype(q_QNH.dtype)
    num_rows, num_heads, _ = q_QNH.shape
    out = torch.zeros(num_rows, num_heads, v_KGH.shape[-1], dtype=dtype)
    lse = torch.full((num_rows, num_heads), -torch.inf, dtype=dtype)
    written = np.zeros(num_rows, dtype=np.bool_)
    kernel = tiles if options.softcap else flash
    for piece in pieces_of(mask):
        rows, keys = slice(piece.q_start, piece.q_end), slice(piece.k_start, piece.k_end)
        is_first = not written[rows].any()
        written[rows] = True
        for heads, kv_heads in _head_groups(piece, q_QNH, k_KGH):
            part_out, part_lse = kernel.forward(
                q_QNH[rows, heads], k_KGH[keys, kv_heads], v_KGH[keys, kv_heads], piece, options
            )
            if is_first:
                out[rows, heads], lse[rows, heads] = part_out, part_lse
            else:
                merge_span_(out[rows, heads], lse[rows, heads], part_out, part_lse)
    return out, lse


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
    dtype = accumulation_dtype(q_QNH.dtype)
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype) for x in (q_QNH, k_KGH, v_KGH))
    for piece in pieces_of(mask):
        rows, keys = slice(piece.q_start, piece.q_end), slice(piece.k_start, piece.k_end)
        # exp(s - inf) = 0: a row that no rank gave keys gets and gives nothing.
        no_keys = lse_QN[rows] == -torch.inf
        lse = lse_QN[rows].to(dtype).masked_fill(no_keys, torch.inf)
        delta = delta_QN[rows].to(dtype).masked_fill(no_keys, 0.0)
        for heads, kv_heads in _head_groups(piece, q_QNH, k_KGH):
            k, v = k_KGH[keys, kv_heads], v_KGH[keys, kv_heads]
            rest = (lse[:, heads], delta[:, heads], piece, options)
            part_dq, part_dk, part_dv = _piece_backward(
                dout_QNH[rows, heads], q_QNH[rows, heads], k, v, *rest
            )
            dq[rows, heads] += part_dq
            dk[keys, kv_heads] += part_dk
            dv[keys, kv_heads] += part_dv
    return dq, dk, dv


def _piece_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    piece: Piece,
    options: AttendOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    if not options.softcap:
        gradients = flash.backward(dout, q, k, v, lse, delta, piece, options)
        if gradients is not None:
            return gradients
    return tiles.backward(dout, q, k, v, lse, delta, piece, options)


def _head_groups(piece: Piece, q_QNH: Tensor, k_KGH: Tensor) -> list[tuple[slice, slice]]:
    """Returns pairs (query heads, kv heads) that are computed together; never fewer query heads than threads."""
    num_heads, num_kv_heads = q_QNH.shape[1], k_KGH.shape[1]
    repeats = num_heads // num_kv_heads
    numel_per_kv_head = (piece.num_rows + piece.num_keys) * repeats * q_QNH.shape[2]
    fewest = -(-torch.get_num_threads() // repeats)
    step = min(num_kv_heads, max(fewest, MAX_PIECE_NUMEL // numel_per_kv_head))
    starts = range(0, num_kv_heads, step)
    return [(slice(g * repeats, (g + step) * repeats), slice(g, g + step)) for g in starts]
