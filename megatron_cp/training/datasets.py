"""The documents of a run, opened before any process group exists; its loaders, and the plans that its batches need."""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_cp.data.batch import BatchConfig, PlanRequest
from megatron_cp.data.batch_schedule import BatchSchedule
from megatron_cp.data.blend import BlendedDocuments, check_packs
from megatron_cp.data.document_set import BIDIRECTIONAL, Documents, DocumentSet
from megatron_cp.data.indexed import IndexedDataset
from megatron_cp.data.loader import LoaderConfig, PackedLoader
from megatron_cp.data.manifest import note_of_another_tokenizer
from megatron_cp.data.one_epoch import OneEpoch, packs_of_all_tokens
from megatron_cp.data.packing import Packer, PackingConfig, PackSource
from megatron_cp.data.tokenizer import Tokenizer
from megatron_cp.mcore.settings.arguments import cp_config_from_arguments
from megatron_cp.mcore.settings.validation import check_padding
from megatron_cp.plan.hardware.speeds import check_rank_speeds
from megatron_cp.training.config import TrainConfig
from megatron_cp.training.corpora import (
    RunData,
    Split,
    open_corpora,
    open_fill_in_the_middle,
    open_tokenizer,
)
from megatron_cp.training.logging.lines import print_rank_0
from megatron_cp.training.logging.text_size import bytes_per_token
from megatron_cp.training.same_samples import check_same_samples

if TYPE_CHECKING:
    from megatron_cp.training.run_state import RunState


def open_data(config: TrainConfig) -> tuple[TrainConfig, RunData]:
    """Returns the opened and checked documents, and the configuration with its vocabulary.

    Every rank does this by itself and comes to the same result. Raises ValueError or OSError with
    one line.
    """
    tokenizer = open_tokenizer(config.data)
    config = _with_vocabulary(config, tokenizer)
    fim = open_fill_in_the_middle(config.data, config.steps.seed)
    data = replace(open_corpora(config), fim=fim)
    _check_something_is_learned(data.train(), config)
    # Those of validation and test are drawn when ranks wait for each other.
    for split, documents in data.splits.items():
        is_once = split == "valid" and config.steps.full_validation
        if documents is not None and (split == "train" or config.steps.eval_iters) and not is_once:
            check_packs(documents, _packing(config, shuffle=False))
    if fim is not None and fim.tokens.eod != config.data.eod_token:
        config = config.with_note(
            f"--fim-eod-token {config.data.fim_eod_token} is not the token {config.data.eod_token} "
            "with which the tokenizer ends documents: that one is cut and moved like text"
        )
    for note in (*data.notes, *_notes_of_tokenizers(tokenizer, data)):
        config = config.with_note(note)
    return config, data


def _check_something_is_learned(documents: Documents, config: TrainConfig) -> None:
    """Raises ValueError where no token has a label: the run would end well, and only decay the weights."""
    if not config.data.reset_attention_mask or config.data.packing == "megatron":
        return  # labels cross documents
    kinds = documents.prefix_lengths
    has_label = (kinds != BIDIRECTIONAL) & (documents.lengths > np.maximum(kinds, 1))
    if not has_label.any():
        raise ValueError(
            f"no token of the training split would be learned: its {len(documents)} documents have one token, or are "
            "prefixes or bidirectional as a whole, and with --reset-attention-mask a token predicts the next of its "
            "own document; give documents with a token to predict"
        )


def _notes_of_tokenizers(tokenizer: Tokenizer | None, data: RunData) -> list[str]:
    """Returns what is to be said of corpora that the run's tokenizer did not make; ValueError for wrong ones."""
    if tokenizer is None:
        return []
    files = _token_files(data)
    notes = [note_of_another_tokenizer(p, files[p].facts, tokenizer) for p in sorted(files)]
    return [note for note in notes if note is not None]


