"""The documents that one loader sees: a range of a corpus, and which part of each is a prefix.

A document is causal unless the file `<prefix>.prefix_lengths.npy` says otherwise (int64, one entry
per document of the corpus):

     0   causal          every token sees the tokens before it
     p   prefix          the first p tokens see each other both ways, the rest is causal
    -1   bidirectional   every token sees the whole document
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_cp.data.indexed import PREFIX_LENGTHS, IndexedDataset
from megatron_cp.data.packing import Piece
from megatron_cp.data.plain_array import read_plain_array, write_plain_array
from megatron_cp.data.supervision import Supervision, read_supervision

BIDIRECTIONAL = -1


def prefix_lengths_path(prefix: str | os.PathLike[str]) -> Path:
    """Returns `<prefix>.prefix_lengths.npy`."""
    return Path(f"{os.fspath(prefix)}.{PREFIX_LENGTHS}")


def write_prefix_lengths(prefix: str | os.PathLike[str], lengths: NDArray[np.int64]) -> None:
    """Writes the kind of every document beside the token files.

    Raises:
        ValueError: not one kind for every document of the corpus, or a kind that it cannot have.
    """
    _check_prefix_lengths(lengths, IndexedDataset(prefix), "lengths")
    write_plain_array(prefix_lengths_path(prefix), np.asarray(lengths, dtype=np.int64))


def _read_prefix_lengths(dataset: IndexedDataset) -> NDArray[np.int64]:
    path = prefix_lengths_path(dataset.prefix)
    if not path.is_file():
        return np.zeros(len(dataset), dtype=np.int64)
    lengths = read_plain_array(path)
    _check_prefix_lengths(lengths, dataset, str(path))
    return np.asarray(lengths, dtype=np.int64)


def _check_prefix_lengths(lengths: NDArray[Any], dataset: IndexedDataset, name: str) -> None:
    if lengths.shape != (len(dataset),) or not np.issubdtype(lengths.dtype, np.integer):
        raise ValueError(
            f"{name} has shape {lengths.shape} and dtype {lengths.dtype}, want one integer for "
            f"each of the {len(dataset)} documents of {dataset.prefix}; write it again"
        )
    wrong = (lengths < BIDIRECTIONAL) | (lengths > dataset.document_lengths)
    if wrong.any():
        document = int(wrong.argmax())
        raise ValueError(
            f"{name}[{document}]={lengths[document]} must be -1, or in [0, "
            f"{dataset.document_lengths[document]}], the length of the document; write it again"
        )


class Texts(Protocol):
    """Documents numbered from 0, as the pieces of a pack read them."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document: int64 `[num_documents]`."""

    @property
    def prefix_lengths(self) -> NDArray[np.int64]:
        """Kind of each document: int64 `[num_documents]`."""

    def read(self, document: int, start: int, stop: int) -> NDArray[np.int64]:
        """Returns the tokens `[start, stop)` of a document as int64."""

    def name(self, document: int) -> str:
        """Returns what a message calls a document."""

    def supervised(self, document: int, start: int, stop: int) -> NDArray[np.bool_] | None:
        """Returns which tokens `[start, stop)` of a document are learned; None for all."""


class Documents(Texts, Protocol):
    """Documents of one corpus or of several: what packing and batches read."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents together."""

    @property
    def is_supervised(self) -> bool:
        """Whether some document has tokens that are not learned."""

    def __len__(self) -> int:
        """Returns the number of documents, empty ones included."""

    def digest(self) -> str:
        """Returns a SHA-256 of what determines a stream."""


