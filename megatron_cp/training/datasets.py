"""The documents of a run, its loaders, and the plans that its batches need.

Opened before any process group exists.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megatron_cp.data.batch import PlanRequest
from megatron_cp.data.document_set import DocumentSet, open_documents, split_documents
from megatron_cp.data.indexed import token_dtype
from megatron_cp.data.indexed_writer import IndexedWriter
from megatron_cp.data.loader import LoaderConfig, PackedLoader
from megatron_cp.data.tokenizer import build_tokenizer
from megatron_cp.mcore.arguments import cp_config_from_arguments

Split = Literal["train", "valid", "test"]
_DEFAULT_SPLIT = "969,30,1"  # Megatron-LM's
_NUM_MOCK_DOCUMENTS = 512


@dataclass(frozen=True)
class RunData:
    """The documents of each split; None where a split has no token."""

    splits: dict[Split, DocumentSet | None]
    eod: int | None

    def train(self) -> DocumentSet:
        """The training documents. Raises ValueError if there are none."""
        documents = self.splits["train"]
        if documents is None:
            raise ValueError(
                "the training split holds no token; give more documents or another --split"
            )
        return documents


def open_data(args: Namespace) -> RunData:
    """Opens and checks tokenizer and token files.

    Completes ``vocab_size``, ``padded_vocab_size`` and ``eod_token``.

    Every rank does this by itself and comes to the same result. Raises ValueError or OSError with
    one line.
    """
    eod = _complete_vocabulary(args)
    if args.mock_data:
        documents = _mock_documents(args)
        splits = split_documents(documents, args.split or _DEFAULT_SPLIT)
    elif args.data_path:
        splits = split_documents(open_documents(args.data_path[0]), args.split or _DEFAULT_SPLIT)
    else:
        paths = (args.train_data_path, args.valid_data_path, args.test_data_path)
        splits = [open_documents(path[0]) if path else None for path in paths]  # type: ignore[misc]
    names: tuple[Split, ...] = ("train", "valid", "test")
    kept = {
        name: documents if documents is not None and documents.num_tokens else None
        for name, documents in zip(names, splits, strict=True)
    }
    data = RunData(kept, eod)
    data.train()
    return data


def _complete_vocabulary(args: Namespace) -> int | None:
    """Sets vocabulary sizes from tokenizer or flag.

    The end-of-document token, where a tokenizer says it.
    """
    eod = None
    if args.tokenizer_type is not None and args.tokenizer_type != "NullTokenizer":
        tokenizer = build_tokenizer(
            args.tokenizer_type,
            args.tokenizer_model,
            vocab_file=args.vocab_file,
            merge_file=args.merge_file,
        )
        eod = tokenizer.eod
        if args.vocab_size is not None and args.vocab_size < tokenizer.vocab_size:
            raise ValueError(
                f"--vocab-size {args.vocab_size} must be at least the tokenizer's "
                f"{tokenizer.vocab_size}; drop the flag"
            )
        args.vocab_size = args.vocab_size or tokenizer.vocab_size
    if args.vocab_size is None or args.vocab_size <= 0:
        raise ValueError(
            "the vocabulary is unknown; give --tokenizer-type (and --tokenizer-model), or "
            "--vocab-size"
        )
    if args.eod_mask_loss and eod is None:
        raise ValueError("--eod-mask-loss needs the end-of-document token; give --tokenizer-type")
    unit = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    args.padded_vocab_size = -(-args.vocab_size // unit) * unit
    args.eod_token = eod
    return eod


def _mock_documents(args: Namespace) -> DocumentSet:
    """Documents that count upwards from a random start, of log-normal length.

    The same on every rank.
    """
    generator = np.random.default_rng(args.seed)
    median = max(16.0, args.seq_length / 8)
    lengths = (
        np.exp(generator.normal(np.log(median), 1.0, _NUM_MOCK_DOCUMENTS))
        .astype(np.int64)
        .clip(2, args.seq_length)
    )
    folder = Path(tempfile.mkdtemp(prefix="megatron_cp_mock_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    prefix = folder / "mock"
    with IndexedWriter(prefix, dtype=token_dtype(args.vocab_size)) as writer:
        for length in lengths:
            start, step = generator.integers(0, args.vocab_size), generator.integers(1, 4)
            writer.add_document((start + step * np.arange(length)) % args.vocab_size)
        writer.finish()
    return open_documents(prefix)


def plan_request(args: Namespace, *, on_cuda: bool) -> PlanRequest:
    """Which plans every batch needs.

    For full layers, and for window layers where the model has some.
    """
    num_window = sum(is_window_layer(args, layer) for layer in range(1, args.num_layers + 1))
    return PlanRequest(
        cp_size=args.context_parallel_size,
        config=cp_config_from_arguments(args, on_cuda=on_cuda),
        num_full_layers=args.num_layers - num_window,
        num_window_layers=num_window,
        window=args.window_size if num_window else None,
    )


def is_window_layer(args: Namespace, layer: int) -> bool:
    """Whether layer ``layer`` (from 1) looks through the sliding window.

    Source: Megatron-Core's ``is_layer_window_attention``: every Nth layer is full, or a list of 0
    (full) and 1 (window).
    """
    if args.window_size is None:
        return False
    frequency = args.window_attn_skip_freq
    if frequency is None:
        return True
    if isinstance(frequency, int):
        return layer % frequency != 0
    return bool(frequency[layer - 1])


def build_loader(
    args: Namespace,
    data: RunData,
    request: PlanRequest,
    *,
    split: Split,
    dp_rank: int,
    dp_size: int,
) -> PackedLoader | None:
    """The loader of a split for this data-parallel rank; None where the split is empty.

    Training packs are shuffled and built by workers; evaluation reads its packs in order, the same
    ones every time.
    """
    documents = data.splits[split]
    if documents is None:
        return None
    is_train = split == "train"
    config = LoaderConfig(
        seq_length=args.seq_length,
        global_batch_size=args.global_batch_size,
        micro_batch_size=args.micro_batch_size,
        seed=args.seed,
        shuffle=is_train,
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        eod_token=data.eod,
        vocab_size=args.vocab_size,
        num_workers=args.num_workers if is_train else 0,
    )
    return PackedLoader(documents, config, request, dp_rank=dp_rank, dp_size=dp_size)


def check_first_batch(args: Namespace, data: RunData, request: PlanRequest) -> None:
    """Draws and plans one batch in this process, as every context rank will.

    Raises ValueError or NotImplementedError for what planner, topology, chunks and tokens allow.
    """
    inline = Namespace(**{**vars(args), "num_workers": 0})
    loader = build_loader(
        inline, data, request, split="train", dp_rank=0, dp_size=args.data_parallel_size
    )
    assert loader is not None
    next(loader)
    loader.close()


def digests(data: RunData) -> dict[str, str]:
    """The digest of each split's documents: equal on all ranks of a job."""
    return {
        f"the documents of the {name} split": documents.digest()
        for name, documents in data.splits.items()
        if documents is not None
    }


def describe(data: RunData) -> dict[str, Any]:
    """Sizes of each split for the run's records, with the quantiles of its document lengths."""
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
