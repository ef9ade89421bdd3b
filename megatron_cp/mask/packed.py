"""Masks of several documents packed into one sequence: independent, prefixed, tree-shaped, video.

A document is a run of tokens; `lengths` lists their sizes in order, and a length of 0 is legal.
Everything is vectorised: 10^4 documents in 1M tokens take milliseconds.
"""

from collections.abc import Callable, Sequence
from numbers import Integral
from typing import TypeAlias, cast

import numpy as np

from megatron_cp.mask.builders import prefix_rows
from megatron_cp.mask.checks import (
    as_array,
    as_count,
    as_cu_seqlens,
    as_integers,
    as_lengths,
    as_window_side,
    check_number_of_slices,
)
from megatron_cp.mask.interval import IntArray, expand_ranges
from megatron_cp.mask.mask import AttentionMask
from megatron_cp.mask.slice import OPEN, make_rows, shift_rows

NamedKind: TypeAlias = str | tuple[str | int, ...]
CustomKind: TypeAlias = AttentionMask | Callable[[int], AttentionMask]
Kind: TypeAlias = NamedKind | CustomKind
Kinds: TypeAlias = Kind | Sequence[Kind]

KINDS_ALLOWED = (
    '"causal", "full", ("prefix", tokens), ("window", left[, right]), a mask of the document, '
    "or a function from its length to a mask"
)


def documents(lengths: Sequence[int] | IntArray, within: Kinds = "causal") -> AttentionMask:
    """Returns documents that never see each other, each with the attention that `within` names.

        # . . . .
        # # . . .        lengths=[2, 3], within=["causal", "full"]
        . . # # #        allowed(q, k) = document(q) == document(k)
        . . # # #                        and within(q - start, k - start)
        . . # # #

    `within` is one kind for all documents or a list with one per document. A kind is "causal",
    "full", `("prefix", p)` (the first p tokens in both directions), `("window", left, right=0)`, an
    AttentionMask, or a function from the length to an AttentionMask (any builder). Rules on top of
    all documents are cheaper as algebra: `documents(lengths) & sliding_window(n, 4095)`.

    Source: Llama 3 (intra-document causal), every packed SFT stack; full_document, causal_document
    of LongCA-bench.
    """
    sizes = as_lengths("lengths", lengths)
    end = np.cumsum(sizes)
    start, total = end - sizes, int(sizes.sum())
    named, custom = _group_kinds(_kind_of_each(within, len(sizes)))
    rows = [make_rows(0, 0, 0, 0)]
    for kind, which in named.items():
        rows.append(_rows_of_kind(kind, start[which], end[which], which))
    for index, other in custom:
        mask = _custom_mask(other, int(sizes[index]), index)
        rows.append(shift_rows(mask.array, q=int(start[index]), k=int(start[index])))
    return AttentionMask(total, total, np.concatenate(rows))


def from_cu_seqlens(
    cu_seqlens: Sequence[int] | IntArray,
    within: Kinds = "causal",
    cu_seqlens_k: Sequence[int] | IntArray | None = None,
) -> AttentionMask:
    """Returns packed documents from running sums `[0, end of document 0, ...]`.

    This is the form of FlashAttention. With `cu_seqlens_k` the keys have lengths of their own; then
    `within` is "full" or "causal" (aligned at the bottom right of each document's box).
    """
    queries = as_cu_seqlens("cu_seqlens", cu_seqlens)
    if cu_seqlens_k is None:
        return documents(np.diff(queries), within)
    keys = as_cu_seqlens("cu_seqlens_k", cu_seqlens_k)
    if len(keys) != len(queries):
        raise ValueError(
            f"cu_seqlens_k has {len(keys)} entries and cu_seqlens {len(queries)}; both need one more than there are "
            "documents: pass the pair of one pack"
        )
    if within not in ("causal", "full"):
        raise ValueError(
            f"within={within!r} must be 'causal' or 'full' when cu_seqlens_k is given; "
            "build other masks with from_slices or from_ranges"
        )
    hi = keys[1:] - queries[1:] if within == "causal" else OPEN
    rows = make_rows(queries[:-1], queries[1:], keys[:-1], keys[1:], hi=hi)
    return AttentionMask(int(queries[-1]), int(keys[-1]), rows)


