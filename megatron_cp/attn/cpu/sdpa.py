"""One piece of attention by PyTorch's CPU flash operator, forward and backward, in float32 or float64.

The operator's backward takes the forward's `out` only to form `delta = rowsum(dout * out)`. We have the
delta of the globally merged result, so it gets a stand-in for `out` with that very row sum:

    stand_in = dout * delta / |dout|^2

There is none where `dout` is (nearly) zero and delta is not: only `lse` has a gradient there.
"""

# B, R as in heads.py, Q rows and K keys of the piece, H head dim (padded to max(H, Hv))

import math
from functools import lru_cache

import torch
from torch import Tensor

from megatron_cp.attn.cpu.pieces import BLOCK_ROWS, MAX_BAND_KEYS, TALL_BLOCK_ROWS, diagonals_of
from megatron_cp.attn.options import AttendOptions
from megatron_cp.mask import MaskSlice

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# Outside these |dout|^2 or its quotient lose digits in float32.
_SMALLEST_SQUARE, _LARGEST_SQUARE = 1e-30, 1e30
# Numbers of a vector register, at most. With fewer keys the operator's maximum ignores nan, and a row whose scores are
# all nan comes out as (0, 0), like one that is masked (torch 2.13: below 16 keys in float32, 8 in float64).
_VECTOR_SIZE = 64


def largest_score(q_BRQH: Tensor, k_BRKH: Tensor, softmax_scale: float) -> float:
    """Returns what no score exceeds, either way, before it is scaled and after; nan where there is nan."""
    if not q_BRQH.numel() or not k_BRKH.numel():
        return 0.0
    sides = (torch.stack(x.aminmax()).abs().amax() for x in (q_BRQH, k_BRKH))
    return math.prod(map(float, sides)) * q_BRQH.shape[-1] * max(1.0, abs(softmax_scale))


def serves(q_BRQH: Tensor, k_BRKH: Tensor, largest: float) -> bool:
    """Returns whether the operator is right about these scores.

    It takes a row of nan for a masked one where there are few keys, and one whose scores are all -inf, for lack of
    exponents, for one with a denominator of 1.
    """
    if math.isnan(largest):
        return k_BRKH.shape[2] >= _VECTOR_SIZE
    return largest < torch.finfo(q_BRQH.dtype).max


def forward(
    q_BRQH: Tensor, k_BRKH: Tensor, v_BRKH: Tensor, piece: MaskSlice, options: AttendOptions
) -> tuple[Tensor, Tensor]:
    """Returns `(out [B, R, Q, H], lse [B, R, Q])` of the piece's rows over the piece's keys."""
    k, v = _for_all_heads(k_BRKH, q_BRQH), _for_all_heads(v_BRKH, q_BRQH)
    mask = _additive_mask(piece, q_BRQH.dtype)
    out, lse = _forward(q_BRQH, k, v, 0.0, False, attn_mask=mask, scale=options.softmax_scale)
    return out, lse


def backward(
    dout_BRQH: Tensor,
    stand_in_BRQH: Tensor,
    q_BRQH: Tensor,
    k_BRKH: Tensor,
    v_BRKH: Tensor,
    lse_BRQ: Tensor,
    piece: MaskSlice,
    options: AttendOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns `(dq, dk, dv)` of the piece in the shapes of q, k, v; `lse` must be free of -inf."""
    k, v = _for_all_heads(k_BRKH, q_BRQH), _for_all_heads(v_BRKH, q_BRQH)
    mask, scale = _additive_mask(piece, q_BRQH.dtype), options.softmax_scale
    dq, dk, dv = _backward(
        dout_BRQH, q_BRQH, k, v, stand_in_BRQH, lse_BRQ, 0.0, False, attn_mask=mask, scale=scale
    )
    if k_BRKH.shape[1] != dk.shape[1]:
        dk, dv = dk.sum(dim=1, keepdim=True), dv.sum(dim=1, keepdim=True)
    return dq, dk, dv


def stand_in_for_out(dout_BRQH: Tensor, delta_BRQ: Tensor) -> Tensor | None:
    """Returns a tensor whose row sums with `dout` are `delta`; None if a row has no such tensor."""
    square_BRQ = torch.linalg.vecdot(dout_BRQH, dout_BRQH)
    unusable = ~((square_BRQ >= _SMALLEST_SQUARE) & (square_BRQ <= _LARGEST_SQUARE))
    if bool((unusable & (delta_BRQ != 0)).any()):
        return None
    ratio_BRQ = (delta_BRQ / square_BRQ).masked_fill_(unusable, 0.0)
    return dout_BRQH * ratio_BRQ.unsqueeze(-1)


def _for_all_heads(x_BRKH: Tensor, q_BRQH: Tensor) -> Tensor:
    return x_BRKH.expand(-1, q_BRQH.shape[1], -1, -1)


def _additive_mask(piece: MaskSlice, dtype: torch.dtype) -> Tensor | None:
    """Returns 0 on the piece's pairs and -inf elsewhere, `[Q, K]`; None for a full box.

    It is a view: a band depends on `column - row` alone, so all blocks along one diagonal share one
    matrix, whose left column is the piece's column `start`. A side that cuts nothing is moved out to
    a fixed width, so that more blocks share.
    """
    if piece.lo is None and piece.hi is None:
        return None
    num_rows, num_keys = piece.q_end - piece.q_start, piece.k_end - piece.k_start
    lo, hi = (diagonal - piece.k_start + piece.q_start for diagonal in diagonals_of(piece))
    width, start = hi - lo, lo
    if piece.lo is None or piece.hi is None:
        width = MAX_BAND_KEYS + TALL_BLOCK_ROWS
        start = lo if piece.hi is None else hi - width
    max_rows = BLOCK_ROWS if num_rows <= BLOCK_ROWS else TALL_BLOCK_ROWS
    band = _additive_band(max_rows, width, dtype)
    return band[:num_rows, -start : num_keys - start]


@lru_cache(maxsize=8)  # at most 2.6 MB each (float32), never written to
def _additive_band(num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Returns `[num_rows, num_rows + width]`, 0 where `0 <= column - row <= width`, else -inf."""
    distance = torch.arange(num_rows + width, device="cpu")
    distance = distance - torch.arange(num_rows, device="cpu")[:, None]
    outside = (distance < 0) | (distance > width)
    zeros = torch.zeros(outside.shape, dtype=dtype, device="cpu")
    return zeros.masked_fill_(outside, -torch.inf)
