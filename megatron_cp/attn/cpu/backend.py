"""The `cpu` backend: exact attention with memory O(rows), made of few large operations.

The mask's slices are cut into pieces (pieces.py); each is one call of PyTorch's flash operator
(sdpa.py) or, where that cannot, matrix products over tiles (tiles.py). Partial results are merged by
their lse, gradients are added, both in the order of the pieces: every run gives the same bits. Work
follows the mask's area, not its grid.

Half-precision inputs are computed in float32: the operator would round `out` of every piece and every
partial sum of the gradients to 16 bits (docs/numerics.md has the price).
"""

# Q query rows, K key rows, N query heads, G kv heads, H head dim, Hv value head dim

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from megatron_cp.attn.cpu import sdpa, tiles
from megatron_cp.attn.cpu.heads import HeadGroup, head_groups
from megatron_cp.attn.cpu.pieces import pieces_of
from megatron_cp.attn.merge import merge_span_
from megatron_cp.attn.options import AttendOptions, accumulation_dtype
from megatron_cp.mask import AttentionMask, MaskSlice


def forward(
    q_QNH: Tensor,
    k_KGH: Tensor,
    v_KGH: Tensor,
    mask: AttentionMask,
    options: AttendOptions,
    max_logits_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns `(out [Q, N, Hv], lse [Q, N])` in the accumulation dtype, (0, -inf) without keys.

    `max_logits` is raised, in place, to the largest score of each head; that takes the tiles, which see scores.
    """
    dtype, head_dim = _compute_format(q_QNH, v_KGH)
    num_rows, num_heads, _ = q_QNH.shape
    out = q_QNH.new_empty(num_rows, num_heads, v_KGH.shape[-1], dtype=dtype)
    lse = q_QNH.new_full((num_rows, num_heads), -torch.inf, dtype=dtype)
    pieces = list(pieces_of(mask))
    overwrites, others = _writing_order(pieces, num_rows)
    out[torch.from_numpy(others)] = 0.0
    uses_tiles = _needs_scores(options) or max_logits_N is not None
    for group in head_groups(q_QNH, k_KGH):
        q = group.read_rows(q_QNH, dtype, head_dim)
        k, v = (group.read_keys(x, dtype, head_dim) for x in (k_KGH, v_KGH))
        out_view, lse_view = group.rows_view(out), group.read_numbers(lse)
        mine = _of_heads(options, group)
        scale = options.softmax_scale
        is_plain = sdpa.largest_score(q, k, scale) < torch.finfo(dtype).max
        for piece, overwrite in zip(pieces, overwrites, strict=True):
            rows, keys = _spans(piece)
            parts = q[:, :, rows], k[:, :, keys], v[:, :, keys]
            serves = is_plain or sdpa.serves(*parts[:2], sdpa.largest_score(*parts[:2], scale))
            if uses_tiles or not serves:
                tops = None if max_logits_N is None else max_logits_N[group.heads]
                part_out, part_lse = tiles.forward(*parts, piece, mine, tops)
            else:
                part_out, part_lse = sdpa.forward(*parts, piece, options)
            part_out = part_out[..., : v_KGH.shape[-1]]
            if overwrite:
                out_view[:, :, rows], lse_view[:, :, rows] = part_out, part_lse
            else:
                merge_span_(out_view[:, :, rows], lse_view[:, :, rows], part_out, part_lse)
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
    dtype, head_dim = _compute_format(q_QNH, v_KGH)
    dq, dk, dv = (x.new_zeros(x.shape, dtype=dtype) for x in (q_QNH, k_KGH, v_KGH))
    pieces = list(pieces_of(mask))
    # exp(s - inf) = 0: a row that no rank gave keys gets and gives nothing.
    no_keys = lse_QN == -torch.inf
    lse_QN = lse_QN.to(dtype).masked_fill(no_keys, torch.inf)
    delta_QN = delta_QN.to(dtype).masked_fill(no_keys, 0.0)
    for group in head_groups(q_QNH, k_KGH):
        inputs = (
            group.read_rows(dout_QNH, dtype, head_dim),
            group.read_rows(q_QNH, dtype, head_dim),
            group.read_keys(k_KGH, dtype, head_dim),
            group.read_keys(v_KGH, dtype, head_dim),
            group.read_numbers(lse_QN),
            group.read_numbers(delta_QN),
        )
        views = group.rows_view(dq), group.keys_view(dk), group.keys_view(dv)
        _add_gradients_(views, inputs, pieces, _of_heads(options, group))
    return dq, dk, dv


def _add_gradients_(
    results: tuple[Tensor, Tensor, Tensor],
    inputs: tuple[Tensor, ...],
    pieces: list[MaskSlice],
    options: AttendOptions,
) -> None:
    """Adds the gradients of all pieces for one group of heads to `results` = (dq, dk, dv)."""
    dout, q, k, v, lse, delta = inputs
    dq, dk, dv = results
    stand_in = None if _needs_scores(options) else sdpa.stand_in_for_out(dout, delta)
    for piece in pieces:
        rows, keys = _spans(piece)
        q_, k_, v_ = q[:, :, rows], k[:, :, keys], v[:, :, keys]
        dout_, lse_ = dout[:, :, rows], lse[:, :, rows]
        if stand_in is None:
            delta_ = delta[:, :, rows]
            parts = tiles.backward(dout_, q_, k_, v_, lse_, delta_, piece, options)
        else:
            stand_in_ = stand_in[:, :, rows]
            parts = sdpa.backward(dout_, stand_in_, q_, k_, v_, lse_, piece, options)
        dq[:, :, rows] += parts[0][..., : dq.shape[-1]]
        dk[:, :, keys] += parts[1][..., : dk.shape[-1]]
        dv[:, :, keys] += parts[2][..., : dv.shape[-1]]


def _needs_scores(options: AttendOptions) -> bool:
    """Returns whether something is done to scores or probabilities that the operator does not do."""
    return options.softcap > 0 or options.dropout is not None


def _of_heads(options: AttendOptions, group: HeadGroup) -> AttendOptions:
    dropout = options.dropout
    return options if dropout is None else replace(options, dropout=dropout.of_heads(group.heads))


def _compute_format(q_QNH: Tensor, v_KGH: Tensor) -> tuple[torch.dtype, int]:
    """Returns the dtype and the head dim of the computation; the operator wants one for q, k and v."""
    return accumulation_dtype(q_QNH.dtype), max(q_QNH.shape[-1], v_KGH.shape[-1])


def _spans(piece: MaskSlice) -> tuple[slice, slice]:
    return slice(piece.q_start, piece.q_end), slice(piece.k_start, piece.k_end)


def _writing_order(pieces: list[MaskSlice], num_rows: int) -> tuple[list[bool], np.ndarray]:
    """Returns which pieces may overwrite their rows, being the first of all of them; and the other rows."""
    is_written = np.zeros(num_rows, dtype=np.bool_)
    is_overwritten = np.zeros(num_rows, dtype=np.bool_)
    overwrites = []
    for piece in pieces:
        rows = slice(piece.q_start, piece.q_end)
        overwrites.append(not is_written[rows].any())
        is_overwritten[rows] |= overwrites[-1]
        is_written[rows] = True
    return overwrites, ~is_overwritten
