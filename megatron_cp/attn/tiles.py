"""One piece of attention by matrix products over small tiles: what the flash operator cannot do.

That is softcap, and a gradient of `lse` in rows without a gradient of `out`. Query heads that share a kv head are rows
of one matrix, so keys are never repeated.
"""

# G kv heads, R query heads per kv head, Q rows and K keys of a tile, H head dim, Hv value head dim

from functools import lru_cache

import torch
from torch import Tensor

from megatron_cp.attn.merge import merge_span_
from megatron_cp.attn.options import AttendOptions, accumulation_dtype
from megatron_cp.attn.pieces import Piece, tiles_of

# Scores of one tile over all heads: 4 MB in float32, so that a tile's passes stay in the shared cache.
MAX_TILE_SCORES = 1 << 20
MAX_TILE_ROWS = 256


def forward(
    q_QNH: Tensor, k_KGH: Tensor, v_KGH: Tensor, piece: Piece, options: AttendOptions
) -> tuple[Tensor, Tensor]:
    """Returns `(out [Q, N, Hv], lse [Q, N])` of the piece's rows over the piece's keys."""
    dtype = accumulation_dtype(q_QNH.dtype)
    num_rows, num_heads, _ = q_QNH.shape
    out = q_QNH.new_zeros(num_rows, num_heads, v_KGH.shape[-1], dtype=dtype)
    lse = q_QNH.new_full((num_rows, num_heads), -torch.inf, dtype=dtype)
    for tile in _tiles(piece, num_heads):
        rows, keys = _spans(tile, piece)
        q = _fold(q_QNH[rows].to(dtype), k_KGH.shape[1])
        k, v = (x[keys].to(dtype).transpose(0, 1) for x in (k_KGH, v_KGH))
        scores = torch.bmm(q, k.transpose(1, 2)).mul_(options.softmax_scale)
        if options.softcap:
            scores.div_(options.softcap).tanh_().mul_(options.softcap)
        _mask_(scores, tile, -torch.inf)
        top = scores.amax(dim=-1, keepdim=True).nan_to_num_(neginf=0.0)
        weights = scores.sub_(top).exp_()
        total = weights.sum(dim=-1, keepdim=True)
        tile_out = torch.bmm(weights, v).div_(total.masked_fill(total == 0, 1.0))
        tile_lse = top.add_(total.log_())
        merge_span_(
            out[rows], lse[rows], _unfold(tile_out, num_heads), _unfold(tile_lse, num_heads)[..., 0]
        )
    return out, lse


def backward(
    dout_QNH: Tensor,
    q_QNH: Tensor,
    k_KGH: Tensor,
    v_KGH: Tensor,
    lse_QN: Tensor,
    delta_QN: Tensor,
    piece: Piece,
    options: AttendOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns `(dq, dk, dv)` of the piece; `lse` must be free of -inf (+inf makes a row's probabilities 0)."""
    dtype = accumulation_dtype(q_QNH.dtype)
    num_heads, num_kv_heads = q_QNH.shape[1], k_KGH.shape[1]
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype) for x in (q_QNH, k_KGH, v_KGH))
    for tile in _tiles(piece, num_heads):
        rows, keys = _spans(tile, piece)
        q, dout = (_fold(x[rows].to(dtype), num_kv_heads) for x in (q_QNH, dout_QNH))
        lse, delta = (_fold(x[rows].unsqueeze(-1), num_kv_heads) for x in (lse_QN, delta_QN))
        k, v = (x[keys].to(dtype).transpose(0, 1) for x in (k_KGH, v_KGH))
        scores = torch.bmm(q, k.transpose(1, 2)).mul_(options.softmax_scale)
        slope = _softcap_(scores, options.softcap)
        weights = scores.sub_(lse).exp_()
        _mask_(weights, tile, 0.0)
        dscores = torch.baddbmm(delta, dout, v.transpose(1, 2), beta=-1.0).mul_(weights)
        if slope is not None:
            dscores.mul_(slope)
        dv[keys] += torch.bmm(weights.transpose(1, 2), dout).transpose(0, 1)
        dq[rows] += _unfold(torch.bmm(dscores, k), num_heads).mul_(options.softmax_scale)
        dk[keys] += (
            torch.bmm(dscores.transpose(1, 2), q).transpose(0, 1).mul_(options.softmax_scale)
        )
    return dq, dk, dv


def _tiles(piece: Piece, num_heads: int) -> list[Piece]:
    max_rows = max(1, min(MAX_TILE_ROWS, piece.num_rows))
    return list(tiles_of(piece, max_rows, max(64, MAX_TILE_SCORES // (max_rows * num_heads))))


def _spans(tile: Piece, piece: Piece) -> tuple[slice, slice]:
    """Returns the tile's rows and keys, counted from the piece's corner."""
    q0, k0 = piece.q_start, piece.k_start
    return slice(tile.q_start - q0, tile.q_end - q0), slice(tile.k_start - k0, tile.k_end - k0)


def _fold(x_QNH: Tensor, num_kv_heads: int) -> Tensor:
    """Returns `[G, R * Q, H]`: the query heads of a kv head as rows of one matrix."""
    return x_QNH.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)


def _unfold(x: Tensor, num_heads: int) -> Tensor:
    """Returns `[Q, N, H]` from `[G, R * Q, H]`."""
    repeats = num_heads // x.shape[0]
    return x.unflatten(1, (repeats, -1)).permute(2, 0, 1, 3).flatten(1, 2)


def _softcap_(scores: Tensor, softcap: float) -> Tensor | None:
    """Caps scores in place and returns the derivative of the cap; None without one."""
    if not softcap:
        return None
    bounded = scores.div_(softcap).tanh_()
    slope = 1 - bounded**2
    scores.mul_(softcap)
    return slope


def _mask_(scores: Tensor, tile: Piece, value: float) -> None:
    """Writes `value` over the pairs of `scores` `[G, R * Q, K]` that are not the tile's."""
    if tile.cuts_lower or tile.cuts_upper:
        outside = _outside_band(tile.num_rows, tile.num_keys, tile.lo, tile.hi)
        scores.unflatten(1, (-1, tile.num_rows)).masked_fill_(outside, value)


@lru_cache(maxsize=16)  # tiles along one diagonal all have the same mask
def _outside_band(num_rows: int, num_keys: int, lo: int, hi: int) -> Tensor:
    distance = torch.arange(num_keys) - torch.arange(num_rows)[:, None]
    return (distance < lo) | (distance > hi)
