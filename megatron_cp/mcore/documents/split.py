"""Makes plans for batches that Megatron has split over the context ranks by itself.

Swapped into an existing Megatron configuration, our attention takes the rows where Megatron put them. Both
of its splits are zigzag: of 2 x cp_size pieces, rank r holds pieces r and 2 x cp_size - 1 - r.

    layout         what is cut                example, cp_size=2     rank 0     rank 1
    [s, b, n, h]   the sequence               8 tokens               0 1 6 7    2 3 4 5
    thd            every document by itself   documents of 4 and 4   0 3 4 7    1 2 5 6

The placement is made here; the planner adds the transfers. Plans are cached, since lengths repeat.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.enums import AttnMaskType
from torch.utils.weak import WeakIdKeyDictionary

from megatron_cp.attn.eager import eager
from megatron_cp.config import CPConfig
from megatron_cp.mask import from_slices
from megatron_cp.mcore.documents.find import current_rule
from megatron_cp.mcore.versions import program
from megatron_cp.plan import AttentionPlan
from megatron_cp.plan.placement.placement import per_document_zigzag
from megatron_cp.plan.planner import plan_on_placement

Band = tuple[int | None, int | None]

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.causal_bottom_right)
_FULL = (AttnMaskType.no_mask, AttnMaskType.padding)

_checked_masks: Any = WeakIdKeyDictionary()


def band_of(mask_type: AttnMaskType, window: tuple[int, int] | None) -> Band:
    """Returns the bounds (lo, hi) of key - query inside one document: the layer's static mask.

    `window` counts the keys (left, right) that a query sees beside its own, -1 for all; None is no window.
    Queries and keys are equally many, so bottom-right causal is causal. Raises NotImplementedError for
    `arbitrary`, whose mask only a dense tensor holds.
    """
    if mask_type not in (*_CAUSAL, *_FULL):
        raise NotImplementedError(
            f"attn_mask_type={mask_type}; without ContextParallelParams it must be causal, padding_causal, "
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
    """Returns the plan over documents that Megatron split zigzag, one by one.

    `starts` holds the first row of each document in the padded stream, then the end of the last one.
    `lengths` counts the real tokens of each; what follows up to the next start is padding, which sees nobody
    and is seen by nobody. `band` bounds key - query inside a document. `config` has the sizes for the cost
    model; its planner is not asked, because Megatron has placed the tokens. Raises ValueError if a padded
    document cannot have been split zigzag.
    """
    padded = [stop - start for start, stop in itertools.pairwise(starts)]
    placement = per_document_zigzag(padded, cp_size)
    mask = from_slices(
        starts[-1],
        starts[-1],
        [(s, s + n, s, s + n, *band) for s, n in zip(starts[:-1], lengths, strict=True)],
    )
    return plan_on_placement(mask, placement, config, "megatron_split")


def check_thd_split(thd_split: str | None) -> None:
    """Returns if `thd_split` names a cut of thd batches over the context ranks that can be followed.

    Raises ValueError for any other. Zigzag over the *sequence* with documents' cu_seqlens cannot be followed:
    Megatron's RoPE rotates such rows by positions of the other cut.
    """
    if thd_split not in (None, "per_document"):
        raise ValueError(
            f"thd_split={thd_split!r}; allowed are None and 'per_document'; batches that are cut in another way "
            "must pass the hooks of megatron_cp.mcore.hooks, which cut them themselves"
        )


def check_partition(said: Any, name: str, cp_size: int) -> None:
    """Returns if `said`, a model's configuration or packed parameters, names no cut but the zigzag one.

    Raises NotImplementedError for any other. Megatron-Core behind 0.20 has the field, and programs on it may set it.
    """
    mode = getattr(said, "cp_partition_mode", None)
    if cp_size > 1 and mode not in (None, "zigzag"):
        raise NotImplementedError(
            f"{name}.cp_partition_mode={mode!r}: rows that are cut in another way are not served here; give 'zigzag'"
        )


def _check_program() -> None:
    """Returns if the arguments of the program, where it has any, name no other cut of thd batches (slime has one)."""
    if getattr(program.arguments(), "allgather_cp", False):
        raise NotImplementedError(
            "--allgather-cp cuts the row of all samples contiguously, for layers that have an attention of their own; "
            "plain attention is served where each sample is cut zigzag; leave it out"
        )


def documents_of_batch(
    params: Any, num_rows: int, cp_size: int, thd_split: str | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns (starts, lengths) of the documents in a batch of `num_rows` rows a rank that Megatron has cut.

    Without thd parameters each sample is one document. Raises RuntimeError where Megatron-LM's flags ask for
    documents that did not come along, and ValueError where it is unknown how a thd batch was cut.
    """
    if params is None or params.qkv_format == "sbhd":
        rule = current_rule()
        if rule.asks_for_documents:
            raise RuntimeError(
                f"{rule.asked_by} asks for documents that do not see each other, but this batch came without them: "
                "its loop does not use Megatron-LM's batch functions as they stand in its modules; call "
                "megatron_cp.mcore.hooks.install() after the imports of the training script"
            )
        length = num_rows * cp_size
        return (0, length), (length if params is None else _real_length(params, length),)
    if params.qkv_format != "thd":
        raise NotImplementedError(
            f"packed_seq_params.qkv_format={params.qkv_format!r}; Megatron's own parameters "
            "must be 'thd' or 'sbhd'; use ContextParallelParams for anything else"
        )
    check_partition(params, "packed_seq_params", cp_size)
    if cp_size > 1 and thd_split is None:
        raise ValueError(
            f"packed_seq_params.qkv_format='thd' on {cp_size} context ranks does not say how the rows were cut, and "
            "Megatron has two ways; let the hooks cut the batch (docs/megatron.md), or, where each document was cut "
            "zigzag, say so: with_context_parallel(spec, thd_split='per_document')"
        )
    if cp_size > 1:
        _check_program()
    return documents_of(params)


