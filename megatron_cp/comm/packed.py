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
WORD = (
    torch.int64
)  # a gather moves words, not elements: 3 times faster than 2-byte elements on a CPU core


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

    def has_words(self, part: _Part) -> bool:
        """Returns whether a part is made of whole words in every row."""
        size = WORD.itemsize
        return part.end > part.begin and not (
            self.width % size or part.begin % size or part.end % size
        )


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
        """Fills all rows with rows `index` of `source`, contiguous tensors like ours."""
        typed = _Typed(self.data)
        for part, x in zip(self.layout.parts, source, strict=True):
            dtype, rows = part.dtype, _flat(x)
            if self.layout.has_words(part) and _begins_words(rows):
                dtype, rows = WORD, rows.view(WORD)
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
    sizes = [math.prod(x.shape[1:]) * x.element_size() for x in source]
    begins, width = _places(sizes)
    first, size = source[0], source[0].element_size()
    storage, num_rows = first.untyped_storage(), len(first)
    at = first.storage_offset() * size - begins[0]
    if num_rows == 0 or at < 0 or at % size or width % size:
        return None
    if at + num_rows * width > storage.nbytes():
        return None
    for x, begin in zip(source, begins, strict=True):
        offset, step = x.storage_offset() * x.element_size(), x.stride(0) * x.element_size()
        lies_there = x.untyped_storage()._cdata == storage._cdata and offset == at + begin
        if not lies_there or not x[:1].is_contiguous() or (num_rows > 1 and step != width):
            return None
    words = first.as_strided((num_rows, width // size), (width // size, 1), at // size)
    return PackedRows(words.view(torch.uint8), _layout_like(source))


def _places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Returns where each part begins in a row, and the bytes of a row; both are aligned as the parts want it."""
    wants = [math.gcd(size, ALIGNMENT) for size in sizes]
    begins, end = [0] * len(sizes), 0
    for part in sorted(range(len(sizes)), key=lambda part: -wants[part]):
        begins[part] = end
        end += sizes[part]
    return begins, -(-end // max(wants)) * max(wants)


def _flat(x: Tensor) -> Tensor:
    num_dims = x.dim()
    return x if num_dims == 2 else x.flatten(1) if num_dims > 1 else x.unsqueeze(1)


def _begins_words(rows: Tensor) -> bool:
    """Returns whether every row of a matrix begins with a word."""
    size = rows.element_size()
    return not (
        rows.stride(0) * size % WORD.itemsize or rows.storage_offset() * size % WORD.itemsize
    )
