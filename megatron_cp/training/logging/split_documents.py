"""Pairs of each rank where every document is cut in 2P pieces, two to a rank: Transformer Engine's THD layout.

    a document, P = 3    | 0 | 1 | 2 | 3 | 4 | 5 |    rank 0 has pieces 0 and 5, rank 1 has 1 and 4, rank 2 has 2 and 3

Documents are filled up to a multiple of 2P with tokens that see nothing, so the last pieces are short. None is cut
here. Pairs of a slice above a row are a quadratic of the row, another one from some rows on; so those above the i-th
cuts of all documents are a sum of quadratics in i, each of which holds from some i on.
"""

from __future__ import annotations

import numpy as np

from megatron_cp.mask import AttentionMask
from megatron_cp.mask.interval import IntArray
from megatron_cp.mask.linked import document_bounds
from megatron_cp.mask.slice import rows_area


def pairs_of_split_documents(mask: AttentionMask, cp_size: int) -> IntArray:
    """Returns the pairs of each rank: int64 `[cp_size]`. O(slices + ranks)."""
    pieces = 2 * cp_size
    bounds = document_bounds(mask)
    q0, q1, k0, k1, lo, hi = mask.array.T
    document = np.searchsorted(bounds, q0, side="right") - 1
    # Cut i is at begin + size * i.
    begin, size = bounds[document], -(-np.diff(bounds) // pieces)[document]
    upper = k1 - 1 - q0 - hi  # leg of the corner that the box lacks at its first row
    box = np.stack([2 * (k1 - k0) * (begin - q0), 2 * (k1 - k0) * size, 0 * size])
    corner = _twice_triangle(upper + q0 - begin, -size)  # what is left of it below the cut
    lower = _twice_triangle(begin - 1 - k0 + lo, size)  # the other corner, above the cut
    lacking, area = (_constant(x) for x in (upper * (upper + 1), 2 * rows_area(mask.array)))
    terms = [
        (q0, box - lacking + corner),
        (q0 + upper, -corner),
        (k0 - lo + 1, -lower),
        (q1, area - (box - lacking - lower)),
    ]
    changes = np.zeros((pieces + 1, 3), dtype=np.int64)  # of the sum's coefficients, at each i
    for row, term in terms:
        np.add.at(changes, -((begin - row) // size), term.T)
    cut = np.arange(pieces + 1)
    constant, linear, square = changes.cumsum(axis=0).T
    areas = np.diff((constant + (linear + square * cut) * cut) // 2)
    return areas[:cp_size] + areas[: cp_size - 1 : -1]


def _twice_triangle(at_zero: IntArray, step: IntArray) -> IntArray:
    """Returns x * (x + 1) for x = at_zero + step * i, as coefficients of 1, i and i * i: int64 `[3, n]`."""
    return np.stack([at_zero * (at_zero + 1), step * (2 * at_zero + 1), step * step])


def _constant(value: IntArray) -> IntArray:
    return np.stack([value, 0 * value, 0 * value])
