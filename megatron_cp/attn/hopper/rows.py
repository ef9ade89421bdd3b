"""Results for the same rows joined by our kernels: each row is read and written once, whatever comes to it.

torch takes eleven passes over the rows for one merge (attn/merge.py, which is the definition), three for one sum, and
a call for each part. On an H200 they moved 2.7 to 3.6 TB/s, torch's copy 4.3 (2026-11-27; merging asks for a part's
columns earlier since: right there, not timed).
"""

# R rows, N query heads, Hv value head dim

import ctypes
from functools import cache, lru_cache

import torch
from torch import Tensor

from megatron_cp.attn.hopper.launch import launch_rows
from megatron_cp.attn.hopper.machine import Memory
from megatron_cp.attn.merge import ByRow
from megatron_cp.kernels import build
from megatron_cp.kernels.params import AddRowsParams, Joins, MergeRowsParams

MERGE, ADD = "merge_rows", "add_rows"
Layout = tuple[torch.Size, tuple[int, ...]]
"""Shape and strides."""


def merge_parts_(
    out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor, by_row: ByRow | None = None
) -> None:
    """Merges partial results `part_out` `[R, N, Hv]`, `part_lse` `[R, N]` into rows of `out` and `lse`, in place.

    Without `by_row` into the first R rows. All in float32.
    """
    params, num_items = merge_params(out, lse, part_out, part_lse, by_row)

    def memory() -> Memory:
        read = {"part_out": part_out, "part_lse": part_lse, **_lists(by_row)}
        return Memory(read, {}, {"out": out, "lse": lse})

    launch_rows(MERGE, part_out, num_items, params, memory)


def add_parts_(total: Tensor, part: Tensor, by_row: ByRow) -> None:
    """Adds rows of `part` `[R, ...]` to rows of `total`, in place, in the order of `by_row`. Both in float32."""
    params, num_items = add_params(total, part, by_row)

    def memory() -> Memory:
        return Memory({"part": part, **_lists(by_row)}, {}, {"total": total})

    launch_rows(ADD, part, num_items, params, memory)


def merge_params(
    out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor, by_row: ByRow | None = None
) -> tuple[MergeRowsParams, int]:
    """Returns the kernel's parameters and its number of warps' shares.

    Raises ValueError for rows that are not float32 in pairs of elements.
    """
    _check_pairs("out", out.shape, out.stride(), out.dtype)
    _check_pairs("part_out", part_out.shape, part_out.stride(), part_out.dtype)
    joins = _joins(by_row, part_out.shape[0])
    num_heads, width = part_out.shape[1:]
    params = MergeRowsParams(
        joins,
        out.data_ptr(),
        lse.data_ptr(),
        part_out.data_ptr(),
        part_lse.data_ptr(),
        *out.stride()[:2],
        *lse.stride(),
        *part_out.stride()[:2],
        *part_lse.stride(),
        num_heads,
        width,
    )
    return params, joins.num_rows * num_heads


def add_params(total: Tensor, part: Tensor, by_row: ByRow) -> tuple[AddRowsParams, int]:
    """Returns the kernel's parameters and its number of warps' shares.

    Raises ValueError for rows that are not float32 or have gaps between columns.
    """
    of_total, of_part = (total.shape, total.stride()), (part.shape, part.stride())
    strides, num_heads, width = _layout_of_sums(of_total, of_part, (total.dtype, part.dtype))
    joins = _joins(by_row, part.shape[0])
    params = AddRowsParams(joins, total.data_ptr(), part.data_ptr(), *strides, num_heads, width)
    return params, joins.num_rows * num_heads * -(-width // _columns_of_a_warp())


@lru_cache(maxsize=1024)  # what is refused raises, and is asked again
def _layout_of_sums(
    total: Layout, part: Layout, dtypes: tuple[torch.dtype, torch.dtype]
) -> tuple[tuple[int, ...], int, int]:
    """Returns the strides of rows and heads of both, the number of heads and their width, for the kernel."""
    is_dense = _has_dense_rows(*total) and _has_dense_rows(*part)
    for name, (shape, strides), dtype in zip(("total", "part"), (total, part), dtypes, strict=True):
        is_laid_out = is_dense or len(shape) == 3
        _check(
            name, shape, strides, dtype, is_laid_out, "be [rows, heads, columns] with last stride 1"
        )
    (shape, of_total), (_, of_part) = total, part
    if is_dense:  # all heads side by side, as one
        width = shape[1:].numel()
        return (of_total[0], width, of_part[0], width), 1, width
    return (*of_total[:2], *of_part[:2]), *shape[1:]


def _has_dense_rows(shape: torch.Size, strides: tuple[int, ...]) -> bool:
    """Returns whether the elements of each row lie side by side, in order."""
    step = 1
    for size, stride in zip(shape[:0:-1], strides[:0:-1], strict=True):
        if stride != step and size != 1:
            return False
        step *= size
    return True


def _lists(by_row: ByRow | None) -> dict[str, Tensor]:
    return dict(zip(("rows", "begins", "parts"), by_row or (), strict=False))


def _joins(by_row: ByRow | None, num_parts: int) -> Joins:
    if by_row is None:
        return Joins(None, None, None, num_parts)
    addresses: list[ctypes.c_void_p | int] = [x.data_ptr() for x in by_row]
    return Joins(*addresses, by_row[0].shape[0])


@cache
def _columns_of_a_warp() -> int:
    return int(build.variants()[ADD].value("MCP_COLUMNS"))


@lru_cache(maxsize=1024)  # as above
def _check_pairs(
    name: str, shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Raises ValueError for rows `[rows, heads, columns]` that are not float32 in pairs of elements."""
    is_in_pairs = not any(size % 2 for size in (*strides[:2], shape[2]))
    layout = "have an even width, last stride 1 and other strides of whole pairs"
    _check(name, shape, strides, dtype, is_in_pairs, layout)


def _check(
    name: str,
    shape: torch.Size,
    strides: tuple[int, ...],
    dtype: torch.dtype,
    is_laid_out: bool,
    layout: str,
) -> None:
    """Raises ValueError for other types than float32, columns with gaps, or another layout than told."""
    if dtype != torch.float32:
        raise ValueError(f"{name} of {dtype} must be torch.float32; call {name}.float()")
    if not is_laid_out or strides[-1] != 1:
        raise ValueError(
            f"{name} {tuple(shape)} of strides {strides} must {layout}; call {name}.contiguous()"
        )
