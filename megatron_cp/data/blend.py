"""Several corpora as one: which weights, which documents, and whose turn it is.

    --data-path 30 code 70 text        packs   t c t t c t t t c t ...
                                       the corpus furthest behind its share gives the next pack

Every pack comes from one corpus, in the order in which that corpus alone would give its packs. The
choice depends on weights and counts only, so all ranks make the same one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_cp.data.blend_sources import BlendSource
from megatron_cp.data.document_set import Documents, DocumentSet, open_documents, split_documents
from megatron_cp.data.packing import Pack, Packer, PackingConfig, PackSource, check_epochs


@dataclass(frozen=True)
class BlendedDocuments:
    """The documents of several corpora, numbered through in their order, and the corpora's shares.

    `weights` add to 1.
    """

    corpora: tuple[DocumentSet, ...]
    weights: tuple[float, ...]

    @cached_property
    def first_documents(self) -> NDArray[np.int64]:
        """Number of the first document of each corpus, and of all documents: `[corpora + 1]`."""
        return np.concatenate([[0], np.cumsum([len(corpus) for corpus in self.corpora])])

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document: int64 `[num_documents]`."""
        return np.concatenate([corpus.lengths for corpus in self.corpora])

    @cached_property
    def prefix_lengths(self) -> NDArray[np.int64]:
        """Kind of each document: int64 `[num_documents]`."""
        return np.concatenate([corpus.prefix_lengths for corpus in self.corpora])

    def __len__(self) -> int:
        """Returns the number of documents, empty ones included."""
        return int(self.first_documents[-1])

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents together."""
        return sum(corpus.num_tokens for corpus in self.corpora)

    @property
    def is_supervised(self) -> bool:
        """Whether some corpus says which tokens are learned."""
        return any(corpus.is_supervised for corpus in self.corpora)

    def read(self, document: int, start: int, stop: int) -> NDArray[np.int64]:
        """Returns the tokens `[start, stop)` of a document as int64."""
        corpus, number = self._place(document)
        return corpus.read(number, start, stop)

    def name(self, document: int) -> str:
        """Returns what a message calls a document."""
        corpus, number = self._place(document)
        return corpus.name(number)

    def supervised(self, document: int, start: int, stop: int) -> NDArray[np.bool_] | None:
        """Returns which tokens `[start, stop)` of a document are learned; None for all."""
        corpus, number = self._place(document)
        return corpus.supervised(number, start, stop)

    def digest(self) -> str:
        """Returns a SHA-256 of what determines a stream: the corpora, their order and weights."""
        total = hashlib.sha256(repr(self.weights).encode())
        for corpus in self.corpora:
            total.update(corpus.digest().encode())
        return total.hexdigest()

    def _place(self, document: int) -> tuple[DocumentSet, int]:
        which = int(np.searchsorted(self.first_documents, document, side="right")) - 1
        return self.corpora[which], document - int(self.first_documents[which])

    def __reduce__(self) -> tuple[Any, ...]:
        return BlendedDocuments, (self.corpora, self.weights)  # the joined arrays are made anew


Opens = Callable[[str], DocumentSet]


def open_blend(sources: Sequence[BlendSource], opens: Opens = open_documents) -> Documents | None:
    """Returns the documents of a blend; None where no corpus has a weight.

    `opens` returns the documents of a corpus.

    Raises:
        ValueError: a corpus with a weight, or the only one, has no token.
    """
    corpora = [(source.weight, opens(source.prefix)) for source in sources]
    found = _blended(corpora)
    for weight, documents in corpora:
        if weight != 0 and not documents.num_tokens and (weight is not None or found is None):
            raise ValueError(
                f"{documents.dataset.prefix} has no token; give it documents or leave it out"
            )
    return found


def open_split_blend(
    sources: Sequence[BlendSource], split: str | Sequence[float], opens: Opens = open_documents
) -> list[Documents | None]:
    """Returns the train, validation and test documents of a blend; `split` applies to each corpus.

    A corpus whose share of validation or test is empty takes no part there.

    Raises:
        ValueError: a corpus with a weight has no token to train on.
    """
    splits: list[list[tuple[float | None, DocumentSet]]] = [[], [], []]
    for weight, prefix in sources:
        parts = split_documents(opens(prefix), split)
        for kept, documents in zip(splits, parts, strict=True):
            kept.append((weight, documents))
    for weight, documents in splits[0] if len(sources) > 1 else ():
        if weight != 0 and not documents.num_tokens:
            raise ValueError(
                f"{documents.dataset.prefix} has no token in the training share of --split "
                f"{split!r}; give it more documents or leave it out of the blend"
            )
    return [_blended(kept) for kept in splits]


def _blended(corpora: Sequence[tuple[float | None, DocumentSet]]) -> Documents | None:
    kept = [
        (float(documents.num_tokens) if weight is None else weight, documents)
        for weight, documents in corpora
        if weight != 0 and documents.num_tokens
    ]
    if len(kept) < 2:
        return kept[0][1] if kept else None
    total = math.fsum(weight for weight, _ in kept)
    return BlendedDocuments(
        tuple(documents for _, documents in kept), tuple(weight / total for weight, _ in kept)
    )


def furthest_behind(weights: NDArray[np.float64], counts: NDArray[np.int64]) -> int:
    """Returns the corpus whose number of packs is furthest below its share; ties go to the first.

    Source: Megatron-Core's rule of blending, `build_blending_indices`.
    """
    return int((weights * max(int(counts.sum()), 1) - counts).argmax())


class BlendedPacker:
    """An endless iterator of `Pack`s, each of one corpus, as near to the weights as possible."""

    def __init__(self, documents: BlendedDocuments, config: PackingConfig) -> None:
        self._packers = [Packer(corpus.lengths, config) for corpus in documents.corpora]
        self._weights = np.array(documents.weights)
        self._counts = np.zeros(len(documents.corpora), dtype=np.int64)
        self._first_documents = documents.first_documents.tolist()
        self._config = config

    def identity(self) -> dict[str, Any]:
        """Returns the settings that a state belongs to. The weights are in the documents' digest."""
        return self._packers[0].identity()

    def state(self) -> dict[str, Any]:
        """Returns the packs drawn of each corpus and the state of its packer: JSON values."""
        return {
            "counts": self._counts.tolist(),
            "corpora": [packer.state() for packer in self._packers],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Goes to where `state` was taken.

        Raises:
            ValueError: the state cannot be of these corpora.
        """
        counts, corpora = [int(count) for count in state["counts"]], state["corpora"]
        if not len(counts) == len(corpora) == len(self._packers) or min(counts) < 0:
            raise ValueError(
                f"loader state: counts={counts} of {len(corpora)} corpora must be one number from "
                f"0 for each of the {len(self._packers)}; it belongs to another blend"
            )
        for packer, inner in zip(self._packers, corpora, strict=True):
            packer.restore(inner)
        self._counts[:] = counts

    def __iter__(self) -> Iterator[Pack]:
        return self

    def __next__(self) -> Pack:
        which = furthest_behind(self._weights, self._counts)
        self._counts[which] += 1
        return next(self._packers[which]).shifted(self._first_documents[which])


def check_packs(documents: Documents, config: PackingConfig) -> None:
    """Raises ValueError if one pack would take the documents of a corpus more than 1,000 times."""
    if config.policy == "keep":
        return  # a pack ends with its epoch
    corpora = documents.corpora if isinstance(documents, BlendedDocuments) else (documents,)
    for corpus in corpora:
        if len(corpus):
            where = f"{len(corpus)} documents from {corpus.name(0)} on"
            check_epochs(corpus.num_tokens, config.seq_length, where)


def make_packer(documents: Documents, config: PackingConfig) -> PackSource:
    """Returns the endless stream of packs of one corpus or of a blend.

    Raises:
        ValueError: there is no token, or one pack would take them more than 1,000 times.
    """
    check_packs(documents, config)
    if isinstance(documents, BlendedDocuments):
        return BlendedPacker(documents, config)
    return Packer(documents.lengths, config)