def _real_length(params: Any, length: int) -> int:
    """Returns how many of a sample's `length` tokens are no padding, of sbhd parameters, which say it of all samples.

    Megatron's models for images have such parameters beside a batch that is not packed. Raises NotImplementedError
    where samples differ, or where a sample could hold several documents.
    """
    lengths = (length,) if params.cu_seqlens_q is None else documents_of(params)[1]
    if min(lengths) != max(lengths) or not length / 2 < lengths[0] <= length:
        raise NotImplementedError(
            f"packed_seq_params.qkv_format='sbhd' with documents of {min(lengths)} to {max(lengths)} tokens in samples "
            f"of {length}: only samples of one length are served, each one document and less than half padding; pack "
            "documents with qkv_format='thd'"
        )
    return lengths[0]


def documents_of(params: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns (starts, lengths) of the documents in Megatron's THD parameters, without empty ones.

    Raises NotImplementedError when queries and keys are packed differently.
    """
    tensors = (
        params.cu_seqlens_q,
        params.cu_seqlens_kv,
        params.cu_seqlens_q_padded,
        params.cu_seqlens_kv_padded,
    )
    found: Any
    known, found = getattr(params, "_megatron_cp_documents", (None, None))
    if known is not None and _are_as_known(tensors, known):
        return found[0], found[1]  # one transfer from the device per micro-batch, not one per layer
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
                "cu_seqlens_q and cu_seqlens_kv differ; context-parallel self attention needs the same "
                "documents on both sides; pass one cu_seqlens for both"
            )
    rows = zip(padded[:-1], padded[1:], real[:-1], real[1:], strict=True)
    documents = [(start, stop, end - begin) for start, stop, begin, end in rows if stop > start]
    starts = (*(start for start, _, _ in documents), padded[-1])
    lengths = tuple(length for _, _, length in documents)
    if not any(x is not None and x.is_inference() for x in tensors):  # those have no version
        known = [None if x is None else (x, x._version) for x in tensors]
        params._megatron_cp_documents = (known, (starts, lengths))
    return starts, lengths


def _are_as_known(tensors: Sequence[Any], known: Sequence[Any]) -> bool:
    """Returns whether these are the tensors that were read, unchanged since: parameters may be filled anew."""
    return all(
        x is None if before is None else x is before[0] and x._version == before[1]
        for x, before in zip(tensors, known, strict=True)
    )


@eager
def tell_of_uncut_rows(value: torch.Tensor, group: Any) -> None:
    """Warns where all ranks of `group` hold the same rows, as those of a batch that nobody has cut.

    Such rows would be taken for other parts of a longer sequence, and losses be those of another model. Values
    `[s, ...]` of a first layer are rotated by no position: equal tokens have equal ones. Collective over the group.
    """
    if group.size() == 1:
        return
    own = value.detach().flatten(1)[:, 0].float().contiguous()
    of_all = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(of_all, own, group=group)
    if bool((own != own[0]).any()) and all(torch.equal(own, one) for one in of_all):
        warnings.warn(
            f"all {group.size()} context ranks hold the same {len(own)} rows, as if each had the whole batch; cut it "
            "before the model, by megatron.core.utils.get_batch_on_this_cp_rank or the rows of each rank",
            stacklevel=2,
        )


def check_mask_is_causal(
    attention_mask: torch.Tensor, plan: AttentionPlan, rank: int, band: Band
) -> None:
    """Returns if a dense mask (True = hidden) only says that no query sees later keys.

    `attention_mask` is bool `[..., T, S]`: queries of rank `rank`, which `plan` places, against all keys.
    Megatron-LM's loader makes this mask by default; each tensor is looked at once. A layer whose own `band`
    lets queries see later keys takes no dense mask. Raises NotImplementedError for every other mask: it is
    never ignored.
    """
    is_known = not attention_mask.is_inference()  # a mask of inference has no version
    seen = (attention_mask._version if is_known else None, plan.digest())
    if is_known and band[1] == 0 and _checked_masks.get(attention_mask) == seen:
        return
    rows = torch.from_numpy(plan.global_from_local[rank].copy()).to(attention_mask.device)
    keys = torch.arange(attention_mask.shape[-1], device=attention_mask.device)
    hidden = keys[None, :] > rows[:, None]
    fits = attention_mask.shape[-2] == rows.numel() and band[1] == 0
    if not fits or not bool((attention_mask.bool() == hidden).all()):
        raise NotImplementedError(
            f"attention_mask of shape {tuple(attention_mask.shape)} is not the causal mask of this rank's rows; "
            "a dense mask of another kind is not served here, and never ignored; pack samples that have padding (verl: "
            "use_remove_padding, Megatron-SWIFT: padding_free, ROLL: use_sequence_packing); a batch with documents "
            "must pass the hooks of megatron_cp.mcore.hooks, which see it whole; in a loop of your own give the mask "
            "as a plan in packed_seq_params"
        )
    _checked_masks[attention_mask] = seen
