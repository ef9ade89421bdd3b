"""What is planned: document lengths from files, a list or a workload, and the mask over them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_cp.data.document_set import open_documents, split_documents
from megatron_cp.data.packing import document_order
from megatron_cp.data.plain_array import read_plain_array
from megatron_cp.mask import AttentionMask
from megatron_cp.mask.builders import sliding_window
from megatron_cp.plan.study.workloads import (
    MASKS,
    MAX_TOKENS,
    WORKLOADS,
    document_lengths,
    fitted,
    named_mask,
)

IntArray = NDArray[np.int64]
CHARACTERS_PER_TOKEN = 3.3  # of a 32K byte-level BPE on mixed text and code
Tell = Callable[[str], None]
"""Is told what begins now, in words."""
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".json", ".html", ".c", ".h", ".cpp", ".tex")


def quiet(words: str) -> None:
    """Tells nobody."""


@dataclass(frozen=True)
class Source:
    """Where document lengths come from: a workload by name, or the lengths themselves."""

    words: str
    workload: str = "longca"
    lengths: IntArray | None = None

    def documents(self, num_tokens: int, seed: int) -> IntArray:
        """Returns the document lengths of one pack."""
        if self.lengths is not None:
            return fitted(self.lengths, num_tokens)
        return document_lengths(self.workload, num_tokens, seed)


@dataclass(frozen=True)
class MaskChoice:
    """A mask by name (`plan.study.workloads.MASKS`), narrowed to a window (before, after) if there is one."""

    name: str = "causal_document"
    window: tuple[int, int] | None = None

    @property
    def words(self) -> str:
        """Returns the name and the window."""
        return (
            self.name
            if self.window is None
            else f"{self.name}, window {self.window[0]},{self.window[1]}"
        )

    @property
    def has_documents(self) -> bool:
        """Returns whether the mask follows the lengths of documents."""
        return self.name not in MASKS or MASKS[self.name].has_documents

    def documents(self, num_tokens: int, lengths: IntArray) -> IntArray:
        """Returns the documents that the mask tells apart: one for a mask that knows none."""
        return lengths if self.has_documents else np.array([num_tokens], dtype=np.int64)

    def seen_of(self, source: Source) -> Source:
        """Returns the source in words that stay true: for a mask that knows no documents none is drawn."""
        return source if self.has_documents else replace(source, words="no documents")

    def build(self, num_tokens: int, lengths: IntArray, seed: int) -> AttentionMask:
        """Returns the mask over documents of these lengths; ValueError names the nearest of an unknown one."""
        mask = named_mask(self.name, num_tokens, lengths=lengths, seed=seed)
        return mask if self.window is None else mask & sliding_window(num_tokens, *self.window)


def check_ranks(cp_size: int, num_tokens: int) -> None:
    """Raises ValueError for more ranks than tokens."""
    if cp_size > num_tokens:
        raise ValueError(
            f"cp_size={cp_size} is more than the {num_tokens} tokens of the mask; at most one rank per "
            f"token can have work: use {num_tokens} ranks or fewer"
        )


def source_of_workload(name: str) -> Source:
    """Returns a workload by name; ValueError names the nearest."""
    document_lengths(name, 1)
    return Source(f"workload {name}: {WORKLOADS[name].why}", workload=name)


def source_of_lengths(lengths: Sequence[int]) -> Source:
    """Returns the lengths as they are given; ValueError for none, a negative one or no token at all."""
    if not lengths or min(lengths) < 0 or sum(lengths) == 0:
        raise ValueError(
            f"lengths={list(lengths)[:8]} must be document lengths, none negative and not all 0; "
            "write --lengths 137,2041,89"
        )
    counts = np.array(lengths, dtype=np.int64)
    return Source(f"{len(counts)} documents of given lengths", lengths=counts)


def source_of_corpus(prefix: str, split: str, seed: int) -> Source:
    """Returns the training documents of a .bin/.idx pair, in the order of the loader's first epoch."""
    lengths = split_documents(open_documents(prefix), split)[0].lengths
    order = document_order(len(lengths), seed=seed, epoch=0)
    words = f"{prefix}: {len(lengths):,} documents, split {split}, seed {seed}"
    return Source(words, lengths=np.asarray(lengths, dtype=np.int64)[order])


def source_of_path(path: Path) -> Source:
    """Returns the lengths in a file, or those of the texts in a folder (by size, in tokens, about).

    A file holds a JSON list, one number per line, or an .npy array. Raises ValueError for anything else.
    """
    if not path.exists():
        raise ValueError(
            f"--lengths {path} is neither document lengths, as 137,2041,89, nor a file or folder that exists"
        )
    if path.is_dir():
        sizes = [
            file.stat().st_size
            for file in sorted(path.rglob("*"))
            if file.suffix in TEXT_SUFFIXES and file.is_file()
        ]
        lengths = np.array(sizes, dtype=np.float64) / CHARACTERS_PER_TOKEN
        words = f"{path}: {len(sizes):,} text files, sizes over {CHARACTERS_PER_TOKEN} characters a token"
        return Source(words, lengths=_checked(np.floor(lengths).astype(np.int64), path))
    numbers = _numbers_in(path)
    if (
        numbers.ndim != 1
        or not np.isfinite(numbers).all()
        or (numbers % 1).any()
        or (abs(numbers) > MAX_TOKENS).any()
    ):
        raise ValueError(
            f"{path} must hold whole numbers up to {MAX_TOKENS}, one document length per line, a JSON list or "
            "a flat .npy array"
        )
    counts = _checked(numbers.astype(np.int64), path)
    return Source(f"{path}: {len(counts):,} documents", lengths=counts)


def _numbers_in(path: Path) -> NDArray[np.float64]:
    """Returns the numbers of a file, and one that is no number for a file of anything else."""
    try:
        if path.suffix == ".npy":
            content = read_plain_array(path)
            if content.dtype.kind in "iuf":
                return np.asarray(content, dtype=np.float64)
        else:
            text = path.read_text().strip()
            found = json.loads(text) if text.startswith("[") else text.split()
            if not any(isinstance(number, bool) for number in found):
                return np.array(found, float)
    except (ValueError, TypeError, OverflowError, RecursionError):
        pass  # whatever it holds, it is no list of numbers
    return np.array([np.nan])


def _checked(lengths: IntArray, path: Path) -> IntArray:
    if not len(lengths) or lengths.min() < 0 or not lengths.any():
        raise ValueError(
            f"{path} holds {len(lengths)} document lengths, the least {lengths.min(initial=0)}; there must be "
            "one that is not 0, and none negative"
        )
    return lengths
