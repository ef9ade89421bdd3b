"""Workloads by name: document lengths as people train on them, and the masks that benchmarks compare.

    lengths = document_lengths("W1", num_tokens=1 << 20, seed=0)     # sum to num_tokens, the last one cut
    mask = named_mask("causal_document", 1 << 20, workload="W1", seed=0)

Lengths are drawn from published statistics (histograms, quantiles, shares), seeded, with nothing but uniform
numbers from the generator, so that they are the same with every NumPy. Masks are those of LongCA-bench (14
names), UltraAttn (6), three that packed training mixes, and every builder of `megatron_cp.mask`; at any length.
"""

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from megatron_cp import mask as masks
from megatron_cp.mask import AttentionMask
from megatron_cp.mask.interval import IntArray
from megatron_cp.plan.schema import FloatArray

Draw = Callable[[FloatArray, int], FloatArray]
"""From uniform numbers `[n, 2]` and the pack's tokens to lengths `[n]`."""

MAX_TOKENS = 1 << 31  # of a pack: its token ids alone are 16 GiB, in every plan
WINDOW = 1024
VIDEO_BLOCK = 1024
ATTENTION_CHUNK = 8192  # Llama 4
DIFFUSION_BLOCK = 32
BLOCK_DENSITY = 0.2
MAX_BLOCKS = (
    256  # per side of a block-sparse table: larger blocks beyond, so that slices stay countable
)
EQUAL_LENGTH = 4096
LONG_EVERY = 909  # 0.11 % of documents
T = TypeVar("T")


@dataclass(frozen=True)
class Workload:
    """A distribution of document lengths."""

    name: str
    why: str
    draw: Draw


@dataclass(frozen=True)
class NamedMask:
    """A mask at any length; `build(lengths, num_tokens, uniform numbers)`."""

    name: str
    has_documents: bool
    build: Callable[[IntArray, int, FloatArray], AttentionMask]


# ---------------------------------------------------------------------- document lengths


def _from_bins(edges: Sequence[float], shares: Sequence[float]) -> Draw:
    """Draws uniformly inside bins `(edges[i], edges[i+1]]` that hold `shares[i]` of the documents."""
    ends = np.cumsum(shares) / sum(shares)
    low, high = np.array(edges[:-1]), np.array(edges[1:])

    def draw(uniform: FloatArray, num_tokens: int) -> FloatArray:
        which = np.minimum(np.searchsorted(ends, uniform[:, 0], side="right"), len(low) - 1)
        return low[which] + 1 + uniform[:, 1] * (high - low - 1)[which]

    return draw


def _from_quantiles(shares: Sequence[float], lengths: Sequence[float]) -> Draw:
    """Draws from a distribution known by quantiles, log-linear between them."""
    return lambda uniform, num_tokens: np.exp(np.interp(uniform[:, 0], shares, np.log(lengths)))


def _log_normal(median: float, sigma: float) -> Draw:
    def draw(uniform: FloatArray, num_tokens: int) -> FloatArray:
        normal = np.sqrt(-2 * np.log1p(-uniform[:, 0])) * np.cos(2 * np.pi * uniform[:, 1])
        return median * np.exp(sigma * normal)

    return draw


def _log_uniform(low: float, high: float) -> Draw:
    return lambda uniform, num_tokens: low * (high / low) ** uniform[:, 0]


def _at_most_a_quarter(draw: Draw) -> Draw:
    """MagiAttention cuts every document at a quarter of the pack."""
    return lambda uniform, num_tokens: np.minimum(draw(uniform, num_tokens), num_tokens / 4)


def _bimodal(uniform: FloatArray, num_tokens: int) -> FloatArray:
    """Short chats, and every LONG_EVERY-th document, the first one included, of up to 300K tokens."""
    lengths = np.minimum(_log_normal(600, 0.8)(uniform, num_tokens), 8192)
    long = np.minimum(_log_uniform(32_768, 300_000)(uniform, num_tokens), num_tokens / 2)
    return np.where(np.arange(len(lengths)) % LONG_EVERY == 0, long, lengths)


def _longca(uniform: FloatArray, num_tokens: int) -> FloatArray:
    """Returns the distribution that LongCA-bench uses at this length of the pack."""
    name = "pile" if num_tokens <= 12 << 10 else "prolong64k"
    name = name if num_tokens < 64 << 10 else "prolong512k"
    return WORKLOADS[name].draw(uniform, num_tokens)


