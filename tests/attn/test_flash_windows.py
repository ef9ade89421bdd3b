"""Windows as flash-attn 2 reads them: an open side beside a closed one becomes the longest key sequence."""

import numpy as np
import pytest

from megatron_cp import mask as masks
from megatron_cp.attn.flash.grouping import group_calls

# (queries, keys, slices): more queries than keys under a lower diagonal, which leaves the right side open.
CASES = [
    (300, 100, [(0, 300, 0, 100, -250, None)]),
    (300, 100, [(0, 300, 0, 100, None, -20)]),
    (200, 60, [(0, 120, 0, 30, -100, None), (120, 200, 30, 60, -120, None)]),
    (90, 200, [(0, 90, 0, 200, -30, 40)]),
]


def as_read(left, right, max_k):
    """Source: `set_params_fprop` of flash_api.cpp, flash-attn 2.8."""
    left = -1 if left >= max_k else left
    right = -1 if right >= max_k else right
    if left < 0 <= right:
        left = max_k
    if right < 0 <= left:
        right = max_k
    return left, right


def pairs_of(call, num_queries, num_keys):
    """How often the call computes each pair, rows and keys packed as it says."""
    rows, keys = (
        np.concatenate([np.arange(start, stop) for start, stop in spans])
        for spans in (call.q_rows.tolist(), call.k_rows.tolist())
    )
    left, right = as_read(call.left, call.right, call.max_k)
    found = np.zeros((num_queries, num_keys), dtype=int)
    borders = zip(
        call.cu_seqlens_q[:-1], call.cu_seqlens_q[1:], call.cu_seqlens_k[:-1], call.cu_seqlens_k[1:],
        strict=True,
    )  # fmt: skip
    for q0, q1, k0, k1 in borders:
        distance = np.arange(k1 - k0)[None, :] - np.arange(q1 - q0)[:, None] - (k1 - k0) + (q1 - q0)
        seen = (distance >= -left if left >= 0 else True) & (
            distance <= right if right >= 0 else True
        )
        found[np.ix_(rows[q0:q1], keys[k0:k1])] += np.broadcast_to(seen, distance.shape)
    return found


@pytest.mark.parametrize(("num_queries", "num_keys", "slices"), CASES)
def test_windows_that_the_library_completes_compute_the_pairs_of_the_mask(
    num_queries, num_keys, slices
):
    mask = masks.from_slices(num_queries, num_keys, slices)
    found = sum(pairs_of(call, num_queries, num_keys) for call in group_calls(mask))
    assert np.array_equal(found, mask.to_dense().astype(int))
