"""Which corpora a run reads, and the documents of each split; opened before any process group exists."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from megatron_cp.data.blend import BlendedDocuments, Opens, open_blend, open_split_blend
from megatron_cp.data.blend_sources import (
    BlendSource,
    parse_blend,
    read_blend_file,
    read_per_split_file,
)
from megatron_cp.data.chat import chat_format, format_identity
from megatron_cp.data.conversations import conversations_in_folder
from megatron_cp.data.document_set import Documents, DocumentSet, open_documents, split_documents
from megatron_cp.data.fill_in_the_middle import FillInTheMiddle, find_fim_tokens
from megatron_cp.data.indexed import token_dtype
from megatron_cp.data.indexed_writer import IndexedWriter
from megatron_cp.data.sample_index import SamplePacker
from megatron_cp.data.tokenizer import Tokenizer, TokenizerFiles, build_tokenizer
from megatron_cp.mcore.documents.gpt_dataset import GPTSamples, open_gpt_samples
from megatron_cp.training.config import DataConfig, TrainConfig

Split = Literal["train", "valid", "test"]
Sources = tuple[BlendSource, ...]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")
_DEFAULT_SPLIT = "969,30,1"  # Megatron-LM's
_NUM_MOCK_DOCUMENTS = 512


class ValidationSet(NamedTuple):
    """The documents of one corpus of validation; with `--packing megatron` its samples."""

    documents: Documents
    samples: SamplePacker | None


@dataclass(frozen=True)
class RunData:
    """The documents of each split, None where a split has no token; with `--packing megatron` its samples."""

    splits: dict[Split, Documents | None]
    samples: dict[Split, SamplePacker] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    fim: FillInTheMiddle | None = None
    validation_sets: dict[str, ValidationSet] = field(default_factory=dict)
    """By name, with --multiple-validation-sets."""

    def of_validation_set(self, name: str) -> RunData:
        """Returns the data whose validation is this set alone."""
        documents, samples = self.validation_sets[name]
        own: dict[Split, SamplePacker] = {} if samples is None else {"valid": samples}
        return replace(
            self,
            splits={**self.splits, "valid": documents},
            samples={**self.samples, **own},
        )

    def train(self) -> Documents:
        """Returns the training documents. Raises ValueError if there are none."""
        documents = self.splits["train"]
        if documents is None:
            raise ValueError(
                "the training split holds no token; give more documents or another --split"
            )
        return documents


def open_corpora(config: TrainConfig) -> RunData:
    """Returns the opened and checked documents of a configuration whose vocabulary is known.

    Raises:
        ValueError, OSError: with one line.
    """
    options = config.data
    notes: list[str] = []
    split = options.split or _DEFAULT_SPLIT
    opens: Opens = open_documents
    if options.sft:
        opens = _chat_opener(options, notes)
    if options.mock_data:
        splits: list[Documents | None] = [*split_documents(_mock_documents(config), split)]
    elif options.packing == "megatron":
        return _megatron_samples(config, split)
    elif (sources := _joint_sources(options)) is not None:
        splits = open_split_blend(sources, split, opens)
    else:
        parts = _sources_per_split(options)
        splits = [open_blend(part, opens) if part else None for part in parts]
    return RunData(
        {
            name: documents if documents is not None and documents.num_tokens else None
            for name, documents in zip(SPLITS, splits, strict=True)
        },
        notes=tuple(notes),
        validation_sets=_validation_sets(config, splits[1]),
    )


def _validation_sets(config: TrainConfig, valid: Documents | None) -> dict[str, ValidationSet]:
    """Returns each corpus of validation by its name, where they are evaluated one by one."""
    sources = _sources_of_sets(config)
    corpora: Sequence[Documents | None] = (valid,)
    if isinstance(valid, BlendedDocuments):
        corpora = valid.corpora
    if sources and len(corpora) != len(sources):
        raise ValueError(
            f"{len(sources) - len(corpora)} of {len(sources)} corpora of validation have no token to evaluate; leave "
            "them out"
        )
    parts = zip(sources, corpora, strict=False)
    return {name: ValidationSet(part, None) for name, part in parts if part is not None}


def _sources_of_sets(config: TrainConfig) -> dict[str, BlendSource]:
    """Returns the corpora of validation by their names in the log; none where they are evaluated together.

    Raises ValueError where names and corpora are not as many, and for weights where every token is to count once.
    """
    options, steps = config.data, config.steps
    if not steps.full_validation or options.mock_data:
        return {}
    joint = _joint_sources(options)
    sources = _sources_per_split(options)[1] or () if joint is None else joint
    if any(source.weight is not None for source in sources):
        raise ValueError(
            "--full-validation with weights of the corpora of validation is not served, nor by Megatron-LM: every "
            "token counts once; give --train-data-path with weights and --valid-data-path without"
        )
    if not steps.multiple_validation_sets:
        return {}
    names = steps.validation_set_names or [str(number) for number in range(len(sources))]
    if len(names) != len(sources):
        raise ValueError(
            f"--validation-set-names {' '.join(names)} are {len(names)} names for {len(sources)} corpora of "
            "validation; give each one"
        )
    return dict(zip(names, sources, strict=True))


def open_tokenizer(options: DataConfig) -> Tokenizer | None:
    """Returns the tokenizer of the run; None where there is none, or it has no vocabulary."""
    if options.tokenizer_type in (None, "NullTokenizer"):
        return None
    names = (field.name for field in fields(TokenizerFiles))
    files = TokenizerFiles(**{name: getattr(options, name) for name in names})
    return build_tokenizer(options.tokenizer_type, files)


def open_fill_in_the_middle(options: DataConfig, seed: int) -> FillInTheMiddle | None:
    """Returns how documents are rearranged; None without --fim-data.

    Raises:
        ValueError: the tokenizer lacks a token that this needs.
    """
    if not options.fim_data:
        return None
    tokenizer = open_tokenizer(options)
    if tokenizer is None:
        raise ValueError("--fim-data needs a tokenizer; give --tokenizer-type")
    marks = ("prefix", "middle", "suffix", "pad", "eod")
    names = {mark: getattr(options, f"fim_{mark}_token") for mark in marks}
    return FillInTheMiddle(
        tokenizer=tokenizer,
        tokens=find_fim_tokens(tokenizer, {**names, "split": options.fim_split_sample or None}),
        seed=seed,
        rate=options.fim_rate,
        spm_rate=options.fim_spm_rate,
        fragment_rate=options.fim_fragment_rate,
        no_prefix=options.fim_no_prefix,
    )


def _chat_opener(options: DataConfig, notes: list[str]) -> Opens:
    """Returns what opens a chat file as documents, and notes how many conversations were cut.

    The corpus is kept in --data-cache-path; without it every rank writes its own and removes it.
    """
    tokenizer = open_tokenizer(options)
    if tokenizer is None:
        raise ValueError("--sft needs a tokenizer; give --tokenizer-type and --tokenizer-model")
    name = options.sft_tokenizer_prompt_format
    render = chat_format(name, options.tokenizer_model)
    identity = format_identity(name, options.tokenizer_model)
    folder = Path(options.data_cache_path or _removed_at_exit())

    def opens(path: str) -> DocumentSet:
        prefix = conversations_in_folder(
            path,
            folder,
            tokenizer,
            render,
            format_identity=identity,
            max_tokens=options.seq_length,
        )
        documents = open_documents(prefix)
        cut = documents.dataset.facts["truncated"]
        if cut:
            notes.append(
                f"{path}: {cut} of {len(documents)} conversations are longer than --seq-length "
                f"{options.seq_length} and lose their end"
            )
        return documents

    return opens


def _removed_at_exit() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="megatron_cp_corpora_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _joint_sources(options: DataConfig) -> Sources | None:
    """Returns the corpora that --split divides; None where each split has its own."""
    if options.data_args_path is not None:
        return parse_blend(read_blend_file(options.data_args_path), "--data-args-path")
    return parse_blend(options.data_path) if options.data_path else None


def _sources_per_split(options: DataConfig) -> list[Sources | None]:
    if options.per_split_data_args_path is not None:
        words = read_per_split_file(options.per_split_data_args_path)
        flags = {name: f"--per-split-data-args-path, {name}" for name in SPLITS}
    else:
        words = {name: getattr(options, f"{name}_data_path") for name in SPLITS}
        flags = {name: f"--{name}-data-path" for name in SPLITS}
    return [parse_blend(words[name] or (), flags[name]) if words[name] else None for name in SPLITS]


def _megatron_samples(config: TrainConfig, split: str) -> RunData:
    """Returns what Megatron's GPTDataset would draw in this run."""
    options = config.data
    joint = _joint_sources(options)
    sets = _sources_of_sets(config)
    request = GPTSamples(
        seq_length=options.seq_length,
        seed=config.steps.seed,
        num_samples=_num_samples(config),
        blend=joint,
        split=split if joint is not None else None,
        blend_per_split=None
        if joint is not None
        else dict(zip(SPLITS, _sources_per_split(options), strict=True)),
        mid_level_dataset_surplus=options.mid_level_dataset_surplus,
        cache_path=None if options.data_cache_path is None else Path(options.data_cache_path),
        eod=options.eod_token or 0,
        vocab_size=options.vocab_size,
    )
    opened = open_gpt_samples(request)
    parts = {name: opened[name] for name in SPLITS}
    for name, wanted in zip(SPLITS, _least_samples(config), strict=True):
        part = parts[name]
        if part is not None and wanted is not None and part.packer.num_samples < wanted:
            raise ValueError(
                f"--packing megatron: the {name} split has {part.packer.num_samples} samples, this run takes {wanted}; "
                "corpora without weights are read once: give weights, or fewer --train-iters or --eval-iters"
            )
    return RunData(
        {name: None if part is None else part.documents for name, part in parts.items()},
        {name: part.packer for name, part in parts.items() if part is not None},
        validation_sets={name: _set_of_samples(request, source) for name, source in sets.items()},
    )