def _with_vocabulary(config: TrainConfig, tokenizer: Tokenizer | None) -> TrainConfig:
    """Returns the configuration with the vocabulary of tokenizer or flag.

    The end-of-document token is known where a tokenizer says it.
    """
    options, eod, size = config.data, None, config.data.vocab_size
    if tokenizer is not None:
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
        raise ValueError(
            "--eod-mask-loss needs the end-of-document token, which NullTokenizer does not know (Megatron-LM takes the "
            "last of the vocabulary or the one behind it, by version); give the --tokenizer-type that made the files"
        )
    multiple, tp = options.make_vocab_size_divisible_by, config.parallel.tensor_model_parallel_size
    if options.padded_vocab_size:
        return _with_given_padding(config, size, eod)
    padded, alone = _padded(size, multiple * tp), _padded(size, multiple)
    config = config.with_arguments(vocab_size=size, padded_vocab_size=padded, eod_token=eod)
    own = size if tokenizer is None else tokenizer.vocab_size
    if padded != _padded(own, multiple * tp):
        config = config.with_note(
            f"--vocab-size {size} makes {padded} rows of embeddings; Megatron-LM makes {_padded(own, multiple * tp)} "
            f"for the tokenizer's {own} words, whatever the flag says"
        )
    if padded == alone:
        return config
    return config.with_note(
        f"the vocabulary of {size} is padded to {padded} rows for {tp} tensor-parallel ranks, as in Megatron-LM, and "
        f"would be to {alone} for one: the rows that pad are drawn with the others and count in the softmax, so losses "
        f"differ; --make-vocab-size-divisible-by {padded} with one rank gives the same"
    )


