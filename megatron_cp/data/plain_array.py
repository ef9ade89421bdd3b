"""An .npy file of numbers, written whole, and read without running anything that it holds.

numpy.load looks at the first bytes: of a zip it makes an archive, of objects a pickle. Here both are refused, and the
file's size decides before memory is taken.
"""

from __future__ import annotations

import math
import os
import tokenize
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

_NUMBERS = "biuf"  # kinds of dtype
_MAX_DIMENSIONS, _MAX_SIZE = 8, 1 << 48
# What NumPy raises for a header that is none: it parses it as Python's literals.
_NO_HEADER = (
    ValueError, TypeError, SyntaxError, RecursionError, OverflowError, MemoryError, tokenize.TokenError,
)  # fmt: skip


def read_plain_array(path: Path, *, mapped: bool = False) -> NDArray[Any]:
    """Returns the numbers of an .npy file; `mapped` leaves them on the disk, to be read and not written.

    Raises:
        ValueError: the file is none, is cut, or holds anything but numbers.
    """
    with path.open("rb") as stream:
        try:
            shape, is_fortran, dtype = _header(stream)
        except _NO_HEADER as problem:
            raise ValueError(_refusal(path, str(problem) or "no header")) from None
        if dtype.kind not in _NUMBERS:
            raise ValueError(_refusal(path, f"it holds {dtype}"))
        if len(shape) > _MAX_DIMENSIONS or not all(0 <= size < _MAX_SIZE for size in shape):
            raise ValueError(_refusal(path, f"no array has shape {shape}"))
        count, start = math.prod(shape), stream.tell()
        want, have = start + count * dtype.itemsize, os.fstat(stream.fileno()).st_size
        if have < want:
            raise ValueError(
                _refusal(path, f"shape {shape} of {dtype} is {want} bytes, it has {have}")
            )
        order: Literal["F", "C"] = "F" if is_fortran else "C"
        if mapped and count:
            return np.memmap(stream, dtype, "r", start, shape, order)
        return np.fromfile(stream, dtype, count).reshape(shape, order=order)


def write_plain_array(path: Path, values: NDArray[Any]) -> None:
    """Writes an .npy file of numbers; whoever reads it meanwhile finds the old one or the new one."""
    temporary = path.with_suffix(f".tmp{os.getpid()}")
    with temporary.open("wb") as stream:
        np.save(stream, values, allow_pickle=False)
    temporary.replace(path)


def _header(stream: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Returns shape, whether columns come first, and dtype."""
    version = npy.read_magic(stream)
    if version == (1, 0):
        return npy.read_array_header_1_0(stream)
    if version == (2, 0):
        return npy.read_array_header_2_0(stream)
    raise ValueError(f"version {version}")  # 3 is for names of fields, which numbers do not have


def _refusal(path: Path, problem: str) -> str:
    words = " ".join(problem.split())[:200]
    return f"{path} is not an .npy file of numbers ({words}); write it again with numpy.save"
