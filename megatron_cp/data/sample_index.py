"""Packs of an index that lists every sample in advance, as Megatron's GPTDataset makes one.

    documents   d7 d2 d9 d0 ...            the order in which documents are visited
    starts      (0, 0) (1, 35) (1, 99)     where sample i begins: visit and offset; it ends, with one
                                           token more, where sample i + 1 begins
    order       2 0 1                      the i-th sample drawn is sample order[i]

The last token of a sample is only a label, the first token of the sample behind it. A state is a
position, which is the number of samples consumed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_cp.data.packing import Pack, Piece

_MOST_DIGESTED = 65536


@dataclass(frozen=True)
class SampleIndex:
    """The samples of one corpus.

    `documents` `[visits]` and `starts` `[samples + 1, 2]` count the documents of the file from 0.
    `first_in_file` and `first` are the numbers, in the file and among the documents of the loader,
    of the first document that the samples are drawn from.
    """

    documents: NDArray[Any]
    starts: NDArray[Any]
    order: NDArray[Any]
    first_in_file: int
    first: int


class SamplePacker:
    """An iterator of `Pack`s that ends behind the last sample.

    Args:
        lengths: tokens of each document of the loader.
        indices: the samples of each corpus.
        turns: for each sample of a blend the corpus and the sample of that corpus; None for one
            corpus.
        settings: what else identifies the samples, in JSON values.
    """

    def __init__(
        self,
        lengths: NDArray[np.int64],
        indices: Sequence[SampleIndex],
        turns: tuple[NDArray[Any], NDArray[Any]] | None,
        settings: dict[str, Any],
    ) -> None:
        self._lengths, self._indices, self._turns = lengths, indices, turns
        self._settings = settings
        self._position = 0
        self._digest = self._digest_of_indices()

    @property
    def num_samples(self) -> int:
        """Samples of the whole stream."""
        return len(self._indices[0].order if self._turns is None else self._turns[0])

    def identity(self) -> dict[str, Any]:
        """Returns the settings that a state belongs to, with a digest of the index."""
        return {**self._settings, "index": self._digest}

    def state(self) -> dict[str, Any]:
        """Returns the number of samples drawn."""
        return {"position": self._position}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes to where `state` was taken.

        Raises:
            ValueError: there are not so many samples.
        """
        position = int(state["position"])
        if not 0 <= position <= self.num_samples:
            raise ValueError(
                f"loader state: position={position} must be in [0, {self.num_samples}], the "
                "samples of this run; raise --train-iters or --train-samples"
            )
        self._position = position

    def __iter__(self) -> Iterator[Pack]:
        return self

    def __next__(self) -> Pack:
        if self._position >= self.num_samples:
            raise StopIteration
        which, sample = 0, self._position
        if self._turns is not None:
            which, sample = (int(turn[self._position]) for turn in self._turns)
        self._position += 1
        return self._pack(self._indices[which], int(self._indices[which].order[sample]))

    def _pack(self, index: SampleIndex, sample: int) -> Pack:
        (visit, offset), (last_visit, last_offset) = index.starts[sample : sample + 2].tolist()
        pieces = []
        for place in range(visit, last_visit + 1):
            document = int(index.documents[place]) - index.first_in_file + index.first
            stop = last_offset + 1 if place == last_visit else int(self._lengths[document])
            pieces.append(Piece(document, offset if place == visit else 0, stop))
        document, _, stop = pieces[-1]
        pieces[-1] = pieces[-1]._replace(stop=stop - 1)
        return Pack(tuple(piece for piece in pieces if piece.length), (document, stop - 1))

    def _digest_of_indices(self) -> str:
        """Returns a SHA-256 of sizes and of at most 65536 evenly spaced entries of each array.

        Another seed, number of samples or epochs shuffles all of them.
        """
        total = hashlib.sha256()
        arrays = [
            a for index in self._indices for a in (index.documents, index.starts, index.order)
        ]
        for array in [*arrays, *(self._turns or ())]:
            step = -(-len(array) // _MOST_DIGESTED) or 1
            total.update(f"{array.shape}".encode())
            total.update(np.ascontiguousarray(array[::step], dtype=np.int64).tobytes())
        return total.hexdigest()
