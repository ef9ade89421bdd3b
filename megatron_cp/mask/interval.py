"""Sets of half-open integer intervals: int64 `[n, 2]`, sorted, disjoint, non-empty, apart.

Rows of the array are `(start, stop)`. All functions are pure, vectorised and O(n log n).
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]

EMPTY: IntArray = np.zeros((0, 2), dtype=np.int64)
EMPTY.setflags(write=False)


def as_intervals(pairs: Iterable[tuple[int, int]] | IntArray) -> IntArray:
    """Returns any collection of `(start, stop)` pairs as an int64 array `[n, 2]`, order kept."""
    array = np.asarray(pairs if isinstance(pairs, np.ndarray) else list(pairs), dtype=np.int64)
    return array.reshape(-1, 2)


def normalise(intervals: IntArray) -> IntArray:
    """Returns the same set of integers sorted, with overlapping and touching intervals joined."""
    intervals = intervals[intervals[:, 0] < intervals[:, 1]]
    if len(intervals) <= 1:
        return intervals
    intervals = intervals[np.argsort(intervals[:, 0], kind="stable")]
    reach = np.maximum.accumulate(intervals[:, 1])
    opens, closes = np.ones((2, len(intervals)), dtype=bool)
    opens[1:] = intervals[1:, 0] > reach[:-1]
    closes[:-1] = opens[1:]
    return np.stack([intervals[opens, 0], reach[closes]], axis=1)


def length(intervals: IntArray) -> int:
    """Returns how many integers the (disjoint) intervals hold."""
    return int((intervals[:, 1] - intervals[:, 0]).sum())


def intersect(a: IntArray, b: IntArray) -> IntArray:
    """Returns the integers that are in both normalised sets."""
    first, second = overlapping_pairs(a, b)
    start = np.maximum(a[first, 0], b[second, 0])
    stop = np.minimum(a[first, 1], b[second, 1])
    return np.stack([start, stop], axis=1)


def subtract(a: IntArray, b: IntArray) -> IntArray:
    """Returns the integers of normalised `a` that are not in normalised `b`."""
    if not len(a) or not len(b):
        return a
    gaps = np.empty((len(b) + 1, 2), dtype=np.int64)
    gaps[0, 0], gaps[1:, 0] = min(a[0, 0], b[0, 0]) - 1, b[:, 1]
    gaps[:-1, 1], gaps[-1, 1] = b[:, 0], max(a[-1, 1], b[-1, 1]) + 1
    return intersect(a, gaps)


def cut(intervals: IntArray, size: int) -> IntArray:
    """Returns the intervals, in order, cut at the multiples of `size`."""
    which, part = expand_ranges(intervals[:, 0] // size, (intervals[:, 1] - 1) // size + 1)
    start = np.maximum(intervals[which, 0], part * size)
    stop = np.minimum(intervals[which, 1], (part + 1) * size)
    return np.stack([start, stop], axis=1)


def chunks(count: int, size: int) -> IntArray:
    """Returns the first `count` chunks of `size` integers."""
    start = np.arange(count, dtype=np.int64) * size
    return np.stack([start, start + size], axis=1)


def to_indices(intervals: IntArray) -> IntArray:
    """Returns the integers of the intervals, one after another in the order given: int64."""
    sizes = intervals[:, 1] - intervals[:, 0]
    total = int(sizes.sum())
    if not total:
        return np.zeros(0, dtype=np.int64)
    before = np.cumsum(sizes) - sizes
    return np.arange(total, dtype=np.int64) + np.repeat(intervals[:, 0] - before, sizes)


def from_indices(indices: IntArray) -> IntArray:
    """Returns the runs of consecutive values of `indices`, in order; `to_indices` undoes it."""
    if not len(indices):
        return EMPTY
    breaks = np.flatnonzero(np.diff(indices) != 1) + 1
    first = np.r_[0, breaks]
    last = np.r_[breaks, len(indices)] - 1
    return np.stack([indices[first], indices[last] + 1], axis=1)


def overlapping_pairs(a: IntArray, b: IntArray) -> tuple[IntArray, IntArray]:
    """Returns index pairs `(i, j)` with `a[i]` meeting `b[j]`, i ascending; `b` is sorted and disjoint."""
    low = np.searchsorted(b[:, 1], a[:, 0], side="right")
    high = np.searchsorted(b[:, 0], a[:, 1], side="left")
    return expand_ranges(low, np.maximum(high, low))


def expand_ranges(low: IntArray, high: IntArray) -> tuple[IntArray, IntArray]:
    """Returns `(i, j)` for every `i` and every `j` in `[low[i], high[i])`, as two flat arrays."""
    counts = high - low
    first = np.repeat(np.arange(len(low), dtype=np.int64), counts)
    second = to_indices(np.stack([low, high], axis=1).astype(np.int64))
    return first, second
