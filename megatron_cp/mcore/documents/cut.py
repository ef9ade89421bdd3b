"""Cuts a micro-batch that Megatron-LM has loaded, by the plan of its documents.

    batch [b, S]  ->  one stream of b x S tokens  ->  T rows of this rank  ->  batch [b, T / b]

Shapes are those of Megatron's own cut, so pipeline stages and sequence parallelism see nothing new; which
token a row holds is the plan's affair. Attention without the plan would take them for Megatron's, so a plan that
does not arrive there is an error.
"""

# b samples of a micro-batch, S tokens of a sample, P context ranks, T = b S / P rows of a rank

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_cp.data.batch import PlanRequest, make_batch_plans
from megatron_cp.device_memory import copy_to
from megatron_cp.mask import packed
from megatron_cp.mcore import layers
from megatron_cp.mcore.batch import ContextParallelParams
from megatron_cp.plan.placement.placement import chunk_layout
from megatron_cp.runtime.shards import local_indices, position_ids

Lengths = tuple[int, ...]

SEQUENCE_KEYS = ("tokens", "labels", "loss_mask", "position_ids")
_WHOLE_KEYS = {"attention_mask", "cu_seqlens", "cu_seqlens_padded", "max_seqlen"}
PARAMS = "_megatron_cp_params"
"""Attribute of the cut tensors: the parameters that go with them into the model."""


@dataclass
class _CutBatch:
    params: weakref.ref[ContextParallelParams]
    tokens_of_sample: int
    is_claimed: bool = False
    """Attention was given these parameters."""


_last: list[_CutBatch] = []  # the batch that was cut last, while none after it was left to Megatron


def cut_batch(batch: dict[str, Any], lengths: Lengths, group: Any) -> ContextParallelParams:
    """Returns the parameters of this micro-batch; the batch holds this rank's rows from now on.

    `batch` has Megatron-LM's keys, with whole sequences `[b, S]`; they become `[b, S / P]`. Samples lie one
    after the other in the plan's stream of b x S tokens. The dense mask and cu_seqlens are taken out: the plan
    is the mask. No collective: every rank cuts its own share.
    """
    whole = next((batch[key] for key in SEQUENCE_KEYS if batch.get(key) is not None), None)
    if whole is None:
        raise NotImplementedError(
            f"a batch of documents has none of {', '.join(SEQUENCE_KEYS)}, only "
            f"{', '.join(sorted(key for key, value in batch.items() if value is not None))}; give its labels or its "
            "position_ids beside them"
        )
    num_samples, device = whole.shape[0], whole.device
    params = params_of_documents(lengths, num_samples, device, group)
    rows = local_indices(params.plans["full"], group.rank(), device)
    for key in _WHOLE_KEYS & batch.keys():
        batch[key] = None
    for key, value in batch.items():
        # Whatever has a value for each token goes with the tokens, as in Megatron's own cut.
        if isinstance(value, torch.Tensor) and value.shape[:2] == whole.shape[:2]:
            batch[key] = value.flatten(0, 1)[rows].unflatten(0, (num_samples, -1))
            setattr(batch[key], PARAMS, params)
    _last[:] = [_CutBatch(weakref.ref(params), whole.shape[1])]
    return params


def claim(params: ContextParallelParams) -> None:
    """Notes that attention was given these parameters."""
    if _last and _last[0].params() is params:
        _last[0].is_claimed = True


def check_none_is_lost(num_rows: int, cp_size: int) -> None:
    """Returns if attention without a plan is right for `num_rows` rows of a sample on each of `cp_size` ranks.

    It is not where the last batch was cut by a plan that no attention was given, nor on rows as many as that
    batch has: a second model may be given copies of it. Raises RuntimeError then: the rows are not where
    Megatron puts them, and the mask would be lost.
    """
    if not _last:
        return
    has_its_rows = num_rows * cp_size == _last[0].tokens_of_sample
    if _last[0].is_claimed and not has_its_rows:
        return
    raise RuntimeError(
        "a batch was cut by the plan of its documents, but attention was given no plan: the batch's tensors were "
        "copied after Megatron's batch function (clone, cat, copy_), or the model does not run GPTModel.forward "
        "(another model class, --overlap-moe-expert-parallel-comm); give "
        "packed_seq_params=megatron_cp.mcore.params_of_batch(batch), of the batch as that function returned it, to "
        "GPTModel.forward; under Megatron-Bridge, whose own cut of a packed batch is each document zigzag, say "
        "thd_split='per_document' (docs/frameworks.md); for rows that are no copy of that batch, call "
        "megatron_cp.mcore.forget_batch() before (a copy would lose its documents)"
    )


def forget_batch() -> None:
    """Drops the batch that was cut last: rows that come next are where Megatron puts them."""
    _last.clear()


def params_of_batch(batch: Mapping[str, Any]) -> ContextParallelParams | None:
    """Returns the parameters of a batch that was cut by a plan: what its model needs in `packed_seq_params`.

    GPTModel finds them by itself, on the tensors that it is given. None: the rows are where Megatron puts them.
    """
    return params_on(batch.get(key) for key in SEQUENCE_KEYS)


def params_on(tensors: Iterable[Any]) -> ContextParallelParams | None:
    """Returns the parameters that `cut_batch` put on the first of these tensors that has some; None on none."""
    found = (getattr(tensor, PARAMS, None) for tensor in tensors)
    return next((params for params in found if params is not None), None)


def params_of_documents(
    lengths: Lengths, num_samples: int, device: torch.device, group: Any
) -> ContextParallelParams:
    """Returns plans of these documents, and positions that count in each."""
    num_tokens = sum(lengths)
    request = _without_padding(layers.plan_request(num_samples), num_tokens)
    plans = make_batch_plans(packed.documents(lengths), request)
    plan = plans["full"]
    if plan.tokens_per_rank * group.size() != num_tokens:
        raise ValueError(
            f"a micro-batch of {num_tokens} tokens cannot be cut into equal shares of {request.cp_size} context "
            f"ranks, in multiples of {request.config.token_multiple}; give a --seq-length that divides by context x "
            "tensor parallel size"
        )
    return ContextParallelParams(
        plans=dict(plans),
        positions=copy_to(position_ids(plan, group.rank(), relative=True), device),
        num_samples=num_samples,
        max_seqlen_q=num_tokens,
        max_seqlen_kv=num_tokens,
    )


def _without_padding(request: PlanRequest, num_tokens: int) -> PlanRequest:
    """Returns the request with a chunk size that pads no rows: Megatron's shapes leave no room for them.

    By itself a planner may pad up to a 64th of the rows, to get finer chunks of an odd length.
    """
    rows, config = num_tokens // request.cp_size, request.config
    chunk, count = chunk_layout(num_tokens, request.cp_size, config)
    if config.chunk_size is not None or chunk * count == rows:
        return request
    finest = max(n for n in range(1, count + 1) if rows % n == 0)
    return replace(request, config=replace(config, chunk_size=rows // finest))