_MAGI_BINS = (0, 10, 50, 100, 200, 500, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 196608)
_MAGI_SHARES = (
    0.22, 2.91, 5.20, 10.23, 28.19, 24.64, 15.65, 7.34, 3.05, 1.29, 0.85, 0.14, 0.17, 0.14,
)  # fmt: skip
_MACHINE_BINS = (0, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 1_000_000)
_MACHINE_SHARES = (45.6, 22.5, 12.8, 8.7, 5.8, 3.1, 1.05, 0.33, 0.16)

WORKLOADS: Mapping[str, Workload] = {
    one.name: one
    for one in (
        Workload(
            "W1",
            "MagiAttention's histogram of 13.5M documents, cut at a quarter of the pack",
            _at_most_a_quarter(_from_bins(_MAGI_BINS, _MAGI_SHARES)),
        ),
        Workload(
            "W2", "log-normal, median 1.9K, fitted to DistCA's ProLong", _log_normal(1914, 0.90)
        ),
        Workload(
            "W3",
            "DistCA's WLB-like quantiles: most of the area in documents beyond 64K",
            _from_quantiles(
                (0, 0.1, 0.5, 0.9, 0.95, 0.99, 0.999, 1),
                (16, 646, 3227, 5784, 6110, 26_070, 119_836, 124_913),
            ),
        ),
        Workload("W4", "LongAlign-like, 8K to 64K", _log_uniform(8192, 65_536)),
        Workload("W5", "bimodal: 0.11 % long documents among short ones", _bimodal),
        Workload(
            "W6",
            "one whole document: balance is easy, volume is at its maximum",
            lambda uniform, num_tokens: np.full(len(uniform), float(num_tokens)),
        ),
        Workload(
            "W7",
            "all equal, 4K: the best case of a split in order",
            lambda uniform, num_tokens: np.full(len(uniform), float(EQUAL_LENGTH)),
        ),
        Workload(
            "W8",
            "text files of a development machine, by their histogram",
            _from_bins(_MACHINE_BINS, _MACHINE_SHARES),
        ),
        Workload("longca", "what LongCA-bench draws at this length of the pack", _longca),
        Workload(
            "pile",
            "LongCA-bench up to 12K tokens",
            _from_bins(
                (0, 256, 512, 1056, 2048, 4096, 7584, 14_208, 9_300_000),
                (0.498, 0.222, 0.129, 0.066, 0.042, 0.0308, 0.010, 0.0022),
            ),
        ),
        Workload(
            "prolong64k",
            "LongCA-bench from 12K to 64K tokens",
            _from_bins(
                (0, 256, 512, 1056, 2048, 4768, 8928, 50_272, 61_920),
                (0.354, 0.259, 0.232, 0.093, 0.0405, 0.010, 0.010, 0.0015),
            ),
        ),
        Workload(
            "prolong512k",
            "LongCA-bench from 64K tokens on",
            _from_bins(
                (0, 256, 512, 1024, 2048, 4544, 10_912, 475_872),
                (0.383, 0.263, 0.213, 0.082, 0.0417, 0.010, 0.0073),
            ),
        ),
    )
}


def document_lengths(workload: str, num_tokens: int, seed: int = 0) -> IntArray:
    """Returns lengths of at least 1 that sum to `num_tokens`; the last document is cut.

    Raises ValueError for an unknown workload (naming the nearest), fewer than one token or more than MAX_TOKENS.
    """
    rule = _known("workload", workload, WORKLOADS)
    _check_tokens(num_tokens)
    rng = np.random.default_rng(seed)
    drawn = [np.zeros(0, dtype=np.int64)]
    while sum(int(part.sum()) for part in drawn) < num_tokens:
        lengths = rule.draw(rng.random((LONG_EVERY, 2)), num_tokens)
        drawn.append(np.maximum(1, np.floor(lengths)).astype(np.int64))
    return fitted(np.concatenate(drawn), num_tokens)