def prefix_lm_documents(
    lengths: Sequence[int] | IntArray, prefix: int | Sequence[int] | IntArray
) -> AttentionMask:
    """Returns packed prefix-LM documents: in each, the first tokens see each other both ways.

        # # . . . .
        # # . . . .      lengths=[3, 3], prefix=[2, 1]
        # # # . . .
        . . . # . .      allowed(q, k) = document(q) == document(k)
        . . . # # .                      and (k <= q or k - start < prefix)
        . . . # # #

    One number serves all documents (those not longer than it are full), a sequence gives each its
    own. Source: `prefix_lm_document` of LongCA-bench.
    """
    sizes = as_lengths("lengths", lengths)
    end = np.cumsum(sizes)
    if as_array("prefix", prefix).ndim == 0:
        prefixes = np.minimum(as_count("prefix", prefix), sizes)
    else:
        prefixes = as_lengths("prefix", prefix)  # type: ignore[arg-type]
        _check_count("prefix", len(prefixes), len(sizes))
        _check_prefixes(prefixes, sizes, np.arange(len(sizes)))
    return AttentionMask(
        int(sizes.sum()), int(sizes.sum()), prefix_rows(end - sizes, end, prefixes)
    )


def shared_question(lengths: Sequence[int] | IntArray) -> AttentionMask:
    """Returns one question and then answers that see the question and themselves only.

        # . . . . .
        # # . . . .      lengths=[2, 2, 2]: question, answer, answer
        # # # . . .
        # # # # . .      allowed(q, k) = k <= q and (document(k) == 0 or document(k) == document(q))
        # # . . # .
        # # . . # #

    Source: reward models, DPO, groups of rollouts; `share_question` of LongCA-bench and FlashMask.
    """
    sizes = as_lengths("lengths", lengths)
    return prefix_tree(sizes, np.minimum(0, np.arange(len(sizes)) - 1))


def prefix_tree(
    lengths: Sequence[int] | IntArray, parents: Sequence[int] | IntArray
) -> AttentionMask:
    """Returns a forest of documents: a token sees its own causally and all ancestors fully.

        # . . . .
        # # . . .        lengths=[1, 1, 1, 2], parents=[-1, 0, 1, 0]
        # # # . .        allowed(q, k) = k <= q and document(k) is document(q)
        # . . # .                        or one of its ancestors
        # . . # #

    `parents[i]` is the index of an earlier document, or -1 for a root; any depth. A chain whose
    members lie one after another costs one slice. Source: tree-structured rollouts; shared_question
    is the tree of depth 1.
    """
    sizes, parent = as_lengths("lengths", lengths), as_integers("parents", parents)
    _check_count("parents", len(parent), len(sizes))
    node = np.arange(len(sizes))
    bad = np.flatnonzero((parent < -1) | (parent >= node))
    if len(bad):
        raise ValueError(
            f"parents[{bad[0]}]={parent[bad[0]]} must be -1 or the index of an earlier document; "
            "order the documents so that every parent comes before its children"
        )
    end = np.cumsum(sizes)
    start = end - sizes
    # A chain is a maximal run of documents each of which is the parent of the next: it acts as one
    # document.
    opens = np.flatnonzero((parent != node - 1) | (node == 0))
    closes = np.r_[opens[1:], len(node)][: len(opens)] - 1
    top = np.repeat(opens, closes - opens + 1)
    q_start, q_end = start[opens], end[closes]
    rows = [make_rows(q_start, q_end, q_start, q_end, hi=0)]
    ancestor = parent[opens]
    while True:
        alive = ancestor >= 0
        q_start, q_end, ancestor = q_start[alive], q_end[alive], ancestor[alive]
        if not len(ancestor):
            break
        rows.append(make_rows(q_start, q_end, start[top[ancestor]], end[ancestor]))
        ancestor = parent[top[ancestor]]
    return AttentionMask(int(sizes.sum()), int(sizes.sum()), np.concatenate(rows))


def causal_blockwise(lengths: Sequence[int] | IntArray) -> AttentionMask:
    """Returns independent causal documents, the last of which sees all the others.

        # . . . .
        # # . . .        lengths=[2, 1, 2]
        . . # . .        allowed(q, k) = k <= q
        # # # # .                        and (document(q) == document(k) or document(q) is the last)
        # # # # #

    Source: in-context learning with independent demonstrations; `causal_blockwise` of LongCA-bench.
    """
    sizes = as_lengths("lengths", lengths)
    end = np.cumsum(sizes)
    k_start = end - sizes
    k_start[-1:] = 0
    return AttentionMask(
        int(sizes.sum()), int(sizes.sum()), make_rows(end - sizes, end, k_start, end, hi=0)
    )