def _set_of_samples(request: GPTSamples, source: BlendSource) -> ValidationSet:
    """Returns all of Megatron's samples of one corpus of validation."""
    part = open_gpt_samples(
        replace(request, num_samples=(0, None, 0), blend_per_split={"valid": [source]})
    )["valid"]
    assert part is not None
    return ValidationSet(part.documents, part.packer)


def _num_samples(config: TrainConfig) -> tuple[int, int | None, int]:
    """Returns how many samples Megatron-LM asks of each split, None for one epoch: its order depends on the number."""
    steps = config.steps
    size = steps.global_batch_size
    if steps.plan_only:
        return steps.plan_batches * size, 0, 0
    train: int = steps.train_samples or max(steps.train_iters, 1) * size
    num_evaluations = 1
    if steps.eval_interval and not steps.skip_train:
        skipped = (steps.start_eval_at_iter or 0) // steps.eval_interval
        num_evaluations = max(1 + steps.train_iters // steps.eval_interval - skipped, 1)
    evaluated = steps.eval_iters * steps.eval_global_batch_size
    return train, None if steps.full_validation else num_evaluations * evaluated, evaluated


def _least_samples(config: TrainConfig) -> tuple[int, int | None, int]:
    """Returns how many samples of each split are taken: an evaluation at the last step is the last one."""
    steps, (train, valid, test) = config.steps, _num_samples(config)
    evaluated = steps.eval_iters * steps.eval_global_batch_size
    is_last = steps.eval_interval and steps.train_iters % steps.eval_interval == 0
    if is_last and valid is not None and valid > evaluated:
        valid -= evaluated
    return train, valid, test


def _mock_documents(config: TrainConfig) -> DocumentSet:
    """Returns documents that count upwards from a random start, of log-normal length.

    The same on every rank.
    """
    size, longest = config.data.vocab_size, config.data.seq_length
    assert size is not None
    generator = np.random.default_rng(config.steps.seed)
    median = max(16.0, longest / 8)
    lengths = np.exp(generator.normal(np.log(median), 1.0, _NUM_MOCK_DOCUMENTS))
    prefix = _removed_at_exit() / "mock"
    with IndexedWriter(prefix, dtype=token_dtype(size)) as writer:
        for length in lengths.astype(np.int64).clip(2, longest):
            start, step = generator.integers(0, size), generator.integers(1, 4)
            writer.add_document((start + step * np.arange(length)) % size)
        writer.finish()
    return open_documents(prefix)