def fitted(lengths: IntArray, num_tokens: int) -> IntArray:
    """Returns the first documents that fill `num_tokens`, again from the first where there are too few.

    The last document is cut. Raises ValueError for lengths that hold no token.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    total = int(lengths.sum())
    if (lengths < 0).any() or total == 0:
        raise ValueError(
            f"lengths={lengths[:8].tolist()} must hold a token and no negative number; give document lengths"
        )
    ends = np.cumsum(np.tile(lengths, -(-num_tokens // total)))
    ends = np.append(ends[ends < num_tokens], num_tokens)
    sizes = np.diff(ends, prepend=0)
    return sizes[sizes > 0]


# ---------------------------------------------------------------------- masks


def _block_causal_documents(
    lengths: IntArray, num_tokens: int, uniform: FloatArray
) -> AttentionMask:
    """LongCA-bench draws its own documents here: 1 to 8 blocks each."""
    blocks = 1 + (uniform * 8).astype(np.int64)
    return masks.block_causal_documents(fitted(blocks * VIDEO_BLOCK, num_tokens), VIDEO_BLOCK)


def _block_sparse(lengths: IntArray, num_tokens: int, uniform: FloatArray) -> AttentionMask:
    size = max(128, math.ceil(num_tokens / MAX_BLOCKS))
    count = math.ceil(num_tokens / size)
    table = np.resize(uniform, (count, count)) < BLOCK_DENSITY
    return masks.block_sparse(table, size, num_queries=num_tokens, num_keys=num_tokens)


def _variable_block_sparse(
    lengths: IntArray, num_tokens: int, uniform: FloatArray
) -> AttentionMask:
    mean = max(512, math.ceil(4 * num_tokens / MAX_BLOCKS))
    sizes = fitted((mean * (0.25 + 1.5 * uniform[:1024])).astype(np.int64), num_tokens)
    table = np.resize(uniform[::-1], (len(sizes), len(sizes))) < BLOCK_DENSITY
    return masks.block_sparse(table, sizes)


def _global_window(lengths: IntArray, num_tokens: int, uniform: FloatArray) -> AttentionMask:
    width = 1 + int(uniform[0] * max(0, num_tokens // 3 - 1))
    return masks.global_sliding_window(num_tokens, min(width, num_tokens), min(width, num_tokens))


def _mixed(lengths: IntArray, num_tokens: int, uniform: FloatArray) -> AttentionMask:
    """Documents of four kinds in turn: causal, full, a prefix of an eighth, a window."""
    kinds: list[str | tuple[str | int, ...]] = []
    for index, length in enumerate(lengths.tolist()):
        kinds.append(("causal", "full", ("prefix", length // 8), ("window", WINDOW))[index % 4])
    return masks.documents(lengths, within=kinds)


def _image_spans(lengths: IntArray, num_tokens: int, uniform: FloatArray) -> AttentionMask:
    """Every second document is an image."""
    end = np.cumsum(lengths)
    return masks.image_spans(num_tokens, np.stack([end - lengths, end], axis=1)[1::2])


def _block_diffusion(lengths: IntArray, num_tokens: int, uniform: FloatArray) -> AttentionMask:
    """Half of the pack is noisy, half clean; of an odd number the last token is on its own."""
    half = num_tokens // 2
    pairs = masks.block_diffusion(half, max(DIFFUSION_BLOCK, math.ceil(half / MAX_BLOCKS)))
    return masks.concat([pairs, masks.full(1)]) if num_tokens % 2 else pairs


_BENCHMARK_MASKS: Mapping[str, NamedMask] = {
    one.name: one
    for one in (
        # LongCA-bench, fourteen
        NamedMask("full", False, lambda d, n, u: masks.full(n)),
        NamedMask("causal", False, lambda d, n, u: masks.causal(n)),
        NamedMask("full_document", True, lambda d, n, u: masks.documents(d, "full")),
        NamedMask("causal_document", True, lambda d, n, u: masks.documents(d)),
        NamedMask("sliding_window", False, lambda d, n, u: masks.sliding_window(n, WINDOW, WINDOW)),
        NamedMask("sliding_window_causal", False, lambda d, n, u: masks.sliding_window(n, WINDOW)),
        NamedMask("share_question", True, lambda d, n, u: masks.shared_question(d)),
        NamedMask("causal_blockwise", True, lambda d, n, u: masks.causal_blockwise(d)),
        NamedMask("prefix_lm_causal", False, lambda d, n, u: masks.prefix_lm(n, _some(n, u))),
        NamedMask(
            "prefix_lm_document",
            True,
            lambda d, n, u: masks.prefix_lm_documents(d, _some(int(d[0]), u)),
        ),
        NamedMask("global_sliding_window", False, _global_window),
        NamedMask("block_causal_document", False, _block_causal_documents),
        NamedMask("uniform_block_sparse", False, _block_sparse),
        NamedMask("variable_block_sparse", False, _variable_block_sparse),
        # UltraAttn, beside full and causal; strided after its remap
        NamedMask("strided", False, lambda d, n, u: masks.strided(n, remapped=True)),
        NamedMask("global_local", False, lambda d, n, u: masks.global_local(n)),
        NamedMask("star", False, lambda d, n, u: masks.star(n)),
        NamedMask("streaming", False, lambda d, n, u: masks.streaming(n)),
        # packed training
        NamedMask("window_document", True, lambda d, n, u: masks.documents(d, ("window", WINDOW))),
        NamedMask("mixed_document", True, _mixed),
    )
}
_MORE_BUILDERS = (
    NamedMask(
        "prefix_tree", True, lambda d, n, u: masks.prefix_tree(d, (np.arange(len(d)) - 1) // 2)
    ),
    NamedMask("image_spans", True, _image_spans),
    NamedMask("chunked_causal", False, lambda d, n, u: masks.chunked_causal(n, ATTENTION_CHUNK)),
    NamedMask("block_causal", False, lambda d, n, u: masks.block_causal(n, VIDEO_BLOCK)),
    NamedMask("block_diffusion", False, _block_diffusion),
    NamedMask("dilated", False, lambda d, n, u: masks.dilated(n, WINDOW)),
)
ALIASES: Mapping[str, str] = {
    "documents": "causal_document",
    "shared_question": "share_question",
    "prefix_lm": "prefix_lm_causal",
    "prefix_lm_documents": "prefix_lm_document",
    "block_causal_documents": "block_causal_document",
    "block_sparse": "uniform_block_sparse",
}
"""Builders of `megatron_cp.mask` whose masks benchmarks have under another name: builder -> benchmark."""

MASKS: Mapping[str, NamedMask] = {
    **_BENCHMARK_MASKS,
    **{name: replace(_BENCHMARK_MASKS[old], name=name) for name, old in ALIASES.items()},
    **{one.name: one for one in _MORE_BUILDERS},
}
BUILDER_MASKS = tuple(name for name in masks.__all__ if name in MASKS)
LONGCA_MASKS = tuple(_BENCHMARK_MASKS)[:14]
TRAINING_MASKS = (
    "causal_document",
    "full_document",
    "window_document",
    "share_question",
    "mixed_document",
)


def _some(limit: int, uniform: FloatArray) -> int:
    """Returns a number from 1 to `limit`."""
    return 1 + int(uniform[0] * limit)


def named_mask(
    name: str,
    num_tokens: int,
    *,
    workload: str = "longca",
    lengths: IntArray | None = None,
    seed: int = 0,
) -> AttentionMask:
    """Returns the mask called `name` over `num_tokens` tokens.

    Masks of documents take `lengths` (cut or repeated to fill the tokens) or draw those of `workload`.
    Raises ValueError for unknown names (with the nearest), fewer than one token and more than MAX_TOKENS.
    """
    rule = _known("mask", name, MASKS)
    _check_tokens(num_tokens)
    if lengths is not None:
        lengths = fitted(lengths, num_tokens)
    elif rule.has_documents:
        lengths = document_lengths(workload, num_tokens, seed)
    else:
        _known("workload", workload, WORKLOADS)
        lengths = np.array([num_tokens], dtype=np.int64)
    # a stream of its own, so that a mask's choices do not follow its documents' lengths
    uniform = np.random.default_rng((seed, 1)).random(MAX_BLOCKS * MAX_BLOCKS)
    return rule.build(lengths, num_tokens, uniform)


def _check_tokens(num_tokens: int) -> None:
    if (
        not isinstance(num_tokens, int)
        or isinstance(num_tokens, bool)
        or not (1 <= num_tokens <= MAX_TOKENS)
    ):
        raise ValueError(
            f"num_tokens={num_tokens!r} must be a positive integer of at most {MAX_TOKENS}, the tokens of a "
            "pack; choose a shorter one"
        )


def _known(what: str, name: str, table: Mapping[str, T]) -> T:
    if name not in table:
        near = difflib.get_close_matches(str(name), table, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"{what}={name!r} is unknown; choose one of {', '.join(table)} (nearest: {near})"
        )
    return table[name]
