"""Masks of one sequence: full, causal, windows, chunks, prefixes, global tokens, image spans.

Every builder states its formula for "query q may see key k" over the whole grid, and draws it small
(`#` is allowed, rows are queries). All of them return disjoint slices, a handful wherever the
formula permits; none builds anything of size queries x keys. Packed documents are in `packed.py`,
block tables in `patterns.py`.
"""

from collections.abc import Sequence

import numpy as np

from megatron_cp.mask.checks import (
    as_count,
    as_ranges,
    as_tokens,
    as_window_side,
    check_number_of_slices,
)
from megatron_cp.mask.interval import IntArray
from megatron_cp.mask.mask import AttentionMask
from megatron_cp.mask.slice import OPEN, make_rows


def full(num_queries: int, num_keys: int | None = None) -> AttentionMask:
    """Returns the mask of all pairs; `num_keys` defaults to `num_queries`.

    # # #
    # # #        allowed(q, k) = true
    # # #
    """
    num_queries, num_keys = _grid(num_queries, num_keys)
    return AttentionMask(num_queries, num_keys, make_rows(0, num_queries, 0, num_keys))


def causal(num_queries: int, num_keys: int | None = None) -> AttentionMask:
    """Returns the mask of keys not after the query, aligned at the bottom right of the grid.

        # . .
        # # .        allowed(q, k) = k - q <= num_keys - num_queries
        # # #

    Source: the alignment is FlashAttention's since 2.1; with more queries than keys the first rows
    are empty.
    """
    num_queries, num_keys = _grid(num_queries, num_keys)
    rows = make_rows(0, num_queries, 0, num_keys, hi=num_keys - num_queries)
    return AttentionMask(num_queries, num_keys, rows)


def sliding_window(num_tokens: int, left: int, right: int = 0, num_sink: int = 0) -> AttentionMask:
    """Returns a window of `left` keys before and `right` after the query, and first keys as sinks.

        # . . . . .
        # # . . . .      left=1, right=0, num_sink=1
        # # # . . .
        # . # # . .      allowed(q, k) = k - q <= right
        # . . # # .                      and (q - k <= left or k < num_sink)
        # . . . # #

    Both ends are inclusive, so a query sees `left + right + 1` keys; -1 means no limit on that
    side. Sinks widen the left side only: with right=0 the mask stays causal. Source: window_size of
    FlashAttention and Megatron; Mistral, Gemma, gpt-oss (which say "window 128" for left=127);
    sinks: StreamingLLM (arXiv 2309.17453).
    """
    num_tokens, num_sink = as_tokens("num_tokens", num_tokens), as_count("num_sink", num_sink)
    reach_left, reach_right = as_window_side("left", left), as_window_side("right", right)
    hi = OPEN if reach_right is None else reach_right
    if reach_left is None:
        return AttentionMask(num_tokens, num_tokens, make_rows(0, num_tokens, 0, num_tokens, hi=hi))
    band = make_rows(0, num_tokens, 0, num_tokens, -reach_left, hi)
    sink = make_rows(0, num_tokens, 0, min(num_sink, num_tokens), hi=-reach_left - 1)
    return AttentionMask(num_tokens, num_tokens, np.concatenate([band, sink]))


