"""Megatron-Core's own token files and splits, asked in another process.

Importing Megatron-Core here would put it, without the CPU stand-ins, into every rank that later tests fork.
"""

import functools
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from megatron_cp.mcore.versions import triton_free
from megatron_cp.processes import die_with_parent
from tests.processes import HANG_SECONDS


def asked_elsewhere(function):
    """Makes `function` run in the one process that has imported Megatron-Core."""

    @functools.wraps(function)
    def ask(*args, **kwargs):
        return _process().submit(_run, function.__name__, args, kwargs).result(timeout=HANG_SECONDS)

    _FUNCTIONS[function.__name__] = function
    return ask


_FUNCTIONS = {}


@functools.lru_cache
def _process():
    # Nobody closes it: it ends with the session, however that ends.
    return ProcessPoolExecutor(1, get_context("spawn"), die_with_parent, (os.getpid(),))


def _run(name, args, kwargs):
    triton_free.install()
    return _FUNCTIONS[name](*args, **kwargs)


@asked_elsewhere
def write_documents(prefix, documents, dtype, sequence_lengths=None):
    """Writes documents (lists of arrays) with Megatron's builder."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for index, tokens in enumerate(documents):
        lengths = [len(tokens)] if sequence_lengths is None else sequence_lengths[index]
        builder.add_document(tokens, lengths)
    builder.finalize(f"{prefix}.idx")


@asked_elsewhere
def read_documents(prefix):
    """Returns (documents as lists, document indices as a list) by Megatron's reader."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix), mmap=True)
    return [dataset[i].tolist() for i in range(len(dataset))], dataset.document_indices.tolist()


@asked_elsewhere
def split_matrix(split):
    """Returns Megatron's bookends of a --split text: a list of (begin, end) shares or None."""
    from megatron.core.datasets import blended_megatron_dataset_config as config

    return config.convert_split_vector_to_split_matrix(config.parse_and_normalize_split(split))


@asked_elsewhere
def blend_of_words(words):
    """Returns Megatron's (prefixes, weights or None) of a --data-path; None where it refuses."""
    from megatron.core.datasets.utils import get_blend_from_list

    try:
        return get_blend_from_list(words)
    except AssertionError:
        return None


@asked_elsewhere
def blending_order(weights, size):
    """Returns the corpus of each of the first `size` samples of a blend."""
    import numpy as np
    from megatron.core.datasets import helpers

    corpus, sample = np.zeros(size, dtype=np.int16), np.zeros(size, dtype=np.int64)
    helpers.build_blending_indices(corpus, sample, np.array(weights), len(weights), size, False)
    return corpus.tolist()


@asked_elsewhere
def ramped_sizes(start, increment, packs, final, consumed):
    """Returns Megatron-Core's global batch size of a ramp at each number of packs consumed; None since 0.19.2."""
    from megatron.core import num_microbatches_calculator as calculators

    ramp = getattr(calculators, "RampupBatchsizeNumMicroBatchesCalculator", None)
    if ramp is None:
        return None
    sizes = []
    for count in consumed:
        calculator = ramp(final, 1, 1, False, 1, start, increment, packs)
        calculator.update(count, consistency_check=False)
        sizes.append(calculator.get_current_global_batch_size())
    return sizes


class Tokens:
    """A tokenizer for Megatron's datasets: no text, no padding."""

    vocab_size = 100_000

    def __init__(self, eod):
        self.eod = eod
        self.unique_identifiers = {"class": "Tokens", "eod": eod}


@asked_elsewhere
def gpt_samples(which, sizes, count, cache, **config):
    """Returns (length, first `count` samples as lists) of a split by Megatron's own datasets."""
    import torch.distributed as dist
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    tokenizer = Tokens(config.pop("eod"))
    settings = GPTDatasetConfig(path_to_cache=str(cache), tokenizer=tokenizer, **config)
    try:
        splits = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, settings).build()
    finally:
        dist.destroy_process_group()
    samples = splits[which]
    keys = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")
    return len(samples), [
        {key: samples[i][key].squeeze(0).tolist() for key in keys} for i in range(count)
    ]


@asked_elsewhere
def token_ids(library, path, texts, **settings):
    """Returns (eod, pad, vocab_size, ids of each text) of a tokenizer of Megatron-Core."""
    from megatron.core.tokenizers import MegatronTokenizer

    tokenizer = MegatronTokenizer.from_pretrained(
        tokenizer_path=str(path), metadata_path={"library": library}, **settings
    )
    ids = [[int(i) for i in tokenizer.tokenize(text)] for text in texts]
    return tokenizer.eod, tokenizer.pad, tokenizer.vocab_size, ids


@asked_elsewhere
def tiktoken_patterns():
    """Returns Megatron's patterns v1 and v2."""
    from megatron.core.tokenizers.text.libraries import tiktoken_tokenizer as library

    return {"v1": library._PATTERN_TIKTOKEN_V1, "v2": library._PATTERN_TIKTOKEN_V2}
