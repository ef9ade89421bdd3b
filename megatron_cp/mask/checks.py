"""Checks of what a caller hands to a mask builder: counts, lengths, ranges, cumulative lengths.

Each function returns its input as plain Python or int64 NumPy data, or raises a ValueError that
says what was received, what is allowed and what to do. Anything that `np.asarray` understands is
accepted, tensors included.
"""

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_cp.mask.interval import IntArray
from megatron_cp.mask.slice import MAX_TOKENS, OPEN, MaskSlice

INFINITE = -1  # Megatron's word for a window side without limit
MAX_SLICES = 1 << 22  # that a builder makes: 200 MB, and seconds of every planner


def as_count(name: str, value: object, *, minimum: int = 0) -> int:
    """Returns `value` as an int of at least `minimum`."""
    try:
        count = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        count = minimum - 1
    if count < minimum or isinstance(value, bool):
        raise ValueError(
            f"{name}={value!r} must be an integer >= {minimum}; give a whole number of tokens"
        )
    if count > OPEN:
        raise ValueError(f"{name}={value!r} must be at most 2^40; give a whole number of tokens")
    return count


def as_tokens(name: str, value: object) -> int:
    """Returns the number of tokens of one side of a grid."""
    count = as_count(name, value)
    if count > MAX_TOKENS:
        raise ValueError(
            f"{name}={count} must be at most 2^31, as the area of a grid has to fit 63 bits; cut the pack"
        )
    return count


def check_number_of_slices(count: int, what: str) -> None:
    """Raises ValueError for more slices than a mask is to have; `what` says where they come from."""
    if count > MAX_SLICES:
        raise ValueError(
            f"{what} makes {count} slices, at most {MAX_SLICES} are allowed; take larger blocks or fewer tokens"
        )


def as_int32(numbers: IntArray, form: str) -> NDArray[np.int32]:
    """Returns rows and keys as int32, for `form`; NotImplementedError where one does not fit: it would wrap."""
    most = int(numbers.max(initial=0))
    if most >= 1 << 31:
        raise NotImplementedError(
            f"{form} counts in int32, up to {(1 << 31) - 1}, and the mask has {most} rows or keys; crop it first"
        )
    return numbers.astype(np.int32)


def check_mask(value: object, name: str = "mask") -> None:
    """Raises TypeError unless `value` is an AttentionMask."""
    from megatron_cp.mask.mask import AttentionMask

    if not isinstance(value, AttentionMask):
        shown = repr(value)
        raise TypeError(
            f"{name}={shown[:80]} is a {type(value).__name__}, it must be an AttentionMask; make one with a builder "
            "of megatron_cp.mask"
        )


def as_array(name: str, values: object) -> NDArray[Any]:
    """Returns `np.asarray(values)`. Raises ValueError for what is no array of equal rows."""
    try:
        return np.asarray(values)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise ValueError(
            f"{name} of type {type(values).__name__} is no array ({error}); give numbers in rows of one length"
        ) from None


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
    return None if reach == INFINITE else min(reach, OPEN)


def as_integers(name: str, values: Sequence[int] | IntArray) -> IntArray:
    """Returns integers in one dimension as int64 `[n]`; refuses floats, NaN and booleans."""
    array = as_array(name, values)
    if array.ndim == 1 and not array.size:
        return np.zeros(0, dtype=np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            f"{name} has dtype {array.dtype} and shape {array.shape}; it must hold integers in one dimension: "
            "convert it to int64 (floats may hide NaN or rounding)"
        )
    return array.astype(np.int64)


def as_lengths(name: str, values: Sequence[int] | IntArray) -> IntArray:
    """Returns token counts, each >= 0, as int64 `[n]`."""
    lengths = as_integers(name, values)
    if len(lengths) and lengths.min() < 0:
        index = int(np.argmax(lengths < 0))
        raise ValueError(
            f"{name}[{index}]={lengths[index]} must be >= 0; drop that document or give its "
            "number of tokens"
        )
    if lengths.sum(dtype=np.float64) > MAX_TOKENS:
        raise ValueError(
            f"{name} sum to {sum(lengths.tolist())} tokens, at most 2^31 are allowed; cut the pack"
        )
    return lengths


def as_cu_seqlens(name: str, values: Sequence[int] | IntArray) -> IntArray:
    """Returns cumulative lengths (start 0, never falling, integers) as int64 `[documents + 1]`."""
    cumulative = as_integers(name, values)
    if not len(cumulative) or cumulative[0] != 0:
        first = cumulative[0] if len(cumulative) else "nothing"
        raise ValueError(
            f"{name} begins with {first}; it must begin with 0: prepend 0 to the running sums"
        )
    falls = np.flatnonzero(np.diff(cumulative) < 0)
    if len(falls):
        index = int(falls[0]) + 1
        raise ValueError(
            f"{name}[{index}]={cumulative[index]} is below "
            f"{name}[{index - 1}]={cumulative[index - 1]}; "
            "cumulative lengths must never fall: pass running sums, not lengths"
        )
    as_tokens(f"{name}[-1]", int(cumulative[-1]))
    return cumulative