def chunked_causal(num_tokens: int, chunk: int) -> AttentionMask:
    """Returns causal attention that restarts every `chunk` tokens.

        # . . . .
        # # . . .        chunk=2
        . . # . .        allowed(q, k) = k <= q and q // chunk == k // chunk
        . . # # .
        . . . . #

    Source: Llama 4 (attention_chunk_size 8192 in three layers of four).
    """
    num_tokens, chunk = as_tokens("num_tokens", num_tokens), as_count("chunk", chunk, minimum=1)
    check_number_of_slices(num_tokens // chunk, f"chunk={chunk} of num_tokens={num_tokens}")
    start = np.arange(0, num_tokens, chunk, dtype=np.int64)
    end = np.minimum(start + chunk, num_tokens)
    return AttentionMask(num_tokens, num_tokens, make_rows(start, end, start, end, hi=0))


def prefix_lm(num_tokens: int, prefix: int) -> AttentionMask:
    """Returns causal attention whose first `prefix` tokens also see each other in both directions.

        # # . .
        # # . .        prefix=2
        # # # .        allowed(q, k) = k <= q or k < prefix
        # # # #

    Token `prefix` itself is causal. Source: T5, PaliGemma; `prefix_lm_causal` of LongCA-bench
    (whose FlexAttention form lets one key too many in; this is its slice form).
    """
    num_tokens, prefix = as_tokens("num_tokens", num_tokens), as_count("prefix", prefix)
    if prefix > num_tokens:
        raise ValueError(f"prefix={prefix} must be <= num_tokens={num_tokens}; shorten the prefix")
    return AttentionMask(num_tokens, num_tokens, prefix_rows(0, num_tokens, prefix))


def prefix_rows(start: int | IntArray, end: int | IntArray, prefix: int | IntArray) -> IntArray:
    """Returns the rows of documents `[start, end)` with `prefix` bidirectional first tokens."""
    bend = np.asarray(start, dtype=np.int64) + prefix
    both_ways = make_rows(start, bend, start, bend)
    return np.concatenate([both_ways, make_rows(bend, end, start, end, hi=0)])


def global_sliding_window(
    num_tokens: int, window: int, num_global: int, causal: bool = False
) -> AttentionMask:
    """Returns a window on both sides, and first tokens that see and are seen by everyone.

        # # # # #
        # # # . .        window=1, num_global=1
        # # # # .        allowed(q, k) = |k - q| <= window or q < num_global or k < num_global
        # . # # #                        and, with causal=True, k <= q
        # . . # #

    Source: Longformer (arXiv 2004.05150), BigBird. LongCA-bench defines it twice and differently (2
    * window global tokens in one form, nearly none in the other), so here the number is an
    argument.
    """
    num_tokens, window = as_tokens("num_tokens", num_tokens), as_count("window", window)
    num_global = min(as_count("num_global", num_global), num_tokens)
    hi = 0 if causal else OPEN
    rows = [
        make_rows(0, num_global, 0, num_tokens, hi=hi),
        make_rows(num_global, num_tokens, 0, num_global),
        make_rows(num_global, num_tokens, num_global, num_tokens, -window, min(hi, window)),
    ]
    return AttentionMask(num_tokens, num_tokens, np.concatenate(rows))


def image_spans(
    num_tokens: int, spans: Sequence[Sequence[int]] | IntArray, left: int = -1
) -> AttentionMask:
    """Returns causal text in which the tokens of one image see each other in both directions.

        # . . . .
        # # # . .        spans=[(1, 3)]
        # # # . .        allowed(q, k) = 0 <= q - k <= left or span(q) == span(k)
        # # # # .
        # # # # #

    `spans`: disjoint ranges `[n, 2]`. `left` is the window of a sliding-window layer (-1: none); an
    image sees itself even beyond the window. Source: Gemma 3, `token_type_ids_mask_function` of
    Hugging Face.
    """
    num_tokens, reach = as_tokens("num_tokens", num_tokens), as_window_side("left", left)
    ranges = as_ranges("spans", spans)
    ranges = ranges[np.argsort(ranges[:, 0], kind="stable")]
    ranges = ranges[ranges[:, 0] < ranges[:, 1]]
    if (ranges[1:, 0] < ranges[:-1, 1]).any() or (ranges[-1:, 1] > num_tokens).any():
        raise ValueError(
            f"spans={_shortened(ranges)} must be disjoint and end at or before num_tokens={num_tokens}; join or cut "
            "the image spans"
        )
    start, end = ranges.T
    lo = -OPEN if reach is None else -reach
    rows = [
        make_rows(0, num_tokens, 0, num_tokens, lo, 0),
        make_rows(start, end, start, end, lo=1),
        make_rows(start, end, start, end, hi=lo - 1),
    ]
    return AttentionMask(num_tokens, num_tokens, np.concatenate(rows))


def dilated(num_tokens: int, left: int, right: int = 0, dilation: int = 2) -> AttentionMask:
    """Returns a window that sees only every `dilation`-th key, counted from the query.

        # . . . .
        . # . . .        left=2, right=0, dilation=2
        # . # . .        allowed(q, k) = -left <= k - q <= right and (k - q) % dilation == 0
        . # . # .
        . . # . #

    -1 means no limit on that side. One slice per diagonal: `(left + right) / dilation`, whatever
    `num_tokens`. Source: Sparse Transformer (arXiv 1904.10509), LongNet.
    """
    num_tokens, dilation = (
        as_tokens("num_tokens", num_tokens),
        as_count("dilation", dilation, minimum=1),
    )
    reach_left, reach_right = as_window_side("left", left), as_window_side("right", right)
    furthest = max(0, num_tokens - 1)
    steps_left = min(furthest, furthest if reach_left is None else reach_left) // dilation
    steps_right = min(furthest, furthest if reach_right is None else reach_right) // dilation
    if dilation == 1:
        rows = make_rows(0, num_tokens, 0, num_tokens, -steps_left, steps_right)
        return AttentionMask(num_tokens, num_tokens, rows)
    check_number_of_slices(steps_left + steps_right, f"dilation={dilation} of this window")
    diagonal = np.arange(-steps_left, steps_right + 1, dtype=np.int64) * dilation
    return AttentionMask(
        num_tokens, num_tokens, make_rows(0, num_tokens, 0, num_tokens, diagonal, diagonal)
    )


def _grid(num_queries: int, num_keys: int | None) -> tuple[int, int]:
    queries = as_tokens("num_queries", num_queries)
    return queries, queries if num_keys is None else as_tokens("num_keys", num_keys)


def _shortened(ranges: IntArray) -> str:
    shown = ", ".join(str(tuple(span)) for span in ranges[:4].tolist())
    return f"[{shown}{', ...' if len(ranges) > 4 else ''}]"
