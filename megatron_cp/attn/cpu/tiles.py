"""One piece of attention by matrix products over small tiles: what the flash operator cannot do.

That is softcap, dropout, and a gradient of `lse` in rows without a gradient of `out`. Query heads that share a
kv head are rows of one matrix, so keys are never repeated.
"""

# B, R as in heads.py, G kv heads of the group, Q rows and K keys of a tile, H head dim

from functools import lru_cache

import torch
from torch import Tensor

from megatron_cp.attn.cpu.pieces import diagonals_of, tiles_of
from megatron_cp.attn.logits import raise_to_
from megatron_cp.attn.merge import merge_span_
from megatron_cp.attn.options import AttendOptions
from megatron_cp.mask import MaskSlice

# Scores of one tile over all heads: 4 MB in float32, so that a tile's passes stay in the shared cache.
MAX_TILE_SCORES = 1 << 20
MAX_TILE_ROWS = 256
MIN_TILE_KEYS = 64


def forward(
    q_BRQH: Tensor,
    k_BRKH: Tensor,
    v_BRKH: Tensor,
    piece: MaskSlice,
    options: AttendOptions,
    max_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns `(out [B, R, Q, H], lse [B, R, Q])` of the piece's rows over the piece's keys.

    `max_logits` `[B R]` is raised, in place, to the largest score of each head. The dropout of `options` is that of
    these heads.
    """
    out, lse = torch.zeros_like(q_BRQH), q_BRQH.new_full(q_BRQH.shape[:3], -torch.inf)
    for tile, rows, keys in _tiles(piece, q_BRQH):
        k, v = _fold(k_BRKH[:, :, keys], k_BRKH), _fold(v_BRKH[:, :, keys], k_BRKH)
        q = _fold(q_BRQH[:, :, rows], k_BRKH)
        scores = torch.bmm(q, k.transpose(1, 2)).mul_(options.softmax_scale)
        if options.softcap:
            scores.div_(options.softcap).tanh_().mul_(options.softcap)
        _mask_(scores, tile, -torch.inf)
        top = scores.amax(dim=-1, keepdim=True)
        if max_logits is not None:
            raise_to_(max_logits, top.view(len(max_logits), -1).amax(dim=1))
        weights = scores.sub_(top.masked_fill(top == -torch.inf, 0.0)).exp_()
        total = weights.sum(dim=-1, keepdim=True)
        _drop_(weights, tile, options)
        whole = total.masked_fill(total == 0.0, 1.0)  # of a row whose scores are all -inf
        tile_out = torch.bmm(weights, v).div_(whole).view(out[:, :, rows].shape)
        tile_lse = top.add_(total.log_()).view(lse[:, :, rows].shape)
        merge_span_(out[:, :, rows], lse[:, :, rows], tile_out, tile_lse)
    return out, lse


def backward(
    dout_BRQH: Tensor,
    q_BRQH: Tensor,
    k_BRKH: Tensor,
    v_BRKH: Tensor,
    lse_BRQ: Tensor,
    delta_BRQ: Tensor,
    piece: MaskSlice,
    options: AttendOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns `(dq, dk, dv)` of the piece in the shapes of q, k, v; `lse` must be free of -inf."""
    dq, dk, dv = (torch.zeros_like(x) for x in (q_BRQH, k_BRKH, v_BRKH))
    scale = options.softmax_scale
    for tile, rows, keys in _tiles(piece, q_BRQH):
        k, v = _fold(k_BRKH[:, :, keys], k_BRKH), _fold(v_BRKH[:, :, keys], k_BRKH)
        q, dout = _fold(q_BRQH[:, :, rows], k_BRKH), _fold(dout_BRQH[:, :, rows], k_BRKH)
        lse = lse_BRQ[:, :, rows].reshape(*q.shape[:2], 1)
        delta = delta_BRQ[:, :, rows].reshape(*q.shape[:2], 1)
        scores = torch.bmm(q, k.transpose(1, 2)).mul_(scale)
        slope = _softcap_(scores, options.softcap)
        weights = scores.sub_(lse).exp_()
        _mask_(weights, tile, 0.0)
        dweights = torch.bmm(dout, v.transpose(1, 2))
        factors = _drop_(dweights, tile, options)
        dscores = dweights.sub_(delta).mul_(weights)
        if slope is not None:
            dscores.mul_(slope)
        if factors is not None:
            weights.mul_(factors)
        dv[:, :, keys] += torch.bmm(weights.transpose(1, 2), dout).view(v_BRKH[:, :, keys].shape)
        dq_tile, dk_tile = torch.bmm(dscores, k), torch.bmm(dscores.transpose(1, 2), q)
        dq[:, :, rows] += dq_tile.mul_(scale).view(q_BRQH[:, :, rows].shape)
        dk[:, :, keys] += dk_tile.mul_(scale).view(k_BRKH[:, :, keys].shape)
    return dq, dk, dv


def _tiles(piece: MaskSlice, q_BRQH: Tensor) -> list[tuple[MaskSlice, slice, slice]]:
    """Returns tiles with their rows and keys counted from the piece's corner."""
    num_heads = q_BRQH.shape[0] * q_BRQH.shape[1]
    max_rows = min(MAX_TILE_ROWS, piece.q_end - piece.q_start)
    max_keys = max(MIN_TILE_KEYS, MAX_TILE_SCORES // (max_rows * num_heads))
    q0, k0 = piece.q_start, piece.k_start
    return [
        (tile, slice(tile.q_start - q0, tile.q_end - q0), slice(tile.k_start - k0, tile.k_end - k0))
        for tile in tiles_of(piece, max_rows, max_keys)
    ]


def _fold(x: Tensor, k_BRKH: Tensor) -> Tensor:
    """Returns `[G, rows, H]`: one matrix per kv head, the rows of its query heads one after another."""
    return x.reshape(k_BRKH.shape[0] * k_BRKH.shape[1], -1, x.shape[-1])


def _softcap_(scores: Tensor, softcap: float) -> Tensor | None:
    """Caps scores in place and returns the derivative of the cap; None without one."""
    if not softcap:
        return None
    bounded = scores.div_(softcap).tanh_()
    slope = 1 - bounded**2
    scores.mul_(softcap)
    return slope


def _drop_(x: Tensor, tile: MaskSlice, options: AttendOptions) -> Tensor | None:
    """Multiplies `x` `[G, query heads * Q, K]` in place by the factors of dropout and returns them; None without it."""
    if options.dropout is None:
        return None
    rows, keys = slice(tile.q_start, tile.q_end), slice(tile.k_start, tile.k_end)
    factors = options.dropout.factors(rows, keys, x.dtype).view(x.shape)
    x.mul_(factors)
    return factors


def _mask_(scores: Tensor, tile: MaskSlice, value: float) -> None:
    """Writes `value` over the pairs of `scores` `[G, query heads * Q, K]` that are not the tile's."""
    if tile.lo is None and tile.hi is None:
        return
    num_rows, num_keys = tile.q_end - tile.q_start, tile.k_end - tile.k_start
    lo, hi = (diagonal - tile.k_start + tile.q_start for diagonal in diagonals_of(tile))
    outside = _outside_band(num_rows, num_keys, lo, hi)
    scores.unflatten(1, (-1, num_rows)).masked_fill_(outside, value)


@lru_cache(maxsize=16)  # tiles along one diagonal all have the same mask
def _outside_band(num_rows: int, num_keys: int, lo: int, hi: int) -> Tensor:
    rows = torch.arange(num_rows, device="cpu")
    distance = torch.arange(num_keys, device="cpu") - rows[:, None]
    return (distance < lo) | (distance > hi)