def block_causal_documents(lengths: Sequence[int] | IntArray, block: int) -> AttentionMask:
    """Returns documents of blocks: a token sees its block and all earlier ones of its document.

        # # . . .
        # # . . .        lengths=[3, 2], block=2 (a document's last block may be short)
        # # # . .        allowed(q, k) = document(q) == document(k)
        . . . # #                        and (k - start) // block <= (q - start) // block
        . . . # #

    Source: autoregressive video (MAGI-1, CausVid: one block is a frame or chunk of frames);
    `block_causal_document` of LongCA-bench.
    """
    sizes, block = as_lengths("lengths", lengths), as_count("block", block, minimum=1)
    if block == 1:
        return documents(sizes, "causal")
    end, blocks = np.cumsum(sizes), -(-sizes // block)
    check_number_of_slices(int(blocks.sum()), f"block={block} of {int(sizes.sum())} tokens")
    which, index = expand_ranges(np.zeros_like(sizes), blocks)
    document_start = (end - sizes)[which]
    q_start = document_start + index * block
    q_end = np.minimum(q_start + block, end[which])
    rows = make_rows(q_start, q_end, document_start, q_end)
    return AttentionMask(int(sizes.sum()), int(sizes.sum()), rows)


# ---------------------------------------------------------------------- kinds of one document


def _kind_of_each(within: Kinds, num_documents: int) -> list[Kind]:
    """Returns the kind of every document."""
    if isinstance(within, str | AttentionMask) or callable(within):
        return [within] * num_documents
    if isinstance(within, tuple) and within and isinstance(within[-1], Integral):
        return [cast(NamedKind, within)] * num_documents
    if not isinstance(within, Sequence):
        raise ValueError(
            f"within={within!r} is no kind of attention; use {KINDS_ALLOWED}, or a list of these"
        )
    _check_count("within", len(within), num_documents)
    return list(cast(Sequence[Kind], within))


def _group_kinds(
    kinds: list[Kind],
) -> tuple[dict[NamedKind, IntArray], list[tuple[int, CustomKind]]]:
    """Returns the documents of each named kind, and the `(index, kind)` that need a call each."""
    named: dict[NamedKind, list[int]] = {}
    custom: list[tuple[int, CustomKind]] = []
    for index, kind in enumerate(kinds):
        if isinstance(kind, str | tuple):
            named.setdefault(kind, []).append(index)
        else:
            custom.append((index, kind))
    return {kind: np.array(which, dtype=np.int64) for kind, which in named.items()}, custom


def _rows_of_kind(kind: NamedKind, start: IntArray, end: IntArray, which: IntArray) -> IntArray:
    """Returns the rows of the documents `which`, all of one named kind."""
    if kind == "full":
        return make_rows(start, end, start, end)
    if kind == "causal":
        return make_rows(start, end, start, end, hi=0)
    if isinstance(kind, tuple) and kind[:1] == ("prefix",) and len(kind) == 2:
        prefix = np.full_like(start, as_count("prefix", kind[1]))
        _check_prefixes(prefix, end - start, which)
        return prefix_rows(start, end, prefix)
    if isinstance(kind, tuple) and kind[:1] == ("window",) and len(kind) in (2, 3):
        left = as_window_side("left", kind[1])
        right = as_window_side("right", kind[2] if len(kind) == 3 else 0)
        lo, hi = -OPEN if left is None else -left, OPEN if right is None else right
        return make_rows(start, end, start, end, lo, hi)
    raise ValueError(f"within={kind!r} is no kind of attention; use {KINDS_ALLOWED}")


def _custom_mask(kind: CustomKind, length: int, index: int) -> AttentionMask:
    mask = kind(length) if callable(kind) else kind
    if not isinstance(mask, AttentionMask):
        raise ValueError(
            f"within={mask!r} for document {index} is no kind of attention; use {KINDS_ALLOWED}"
        )
    if (mask.num_queries, mask.num_keys) != (length, length):
        raise ValueError(
            f"within for document {index} is {mask.num_queries} x {mask.num_keys}; it must be {length} x {length}, "
            "the document's length: build it for that length"
        )
    return mask


def _check_prefixes(prefixes: IntArray, sizes: IntArray, which: IntArray) -> None:
    bad = np.flatnonzero(prefixes > sizes)
    if len(bad):
        raise ValueError(
            f"prefix={prefixes[bad[0]]} of document {which[bad[0]]} must be <= its length {sizes[bad[0]]}; shorten "
            "the prefix"
        )


def _check_count(name: str, count: int, num_documents: int) -> None:
    if count != num_documents:
        raise ValueError(
            f"{name} has {count} entries for {num_documents} documents; it must have one per document: give both "
            "lists the same length"
        )