def _padded(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _with_given_padding(config: TrainConfig, size: int, eod: int | None) -> TrainConfig:
    """Returns the configuration whose model has the rows of --padded-vocab-size.

    Raises ValueError where they do not fit.
    """
    padded, tp = config.data.padded_vocab_size, config.parallel.tensor_model_parallel_size
    if padded < size or padded % tp:
        raise ValueError(
            f"--padded-vocab-size {padded} must be a multiple of --tensor-model-parallel-size {tp} and at least the "
            f"vocabulary of {size}; give another, or leave it out (--use-checkpoint-args takes the checkpoint's)"
        )
    return config.with_arguments(vocab_size=size, eod_token=eod)


def plan_request(config: TrainConfig, *, on_cuda: bool) -> PlanRequest:
    """Returns which plans every batch needs: for full layers, and for window layers if there are."""
    layers = config.model.layers_by_mask()
    cp_size = config.parallel.context_parallel_size
    planning = cp_config_from_arguments(config.namespace(), on_cuda=on_cuda)
    check_rank_speeds(planning, cp_size)
    return PlanRequest(
        cp_size=cp_size,
        config=planning,
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
) -> PackedLoader:
    """Returns the loader of a split that has documents, for this data-parallel rank.

    Training packs are shuffled and built by workers; evaluation reads its packs in order, the same
    ones every time.
    """
    documents = data.splits[split]
    assert documents is not None
    is_train = split == "train"
    options = config.data
    samples = data.samples.get(split)
    settings = LoaderConfig(
        packing=_packing(config, shuffle=is_train),
        batch=BatchConfig(
            seq_length=options.seq_length,
            reset_position_ids=options.reset_position_ids,
            reset_attention_mask=options.reset_attention_mask,
            eod_mask_loss=options.eod_mask_loss,
            labels_cross_documents=samples is not None,
            eod_token=options.eod_token,
            vocab_size=options.vocab_size,
            fim=data.fim,
        ),
        global_batch_size=BatchSchedule(config.steps.batch_schedule)
        if is_train
        else config.steps.eval_global_batch_size,
        micro_batch_size=config.steps.micro_batch_size
        if is_train
        else config.steps.eval_micro_batch_size,
        balance=samples is None,
        spans_replicas=config.parallel.spans_replicas,
        num_workers=options.num_workers if is_train else 0,
    )
    packer: PackSource | None = copy.copy(samples)  # the index is shared, the position is not
    if split == "valid" and config.steps.full_validation:
        packer = _one_epoch(
            documents, packer, settings.packing, config.steps.eval_global_batch_size
        )
    return PackedLoader(
        documents, settings, request, packer=packer, dp_rank=dp_rank, dp_size=dp_size
    )


def _one_epoch(
    documents: Documents, samples: PackSource | None, packing: PackingConfig, batch_size: int
) -> OneEpoch:
    """Returns all packs of validation, or all of Megatron's samples of it."""
    if samples is not None:
        return OneEpoch(list(samples), batch_size, samples.identity())
    packs = packs_of_all_tokens(documents, packing)
    return OneEpoch(packs, batch_size, Packer(documents.lengths, packing).identity())


def _packing(config: TrainConfig, *, shuffle: bool) -> PackingConfig:
    return PackingConfig(
        seq_length=config.data.seq_length,
        policy="keep" if config.data.packing == "keep" else "split",
        seed=config.steps.seed,
        shuffle=shuffle,
    )


def resume_loader(loader: PackedLoader, data: RunData, resumed: RunState) -> None:
    """Goes on where a checkpoint stands.

    One of Megatron-LM has no state of a loader; its samples consumed say where its own packing stood. Another packing
    has other samples: it goes on behind as many of its own.
    """
    config, consumed_samples = resumed.config, resumed.consumed_samples
    if resumed.data:
        loader.load_state_dict(resumed.data)
    elif config.data.packing == "megatron":
        if consumed_samples:
            check_same_samples(config, data, resumed.foreign_arguments)
        place = {"position": consumed_samples, "consumed_samples": consumed_samples}
        loader.load_state_dict({**loader.state_dict(), **place})
    elif consumed_samples:
        loader.skip(consumed_samples)
        print_rank_0(
            f"data: the checkpoint does not say where its data stood; the first {consumed_samples:,} packs are "
            "skipped, which are not the samples it was trained on (--packing megatron goes on exactly where "
            "Megatron-LM stopped)"
        )


def check_first_batch(config: TrainConfig, data: RunData, request: PlanRequest) -> None:
    """Draws and plans one batch in this process, as every context rank will; of evaluations too, if theirs are other.

    Raises ValueError or NotImplementedError for what planner, topology, chunks, tokens and experts
    allow.
    """
    steps, replicas = config.steps, config.parallel.data_parallel_size
    sizes = [steps.micro_batch_size]
    if steps.eval_iters or steps.full_validation:
        sizes.append(steps.eval_micro_batch_size)
    for size in dict.fromkeys(sizes):
        values: dict[str, Any] = {"num_workers": 0, "micro_batch_size": size}
        # With replicas that are planned together a layout is chosen for a step: one of a micro-batch.
        if config.parallel.spans_replicas or size != steps.micro_batch_size:
            values["batch_schedule"] = ((0, size * replicas),)
        inline = config.with_arguments(**values)
        loader = build_loader(inline, data, request, split="train", dp_rank=0, dp_size=replicas)
        plan = next(loader).plans["full"]
        loader.close()
        check_padding(config.namespace(), plan.tokens_per_rank * plan.cp_size, plan.num_tokens)


def digests(data: RunData) -> dict[str, Any]:
    """Returns what makes each split's tokens: documents, samples, and the tokenizer that cuts texts.

    Equal on all ranks of a job.
    """
    documents = {
        f"the documents of the {name} split": part.digest()
        for name, part in data.splits.items()
        if part is not None
    }
    samples = {
        f"the samples of the {name} split": packer.identity()["index"]
        for name, packer in data.samples.items()
    }
    cuts = {} if data.fim is None else {"the tokenizer": data.fim.tokenizer.unique_identifiers}
    return {**documents, **samples, **cuts}


def recorded_files(data: RunData) -> list[tuple[str, str | None]]:
    """Returns each token file with the SHA-256 that its manifest has of it, None without one."""
    files = _token_files(data).values()
    return [(str(file.bin_path), file.recorded_sha256) for file in files]


def _token_files(data: RunData) -> dict[str, IndexedDataset]:
    """Returns the token files by prefix, in the order of splits and corpora."""
    files = {}
    for documents in filter(None, data.splits.values()):
        corpora = documents.corpora if isinstance(documents, BlendedDocuments) else [documents]
        for corpus in corpora:
            assert isinstance(corpus, DocumentSet)
            files[corpus.dataset.prefix] = corpus.dataset
    return files


def verify_token_files(data: RunData) -> None:
    """Raises ValueError or OSError for the first token file that has not the SHA-256 of its manifest, or has none.

    The ranks of a node share the files: each looks at some.
    """
    files = _token_files(data)
    own, size = (int(os.environ.get(name, alone)) for name, alone in _PLACE_ON_NODE)
    for prefix in sorted(files)[own % size :: size]:
        files[prefix].verify()


# Of torchrun; a rank without them checks all files itself.
_PLACE_ON_NODE = (("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"))


def describe(data: RunData, tokenizer: Tokenizer | None = None) -> dict[str, Any]:
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
            "bytes_over_tokens": bytes_per_token(documents, tokenizer),
            "length_edges": edges[: last + 1].tolist(),
            "documents_by_length": counts[:last].tolist(),
            "tokens_by_length": tokens[:last].astype(int).tolist(),
            "area_by_length": area[:last].astype(int).tolist(),
        }
    return result
