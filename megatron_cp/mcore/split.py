"""Plans for batches that Megatron has split over the context ranks by itself.

Swapped into an existing Megatron configuration, our attention must take the rows where Megatron put
them.  Megatron has two splits, both zigzag (2 x cp_size pieces, rank r holds pieces r and 2 x
cp_size - 1 - r):

    [s, b, n, d]   the sequence                cp_size=2:   0 1 | 2 3 | 4 5 | 6 7   ->   rank 0: 0 1
    6 7   rank 1: 2 3 4 5 thd            every document by itself    documents of 4, 4:  rank 0: 0 3
    4 7   rank 1: 1 2 5 6

The placement is made here and given to the planner, which adds the transfers; plans are cached,
since lengths repeat.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from megatron.core.transformer.enums import AttnMaskType
from torch.utils.weak import WeakIdKeyDictionary

from megatron_cp.config import CPConfig
from megatron_cp.mask import from_slices
from megatron_cp.plan.placement import per_document_zigzag
from megatron_cp.plan.planner import plan_on_placement
from megatron_cp.plan.schema import AttentionPlan

Band = tuple[int | None, int | None]

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.causal_bottom_right)
_FULL = (AttnMaskType.no_mask, AttnMaskType.padding)

_checked_masks: Any = WeakIdKeyDictionary()


def band_of(mask_type: AttnMaskType, window: tuple[int, int] | None) -> Band:
    """Bounds (lo, hi) of key - query inside one document: the layer's static mask.

    Args:
        mask_type: Megatron's static mask type.  Query and key lengths are equal, so bottom-right
            causal is causal.
        window: (left, right) keys that a query sees beside its own, -1 = all; None without a
            window.

    Raises:
        NotImplementedError: for `arbitrary`, whose mask only a dense tensor holds.
    """
    if mask_type not in (*_CAUSAL, *_FULL):
        raise NotImplementedError(
            f"attn_mask_type={mask_type}; without ContextParallelParams it must be causal, "
            "padding_causal, "
            "causal_bottom_right, no_mask or (packed) padding; give any other mask as a plan in "
            "packed_seq_params"
        )
    low, high = (None, None) if window is None else window
    lo = None if low is None or low < 0 else -low
    hi = None if high is None or high < 0 else high
    if mask_type in _CAUSAL:
        hi = 0
    return lo, hi


@functools.lru_cache(maxsize=256)
def plan_of_split(
    starts: tuple[int, ...], lengths: tuple[int, ...], cp_size: int, band: Band, config: CPConfig
) -> AttentionPlan:
    """The plan over documents that Megatron split zigzag, one by one.

    Args:
        starts: first row of each document in the padded stream, and its end behind: n + 1 values.
        lengths: real tokens of each document; what follows up to the next start is padding, seen by
            and seeing nobody.
        cp_size: ranks of the context group.
        band: bounds (lo, hi) of key - query inside a document.
        config: sizes for the cost model; its planner is not asked, Megatron has placed the tokens.

    Raises:
        ValueError: if a padded document cannot have been split zigzag.
    """
    padded = [stop - start for start, stop in itertools.pairwise(starts)]
    placement = per_document_zigzag(padded, cp_size)
    mask = from_slices(
        starts[-1],
        starts[-1],
        [(s, s + n, s, s + n, *band) for s, n in zip(starts[:-1], lengths, strict=True)],
    )
    return plan_on_placement(mask, placement, config, "megatron_split")


def documents_of(params: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(starts, lengths) of the documents in Megatron's THD parameters, empty ones dropped.

    Raises:
        NotImplementedError: when queries and keys are packed differently.
    """
    known = getattr(params, "_megatron_cp_documents", None)
    if known is not None:  # one transfer from the device per micro-batch, not one per layer
        return known
    real = params.cu_seqlens_q.tolist()
    padded = real if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded.tolist()
    for queries, keys in (
        (params.cu_seqlens_q, params.cu_seqlens_kv),
        (params.cu_seqlens_q_padded, params.cu_seqlens_kv_padded),
    ):
        if (
            queries is not keys
            and keys is not None
            and (queries is None or not torch.equal(queries, keys))
        ):
            raise NotImplementedError(
                "cu_seqlens_q and cu_seqlens_kv differ; context-parallel self attention needs the "
                "same documents on "
                "both sides; pass one cu_seqlens for both"
            )
    rows = zip(padded[:-1], padded[1:], real[:-1], real[1:], strict=True)
    documents = [(start, stop, end - begin) for start, stop, begin, end in rows if stop > start]
    starts = (*(start for start, _, _ in documents), padded[-1])
    lengths = tuple(length for _, _, length in documents)
    params._megatron_cp_documents = (starts, lengths)
    return starts, lengths


def check_mask_is_causal(
    attention_mask: torch.Tensor, plan: AttentionPlan, rank: int, band: Band
) -> None:
    """Returns if a dense mask (True = hidden) only says that no query sees later keys.

    Megatron-LM's loader makes this mask by default. Each mask tensor is looked at once.

    Args:
        attention_mask: bool [..., T, S], queries of this rank against all keys.
        plan: where the rows of this rank come from.
        rank: rank in the context group.
        band: bounds of the layer's own mask; a layer that sees later keys takes no dense mask.

    Raises:
        NotImplementedError: for every other mask; it is never ignored.
    """
    seen = (attention_mask._version, plan.digest())
    if band[1] == 0 and _checked_masks.get(attention_mask) == seen:
        return
    rows = torch.from_numpy(plan.global_from_local[rank].copy()).to(attention_mask.device)
    keys = torch.arange(attention_mask.shape[-1], device=attention_mask.device)
    hidden = keys[None, :] > rows[:, None]
    fits = attention_mask.shape[-2] == rows.numel() and band[1] == 0
    if not fits or not bool((attention_mask.bool() == hidden).all()):
        raise NotImplementedError(
            f"attention_mask of shape {tuple(attention_mask.shape)} is not the causal mask; a "
            "dense mask is not served (and never ignored); drop it "
            "(--no-create-attention-mask-in-dataloader), or give the mask as a plan in "
            "packed_seq_params"
        )
    _checked_masks[attention_mask] = seen
