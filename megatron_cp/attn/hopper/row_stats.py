"""What the backward kernels read of each row: lse in base 2 and delta, as they lie in memory."""

# Q query rows, N query heads, H, Hv head dims, C copies, P padded rows

import torch
from torch import Tensor

from megatron_cp.attn.hopper.checks import find_variant, has_memory
from megatron_cp.attn.hopper.launch import find_map, launch_rows, remember_map
from megatron_cp.attn.hopper.machine import Kernel, Memory
from megatron_cp.attn.hopper.passes import RowStats
from megatron_cp.kernels.driver import FLOAT32
from megatron_cp.kernels.params import BwdPreprocessParams, TensorMap

# The copy engine wants 16 bytes of strides, and of where a box starts: rows per head are a multiple of 4, and
# statistics are kept once for each row modulo 4 that a tile may start at.
ROW_PADDING = STAT_COPIES = 4


def preprocess(
    out_QNH: Tensor, dout_QNH: Tensor, lse_QN: Tensor, dlse_QN: Tensor | None
) -> RowStats:
    """Returns the row statistics of a whole result; `delta = rowsum(dout * out) - dlse`.

    `out` is float32 or has the dtype of `dout`; both are `readable`, or one row for all: 16 bytes are read at a time.
    """
    stats, num_items = empty_stats(lse_QN), lse_QN.numel()
    params, dlse_as_read = preprocess_params(out_QNH, dout_QNH, lse_QN, dlse_QN, stats)
    name = find_variant("backward_preprocess", dout_QNH.dtype, None, dout_QNH.shape[2], None).name

    def memory() -> Memory:
        read = {"out": out_QNH, "dout": dout_QNH, "lse": lse_QN, "dlse": dlse_as_read}
        return Memory.of(read, {"row statistics": stats.both}, {})

    launch_rows(name, dout_QNH, num_items, params, memory)
    return stats


def preprocess_params(
    out_QNH: Tensor, dout_QNH: Tensor, lse_QN: Tensor, dlse_QN: Tensor | None, stats: RowStats
) -> tuple[BwdPreprocessParams, Tensor | None]:
    """Returns the parameters, and `dlse` as they read it: to be kept until the launch."""
    if dlse_QN is not None and (dlse_QN.stride() != lse_QN.stride() or not has_memory(dlse_QN)):
        like_lse = torch.empty_strided(lse_QN.shape, lse_QN.stride(), device=lse_QN.device)
        dlse_QN = like_lse.copy_(dlse_QN)
    params = BwdPreprocessParams(
        out_QNH.data_ptr(),
        dout_QNH.data_ptr(),
        lse_QN.data_ptr(),
        None if dlse_QN is None else dlse_QN.data_ptr(),
        *stats.addresses(),
        *out_QNH.stride()[:2],
        *dout_QNH.stride()[:2],
        *lse_QN.stride(),
        dout_QNH.shape[0],
        stats.both.shape[3],
        dout_QNH.shape[1],
        out_QNH.dtype == torch.float32,
    )
    return params, dlse_QN


def row_stats(dout_QNH: Tensor, lse_QN: Tensor, delta_QN: Tensor) -> RowStats:
    """Returns the row statistics from a `delta` that the caller has, float32 as `lse`; `dout` says for which kernels.

    The kernel adds `-dlse` to a product of rows. Of a row of zeros, which all share, it is 0.
    """
    assert lse_QN.dtype == delta_QN.dtype == torch.float32
    zeros = dout_QNH.new_zeros(dout_QNH.shape[2]).expand(dout_QNH.shape)
    return preprocess(zeros, zeros, lse_QN.contiguous(), delta_QN.neg().contiguous())


def stats_map(address: int, num_rows: int, num_heads: int, kernel: Kernel) -> TensorMap:
    """Returns the map of a statistic that begins at `address`: plain boxes of as many rows as a tile has."""
    key = ("row statistics", address, num_rows, num_heads, kernel.tile_rows)
    cached = find_map(key)
    if cached is None:
        padded = padded_rows(num_rows)
        strides = (4 * padded, 4 * padded * num_heads)
        sizes, box = (num_rows, num_heads, STAT_COPIES), (kernel.tile_rows, 1, 1)
        encoded = kernel.driver.encode_tensor_map(
            FLOAT32, address, sizes, strides, box, swizzled=False
        )
        cached = remember_map(key, encoded)
    return cached


def empty_stats(lse_QN: Tensor) -> RowStats:
    """Returns room for the statistics of as many rows as `lse` has."""
    num_rows, num_heads = lse_QN.shape
    shape = (2, STAT_COPIES, num_heads, padded_rows(num_rows))
    return RowStats(lse_QN.new_empty(shape, dtype=torch.float32))


def padded_rows(num_rows: int) -> int:
    """Returns the rows of a head's statistics: 16 bytes, which the copy engine wants of strides, divide them."""
    return -(-num_rows // ROW_PADDING) * ROW_PADDING
