"""The documents of a run, its loaders, and the plans that its batches need.

Opened before any process group exists.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megatron_cp.data.batch import BatchConfig, PlanRequest
from megatron_cp.data.document_set import DocumentSet, open_documents, split_documents
from megatron_cp.data.indexed import token_dtype
from megatron_cp.data.indexed_writer import IndexedWriter
from megatron_cp.data.loader import LoaderConfig, PackedLoader
from megatron_cp.data.packing import PackingConfig
from megatron_cp.data.tokenizer import TokenizerFiles, build_tokenizer
from megatron_cp.mcore.arguments import cp_config_from_arguments
from megatron_cp.training.config import TrainConfig

Split = Literal["train", "valid", "test"]
_DEFAULT_SPLIT = "969,30,1"  # Megatron-LM's
_NUM_MOCK_DOCUMENTS = 512


@dataclass(frozen=True)
class RunData:
    """The documents of each split; None where a split has no token."""

    splits: dict[Split, DocumentSet | None]

    def train(self) -> DocumentSet:
        """Returns the training documents. Raises ValueError if there are none."""
        documents = self.splits["train"]
        if documents is None:
            raise ValueError(
                "the training split holds no token; give more documents or another --split"
            )
        return documents


def open_data(config: TrainConfig) -> tuple[TrainConfig, RunData]:
    """Returns the opened and checked documents, and the configuration with its vocabulary.

    Every rank does this by itself and comes to the same result. Raises ValueError or OSError with
    one line.
    """
    config = _with_vocabulary(config)
    options = config.data
    if options.mock_data:
        splits = split_documents(_mock_documents(config), options.split or _DEFAULT_SPLIT)
    elif options.data_path:
        documents = open_documents(options.data_path[0])
        splits = split_documents(documents, options.split or _DEFAULT_SPLIT)
    else:
        paths = (options.train_data_path, options.valid_data_path, options.test_data_path)
        splits = [open_documents(path[0]) if path else None for path in paths]  # type: ignore[misc]
    names: tuple[Split, ...] = ("train", "valid", "test")
    kept = {
        name: documents if documents is not None and documents.num_tokens else None
        for name, documents in zip(names, splits, strict=True)
    }
    data = RunData(kept)
    data.train()
    return config, data


def _with_vocabulary(config: TrainConfig) -> TrainConfig:
    """Returns the configuration with the vocabulary of tokenizer or flag.

    The end-of-document token is known where a tokenizer says it.
    """
    options, eod, size = config.data, None, config.data.vocab_size
    if options.tokenizer_type is not None and options.tokenizer_type != "NullTokenizer":
        names = (field.name for field in fields(TokenizerFiles))
        files = TokenizerFiles(**{name: getattr(options, name) for name in names})
        tokenizer = build_tokenizer(options.tokenizer_type, files)
        eod = tokenizer.eod
        if size is not None and size < tokenizer.vocab_size:
            raise ValueError(
                f"--vocab-size {size} must be at least the tokenizer's {tokenizer.vocab_size}; "
                "drop the flag"
            )
        size = size or tokenizer.vocab_size
    if size is None or size <= 0:
        raise ValueError(
            "the vocabulary is unknown; give --tokenizer-type (and --tokenizer-model), or "
            "--vocab-size"
        )
    if options.eod_mask_loss and eod is None:
        raise ValueError("--eod-mask-loss needs the end-of-document token; give --tokenizer-type")
    unit = options.make_vocab_size_divisible_by * config.parallel.tensor_model_parallel_size
    return config.with_arguments(
        vocab_size=size, padded_vocab_size=-(-size // unit) * unit, eod_token=eod
    )


def _mock_documents(config: TrainConfig) -> DocumentSet:
    """Returns documents that count upwards from a random start, of log-normal length.

    The same on every rank.
    """
    size, longest = config.data.vocab_size, config.data.seq_length
    assert size is not None
    generator = np.random.default_rng(config.steps.seed)
    median = max(16.0, longest / 8)
    lengths = np.exp(generator.normal(np.log(median), 1.0, _NUM_MOCK_DOCUMENTS))
    folder = Path(tempfile.mkdtemp(prefix="megatron_cp_mock_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    prefix = folder / "mock"
    with IndexedWriter(prefix, dtype=token_dtype(size)) as writer:
        for length in lengths.astype(np.int64).clip(2, longest):
            start, step = generator.integers(0, size), generator.integers(1, 4)
            writer.add_document((start + step * np.arange(length)) % size)
        writer.finish()
    return open_documents(prefix)


def plan_request(config: TrainConfig, *, on_cuda: bool) -> PlanRequest:
    """Returns which plans every batch needs: for full layers, and for window layers if there are."""
    layers = config.model.layers_by_mask()
    return PlanRequest(
        cp_size=config.parallel.context_parallel_size,
        config=cp_config_from_arguments(config.namespace(), on_cuda=on_cuda),
        num_full_layers=layers["full"],
        num_window_layers=layers["window"],
        window=config.model.window_size if layers["window"] else None,
    )


def build_loader(
    config: TrainConfig,
    data: RunData,
    request: PlanRequest,
    *,
    split: Split,
    dp_rank: int,
    dp_size: int,
) -> PackedLoader | None:
    """Returns the loader of a split for this data-parallel rank; None where the split is empty.

    Training packs are shuffled and built by workers; evaluation reads its packs in order, the same
    ones every time.
    """
    documents = data.splits[split]
    if documents is None:
        return None
    is_train = split == "train"
    options = config.data
    settings = LoaderConfig(
        packing=PackingConfig(
            seq_length=options.seq_length, seed=config.steps.seed, shuffle=is_train
        ),
        batch=BatchConfig(
            seq_length=options.seq_length,
            reset_position_ids=options.reset_position_ids,
            reset_attention_mask=options.reset_attention_mask,
            eod_mask_loss=options.eod_mask_loss,
            eod_token=options.eod_token,
            vocab_size=options.vocab_size,
        ),
        global_batch_size=config.steps.global_batch_size,
        micro_batch_size=config.steps.micro_batch_size,
        num_workers=options.num_workers if is_train else 0,
    )
    return PackedLoader(documents, settings, request, dp_rank=dp_rank, dp_size=dp_size)


def check_first_batch(config: TrainConfig, data: RunData, request: PlanRequest) -> None:
    """Draws and plans one batch in this process, as every context rank will.

    Raises ValueError or NotImplementedError for what planner, topology, chunks and tokens allow.
    """
    inline = config.with_arguments(num_workers=0)
    loader = build_loader(
        inline, data, request, split="train", dp_rank=0, dp_size=config.parallel.data_parallel_size
    )
    assert loader is not None
    next(loader)
    loader.close()


def digests(data: RunData) -> dict[str, str]:
    """Returns the digest of each split's documents: equal on all ranks of a job."""
    return {
        f"the documents of the {name} split": documents.digest()
        for name, documents in data.splits.items()
        if documents is not None
    }


def describe(data: RunData) -> dict[str, Any]:
    """Returns the sizes of each split for the run's records, with the quantiles of its document lengths."""
    result: dict[str, Any] = {}
    for name, documents in data.splits.items():
        if documents is None:
            continue
        lengths = documents.lengths
        edges = 2 ** np.arange(0, 34)
        counts, _ = np.histogram(lengths, bins=edges)
        tokens, _ = np.histogram(lengths, bins=edges, weights=lengths.astype(np.float64))
        area, _ = np.histogram(
            lengths, bins=edges, weights=lengths.astype(np.float64) * (lengths + 1) / 2
        )
        last = int(np.flatnonzero(counts)[-1]) + 1 if counts.any() else 0
        result[name] = {
            "documents": len(documents),
            "tokens": documents.num_tokens,
            "length_edges": edges[: last + 1].tolist(),
            "documents_by_length": counts[:last].tolist(),
            "tokens_by_length": tokens[:last].astype(int).tolist(),
            "area_by_length": area[:last].astype(int).tolist(),
        }
    return result
