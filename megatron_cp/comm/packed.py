"""Rows of several tensors side by side as bytes: how they travel, in one message, and how they are read.

    row of k (bf16) | row of v (bf16) | row of lse (fp32) | ...            uint8 [rows, bytes per row]

A part of whole 16 bytes begins at a multiple of 16, so that the copy engine of a GPU can read it where it arrived;
smaller parts stand behind the others. A gather writes each row once, straight into the message.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

Rows = tuple[Tensor, ...]

ALIGNMENT = 16  # bytes; what the copy engine wants
# A gather moves words, not elements: 3 times faster than 2-byte elements on a CPU core.
WORD = torch.int64


class _Part(NamedTuple):
    """Where the rows of one tensor lie in a message."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements, with that of rows in front."""
    begin: int
    """Bytes, as `end`."""
    end: int

    def columns(self, dtype: torch.dtype) -> slice:
        """Returns its columns of the message as elements of a dtype."""
        return slice(self.begin // dtype.itemsize, self.end // dtype.itemsize)


class _Layout(NamedTuple):
    """A row of a message."""

    parts: tuple[_Part, ...]
    width: int


@lru_cache(maxsize=256)
def _layout(kinds: tuple[tuple[tuple[int, ...], torch.dtype], ...]) -> _Layout:
    """Returns the layout of a message of tensors whose rows have these shapes and dtypes."""
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in kinds]
    begins, width = _places(sizes)
    parts = []
    for (shape, dtype), begin, size in zip(kinds, begins, sizes, strict=True):
        inner = (math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        strides = (width // dtype.itemsize, *inner)
        parts.append(_Part(dtype, tuple(shape), strides, begin, begin + size))
    return _Layout(tuple(parts), width)


def _layout_like(like: Rows) -> _Layout:
    return _layout(tuple((x.shape[1:], x.dtype) for x in like))


@dataclass(frozen=True)
class PackedRows:
    """The message `[rows, bytes per row]`, and what lies in its rows."""

    data: Tensor
    layout: _Layout

    @classmethod
    def empty(cls, num_rows: int, like: Rows) -> "PackedRows":
        """Returns room for rows of the shapes and dtypes that the rows of `like` have, on its device."""
        layout = _layout_like(like)
        data = torch.empty(num_rows, layout.width, dtype=torch.uint8, device=like[0].device)
        return cls(data, layout)

    def room(self, num_rows: int) -> "PackedRows":
        """Returns room for so many rows like these."""
        return PackedRows(self.data.new_empty((num_rows, self.layout.width)), self.layout)

    def gathered(self, source: Rows, index: Tensor) -> "PackedRows":
        """Returns rows `index` of `source`, contiguous tensors with rows like these, packed."""
        made = self.room(index.shape[0])
        made.gather_(source, index)
        return made

    @cached_property
    def tensors(self) -> Rows:
        """The tensors in the message: views of its rows."""
        num_rows, typed = self.data.shape[0], _Typed(self.data)
        views = []
        for part in self.layout.parts:
            whole = typed[part.dtype]
            at = whole.storage_offset() + part.begin // part.dtype.itemsize
            views.append(whole.as_strided((num_rows, *part.shape), part.strides, at))
        return tuple(views)

    def __len__(self) -> int:
        return self.data.shape[0]

    def rows(self, begin: int, end: int) -> "PackedRows":
        """Returns a range of the rows, as a view."""
        if begin == 0 and end == self.data.shape[0]:
            return self
        return PackedRows(self.data[begin:end], self.layout)

    def gather_(self, source: Rows, index: Tensor) -> None:
        """Fills all rows with rows `index` of `source`: contiguous tensors like ours, or the `matrices` of them."""
        typed = _Typed(self.data)
        for part, rows in zip(self.layout.parts, matrices(source), strict=True):
            dtype = rows.dtype
            torch.index_select(rows, 0, index, out=typed[dtype][:, part.columns(dtype)])

    def fill_(self, source: Rows) -> None:
        """Fills all rows with those of `source`, which may have other dtypes."""
        for target, x in zip(self.tensors, source, strict=True):
            target.copy_(x)


class _Typed(dict[torch.dtype, Tensor]):
    """A message as elements of a dtype: a view, made when first asked for."""

    def __init__(self, data: Tensor):
        super().__init__()
        self._data = data

    def __missing__(self, dtype: torch.dtype) -> Tensor:
        view = self[dtype] = self._data.view(dtype)
        return view


def matrices(rows: Rows) -> Rows:
    """Returns contiguous tensors as a gather reads them: a matrix each, of words where every row is of whole ones.

    Such rows are of whole words in a message too. For rows that are gathered more than once.
    """
    return tuple(map(_matrix, rows))


def _matrix(x: Tensor) -> Tensor:
    num_dims = x.dim()
    flat = x if num_dims == 2 else x.flatten(1) if num_dims > 1 else x.unsqueeze(1)
    width, size = flat.shape[1], flat.element_size()
    if not width or flat.dtype == WORD:
        return flat
    is_of_words = not any(
        length * size % WORD.itemsize for length in (width, flat.stride(0), flat.storage_offset())
    )
    return flat.view(WORD) if is_of_words else flat


def packed(source: Sequence[Tensor]) -> PackedRows:
    """Returns all rows of `source`, packed: as views, where they lie side by side in memory already."""
    source = tuple(source)
    rows = _as_they_lie(source)
    if rows is None:
        rows = PackedRows.empty(source[0].shape[0], source)
        rows.fill_(source)
    return rows


def _as_they_lie(source: Rows) -> PackedRows | None:
    """Returns `source` as a message without moving anything; None where its rows lie otherwise."""
    layout, first = _layout_like(source), source[0]
    width, size, num_rows = layout.width, first.element_size(), first.shape[0]
    at = first.storage_offset() * size - layout.parts[0].begin
    if num_rows == 0 or at < 0 or at % size or width % size:
        return None
    storage = first.untyped_storage()
    if at + num_rows * width > storage.nbytes():
        return None
    for x, part in zip(source, layout.parts, strict=True):
        shape, strides, offset = x.shape, x.stride(), x.storage_offset() * part.dtype.itemsize
        lies_there = x.untyped_storage()._cdata == storage._cdata and offset == at + part.begin
        steps = zip(shape, strides, part.strides, strict=True)
        if not lies_there or any(length > 1 and step != ours for length, step, ours in steps):
            return None
    words = first.as_strided((num_rows, width // size), (width // size, 1), at // size)
    return PackedRows(words.view(torch.uint8), layout)


def _places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Returns where each part begins in a row, and the bytes of a row; both are aligned as the parts want it."""
    wants = [math.gcd(size, ALIGNMENT) for size in sizes]
    begins, end = [0] * len(sizes), 0
    for part in sorted(range(len(sizes)), key=lambda part: -wants[part]):
        begins[part] = end
        end += sizes[part]
    return begins, -(-end // max(wants)) * max(wants)
