"""AttentionMask: which query may look at which key, as a set of disjoint slices on a grid.

Pure data: an int64 array `[n, 6]` of tight slice rows (see `slice.py`) and the two grid sizes.
Nothing of size queries x keys is ever built, except by `to_dense`, which exists for tests and
pictures.
"""

import hashlib
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_cp.mask import interval, sweep
from megatron_cp.mask.checks import as_bounds, as_ranges, as_slices, as_tokens, check_mask
from megatron_cp.mask.interval import IntArray
from megatron_cp.mask.slice import (
    HI,
    K_END,
    K_START,
    LO,
    MAX_TOKENS,
    Q_END,
    Q_START,
    MaskSlice,
    as_span,
    crop_rows,
    cut_rows,
    cut_rows_at,
    intersect_rows,
    rows_area,
    shift_rows,
    tighten,
    transpose_rows,
)

Range = tuple[int, int]
MAX_DENSE = 1 << 32  # bytes of `to_dense`
ORDER = [HI, LO, K_END, Q_END, K_START, Q_START]  # of an array's rows, the last decides first


class AttentionMask:
    """An immutable set of allowed (query, key) pairs on a `num_queries x num_keys` grid.

    `array` is int64 `[num_slices, 6]` with the columns q_start, q_end, k_start, k_end, lo, hi; rows
    are tight, pairwise disjoint and sorted by (q_start, k_start, then the rest). The constructor is
    for code that already knows its rows to be disjoint; users call `from_slices` or a named
    builder.
    """

    def __init__(self, num_queries: int, num_keys: int, array: IntArray):
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "iu":
            raise TypeError(
                f"array of type {type(array).__name__} must be an integer array [n, 6]; users call from_slices"
            )
        if array.size and (array.ndim != 2 or array.shape[1] != 6):
            raise TypeError(f"array of shape {array.shape} must be [n, 6]; users call from_slices")
        if max(num_queries, num_keys) > MAX_TOKENS:
            raise ValueError(
                f"grid {num_queries} x {num_keys} must have at most 2^31 rows and keys; cut the pack"
            )
        rows = tighten(array.astype(np.int64, copy=False).reshape(-1, 6))
        rows = rows.take(np.lexsort(rows.T[ORDER]), axis=0)
        rows.setflags(write=False)
        self.num_queries, self.num_keys, self.array = int(num_queries), int(num_keys), rows

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.array.setflags(write=False)  # NumPy pickles arrays as writable

    @classmethod
    def many(
        cls, num_queries: IntArray, num_keys: IntArray, rows: IntArray, owner: IntArray
    ) -> tuple["AttentionMask", ...]:
        """Returns a mask per grid (sizes int64 `[n]`); the tight slice `rows[i]` is of mask `owner[i]`.

        As the constructor does, all in one go: a plan has thousands of small masks.
        """
        order = np.lexsort((*rows.T[ORDER], owner))
        rows = rows.take(order, axis=0)
        rows.setflags(write=False)
        cuts = np.searchsorted(owner[order], np.arange(len(num_queries) + 1)).tolist()
        upto = np.concatenate([[0], np.cumsum(rows_area(rows))])[cuts].tolist()
        masks = []
        for index, sizes in enumerate(zip(num_queries.tolist(), num_keys.tolist(), strict=True)):
            mask = cls.__new__(cls)
            mask.num_queries, mask.num_keys = sizes
            mask.array = rows[cuts[index] : cuts[index + 1]]
            mask._area = upto[index + 1] - upto[index]
            masks.append(mask)
        return tuple(masks)

    # ------------------------------------------------------------------ what it holds

    @property
    def num_slices(self) -> int:
        """Returns the number of slices."""
        return len(self.array)

    @cached_property
    def slices(self) -> tuple[MaskSlice, ...]:
        """The slices as objects; a side of the band that cuts nothing is None."""
        return tuple(MaskSlice.from_row(row) for row in self.array)

    @cached_property
    def _area(self) -> int:
        return int(rows_area(self.array).sum())

    def area(self) -> int:
        """Returns the number of allowed pairs."""
        return self._area

    def density(self) -> float:
        """Returns the allowed share of the grid, 0 for an empty grid."""
        return self.area() / max(1, self.num_queries * self.num_keys)

    def area_of_rows(self, bounds: IntArray) -> IntArray:
        """Returns the area of every run of rows `[bounds[i], bounds[i+1])`: int64 `[runs]`.

        `bounds` never falls. O(slices x runs that each slice meets).
        """
        bounds = as_bounds("bounds", bounds)
        parts, _, run = cut_rows_at(self.array, bounds, Q_START, Q_END)
        areas = np.zeros(len(bounds) - 1, dtype=np.int64)
        np.add.at(areas, run, rows_area(parts))
        return areas

    def needed_keys(self, q_ranges: IntArray) -> IntArray:
        """Returns the keys that any of these query rows may see, as sorted disjoint intervals."""
        ranges = interval.normalise(as_ranges("q_ranges", q_ranges))
        parts, _, _ = cut_rows(self.array, ranges, Q_START, Q_END)
        return interval.normalise(parts[:, [K_START, K_END]])

    # ------------------------------------------------------------------ algebra

    def crop(self, q: Range | None = None, k: Range | None = None) -> "AttentionMask":
        """Returns the mask of these rows and keys, moved to the origin: `dense[a:b, c:d]`."""
        q = (0, self.num_queries) if q is None else as_span("q", q)
        k = (0, self.num_keys) if k is None else as_span("k", k)
        _check_range("q", q, self.num_queries)
        _check_range("k", k, self.num_keys)
        rows = shift_rows(crop_rows(self.array, q, k), -q[0], -k[0])
        return AttentionMask(q[1] - q[0], k[1] - k[0], rows)

    def gather(self, q_ranges: IntArray, k_ranges: IntArray) -> "AttentionMask":
        """Returns the mask between concatenated row ranges and concatenated key ranges.

        `q_ranges`, `k_ranges`: int64 `[m, 2]`, each disjoint, in any order. In dense form
        `dense[rows][:, keys]`; this is what a rank computes on rows that it holds in any order.

        Raises ValueError for ranges outside the grid or overlapping.
        """
        q_ranges = _checked_ranges("q_ranges", q_ranges, self.num_queries)
        k_ranges = _checked_ranges("k_ranges", k_ranges, self.num_keys)
        rows, _, which = cut_rows(self.array, q_ranges, Q_START, Q_END)
        rows = shift_rows(rows, q=(_offsets(q_ranges) - q_ranges[:, 0])[which])
        rows, _, which = cut_rows(rows, k_ranges, K_START, K_END)
        rows = shift_rows(rows, k=(_offsets(k_ranges) - k_ranges[:, 0])[which])
        return AttentionMask(interval.length(q_ranges), interval.length(k_ranges), rows)

    def shift(
        self, q: int = 0, k: int = 0, num_queries: int | None = None, num_keys: int | None = None
    ) -> "AttentionMask":
        """Returns the mask moved by `q` rows and `k` keys; the grid grows by as much, or as given.

        Raises ValueError when a pair would leave the grid.
        """
        (q, k) = as_span("(q, k)", (q, k))
        num_queries = self.num_queries + q if num_queries is None else num_queries
        num_keys = self.num_keys + k if num_keys is None else num_keys
        num_queries, num_keys = (
            as_tokens("num_queries", num_queries),
            as_tokens("num_keys", num_keys),
        )
        rows = shift_rows(self.array, q, k)
        _check_inside(rows, num_queries, num_keys)
        return AttentionMask(num_queries, num_keys, rows)

    def transpose(self) -> "AttentionMask":
        """Returns the mask with queries and keys exchanged."""
        return AttentionMask(self.num_keys, self.num_queries, transpose_rows(self.array))

    def __and__(self, other: "AttentionMask") -> "AttentionMask":
        self._check_same_grid(other)
        first, second = sweep.meeting_pairs(self.array, other.array)
        rows = intersect_rows(self.array[first], other.array[second])
        return AttentionMask(self.num_queries, self.num_keys, rows)

    def __or__(self, other: "AttentionMask") -> "AttentionMask":
        self._check_same_grid(other)
        # The parts of either mask may be kept whole; fewer slices are cheaper for all that follows.
        choices = [(self, other - self), (other, self - other)]
        whole, rest = min(choices, key=lambda choice: choice[0].num_slices + choice[1].num_slices)
        rows = np.concatenate([whole.array, rest.array])
        return AttentionMask(self.num_queries, self.num_keys, rows)

    def __sub__(self, other: "AttentionMask") -> "AttentionMask":
        self._check_same_grid(other)
        rows = sweep.subtract(self.array, other.array)
        return AttentionMask(self.num_queries, self.num_keys, rows)

    def merged(self) -> "AttentionMask":
        """Returns the same pairs in fewer slices: neighbours whose union is a slice are joined."""
        return AttentionMask(self.num_queries, self.num_keys, sweep.merge(self.array))

    # ------------------------------------------------------------------ identity

    def to_dense(self) -> NDArray[np.bool_]:
        """Returns the mask as booleans `[num_queries, num_keys]`; for tests and pictures only."""
        if self.num_queries * self.num_keys > MAX_DENSE:
            raise NotImplementedError(
                f"a grid {self.num_queries} x {self.num_keys} has at most 2^32 pairs as booleans; crop the mask first"
            )
        dense = np.zeros((self.num_queries, self.num_keys), dtype=bool)
        for q0, q1, k0, k1, lo, hi in self.array.tolist():
            distance = np.arange(k0, k1)[None, :] - np.arange(q0, q1)[:, None]
            dense[q0:q1, k0:k1] |= (lo <= distance) & (distance <= hi)
        return dense

    def digest(self) -> str:
        """Returns a SHA-256 of grid and slices; the same on every machine and process."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        header = f"AttentionMask {self.num_queries} {self.num_keys} {len(self.array)}\n".encode()
        return hashlib.sha256(header + self.array.astype("<i8").tobytes()).hexdigest()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AttentionMask):
            return NotImplemented
        same_grid = (self.num_queries, self.num_keys) == (other.num_queries, other.num_keys)
        return same_grid and np.array_equal(self.array, other.array)

    def __hash__(self) -> int:
        return hash(self._digest)

    def __repr__(self) -> str:
        grid = f"{self.num_queries} x {self.num_keys}"
        return f"AttentionMask({grid}, {self.num_slices} slices, density {self.density():.3g})"

    def _repr_svg_(self) -> str:
        """Returns the picture that a notebook shows."""
        from megatron_cp.mask.draw import svg  # it draws masks

        return svg(self, max_pixels=320)

    def _check_same_grid(self, other: "AttentionMask") -> None:
        check_mask(other, "other mask")
        mine, theirs = (self.num_queries, self.num_keys), (other.num_queries, other.num_keys)
        if mine != theirs:
            raise ValueError(
                f"other mask has grid {theirs}, this one {mine}; both must have the same grid: "
                "use shift() or crop() first"
            )


def from_slices(
    num_queries: int,
    num_keys: int,
    slices: Iterable[MaskSlice | Sequence[int | None]] | IntArray,
) -> AttentionMask:
    """Returns the mask of disjoint `(q_start, q_end, k_start, k_end, lo, hi)`; None = open side.

    Empty slices are allowed and dropped. Raises ValueError, naming the slice, for a range that is
    reversed or outside the grid, a band with lo > hi, and for two slices that share a pair (a pair
    counted twice would be a wrong softmax; `mask_a | mask_b` joins overlapping masks instead).
    """
    num_queries, num_keys = as_tokens("num_queries", num_queries), as_tokens("num_keys", num_keys)
    rows = as_slices(slices, num_queries, num_keys)
    return from_rows(num_queries, num_keys, rows, "slices")


def from_rows(num_queries: int, num_keys: int, rows: IntArray, name: str) -> AttentionMask:
    """Returns the mask of rows inside the grid; ValueError if `name[i]` and `name[j]` overlap."""
    solid = np.flatnonzero(
        (rows[:, Q_START] < rows[:, Q_END]) & (rows[:, K_START] < rows[:, K_END])
    )
    overlap = sweep.find_overlap(rows[solid])
    if overlap is not None:
        i, j = (int(solid[index]) for index in overlap)
        first, second = (MaskSlice.from_row(rows[index]) for index in (i, j))
        raise ValueError(
            f"{name}[{i}]={first} and {name}[{j}]={second} share pairs; slices must be disjoint: "
            "cut one of them, or join two masks with |"
        )
    return AttentionMask(num_queries, num_keys, rows)


def concat(masks: Sequence[AttentionMask]) -> AttentionMask:
    """Returns the block-diagonal mask: each mask sees itself only, one after the other."""
    if not isinstance(masks, Sequence):
        raise TypeError(f"masks={masks!r} must be a sequence of masks; give a list")
    for index, mask in enumerate(masks):
        check_mask(mask, f"masks[{index}]")
    queries = np.cumsum([0] + [mask.num_queries for mask in masks])
    keys = np.cumsum([0] + [mask.num_keys for mask in masks])
    counts = [mask.num_slices for mask in masks]
    rows = np.concatenate([np.zeros((0, 6), dtype=np.int64)] + [mask.array for mask in masks])
    rows = shift_rows(rows, np.repeat(queries[:-1], counts), np.repeat(keys[:-1], counts))
    return AttentionMask(int(queries[-1]), int(keys[-1]), rows)


def _check_range(name: str, span: Range, size: int) -> None:
    if not 0 <= span[0] <= span[1] <= size:
        raise ValueError(
            f"{name}={span} must satisfy 0 <= start <= end <= {size}; crop inside the grid"
        )


def _checked_ranges(name: str, ranges: IntArray, size: int) -> IntArray:
    """Returns disjoint, non-empty ranges inside `[0, size)`, in the order given."""
    ranges = as_ranges(name, ranges)
    ranges = ranges[ranges[:, 0] != ranges[:, 1]]
    in_order = ranges[np.argsort(ranges[:, 0])]
    if len(ranges) and (
        (ranges[:, 0] > ranges[:, 1]).any()
        or (in_order[1:, 0] < in_order[:-1, 1]).any()
        or in_order[0, 0] < 0
        or in_order[-1, 1] > size
    ):
        raise ValueError(
            f"{name}={ranges[:8].tolist()} must be disjoint ranges with 0 <= start <= end <= {size}; take each row "
            "or key once"
        )
    return ranges


def _check_inside(rows: IntArray, num_queries: int, num_keys: int) -> None:
    if len(rows) and (
        rows[:, [Q_START, K_START]].min() < 0
        or rows[:, Q_END].max() > num_queries
        or rows[:, K_END].max() > num_keys
    ):
        raise ValueError(
            f"shifted slices leave the grid {num_queries} x {num_keys}; "
            "give a larger num_queries/num_keys or crop first"
        )


def _offsets(ranges: IntArray) -> IntArray:
    """Returns where each range begins in the concatenation of all."""
    sizes = ranges[:, 1] - ranges[:, 0]
    return np.cumsum(sizes) - sizes
