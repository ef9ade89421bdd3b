"""Which tokens of a document are learned: all, or the spans that a file beside the corpus lists.

    <prefix>.supervised.npy      int64 [spans, 3]: document, start, stop; sorted, not overlapping

Loss counts where the *label* lies in a span. So the token before an answer learns its first token,
and a question is read but never learned.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_cp.data.indexed import SUPERVISED, IndexedDataset
from megatron_cp.data.plain_array import read_plain_array, write_plain_array


@dataclass(frozen=True)
class Supervision:
    """The learned spans of a corpus. `first_span` `[documents + 1]` says whose they are."""

    spans: NDArray[np.int64] = field(repr=False)
    first_span: NDArray[np.int64] = field(repr=False)

    def covers(self, document: int, start: int, stop: int) -> NDArray[np.bool_]:
        """Returns which tokens `[start, stop)` of a document are learned; none behind its end."""
        flags = np.zeros(stop - start, dtype=np.bool_)
        first, last = self.first_span[document : document + 2]
        for begin, end in self.spans[first:last].tolist():
            flags[max(begin - start, 0) : max(end - start, 0)] = True
        return flags


def supervision_path(prefix: str | os.PathLike[str]) -> Path:
    """Returns `<prefix>.supervised.npy`."""
    return Path(f"{os.fspath(prefix)}.{SUPERVISED}")


def write_supervision(
    prefix: str | os.PathLike[str], spans: Sequence[tuple[int, int, int]]
) -> None:
    """Writes the learned spans `(document, start, stop)` beside the token files.

    Raises:
        ValueError: a span is not in its document, or they overlap or are out of order.
    """
    rows = np.array(spans, dtype=np.int64).reshape(-1, 3)
    _check(rows, IndexedDataset(prefix), "spans")
    write_plain_array(supervision_path(prefix), rows)


def read_supervision(dataset: IndexedDataset) -> Supervision | None:
    """Returns the learned spans of a corpus; None where there is no file: all tokens are learned."""
    path = supervision_path(dataset.prefix)
    if not path.is_file():
        return None
    rows = read_plain_array(path)
    _check(rows, dataset, str(path))
    first_span = np.searchsorted(rows[:, 0], np.arange(len(dataset) + 1))
    return Supervision(np.ascontiguousarray(rows[:, 1:], dtype=np.int64), first_span)


def _check(rows: NDArray[Any], dataset: IndexedDataset, name: str) -> None:
    if rows.ndim != 2 or rows.shape[1] != 3 or rows.dtype != np.int64:
        raise ValueError(
            f"{name} has shape {rows.shape} and dtype {rows.dtype}, want int64 [spans, 3]: "
            "document, start, stop; write it again"
        )
    documents, starts, stops = rows.T
    known = (documents >= 0) & (documents < len(dataset))
    lengths = np.zeros(len(rows), dtype=np.int64)
    lengths[known] = dataset.document_lengths[documents[known]]
    wrong = ~known | (starts < 0) | (starts >= stops) | (stops > lengths)
    follows = (documents[1:] > documents[:-1]) | (
        (documents[1:] == documents[:-1]) & (starts[1:] >= stops[:-1])
    )
    wrong[1:] |= ~follows
    if wrong.any():
        place = int(wrong.argmax())
        raise ValueError(
            f"{name}[{place}]={rows[place].tolist()} must be a document of {dataset.prefix} and a "
            "range of its tokens behind the span before it; write it again"
        )
