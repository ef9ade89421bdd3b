"""Joins partial attention results over disjoint sets of keys.

A partial result of a row is `(out, lse)`: the softmax-weighted mean of the values and the natural log of the
softmax denominator. Two of them join like a mean weighted by their denominators:

    lse = log(exp(lse_a) + exp(lse_b))      out = out_a * exp(lse_a - lse) + out_b * exp(lse_b - lse)

A row without keys is `(0, -inf)`, the neutral element. A sink is one more key without a value.
Source: Milakov & Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867, section 3.1.
"""

# Q rows, N query heads, Hv value head dim

from typing import Protocol

import torch
from torch import Tensor

ByRow = tuple[Tensor, Tensor, Tensor]
"""`(rows, begins, parts)`, int64 and contiguous: row `rows[i]`, each there once, gets rows
`parts[begins[i] : begins[i + 1]]` of a part, one after the other."""


class PartJoiner(Protocol):
    """A backend's kernels that join results for the same rows, in place, each row read and written once."""

    def merge_parts_(
        self,
        out: Tensor,
        lse: Tensor,
        part_out: Tensor,
        part_lse: Tensor,
        by_row: ByRow | None = None,
    ) -> None:
        """Merges partial results; without `by_row` the first rows get one each."""

    def add_parts_(self, total: Tensor, part: Tensor, by_row: ByRow) -> None:
        """Adds gradients."""


def merge_partials(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns `(out, lse)` over the keys of both partial results.

    Shapes: out `[Q, N, Hv]`, lse `[Q, N]`, all in one accumulation dtype (float32 or float64).
    """
    lse = torch.logaddexp(lse_a, lse_b)
    weight_a = _weight(lse_a, lse).unsqueeze(-1)
    weight_b = _weight(lse_b, lse).unsqueeze(-1)
    return out_a * weight_a + out_b * weight_b, lse


def merge_rows_(out: Tensor, lse: Tensor, rows: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merges a partial result of some rows into `out` and `lse` in place.

    `rows` int64 `[m]` without repeats; `part_out` `[m, N, Hv]`, `part_lse` `[m, N]`
    of any float dtype.
    """
    if rows.numel() == 0:
        return
    part_out, part_lse = part_out.to(out.dtype), part_lse.to(lse.dtype)
    merged_out, merged_lse = merge_partials(out[rows], lse[rows], part_out, part_lse)
    out.index_copy_(0, rows, merged_out)
    lse.index_copy_(0, rows, merged_lse)


def merge_span_(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merges a partial result into views `out` and `lse` of the same rows, in place and without index copies."""
    merged = torch.logaddexp(lse, part_lse)
    weight, part_weight = _weight(lse, merged), _weight(part_lse, merged)
    out.mul_(weight.unsqueeze(-1)).addcmul_(part_out, part_weight.unsqueeze(-1))
    lse.copy_(merged)


def apply_sink(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Returns `(out, lse)` with one logit per head, `sink` `[N]`, added to every row's denominator.

    A row without keys becomes `(0, sink)`. `sink = 0` is the off-by-one softmax.
    Source: Xiao et al., "Efficient streaming language models with attention sinks", arXiv:2309.17453.
    """
    with_sink = torch.logaddexp(lse, sink.to(lse.dtype).expand_as(lse))
    return out * _weight(lse, with_sink).unsqueeze(-1), with_sink


def sink_gradient(lse: Tensor, sink: Tensor, delta: Tensor, dlse: Tensor | None) -> Tensor:
    """Returns the gradient of `sink`, `[N]` in the accumulation dtype.

    `lse` `[Q, N]` includes the sink; `delta = rowsum(dout * out) - dlse` `[Q, N]` as for the keys. The sink is a
    key with value zero, so its score gradient is `p_sink * (0 - delta)`. A row without keys has the constant 0 as
    `out`: its `dout` counts nothing, even where it is nan.
    """
    sinks = sink.to(lse.dtype).expand_as(lse)
    # lse of rows without keys: kernels take the sink through powers of two and back, and miss it by an ulp.
    without_keys = torch.isclose(lse, sinks, rtol=1e-6, atol=1e-6)
    alone = torch.zeros_like(delta) if dlse is None else -dlse
    delta = torch.where(without_keys & delta.isnan(), alone, delta)
    probability = _weight(sinks, lse)
    return -(probability * delta).sum(dim=0)


def _weight(part_lse: Tensor, lse: Tensor) -> Tensor:
    """Returns `exp(part_lse - lse)`, and 0 where both are -inf (a row without keys)."""
    return torch.exp(part_lse - lse.masked_fill(lse == -torch.inf, 0.0))
