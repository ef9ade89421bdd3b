"""The files of an index of samples, named as Megatron's GPTDataset names them: read without running code, and checked.

    <name>-document_index.npy   [visits]           the order in which documents are visited, over epochs
    <name>-sample_index.npy     [samples + 1, 2]   where sample i begins: visit and offset
    <name>-shuffle_index.npy    [samples]          the i-th sample drawn
    <name>-description.txt                         what it was made for; written last

Sample i begins at token `i * seq_length` of the documents in their order. So beside the two orders, which must hold
everything as often as they should, an index has nothing that its documents do not say.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from megatron_cp.data.plain_array import read_plain_array

_ARRAYS = ("document", "sample", "shuffle")
_DESCRIPTION = "description.txt"
_AT_ONCE = 1 << 20  # entries in memory; an index may have billions


class SampleArrays(NamedTuple):
    """The arrays of an index."""

    documents: NDArray[Any]
    starts: NDArray[Any]
    order: NDArray[Any]


@dataclass(frozen=True)
class SampledDocuments:
    """What an index is made of: documents `[first, last)` of a file whose documents have `lengths` tokens.

    `num_samples` is what is asked of it, None for one epoch.
    """

    lengths: NDArray[Any] = field(repr=False)
    first: int
    last: int
    seq_length: int
    num_samples: int | None

    @property
    def num_epochs(self) -> int:
        """The least epochs with as many samples, each with one token behind it."""
        tokens = int(self.lengths[self.first : self.last].sum(dtype=np.int64))
        return (
            1
            if self.num_samples is None
            else -(-(self.num_samples * self.seq_length + 1) // tokens)
        )


def read_sample_files(folder: Path, name: str, made_of: SampledDocuments) -> SampleArrays | None:
    """Returns the arrays of an index, on the disk; None where it is not there.

    Linear in their size.

    Raises:
        ValueError: names the file that is none, or holds what an index of these documents cannot.
    """
    paths = [folder / f"{name}-{kind}_index.npy" for kind in _ARRAYS]
    if not all(path.is_file() for path in (folder / f"{name}-{_DESCRIPTION}", *paths)):
        return None
    arrays = SampleArrays(*(read_plain_array(path, mapped=True) for path in paths))
    num_tokens = _check_documents(paths[0], arrays.documents, made_of)
    num_samples = (num_tokens - 1) // made_of.seq_length
    _check_starts(paths[1], arrays, made_of, num_samples)
    _check_order(paths[2], arrays.order, num_samples)
    return arrays


def write_sample_files(folder: Path, name: str, description: str, arrays: SampleArrays) -> None:
    """Writes an index; whoever reads it meanwhile finds whole files."""
    with tempfile.TemporaryDirectory(prefix="megatron_cp_index_", dir=folder) as own:
        for kind, array in zip(_ARRAYS, arrays, strict=True):
            file = Path(own, f"{name}-{kind}_index.npy")
            np.save(file, array, allow_pickle=False)
            file.replace(folder / file.name)
        file = Path(own, f"{name}-{_DESCRIPTION}")
        file.write_text(description, encoding="utf-8")
        file.replace(folder / file.name)


def _check_documents(path: Path, documents: NDArray[Any], made_of: SampledDocuments) -> int:
    """Returns the tokens of all visits; each document must be visited once in every epoch."""
    count, num_epochs = made_of.last - made_of.first, made_of.num_epochs
    _check_form(path, documents, (count * num_epochs,))
    visits = np.zeros(count, dtype=np.int32)
    for start in range(0, len(documents), _AT_ONCE):
        part = documents[start : start + _AT_ONCE].astype(np.int64)
        _check_range(path, start, part, made_of.first, made_of.last)
        np.add.at(visits, part - made_of.first, np.int32(1))  # of one dtype: 16 times as fast
    if (wrong := visits != num_epochs).any():
        document = int(wrong.argmax())
        _refuse(
            path,
            f"document {made_of.first + document} {visits[document]} times",
            f"{num_epochs}, once in every epoch",
        )
    return num_epochs * int(made_of.lengths[made_of.first : made_of.last].sum(dtype=np.int64))


def _check_starts(
    path: Path, arrays: SampleArrays, made_of: SampledDocuments, num_samples: int
) -> None:
    """Sample i must begin at token `i * seq_length` of the documents in their order."""
    documents, starts, size = arrays.documents, arrays.starts, made_of.seq_length
    _check_form(path, starts, (num_samples + 1, 2))
    seen = 0  # tokens of the visits before
    for first in range(0, len(documents), _AT_ONCE):
        lengths = made_of.lengths[documents[first : first + _AT_ONCE]].astype(np.int64)
        ends = seen + np.cumsum(lengths)
        begins, total = ends - lengths, int(ends[-1])
        low, high = (min(-(-tokens // size), num_samples + 1) for tokens in (seen, total))
        for start in range(low, high, _AT_ONCE):
            rows = starts[start : min(start + _AT_ONCE, high)].astype(np.int64)
            visits, offsets = rows[:, 0] - first, rows[:, 1]
            known = (visits >= 0) & (visits < len(lengths))
            place = np.where(known, visits, 0)
            wanted = np.arange(start, start + len(rows)) * size
            right = known & (offsets >= 0) & (offsets < lengths[place])
            right &= begins[place] + offsets == wanted
            if not right.all():
                row = int((~right).argmax())
                _refuse(
                    path,
                    f"visit and offset {rows[row].tolist()} as sample {start + row}",
                    f"the place of token {wanted[row]} of the documents in their order",
                )
        seen = total


def _check_order(path: Path, order: NDArray[Any], num_samples: int) -> None:
    """Every sample must be drawn once."""
    _check_form(path, order, (num_samples,))
    drawn = np.zeros(num_samples, dtype=np.bool_)
    for start in range(0, num_samples, _AT_ONCE):
        part = order[start : start + _AT_ONCE].astype(np.int64)
        _check_range(path, start, part, 0, num_samples)
        drawn[part] = True
    if not drawn.all():
        _refuse(path, f"no sample {int((~drawn).argmax())}", f"each of {num_samples} once")


def _check_form(path: Path, array: NDArray[Any], shape: tuple[int, ...]) -> None:
    if array.dtype.kind not in "iu" or array.shape != shape:
        _refuse(path, f"{array.dtype} {list(array.shape)}", f"integers {list(shape)}")


def _check_range(path: Path, start: int, part: NDArray[np.int64], low: int, high: int) -> None:
    if (wrong := (part < low) | (part >= high)).any():
        place = int(wrong.argmax())
        _refuse(path, f"{part[place]} at {start + place}", f"a number in [{low}, {high})")


def _refuse(path: Path, have: str, want: str) -> NoReturn:
    raise ValueError(f"{path} holds {have}, want {want}; delete it")
