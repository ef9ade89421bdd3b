"""Checks of what a caller hands to a mask builder: counts, lengths, ranges, cumulative lengths.

Each function returns its input as plain Python or int64 NumPy data, or raises a ValueError that says what was
received, what is allowed and what to do. Anything that `np.asarray` understands is accepted, tensors included.
"""

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_cp.mask.interval import IntArray

INFINITE = -1  # Megatron's word for a window side without limit


def as_count(name: str, value: object, *, minimum: int = 0) -> int:
    """Returns `value` as an int of at least `minimum`."""
    try:
        count = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        count = minimum - 1
    if count < minimum or isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be an integer >= {minimum}; give a whole number of tokens")
    return count


def as_window_side(name: str, value: object) -> int | None:
    """Returns the number of keys that one side of a window reaches, None for -1 (no limit)."""
    try:
        reach = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        reach = INFINITE - 1
    if reach < INFINITE or isinstance(value, bool):
        raise ValueError(
            f"{name}={value!r} must be an integer >= 0, or -1 for no limit; "
            "give how many keys beside its own a query sees on that side"
        )
    return None if reach == INFINITE else reach


def as_integers(name: str, values: Sequence[int] | IntArray) -> IntArray:
    """Returns a one-dimensional collection of integers as int64 `[n]`; refuses floats, NaN and booleans."""
    array: NDArray[Any] = np.asarray(values)
    if array.ndim == 1 and not array.size:
        return np.zeros(0, dtype=np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            f"{name} has dtype {array.dtype} and shape {array.shape}; it must hold integers in one dimension: "
            f"convert it to int64 (floats may hide NaN or rounding)"
        )
    return array.astype(np.int64)


def as_lengths(name: str, values: Sequence[int] | IntArray) -> IntArray:
    """Returns token counts, each >= 0, as int64 `[n]`."""
    lengths = as_integers(name, values)
    if len(lengths) and lengths.min() < 0:
        index = int(np.argmax(lengths < 0))
        raise ValueError(
            f"{name}[{index}]={lengths[index]} must be >= 0; drop that document or give its number of tokens"
        )
    return lengths


def as_cu_seqlens(name: str, values: Sequence[int] | IntArray) -> IntArray:
    """Returns cumulative lengths (start 0, never falling, integers) as int64 `[documents + 1]`."""
    cumulative = as_integers(name, values)
    if not len(cumulative) or cumulative[0] != 0:
        first = cumulative[0] if len(cumulative) else "nothing"
        raise ValueError(f"{name} begins with {first}; it must begin with 0: prepend 0 to the running sums")
    falls = np.flatnonzero(np.diff(cumulative) < 0)
    if len(falls):
        index = int(falls[0]) + 1
        raise ValueError(
            f"{name}[{index}]={cumulative[index]} is below {name}[{index - 1}]={cumulative[index - 1]}; "
            "cumulative lengths must never fall: pass running sums, not lengths"
        )
    return cumulative


def as_ranges(name: str, values: Sequence[Sequence[int]] | IntArray) -> IntArray:
    """Returns half-open ranges as int64 `[n, 2]`, each with 0 <= start <= end."""
    array: NDArray[Any] = np.asarray(values)
    if not array.size:
        return np.zeros((0, 2), dtype=np.int64)
    if array.ndim != 2 or array.shape[1] != 2 or array.dtype.kind not in "iu":
        raise ValueError(
            f"{name} has dtype {array.dtype} and shape {array.shape}; it must be integers of shape [n, 2]: "
            "give one (start, end) pair per range"
        )
    ranges = array.astype(np.int64)
    bad = np.flatnonzero((ranges[:, 0] < 0) | (ranges[:, 0] > ranges[:, 1]))
    if len(bad):
        index = int(bad[0])
        raise ValueError(
            f"{name}[{index}]={tuple(ranges[index].tolist())} must satisfy 0 <= start <= end; fix that range"
        )
    return ranges
