"""Multi-token prediction under dispatch: rows are rolled by their *global* order.

An MTP layer needs the successor of each token. Megatron rolls the rows of a rank and knows its own zigzag
split only. In a dispatched pack the successor may live on any rank, and a document's last token has none.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.moe.router import TopKRouter

from megatron_cp.mask import from_slices
from megatron_cp.mcore.batch import ContextParallelParams
from megatron_cp.mcore.versions import hybrid_classes
from megatron_cp.mcore.versions.wrapping import put_hook
from megatron_cp.plan import AttentionPlan
from megatron_cp.runtime.shards import document_starts, roll


def install_order_roll() -> None:
    """Makes Megatron's `roll_tensor`, and its count of loss tokens, follow the plan of a micro-batch.

    Without ContextParallelParams rows are rolled as they were; loss tokens are counted over the context ranks then too.

    Our attention calls it where MTP layers are configured. A second call changes nothing.
    """
    from megatron.core.models.gpt import gpt_model

    hybrid_model = sys.modules[hybrid_classes.hybrid_parts().model.__module__]
    for module in (multi_token_prediction, gpt_model, hybrid_model):
        if hasattr(module, "roll_tensor"):
            put_hook(module, "roll_tensor", _following_plans)
        if hasattr(module, "process_mtp_loss"):
            put_hook(module, "process_mtp_loss", _counting_over_ranks)


def mark_prediction(stack: torch.nn.Module, config: Any, number: int) -> None:
    """Tells the layers of a hybrid model's prediction that they are in one; `number` counts predictions from 1.

    Auxiliary losses of its experts are logged behind those of the decoder, at one place for each prediction. Megatron
    would take the layer's number in the stack, for which there may be no place. Where the same layers make all
    predictions, each counts a share of those losses, as since 0.17, and attention that is recomputed keeps several
    results.
    """
    num_calls = config.mtp_num_layers if config.mtp_use_repeated_layer else 1
    module: Any
    for module in stack.modules():
        is_router = isinstance(module, TopKRouter)
        if is_router and getattr(module, "is_mtp_layer", False):  # since 0.17 Megatron counts on
            module.set_layer_number(number)
            continue
        if is_router:
            module.set_layer_number(config.num_layers + number)
        if hasattr(module, "num_calls"):
            module.num_calls = num_calls


def mark_repeated_prediction(block: torch.nn.Module, config: Any) -> None:
    """Tells the attention of a GPT's predictions how often a micro-batch calls it, where one layer makes them all.

    Its routers know by themselves: Megatron has had such GPTs since 0.17.
    """
    if getattr(config, "mtp_use_repeated_layer", False):
        for module in block.modules():
            if getattr(module, "follows_plans", False) and hasattr(module, "num_calls"):
                module.num_calls = config.mtp_num_layers


def _following_plans(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps Megatron's `roll_tensor`, which stands for all but dispatched packs."""

    def roll_tensor(
        tensor: torch.Tensor,
        shifts: int = -1,
        dims: int = -1,
        cp_group: Any = None,
        packed_seq_params: Any = None,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not isinstance(packed_seq_params, ContextParallelParams):
            tensor = tensor if tensor is None else tensor.as_subclass(torch.Tensor)
            rolled, total = plain(tensor, shifts, dims, cp_group, packed_seq_params, **options)
            if total is not None and _is_mask(rolled):
                size = cp_group.size() if _is_shared(cp_group) else 1
                total = _share(_summed(total, cp_group) if size > 1 else total, size)
            return rolled, total
        if (shifts, dims) != (-1, -1):
            raise NotImplementedError(
                f"roll_tensor(shifts={shifts}, dims={dims}); a pack is rolled by shifts=-1 along "
                "dims=-1"
            )
        return roll_by_order(tensor, packed_seq_params, cp_group)

    return roll_tensor


def _is_mask(rows: torch.Tensor) -> bool:
    """Returns whether these are a loss mask, and no ids, which are int64: masks are floats, or int32 (slime)."""
    return rows.dtype != torch.int64


def _counting_over_ranks(plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Returns Megatron's loss of predictions with the loss mask's tokens counted over context ranks.

    Since 0.17, under per-token loss, it weighs the loss by tokens before rolling / tokens after. The
    second is ours (`roll_by_order`); the first would be the rank's own, and weights would depend on
    where tokens were dispatched.
    """

    def process_mtp_loss(*args: Any, **kwargs: Any) -> torch.Tensor:
        params, rows = kwargs.get("packed_seq_params"), kwargs.get("input_ids")
        group = getattr(params, "cp_group", None) or kwargs.get("cp_group")
        labels, mask = kwargs.get("labels"), kwargs.get("loss_mask")
        tokens = rows if labels is None else labels
        if tokens is None:  # nothing to learn
            return plain(*args, **kwargs)
        if mask is None:
            mask = torch.ones_like(tokens)
        if not mask.is_floating_point():  # of ids, say: `_is_mask`
            mask = mask.float()
        kwargs["loss_mask"] = mask
        if not _is_shared(group):
            return plain(*args, **kwargs)
        if labels is None:  # since 0.19 Megatron finds them so, but behind the count
            roll_tensor = functools.partial(
                multi_token_prediction.roll_tensor, cp_group=group, packed_seq_params=params
            )
            labels, mask = roll_tensor(rows)[0], roll_tensor(mask)[0]
        counted = mask.as_subclass(_CountedMask)
        counted.count = count_per_rank(mask, group)
        kwargs.update(labels=labels, loss_mask=counted)
        return plain(*args, **kwargs)

    return process_mtp_loss


class _CountedMask(torch.Tensor):
    """A loss mask whose `sum()` is that of all context ranks / cp_size."""

    count: torch.Tensor

    def sum(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns the count over ranks; nothing else is ever asked of a whole loss mask."""
        assert not args and not kwargs, (
            "Megatron's loss of predictions sums its mask in another way"
        )
        return self.count


class _Share(torch.Tensor):
    """Loss tokens of a context group / its size: perhaps less than 1, which Megatron takes at least since 0.17."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Computes as plain tensors do; a share is already of at least one token, and no bound changes it."""
        if func in (torch.clamp, torch.Tensor.clamp):
            return args[0].as_subclass(torch.Tensor)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _share(total: torch.Tensor, cp_size: int) -> torch.Tensor:
    return (total.clamp(min=1) / cp_size).as_subclass(_Share)


def count_per_rank(mask: torch.Tensor, group: Any) -> torch.Tensor:
    """Returns the loss tokens of the context group / its size. Collective: every rank of it calls it."""
    total = mask.sum()
    return _summed(total, group) / group.size() if _is_shared(group) else total


def _is_shared(group: Any) -> bool:
    return group is not None and group.size() > 1


def _summed(count: torch.Tensor, group: Any) -> torch.Tensor:
    total = count.clone()
    dist.all_reduce(total, group=group)
    return total


def roll_by_order(
    values_T: torch.Tensor, params: ContextParallelParams, cp_group: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns each row's successor in its document, and their sum over the context group / cp_size.

    `values_T` holds this rank's rows in dispatched order, `[..., T]`. The last token of a document, and
    padding, get 0; in a loss mask (`_is_mask`), so do rows that see their successor's. The sum is
    Megatron's count of loss tokens when a loss mask is rolled: divided by cp_size it makes the averages over
    ranks that Megatron takes equal the mean over the whole pack, at every CP size. `cp_group` serves where
    `params.cp_group` is None. Collective: every rank of the context group calls it.
    """
    values_T = values_T.as_subclass(torch.Tensor)
    plan, group = params.plans["full"], params.cp_group or cp_group
    rank = 0 if group is None else dist.get_rank(group)
    keep = _has_successor(plan)[rank]
    if _is_mask(values_T):
        keep = keep & ~_sees_successor(plan)[rank]
    keep_T = torch.from_numpy(keep.copy()).to(values_T.device)
    shape = values_T.shape
    if params.num_samples > 1:  # [..., b, T / b] is one stream
        values_T = values_T.flatten(-2)
    rolled = roll(values_T, plan, group, shifts=-1, dim=-1)
    rolled = torch.where(keep_T, rolled, torch.zeros_like(rolled)).reshape(shape)
    total = rolled.sum()
    if plan.cp_size > 1:
        total = _summed(total, group)
    return rolled, _share(total, plan.cp_size)


@functools.lru_cache(maxsize=64)
def _has_successor(plan: AttentionPlan) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Returns bool `[P, T]`: whether the row's token is followed by another one of its document."""
    is_last = np.ones(plan.global_from_local.size, dtype=np.bool_)
    is_last[: plan.num_tokens - 1] = False
    starts = document_starts(plan)
    is_last[starts[starts > 0] - 1] = True
    return ~is_last[plan.global_from_local]


@functools.lru_cache(maxsize=64)
def _sees_successor(plan: AttentionPlan) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Returns bool `[P, T]`: whether the row sees that of its token's successor, as in a prefix.

    The token that a prediction layer lets a row predict is an input of its successor's row: it would be copied.
    """
    size = plan.num_tokens
    ahead = plan.mask & from_slices(size, size, [(0, size, 0, size, 1, 1)])
    sees = np.zeros(plan.global_from_local.size, dtype=np.bool_)
    sees[:size] = ahead.area_of_rows(np.arange(size + 1)) > 0
    return sees[plan.global_from_local]
