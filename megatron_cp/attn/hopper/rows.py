"""Partial results merged by our kernel: each row read and written once.

torch takes eleven passes over the rows for the same (attn/merge.py, which is the definition).
"""

# R rows, N query heads, Hv value head dim

import torch
from torch import Tensor

from megatron_cp.attn.hopper.launch import launch_rows
from megatron_cp.kernels.params import MergeRowsParams

KERNEL = "merge_rows"


def merge_rows_(
    out: Tensor, lse: Tensor, rows: Tensor | None, part_out: Tensor, part_lse: Tensor
) -> None:
    """Merges a partial result of some rows into `out` and `lse` in place, as `attn.merge.merge_rows_`.

    All but `rows` in float32. `rows` int64 `[m]` without repeats, contiguous, or None: the first m rows.
    """
    params = merge_params(out, lse, rows, part_out, part_lse)
    launch_rows(KERNEL, part_out, part_lse.numel(), params)


def merge_params(
    out: Tensor, lse: Tensor, rows: Tensor | None, part_out: Tensor, part_lse: Tensor
) -> MergeRowsParams:
    """Returns the kernel's parameters. Raises ValueError for rows that are not float32 in pairs of elements."""
    for name, x in (("out", out), ("part_out", part_out)):
        if x.dtype != torch.float32:
            raise ValueError(f"{name} of {x.dtype} must be torch.float32; call {name}.float()")
        if x.stride(2) != 1 or any(step % 2 for step in x.stride()[:2]) or x.shape[2] % 2:
            raise ValueError(
                f"{name} {tuple(x.shape)} of strides {x.stride()} must have an even width, last stride 1 and other "
                f"strides of whole pairs; call {name}.contiguous()"
            )
    return MergeRowsParams(
        out.data_ptr(),
        lse.data_ptr(),
        part_out.data_ptr(),
        part_lse.data_ptr(),
        None if rows is None else rows.data_ptr(),
        *out.stride()[:2],
        *lse.stride(),
        *part_out.stride()[:2],
        *part_lse.stride(),
        *part_out.shape,
    )
