"""The samples of Megatron's own GPTDataset, in its order: a Megatron run goes on with its batches.

Megatron's classes build the index (which documents, in which order, cut where); tokens, masks and
plans are made as for every other packing, by the true boundaries of documents.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron_cp.data.blend import BlendedDocuments
from megatron_cp.data.blend_sources import BlendSource
from megatron_cp.data.document_set import (
    Documents,
    DocumentSet,
    open_documents,
    split_documents,
)
from megatron_cp.data.packing import check_epochs
from megatron_cp.data.sample_files import (
    SampleArrays,
    SampledDocuments,
    read_sample_files,
    write_sample_files,
)
from megatron_cp.data.sample_index import SampleIndex, SamplePacker

_SPLITS = ("train", "valid", "test")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class GPTSamples:
    """What Megatron's samples depend on, under Megatron-LM's names.

    Either `blend` and `split`, or `blend_per_split`: the corpora of "train", "valid" and "test".
    `num_samples` is what the run asks of each split, None for those of one epoch; a split that is asked for none is not
    built.
    `cache_path` keeps the indices for the next run; without it nothing is left on disk.
    """

    seq_length: int
    seed: int
    num_samples: tuple[int | None, int | None, int | None]
    blend: Sequence[BlendSource] | None = None
    split: str | None = None
    blend_per_split: Mapping[str, Sequence[BlendSource] | None] | None = None
    mid_level_dataset_surplus: float = 0.005
    cache_path: Path | None = None
    eod: int = 0
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        if (self.blend is None) == (self.blend_per_split is None) or (
            (self.blend is None) != (self.split is None)
        ):
            raise ValueError(
                f"blend={self.blend}, split={self.split}, blend_per_split={self.blend_per_split}: "
                "give blend and split, or blend_per_split alone"
            )


@dataclass(frozen=True)
class GPTSplit:
    """The documents of a split and the stream of Megatron's samples of them."""

    documents: Documents
    packer: SamplePacker


class _TokenizerFacts:
    """As much of a tokenizer as building an index asks for. No `pad`: no token is taken for one."""

    def __init__(self, eod: int, vocab_size: int | None, corpora: str) -> None:
        """`corpora`: their checksum. Megatron names an index by prefixes, which may hold other documents later."""
        self.eod, self.vocab_size = eod, vocab_size
        facts = {"class": "megatron_cp", "eod": eod, "vocab_size": vocab_size, "corpora": corpora}
        self.unique_identifiers = facts


@contextlib.contextmanager
def outside_process_groups() -> Iterator[None]:
    """Lets this rank build an index by itself where there are process groups: Megatron finds none inside."""
    before = dist.is_initialized
    dist.is_initialized = lambda: False
    try:
        yield
    finally:
        dist.is_initialized = before


def open_gpt_samples(request: GPTSamples) -> dict[str, GPTSplit | None]:
    """Returns "train", "valid" and "test" with Megatron's samples; None where there are none.

    Called before there is a process group, or outside of them: every rank builds the same index for itself.

    Raises:
        ValueError: Megatron cannot make samples of these corpora.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "open_gpt_samples() inside a process group, where Megatron's builder waits for other "
            "ranks; call it before init_process_group"
        )
    corpora = _open_corpora(request)
    built = [
        bool(parts) and count != 0 and any(part.num_tokens for _, part in parts)
        for parts, count in zip(corpora, request.num_samples, strict=True)
    ]
    for parts, count, is_built, name in zip(
        corpora, request.num_samples, built, _SPLITS, strict=True
    ):
        if is_built:
            _check_shares(parts, request.seq_length, name, is_one_epoch=count is None)
    datasets = _build(request, built, _checksum(corpora))
    return {
        name: _read_index(dataset, parts, request) if is_built else None
        for name, dataset, parts, is_built in zip(_SPLITS, datasets, corpora, built, strict=True)
    }


_Parts = list[tuple[BlendSource, DocumentSet]]


def _open_corpora(request: GPTSamples) -> list[_Parts]:
    """Returns the corpora with a weight of each split, and their documents there."""
    if request.blend is not None:
        assert request.split is not None
        splits: list[_Parts] = [[], [], []]
        for source in _with_weight(request.blend):
            parts = split_documents(_opened(source.prefix), request.split)
            for kept, part in zip(splits, parts, strict=True):
                kept.append((source, part))
        return splits
    assert request.blend_per_split is not None
    return [
        [
            (source, _opened(source.prefix))
            for source in _with_weight(request.blend_per_split.get(name) or ())
        ]
        for name in _SPLITS
    ]


def _opened(prefix: str) -> DocumentSet:
    """Returns the documents of a corpus. Raises ValueError for one of no token: Megatron cannot map its file."""
    documents = open_documents(prefix)
    if not documents.num_tokens:
        raise ValueError(f"{prefix} has no token; give it documents or leave it out")
    return documents


def _with_weight(sources: Sequence[BlendSource]) -> list[BlendSource]:
    return [source for source in sources if source.weight != 0]


def _check_shares(parts: _Parts, seq_length: int, name: str, *, is_one_epoch: bool) -> None:
    for source, part in parts:
        # Megatron counts epochs until there are enough tokens: with none it never ends.
        is_once = is_one_epoch or (source.weight is None and len(parts) > 1)
        least = seq_length + 1 if is_once else 1
        if part.num_tokens < least:
            raise ValueError(
                f"--packing megatron: {source.prefix} has {part.num_tokens} tokens in the {name} "
                f"split, at least {least} are needed; give it more, change --split, or leave it out"
            )
        check_epochs(part.num_tokens, seq_length, f"{source.prefix} in the {name} split")


def _checksum(corpora: list[_Parts]) -> str:
    found = {part.dataset.digest() for parts in corpora for _, part in parts}
    return hashlib.sha256("".join(sorted(found)).encode()).hexdigest()


def _build(request: GPTSamples, built: list[bool], checksum: str) -> list[Any]:
    """Returns Megatron's dataset of each split; None where it is not built."""
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

    if request.cache_path is not None:
        request.cache_path.mkdir(parents=True, exist_ok=True)
    with _without_notes():
        config = GPTDatasetConfig(
            random_seed=request.seed,
            sequence_length=request.seq_length,
            blend=None if request.blend is None else _blend(request.blend),
            blend_per_split=None
            if request.blend_per_split is None
            else [_blend(request.blend_per_split.get(name)) for name in _SPLITS],
            split=request.split,
            path_to_cache="",  # neither reads nor writes files; None is a folder beside the corpus
            tokenizer=_TokenizerFacts(request.eod, request.vocab_size, checksum),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
            mid_level_dataset_surplus=request.mid_level_dataset_surplus,
        )
        if config.split_matrix is not None:
            config.split_matrix = [
                share if is_built else None
                for share, is_built in zip(config.split_matrix, built, strict=True)
            ]
        if config.blend_per_split is not None:
            config.blend_per_split = [
                blend if is_built else None
                for blend, is_built in zip(config.blend_per_split, built, strict=True)
            ]
        dataset_class = _dataset_class(request.cache_path)
        builder = BlendedMegatronDatasetBuilder(
            dataset_class, list(request.num_samples), lambda: True, config
        )
        try:
            return list(builder.build())
        except IndexError as error:
            raise ValueError(f"--packing megatron: {error}") from None


