"""Rows that are narrower than the kernel: zeros behind them change no score and no sum.

The kernels are built for few head dims; 80 runs on the one for 96, 160 on the one for 192. It costs the products of
the wider kernel and a copy of the rows.
"""

import torch.nn.functional as F
from torch import Tensor


def widen(dims: tuple[int, int], q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q and k `[rows, heads, dims[0]]`, v `[rows, heads, dims[1]]`, zero behind what they had."""
    return _to(q, dims[0]), _to(k, dims[0]), _to(v, dims[1])


def widen_values(dims: tuple[int, int], dout: Tensor) -> Tensor:
    """Returns `dout` as wide as the values that `widen` returns."""
    return _to(dout, dims[1])


def _to(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))