@dataclass(frozen=True)
class DocumentSet:
    """Documents `[first, last)` of a token file, numbered from 0.

    Picklable: another process opens the files itself and refuses replaced ones.
    """

    dataset: IndexedDataset
    first: int
    last: int
    prefix_lengths: NDArray[np.int64] = field(repr=False)
    supervision: Supervision | None = None

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document: int64 `[num_documents]`."""
        return self.dataset.document_lengths[self.first : self.last]

    def __len__(self) -> int:
        """Returns the number of documents, empty ones included."""
        return self.last - self.first

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents together."""
        return int(self.lengths.sum())

    @property
    def is_supervised(self) -> bool:
        """Whether the corpus says which tokens are learned."""
        return self.supervision is not None

    def read(self, document: int, start: int, stop: int) -> NDArray[np.int64]:
        """Returns the tokens `[start, stop)` of a document as int64."""
        return self.dataset.read(self.first + document, start, stop).astype(np.int64)

    def name(self, document: int) -> str:
        """Returns what a message calls a document."""
        return f"document {self.first + document} of {self.dataset.prefix}"

    def supervised(self, document: int, start: int, stop: int) -> NDArray[np.bool_] | None:
        """Returns which tokens `[start, stop)` of a document are learned; None for all."""
        if self.supervision is None:
            return None
        return self.supervision.covers(self.first + document, start, stop)

    def digest(self) -> str:
        """Returns a SHA-256 of what determines a stream: sampled tokens, boundaries, kinds, range."""
        total = hashlib.sha256(f"{self.dataset.digest()} {self.first} {self.last}".encode())
        total.update(self.prefix_lengths.tobytes())
        if self.supervision is not None:
            total.update(self.supervision.spans.tobytes())
            total.update(self.supervision.first_span.tobytes())
        return total.hexdigest()


def read_with_next(documents: Texts, piece: Piece, vocab_size: int | None) -> NDArray[np.int64]:
    """Returns the tokens of the piece, and the one after it if the document goes on.

    Raises:
        ValueError: a token id is outside the vocabulary.
    """
    length = int(documents.lengths[piece.document])
    words = documents.read(piece.document, piece.start, min(piece.stop + 1, length))
    low, high = int(words.min()), int(words.max())
    if low < 0 or (vocab_size is not None and high >= vocab_size):
        wrong = low if low < 0 else high
        where = piece.start + int((words == wrong).argmax())
        raise ValueError(
            f"token id {wrong} at position {where} of {documents.name(piece.document)} must be in "
            f"[0, {vocab_size}); preprocess with the tokenizer that the model is trained with"
        )
    return words


def open_documents(prefix: str | os.PathLike[str]) -> DocumentSet:
    """Returns all documents of a corpus."""
    dataset = IndexedDataset(prefix)
    return DocumentSet(
        dataset, 0, len(dataset), _read_prefix_lengths(dataset), read_supervision(dataset)
    )


def split_documents(documents: DocumentSet, split: str | Sequence[float]) -> list[DocumentSet]:
    """Returns the train, validation and test documents of Megatron's `--split`, "90,5,5".

    Weights are normalised and missing ones are zero. The ranges are contiguous in file order, with
    Megatron's rounding: both programs draw the same documents.

    Raises:
        ValueError: not one to three non-negative weights with a positive sum.
    """
    try:
        weights = [float(w) for w in (split.split(",") if isinstance(split, str) else split)]
    except ValueError:
        weights = []
    valid = 1 <= len(weights) <= 3 and min(weights) >= 0 and 0 < sum(weights) < float("inf")
    if not valid:
        raise ValueError(
            f"split={split!r} must be one to three non-negative numbers, train,validation,test; "
            'write --split "90,5,5"'
        )
    weights += [0.0] * (3 - len(weights))
    total, seen, bounds = sum(weights), 0.0, [0]
    for weight in weights:
        seen += weight / total
        bounds.append(min(round(seen * len(documents)), len(documents)))
    return [
        DocumentSet(
            documents.dataset,
            documents.first + start,
            documents.first + stop,
            documents.prefix_lengths[start:stop],
            documents.supervision,
        )
        for start, stop in itertools.pairwise(bounds)
    ]