def as_bounds(name: str, values: Sequence[int] | IntArray) -> IntArray:
    """Returns the ends of consecutive runs, which never fall, as int64 `[runs + 1]`."""
    bounds = as_integers(name, values)
    falls = np.flatnonzero(np.diff(bounds) < 0)
    if len(falls) or not len(bounds):
        where = f"falls after entry {falls[0]}" if len(falls) else "is empty"
        raise ValueError(
            f"{name} {where}; bounds are one start, then the end of every run: sort them"
        )
    return bounds


def as_ranges(name: str, values: Sequence[Sequence[int]] | IntArray) -> IntArray:
    """Returns half-open ranges as int64 `[n, 2]`, each with 0 <= start <= end."""
    array = as_array(name, values)
    if not array.size:
        return np.zeros((0, 2), dtype=np.int64)
    if array.ndim != 2 or array.shape[1] != 2 or array.dtype.kind not in "iu":
        raise ValueError(
            f"{name} has dtype {array.dtype} and shape {array.shape}; it must be integers of shape [n, 2]: give one "
            "(start, end) pair per range"
        )
    ranges = array.astype(np.int64)
    bad = np.flatnonzero((ranges[:, 0] < 0) | (ranges[:, 0] > ranges[:, 1]))
    if len(bad):
        index = int(bad[0])
        raise ValueError(
            f"{name}[{index}]={tuple(ranges[index].tolist())} must satisfy 0 <= start <= end; fix "
            "that range"
        )
    return ranges


def as_slices(
    slices: Iterable[MaskSlice | Sequence[int | None]] | IntArray, num_queries: int, num_keys: int
) -> IntArray:
    """Returns slices as int64 rows `[n, 6]`, checked to lie inside the grid; None becomes open."""
    if isinstance(slices, np.ndarray):
        if slices.size and (slices.ndim != 2 or slices.shape[1] != 6):
            raise ValueError(
                f"slices of shape {slices.shape} must be [n, 6]; give six numbers for each slice"
            )
        rows = slices if slices.size else np.zeros((0, 6), dtype=np.int64)
    elif not isinstance(slices, Iterable):
        raise TypeError(
            f"slices={slices!r} must be a sequence of slices; give [(q_start, q_end, k_start, k_end, lo, hi), ...]"
        )
    else:
        rows = _stacked([_six_numbers(index, item) for index, item in enumerate(slices)])
    if rows.dtype.kind not in "iu":
        raise ValueError(
            f"slices have dtype {rows.dtype}; all numbers must be integers (or None for an open side): convert them "
            "to int"
        )
    rows = rows.astype(np.int64, copy=False)
    for axis, column, size in (("q", 0, num_queries), ("k", 2, num_keys)):
        start, end = rows[:, column], rows[:, column + 1]
        bad = np.flatnonzero((start < 0) | (start > end) | (end > size))
        if len(bad):
            raise ValueError(
                f"slices[{bad[0]}] has {axis} range [{start[bad[0]]}, {end[bad[0]]}); ranges must satisfy 0 <= start "
                f"<= end <= {size}: fix that slice"
            )
    bad = np.flatnonzero(rows[:, 4] > rows[:, 5])
    if len(bad):
        lo, hi = rows[bad[0], 4:]
        raise ValueError(
            f"slices[{bad[0]}] has lo={lo} > hi={hi}; the band needs lo <= hi: exchange them"
        )
    return np.clip(rows, -OPEN, OPEN)


def _six_numbers(index: int, item: MaskSlice | Sequence[int | None]) -> tuple[int, ...]:
    if isinstance(item, MaskSlice):
        item = (item.q_start, item.q_end, item.k_start, item.k_end, item.lo, item.hi)
    if not isinstance(item, Sequence | np.ndarray) or len(item) not in (4, 5, 6):
        raise ValueError(
            f"slices[{index}]={item!r} must be (q_start, q_end, k_start, k_end, lo, hi); "
            "give four to six numbers, None for an open side"
        )
    q_start, q_end, k_start, k_end, lo, hi = (*item, None, None)[:6]
    if q_start is None or q_end is None or k_start is None or k_end is None:
        raise ValueError(
            f"slices[{index}]={item!r} has None as a range bound; only lo and hi may be None: "
            "give the bound"
        )
    return (q_start, q_end, k_start, k_end, -OPEN if lo is None else lo, OPEN if hi is None else hi)


def _stacked(items: list[tuple[int, ...]]) -> IntArray:
    if not items:
        return np.zeros((0, 6), dtype=np.int64)
    try:
        return np.array(items)
    except (OverflowError, ValueError, TypeError):
        return np.array(items, dtype=object)
