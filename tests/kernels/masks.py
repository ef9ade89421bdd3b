"""A mask with every kind of slice, and its dense form without code of the package."""

import torch

# Full, causal, inverse causal, both, a window, a one-token document, rows without keys, ragged bounds.
MIXED = (
    (0, 40, 0, 100, None, None),
    (40, 170, 40, 170, None, 0),
    (40, 170, 200, 291, 130, None),
    (170, 171, 170, 171, None, 0),
    (180, 260, 130, 260, -37, 5),
    (180, 260, 261, 300, None, None),
    (260, 300, 0, 300, None, -128),
)
_FAR = 10**6  # an open side


def dense_mask(num_queries, num_keys, slices):
    """Returns bool [num_queries, num_keys] of slices (q0, q1, k0, k1, lo, hi)."""
    q, k = torch.arange(num_queries)[:, None], torch.arange(num_keys)[None, :]
    allowed = torch.zeros(num_queries, num_keys, dtype=torch.bool)
    for q0, q1, k0, k1, lo, hi in slices:
        lo, hi = (-_FAR if lo is None else lo), (_FAR if hi is None else hi)
        allowed |= (q >= q0) & (q < q1) & (k >= k0) & (k < k1) & (k - q >= lo) & (k - q <= hi)
    return allowed