def _blend(sources: Sequence[BlendSource] | None) -> tuple[list[str], list[float] | None] | None:
    """Returns a blend as Megatron's configuration holds it."""
    kept = _with_weight(sources or ())
    if not kept:
        return None
    weights = [source.weight for source in kept if source.weight is not None]
    return [source.prefix for source in kept], weights or None


def _dataset_class(cache: Path | None) -> Any:
    """Returns GPTDataset with its index in `cache`; Megatron's own runs what it finds in the files of an index."""
    from megatron.core.datasets.gpt_dataset import GPTDataset

    class DatasetWithCheckedIndex(GPTDataset):
        def _build_document_sample_shuffle_indices(self) -> SampleArrays:
            name = f"{self.unique_description_hash}-GPTDataset-{self.index_split.name}"
            kept = None if cache is None else _kept_index(cache, name, self)
            if kept is not None:
                return kept
            built = SampleArrays(*super()._build_document_sample_shuffle_indices())
            if cache is not None:
                write_sample_files(cache, name, self.unique_description, built)
            return built

    # The description holds the name; so an index of before is found.
    DatasetWithCheckedIndex.__name__ = GPTDataset.__name__
    return DatasetWithCheckedIndex


def _kept_index(cache: Path, name: str, dataset: Any) -> SampleArrays | None:
    """Returns the index of a dataset of Megatron's; None where there is none, or a damaged one, which is said."""
    made_of = SampledDocuments(
        dataset.dataset.sequence_lengths,
        int(dataset.indices[0]),
        int(dataset.indices[-1]) + 1,
        dataset.config.sequence_length,
        dataset.num_samples,
    )
    try:
        return read_sample_files(cache, name, made_of)
    except ValueError as damage:
        found, _, _ = str(damage).rpartition("; ")  # without its advice
        _log.warning("%s: the index of samples is built again", found)
        return None


@contextlib.contextmanager
def _without_notes() -> Iterator[None]:
    """Megatron notes in the log that a blend is not cached, which is what we ask for."""
    logger = logging.getLogger("megatron.core.datasets")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _read_index(dataset: Any, parts: _Parts, request: GPTSamples) -> GPTSplit:
    """Returns the arrays of Megatron's dataset as a stream of packs over our documents."""
    datasets = getattr(dataset, "datasets", [dataset])
    documents, indices, first = _joined(parts), [], 0
    for low, (source, part) in zip(datasets, parts, strict=True):
        whole = part.dataset.document_lengths
        if not np.array_equal(low.dataset.sequence_lengths, whole):
            raise ValueError(
                f"--packing megatron: {source.prefix} holds {len(low.dataset.sequence_lengths)} "
                f"sequences in {len(whole)} documents, and Megatron shuffles sequences; use "
                "--packing split, or preprocess without --split-sentences"
            )
        indices.append(
            SampleIndex(low.document_index, low.sample_index, low.shuffle_index, part.first, first)
        )
        first += len(part)
    turns = None
    if hasattr(dataset, "datasets"):
        turns = (dataset.dataset_index, dataset.dataset_sample_index)
    settings = {"seq_length": request.seq_length, "packing": "megatron", "seed": request.seed}
    return GPTSplit(documents, SamplePacker(documents.lengths, indices, turns, settings))


def _joined(parts: _Parts) -> Documents:
    if len(parts) == 1:
        return parts[0][1]
    weights = [float(p.num_tokens) if s.weight is None else s.weight for s, p in parts]
    return BlendedDocuments(
        tuple(part for _, part in parts), tuple(weight / sum(weights) for weight in weights)
    )
