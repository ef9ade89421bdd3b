"""Rows of several tensors side by side as bytes: how they travel, in one message, and how they are read.

    row of k (bf16) | row of v (bf16) | row of lse (fp32) | ...            uint8 [rows, bytes per row]

A part of whole 16 bytes begins at a multiple of 16, so that the copy engine of a GPU can read it where it arrived;
smaller parts stand behind the others. A gather writes each row once, straight into the message.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Rows = tuple[Tensor, ...]

ALIGNMENT = 16  # bytes; what the copy engine wants
WORD = (
    torch.int64
)  # a gather moves words, not elements: 3 times faster than 2-byte elements on a CPU core


@dataclass(frozen=True)
class PackedRows:
    """The message `[rows, bytes per row]` and the tensors in it, which are views of its rows."""

    data: Tensor
    tensors: Rows

    @classmethod
    def empty(cls, num_rows: int, like: Rows) -> "PackedRows":
        """Returns room for rows of the shapes and dtypes that the rows of `like` have, on its device."""
        sizes = [math.prod(x.shape[1:]) * x.element_size() for x in like]
        begins, width = _places(sizes)
        data = torch.empty(num_rows, width, dtype=torch.uint8, device=like[0].device)
        tensors = []
        for model, size, begin in zip(like, sizes, begins, strict=True):
            part = data[:, begin : begin + size].view(model.dtype)
            tensors.append(part.unflatten(1, model.shape[1:]) if model.dim() > 1 else part[:, 0])
        return cls(data, tuple(tensors))

    def __len__(self) -> int:
        return len(self.data)

    def rows(self, begin: int, end: int) -> "PackedRows":
        """Returns a range of the rows, as a view."""
        return PackedRows(self.data[begin:end], tuple(x[begin:end] for x in self.tensors))

    def gather_(self, source: Rows, index: Tensor) -> None:
        """Fills all rows with rows `index` of `source`, contiguous tensors like ours."""
        for target, x in zip(self.tensors, source, strict=True):
            into, rows = _words(target), _words(x)
            if into.dtype != rows.dtype:
                into, rows = _flat(target), _flat(x)
            torch.index_select(rows, 0, index, out=into)

    def fill_(self, source: Rows) -> None:
        """Fills all rows with those of `source`, which may have other dtypes."""
        for target, x in zip(self.tensors, source, strict=True):
            target.copy_(x)


def gathered(source: Rows, index: Tensor) -> PackedRows:
    """Returns rows `index` of `source`, packed."""
    packed = PackedRows.empty(len(index), source)
    packed.gather_(source, index)
    return packed


def packed(source: Sequence[Tensor]) -> PackedRows:
    """Returns all rows of `source`, packed: as views, where they lie side by side in memory already."""
    source = tuple(source)
    rows = _as_they_lie(source)
    if rows is None:
        rows = PackedRows.empty(len(source[0]), source)
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
    return PackedRows(words.view(torch.uint8), source)


def _places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Returns where each part begins in a row, and the bytes of a row; both are aligned as the parts want it."""
    wants = [math.gcd(size, ALIGNMENT) for size in sizes]
    begins, end = [0] * len(sizes), 0
    for part in sorted(range(len(sizes)), key=lambda part: -wants[part]):
        begins[part] = end
        end += sizes[part]
    return begins, -(-end // max(wants)) * max(wants)


def _flat(x: Tensor) -> Tensor:
    return x.flatten(1) if x.dim() > 1 else x.unsqueeze(1)


def _words(x: Tensor) -> Tensor:
    """Returns the rows as words where they are made of whole ones, else as they are."""
    flat = _flat(x)
    lengths = (flat.shape[1], flat.stride(0), flat.storage_offset())
    whole = all(length * flat.element_size() % WORD.itemsize == 0 for length in lengths)
    return flat.view(WORD) if whole and flat.shape[1] else flat
