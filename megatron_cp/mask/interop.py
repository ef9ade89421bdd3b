"""Masks in the neighbours' forms: FlashMask, Hugging Face, Megatron's PackedSeqParams, cu_seqlens.

Arrays in, arrays out: whatever `np.asarray` takes (CPU tensors too) is accepted, NumPy comes back.
FlexAttention is in `blocks.py`, (query range, key range, type) triples in `forms.py`.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_cp.mask.blocks import row_intervals
from megatron_cp.mask.checks import as_array, as_cu_seqlens, as_int32, as_tokens, check_mask
from megatron_cp.mask.forms import from_dense
from megatron_cp.mask.interval import IntArray, expand_ranges
from megatron_cp.mask.mask import AttentionMask, concat
from megatron_cp.mask.packed import from_cu_seqlens
from megatron_cp.mask.slice import OPEN, make_rows

# ---------------------------------------------------------------------- packed sequences


def to_cu_seqlens(mask: AttentionMask) -> tuple[IntArray, IntArray, str]:
    """Returns `(cu_seqlens_q, cu_seqlens_k, "causal" | "full")` of packed documents.

    Empty documents leave no trace in a mask and do not come back. Raises NotImplementedError for
    any other mask: variable-length kernels compute every pair that the lengths imply, and no other.
    """
    intervals = row_intervals(mask)
    opens = np.flatnonzero(np.diff(intervals[0, :, 0], prepend=-1))
    cu_queries = np.r_[opens, mask.num_queries].astype(np.int64)
    cu_keys = np.r_[intervals[0, opens, 0], mask.num_keys].astype(np.int64)
    plain = len(intervals) == 1 and cu_queries[0] == 0 and cu_keys[0] == 0
    if plain and (np.diff(cu_keys) >= 0).all():
        for within in ("causal", "full"):
            same = row_intervals(from_cu_seqlens(cu_queries, within, cu_keys))
            if np.array_equal(same, intervals):
                return cu_queries, cu_keys, within
    raise NotImplementedError(
        f"{mask} is not a pack of documents that are all causal or all full; cu_seqlens can say nothing else: keep "
        "the AttentionMask, or convert it with to_ranges or block_table"
    )


def from_packed_seq_params(params: Any, within: str = "causal") -> AttentionMask:
    """Returns the mask of Megatron-Core's PackedSeqParams (any object with its cu_seqlens fields).

    With `cu_seqlens_q_padded` each document starts at its padded offset; rows and keys of the
    padding are in the grid and see nothing. A causal document has as many queries as keys: libraries do not agree on
    where the diagonal of another one lies.
    """
    if getattr(params, "cu_seqlens_q", None) is None:
        raise TypeError(
            f"params is a {type(params).__name__} without cu_seqlens_q; give PackedSeqParams of a thd batch"
        )
    queries = as_cu_seqlens("cu_seqlens_q", params.cu_seqlens_q)
    given = getattr(params, "cu_seqlens_kv", None)
    keys = queries if given is None else as_cu_seqlens("cu_seqlens_kv", given)
    q_offsets = _padded("cu_seqlens_q_padded", params, queries)
    has_own = given is not None or getattr(params, "cu_seqlens_kv_padded", None) is not None
    k_offsets = _padded("cu_seqlens_kv_padded", params, keys) if has_own else q_offsets
    if len(keys) != len(queries):
        raise ValueError(
            f"cu_seqlens_kv has {len(keys)} entries and cu_seqlens_q {len(queries)}; both need one more than there "
            "are documents: pass the pair of one pack"
        )
    if within not in ("causal", "full"):
        raise ValueError(f"within={within!r} must be 'causal' or 'full'; name one of them")
    num_queries, num_keys = np.diff(queries), np.diff(keys)
    if within == "causal":
        _check_same_lengths(
            num_queries, num_keys, "from_cu_seqlens, whose diagonal is at the bottom right"
        )
    q_start, k_start = q_offsets[:-1], k_offsets[:-1]
    q_end, k_end = q_start + num_queries, k_start + num_keys
    hi = k_end - q_end if within == "causal" else OPEN
    rows = make_rows(q_start, q_end, k_start, k_end, hi=hi)
    return AttentionMask(int(q_offsets[-1]), int(k_offsets[-1]), rows)


def to_packed_seq_params(mask: AttentionMask) -> dict[str, Any]:
    """Returns the keyword arguments of Megatron-Core's PackedSeqParams, arrays as int32 NumPy.

    Raises NotImplementedError where `to_cu_seqlens` does. The attention mask type that goes with it
    is padding_causal or padding (for "full"), under the key "attn_mask_type", which the caller
    takes out. Raises ValueError for causal documents with other numbers of queries than of keys: Megatron has no
    word for a diagonal at the bottom right, and that of padding_causal begins at the top left.
    """
    queries, keys, within = to_cu_seqlens(mask)
    if within == "causal":
        _check_same_lengths(np.diff(queries), np.diff(keys), "to_cu_seqlens")
    return {
        "qkv_format": "thd",
        "cu_seqlens_q": as_int32(queries, "PackedSeqParams"),
        "cu_seqlens_kv": as_int32(keys, "PackedSeqParams"),
        "max_seqlen_q": int(np.diff(queries).max(initial=0)),
        "max_seqlen_kv": int(np.diff(keys).max(initial=0)),
        "attn_mask_type": "padding_causal" if within == "causal" else "padding",
    }


def _check_same_lengths(num_queries: IntArray, num_keys: IntArray, instead: str) -> None:
    bad = np.flatnonzero(num_queries != num_keys)
    if len(bad):
        index = int(bad[0])
        raise ValueError(
            f"document {index} has {num_queries[index]} queries and {num_keys[index]} keys; a causal one must have as "
            f"many of both in PackedSeqParams, whose diagonal begins at the top left: use {instead}"
        )


def _padded(name: str, params: Any, unpadded: IntArray) -> IntArray:
    """Returns where documents start and the pack ends; padded offsets if there are any."""
    given = getattr(params, name, None)
    if given is None:
        return unpadded
    padded = as_cu_seqlens(name, given)
    if len(padded) != len(unpadded) or (np.diff(padded) < np.diff(unpadded)).any():
        raise ValueError(
            f"{name}={padded.tolist()[:8]} must leave room for each document of "
            f"{unpadded.tolist()[:8]}; pad lengths upwards only"
        )
    return padded


# ---------------------------------------------------------------------- Hugging Face


def from_huggingface(
    attention_mask: Any = None, position_ids: Any = None, within: str = "causal"
) -> AttentionMask:
    """Returns the mask of Hugging Face's padding mask and position ids, `[S]` or `[B, S]`.

    `attention_mask`: 0 = padding, which sees nothing and is not seen; equal numbers belong together
    (1 for all real tokens, or 1, 2, 3, ... for packed documents). `position_ids`: a document begins
    wherever they do not count up by one. With both, tokens see each other if both agree. The B
    sequences stand one after another in one block-diagonal mask of `B S` tokens.

    Source: `transformers.masking_utils` (padding_mask_function, find_packed_sequence_indices).
    """
    segments = [_by_row(name, array) for name, array in _given(attention_mask, position_ids)]
    if not segments or any(array.shape != segments[0].shape for array in segments):
        shapes = [array.shape for array in segments]
        raise ValueError(
            f"attention_mask and position_ids have shapes {shapes}; give one of them, or both with one shape [S] or "
            "[B, S]"
        )
    if within not in ("causal", "full"):
        raise ValueError(f"within={within!r} must be 'causal' or 'full'; name one of them")
    batch, seqlen = segments[0].shape
    labels = np.ones((batch, seqlen), dtype=np.int64)
    if attention_mask is not None:
        labels = segments[0].copy()
    document = np.zeros_like(labels)
    if position_ids is not None:
        document[:, 1:] = np.cumsum(np.diff(segments[-1], axis=1) != 1, axis=1)
    sequence = np.repeat(np.arange(batch), seqlen)
    return _equal_labels_see_each_other(
        np.stack([sequence, labels.ravel(), document.ravel()]), labels.ravel() != 0, within
    )


def from_huggingface_4d(mask: Any) -> AttentionMask:
    """Returns the mask of `[B, 1, Q, K]`: bool (true = allowed) or additive (0 = allowed).

    The B masks stand one after another, block-diagonally. Costs O(B Q K). Raises ValueError for
    additive values that are neither 0 nor at most -1e4 (a bias is not a mask), NotImplementedError
    if heads differ.
    """
    array = as_array("mask", mask)
    if array.ndim != 4 or not array.shape[1] or array.dtype.kind not in "bf":
        raise ValueError(
            f"mask has dtype {array.dtype} and shape {array.shape}; it must be bool or float of shape [B, heads, Q, "
            "K], of one head at least: convert bfloat16 tensors with .float()"
        )
    if array.dtype.kind == "f":
        other = array[~((array == 0) | (array <= -1e4))]
        if len(other):
            raise ValueError(
                f"mask holds {other[0]}, which is neither 0 nor at most -1e4; a bias cannot become a "
                "mask: pass 0 for allowed and -inf for masked"
            )
        array = array == 0
    if (array != array[:, :1]).any():
        raise NotImplementedError(
            f"mask of shape {array.shape} differs between heads; one AttentionMask serves all heads: convert each "
            "head by itself"
        )
    return concat([from_dense(one[0]) for one in array])


def _given(attention_mask: Any, position_ids: Any) -> list[tuple[str, Any]]:
    both = (("attention_mask", attention_mask), ("position_ids", position_ids))
    return [(name, value) for name, value in both if value is not None]


def _by_row(name: str, values: Any) -> IntArray:
    array = as_array(name, values)
    if array.ndim not in (1, 2) or array.dtype.kind not in "biu":
        raise ValueError(
            f"{name} has dtype {array.dtype} and shape {array.shape}; it must be integers of shape [S] or [B, S]: "
            "pass 4-D masks to from_huggingface_4d"
        )
    return np.atleast_2d(array).astype(np.int64)


def _equal_labels_see_each_other(
    labels: IntArray, real: NDArray[np.bool_], within: str
) -> AttentionMask:
    """Returns the mask in which real tokens with equal columns of `labels` see each other."""
    num_tokens = labels.shape[1]
    changes = np.r_[True, (np.diff(labels) != 0).any(axis=0)][:num_tokens]
    start = np.flatnonzero(changes)
    end = np.r_[start[1:], num_tokens][: len(start)]
    kept = real[start]
    start, end = start[kept], end[kept]
    # Runs of one label lie together after sorting; every run sees the runs of its label.
    order = np.lexsort((start, *labels[::-1, start]))
    start, end, key = start[order], end[order], labels[:, start[order]]
    group = np.cumsum(np.r_[True, (np.diff(key) != 0).any(axis=0)][: len(start)])
    first = np.searchsorted(group, group, side="left")
    index = np.arange(len(start))
    stop = index + 1 if within == "causal" else np.searchsorted(group, group, side="right")
    i, j = expand_ranges(first, stop)
    hi = np.where((i == j) & (within == "causal"), 0, OPEN)
    rows = make_rows(start[i], end[i], start[j], end[j], hi=hi)
    return AttentionMask(num_tokens, num_tokens, rows)


# ---------------------------------------------------------------------- FlashMask


def to_flashmask(mask: AttentionMask) -> tuple[NDArray[np.int32], bool]:
    """Returns `(startend_row_indices [num_keys, 1 | 2 | 4], causal)`, FlashMask's form of a mask.

    Column j holds the query rows that key j does *not* reach: with causal=True `[start, end of
    grid)` or `[start, end)` below the diagonal; with causal=False (start, end) of the lower run and
    of the upper run, or two numbers if the lower run ends and the upper begins at the grid's edge.
    The shortest form that holds the mask is chosen. Source: FlashMask (arXiv 2410.01359).

    Raises NotImplementedError, naming the first key, if a key is hidden from more runs of queries
    than fit.
    """
    check_mask(mask)
    hidden = _hidden_runs(mask)
    size, key = mask.num_queries, np.arange(mask.num_keys)
    from_diagonal = np.stack([np.maximum(hidden[..., 0], key), hidden[..., 1]], axis=2)
    if size == mask.num_keys and (hidden[0, :, 1] >= key).all():
        (runs,), counts = _leading_runs(from_diagonal, 1)
        if (counts <= 1).all():
            runs = np.where(counts[:, None] == 0, size, runs)
            columns = runs[:, :1] if (runs[:, 1] == size).all() else runs
            return as_int32(columns, "FlashMask"), True
    (first, second), counts = _leading_runs(hidden, 2)
    if (counts > 2).any():
        worst = int(np.argmax(counts > 2))
        raise NotImplementedError(
            f"key {worst} is hidden from {counts[worst]} runs of queries; FlashMask holds at most two per key: use "
            "to_mask_mod and block_table (FlexAttention) or to_ranges"
        )
    at_top = (first[:, :1] == 0) & (first[:, 1:] > 0)
    upper, lower = np.where(at_top, first, second), np.where(at_top, second, first)
    lower = np.where(lower[:, :1] == lower[:, 1:], size, lower)
    if (lower[:, 1] == size).all() and (upper[:, 0] == 0).all():
        return as_int32(np.stack([lower[:, 0], upper[:, 1]], axis=1), "FlashMask"), False
    return as_int32(np.concatenate([lower, upper], axis=1), "FlashMask"), False


def _hidden_runs(mask: AttentionMask) -> IntArray:
    """Returns the runs of queries that do not see a key, some empty: `[R + 1, num_keys, 2]`.

    The first run of a key is the one before the first query that sees it.
    """
    seen = row_intervals(mask.transpose())
    used = (seen[..., 0] < seen[..., 1]).sum(axis=0)
    hidden = np.zeros((len(seen) + 1, mask.num_keys, 2), dtype=np.int64)
    hidden[1:, :, 0] = seen[..., 1]
    hidden[:-1, :, 1] = seen[..., 0]
    hidden[used, np.arange(mask.num_keys), 1] = mask.num_queries
    hidden[np.arange(len(hidden))[:, None] > used] = 0
    return hidden


def _leading_runs(runs: IntArray, count: int) -> tuple[IntArray, IntArray]:
    """Returns the first `count` solid runs of each key, (0, 0) for want, and how many it has."""
    solid = runs[..., 0] < runs[..., 1]
    order = np.argsort(~solid, axis=0, kind="stable")
    runs = np.take_along_axis(np.where(solid[..., None], runs, 0), order[..., None], axis=0)
    missing = np.zeros((max(0, count - len(runs)), *runs.shape[1:]), dtype=np.int64)
    return np.concatenate([runs, missing])[:count], solid.sum(axis=0)


def from_flashmask(
    startend_row_indices: Any, causal: bool, num_queries: int | None = None
) -> AttentionMask:
    """Returns the mask of FlashMask indices `[num_keys, C]` or `[B, heads, num_keys, C]`.

    C is 1 or 2 with causal=True, 2 or 4 without; the meaning is that of `to_flashmask`. Raises
    ValueError for another C, NotImplementedError if batch entries or heads differ.
    """
    array = as_array("startend_row_indices", startend_row_indices)
    if not isinstance(causal, bool | np.bool_):
        raise TypeError(f"causal={causal!r} must be True or False; say which form the indices have")
    allowed = (1, 2) if causal else (2, 4)
    if array.ndim not in (2, 4) or array.shape[-1] not in allowed or array.dtype.kind not in "iu":
        raise ValueError(
            f"startend_row_indices has dtype {array.dtype} and shape {array.shape}; it must be integers of shape "
            f"[num_keys, C] or [B, heads, num_keys, C] with C in {allowed} for causal={causal}"
        )
    if array.ndim == 4:
        if (array != array[:1, :1]).any():
            raise NotImplementedError(
                f"startend_row_indices of shape {array.shape} differs between batch entries or heads; one "
                "AttentionMask serves all: convert each entry by itself"
            )
        array = array[0, 0]
    num_keys = len(array)
    size = num_keys if num_queries is None else as_tokens("num_queries", num_queries)
    columns = np.clip(array.astype(np.int64), 0, size)
    zero, end = np.zeros(num_keys, np.int64), np.full(num_keys, size)
    lower_end = columns[:, 1] if columns.shape[1] == (2 if causal else 4) else end
    lower = np.stack([columns[:, 0], lower_end], axis=1)
    upper = np.stack([zero, zero], axis=1)
    if not causal:
        upper = columns[:, 2:] if columns.shape[1] == 4 else np.stack([zero, columns[:, 1]], axis=1)
    return _mask_of_hidden_runs(lower, upper, size, causal)


def _mask_of_hidden_runs(
    lower: IntArray, upper: IntArray, num_queries: int, causal: bool
) -> AttentionMask:
    """Returns the mask in which key j is hidden from `lower[j]` and `upper[j]` (half-open runs)."""
    num_keys = len(lower)
    both = np.concatenate([lower, upper], axis=1)
    changes = np.r_[True, (np.diff(both, axis=0) != 0).any(axis=1)][:num_keys]
    k_start = np.flatnonzero(changes)
    k_end = np.r_[k_start[1:], num_keys][: len(k_start)]
    runs = both[k_start].reshape(-1, 2, 2)
    runs = np.where(runs[..., :1] < runs[..., 1:], runs, 0)
    order = np.argsort(runs[..., :1], axis=1, kind="stable")
    early, late = np.take_along_axis(runs, order, axis=1).swapaxes(0, 1)
    hi = 0 if causal else OPEN
    reach = np.maximum(early[:, 1], late[:, 1])
    rows = [
        make_rows(0, early[:, 0], k_start, k_end, hi=hi),
        make_rows(early[:, 1], late[:, 0], k_start, k_end, hi=hi),
        make_rows(reach, num_queries, k_start, k_end, hi=hi),
    ]
    return AttentionMask(num_queries, num_keys, np.concatenate(rows)).merged()
