"""How the CPU kernels see heads: `[B, R, rows, H]` views, a few heads at a time, keys never repeated.

    as many kv heads as query heads   B = 1         q [1, N, Q, H]   k [1, N, K, H]
    fewer                             B = kv heads  q [G, R, Q, H]   k [G, 1, K, H]

Few heads at a time bounds the memory of what is held beside inputs and results: casts to float32 and
what an operator allocates.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# Elements of one group's q and k; larger calls are split by heads (32 MB in float32).
MAX_GROUP_NUMEL = 1 << 23


@dataclass(frozen=True, slots=True)
class HeadGroup:
    """Query heads `heads` and the kv heads `kv_heads` that they use, computed together."""

    heads: slice
    kv_heads: slice
    num_batches: int

    def rows_view(self, x_QNH: Tensor) -> Tensor:
        """Returns a view `[B, R, Q, H]` of this group's query heads."""
        return x_QNH[:, self.heads].unflatten(1, (self.num_batches, -1)).permute(1, 2, 0, 3)

    def keys_view(self, x_KGH: Tensor) -> Tensor:
        """Returns a view `[B, R or 1, K, H]` of this group's kv heads."""
        return x_KGH[:, self.kv_heads].unflatten(1, (self.num_batches, -1)).permute(1, 2, 0, 3)

    def read_rows(self, x_QNH: Tensor, dtype: torch.dtype, head_dim: int) -> Tensor:
        """Returns `rows_view` for reading: cast, padded with zero columns, in strides that BLAS takes."""
        return _to_heads(x_QNH[:, self.heads], self.num_batches, dtype, head_dim)

    def read_keys(self, x_KGH: Tensor, dtype: torch.dtype, head_dim: int) -> Tensor:
        """Returns `keys_view` for reading, as `read_rows`."""
        return _to_heads(x_KGH[:, self.kv_heads], self.num_batches, dtype, head_dim)

    def read_numbers(self, x_QN: Tensor) -> Tensor:
        """Returns a view `[B, R, Q]` of one number per row and head."""
        return x_QN[:, self.heads].unflatten(1, (self.num_batches, -1)).permute(1, 2, 0)


def head_groups(q_QNH: Tensor, k_KGH: Tensor) -> Iterator[HeadGroup]:
    """Yields all heads, split only if q and k are large, never into fewer query heads than threads."""
    num_kv_heads = k_KGH.shape[1]
    repeats = q_QNH.shape[1] // num_kv_heads
    numel = max(1, (q_QNH.shape[0] * repeats + k_KGH.shape[0]) * q_QNH.shape[2])
    fewest = -(-torch.get_num_threads() // repeats)
    step = min(num_kv_heads, max(fewest, MAX_GROUP_NUMEL // numel))
    for first in range(0, num_kv_heads, step):
        last = min(first + step, num_kv_heads)
        num_batches = 1 if repeats == 1 else last - first
        yield HeadGroup(slice(first * repeats, last * repeats), slice(first, last), num_batches)


def _to_heads(x: Tensor, num_batches: int, dtype: torch.dtype, head_dim: int) -> Tensor:
    x = x.to(dtype)
    if x.shape[-1] < head_dim:
        x = F.pad(x, (0, head_dim - x.shape[-1]))
    if x.stride(-1) != 1 or x.stride(0) < head_dim:
        x = x.contiguous()
    return x.unflatten(1, (num_batches, -1)).permute(1, 2, 0, 3)
