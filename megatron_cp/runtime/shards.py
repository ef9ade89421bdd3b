"""Tokens between their global order and the ranks: dispatch, undispatch, roll, positions.

Rows of padding at the tail of the pack are zero after `dispatch`, or what it is told, and dropped by `undispatch`. In
cross attention queries and keys are other tokens, which lie elsewhere: there `side` has to say which are meant, "q" or
"k". Rows travel as bytes: gloo knows few dtypes.
"""

import math
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp.attn.eager import eager
from megatron_cp.attn.options import check_tensor, needs_grad
from megatron_cp.comm.row_exchange import RowExchange
from megatron_cp.comm.upload import upload
from megatron_cp.device_memory import copy_to
from megatron_cp.mask.slice import HI, LO
from megatron_cp.plan import AttentionPlan
from megatron_cp.plan.schema import SIDES, Side
from megatron_cp.runtime.session import check_plan, open_session


def local_indices(
    plan: AttentionPlan, rank: int, device: torch.device | None = None, side: Side | None = None
) -> Tensor:
    """Returns the global token index of each row of `rank`: int64 `[T]`; ids >= num_tokens are padding."""
    side = checked_side(plan, side)
    ids = plan.tokens_of(side)[_checked_rank(plan, rank)]
    return copy_to(torch.from_numpy(ids.copy()), torch.device(device or "cpu"))


def checked_side(plan: AttentionPlan, side: Side | None) -> Side:
    """Returns the side that is meant; where both are the same tokens it need not be said.

    Raises ValueError for another word, and for a plan of cross attention if none is given; TypeError for no plan.
    """
    check_plan(plan)
    if side not in (None, *SIDES):
        raise ValueError(f"side={side!r} must be 'q' or 'k'; say which tokens are meant")
    if side is None and plan.key_tokens is not None:
        raise ValueError(
            "the plan is one of cross attention, whose queries and keys are different tokens on different ranks; "
            "say side='q' or side='k'"
        )
    return side or "q"


@eager
def position_ids(
    plan: AttentionPlan, rank: int, relative: bool = False, side: Side | None = None
) -> Tensor:
    """Returns the position of each row of `rank`: int64 `[T]`, the RoPE positions to use.

    `relative=False`: the global token index (padding counts on). `relative=True`: the index inside the
    row's document, where documents are the connected blocks of the mask; padding rows get 0.

    Raises ValueError as `checked_side`, and for relative positions in cross attention, whose mask does not say where
    the documents of either side begin.
    """
    side = checked_side(plan, side)
    ids = plan.tokens_of(side)[_checked_rank(plan, rank)]
    if not relative:
        return torch.from_numpy(ids.copy())
    if plan.key_tokens is not None:
        raise ValueError(
            "relative=True needs documents, which the mask of cross attention does not name; make the plan with "
            "queries= or keys= the plan of these tokens and take that plan's positions, or count from document starts "
            "of your own"
        )
    starts = document_starts(plan)
    real = ids < plan.num_tokens
    positions = np.zeros_like(ids)
    positions[real] = ids[real] - starts[np.searchsorted(starts, ids[real], side="right") - 1]
    return torch.from_numpy(positions)


def document_starts(plan: AttentionPlan) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Returns the first token of each document: the finest cut that no pair of the mask crosses.

    A token that no pair has is a document of its own, where the planner's `document_bounds` joins neighbours; so is
    one that sees itself alone, which may share a slice with others: the diagonal.
    """
    rows = plan.mask.array
    rows = rows[(rows[:, LO] < 0) | (rows[:, HI] > 0)]
    low = np.minimum(rows[:, 0], rows[:, 2])
    high = np.maximum(rows[:, 1], rows[:, 3])
    crossed = np.zeros(plan.num_tokens + 1, dtype=np.int64)
    np.add.at(crossed, low + 1, 1)  # a slice forbids the cuts strictly inside its extent
    np.add.at(crossed, high, -1)
    inside = np.cumsum(crossed)[: plan.num_tokens]
    cuts = np.flatnonzero(inside == 0)
    return cuts if len(cuts) and cuts[0] == 0 else np.r_[0, cuts]


@eager
def dispatch(
    x: Tensor,
    plan: AttentionPlan,
    group: dist.ProcessGroup | None,
    dim: int = 0,
    side: Side | None = None,
    padding_value: float = 0,
) -> Tensor:
    """Returns this rank's rows of the whole `x`, which every rank holds: `[..., T, ...]` along `dim`.

    Where the ranks hold more rows than there are tokens, the last ones are padding and get `padding_value`: give
    labels one that the loss leaves out, `dispatch(labels, plan, group, padding_value=-100)`.

    Differentiable: the gradient is gathered from all ranks, so every rank gets the whole of it. Collective
    in backward, and in forward for the first use of a side of a plan, with a gradient and without.
    """
    side = checked_side(plan, side)
    _check_length(x, plan.length_of(side), dim, "x")
    _check_padding(x.dtype, padding_value)
    # A rank without a backward pass would leave the others waiting for it there.
    open_session(plan, group, x.device, f"dispatch {side}{_backward_of(x, dim)}")
    local: Tensor = _Dispatch.apply(x.movedim(dim, 0), plan, group, side, padding_value)
    return local.movedim(0, dim)


@eager
def undispatch(
    x_local: Tensor,
    plan: AttentionPlan,
    group: dist.ProcessGroup | None,
    dim: int = 0,
    side: Side | None = None,
) -> Tensor:
    """Returns the whole tensor in global order on every rank, `[..., num_tokens, ...]` along `dim`.

    `undispatch(dispatch(x)) == x` bit for bit. Differentiable: each rank keeps the gradient of its own
    rows of *its* copy, as if the whole had been computed once; use the same loss on every rank.
    Collective: every rank of the group calls it.
    """
    side = checked_side(plan, side)
    _check_length(x_local, plan.own_rows.of(side), dim, "x_local")
    open_session(plan, group, x_local.device, f"undispatch {side} {_rows_of(x_local, dim)}")
    whole: Tensor = _Undispatch.apply(x_local.movedim(dim, 0), plan, group, side)
    return whole.movedim(0, dim)


@eager
def roll(
    x_local: Tensor,
    plan: AttentionPlan,
    group: dist.ProcessGroup | None,
    shifts: int = -1,
    dim: int = 0,
) -> Tensor:
    """Returns `torch.roll` by the *global* order of tokens, on this rank's rows.

    Row of token i gets the value of token i - shifts (modulo num_tokens); padding rows stay as they are.
    Differentiable any number of times: a gradient rolls back. Collective; only rows that cross ranks move. The plan
    is the self-attention plan by which the rows were dispatched.
    """
    checked_side(plan, None)
    _check_length(x_local, plan.tokens_per_rank, dim, "x_local")
    if not isinstance(shifts, Integral):
        raise TypeError(f"shifts={shifts!r} must be an integer, a number of tokens")
    call = f"roll by {int(shifts)} {_rows_of(x_local, dim)}{_backward_of(x_local, dim)}"
    open_session(plan, group, x_local.device, call)
    rolled: Tensor = _Roll.apply(x_local.movedim(dim, 0), plan, group, int(shifts))
    return rolled.movedim(0, dim)


class _Roll(torch.autograd.Function):
    """Local rows, rolled; backward rolls the gradient the other way, differentiably."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, plan: AttentionPlan, group: dist.ProcessGroup | None, shifts: int
    ) -> Tensor:
        ctx.given = plan, group, -shifts
        return _roll_rows(x, plan, group, shifts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _Roll.apply(grad, *ctx.given), None, None, None


def _roll_rows(
    rows: Tensor, plan: AttentionPlan, group: dist.ProcessGroup | None, shifts: int
) -> Tensor:
    rank = 0 if group is None else dist.get_rank(group)
    owner, row = plan.local_from_global
    ids, num_rows = plan.global_from_local, plan.tokens_per_rank
    source = np.where(ids < plan.num_tokens, (ids - shifts) % plan.num_tokens, ids)
    wanted, reader = source.reshape(-1), np.arange(plan.cp_size).repeat(num_rows)
    exchange, arriving = RowExchange.compile(reader, owner[wanted], row[wanted], rank, plan.cp_size)
    places = row[source[rank]]
    places[arriving - rank * num_rows] = num_rows + np.arange(len(arriving))
    exchange, held = upload((exchange, torch.from_numpy(places)), rows.device).here()
    own = _bytes_of(rows)
    received = own[:0]
    if exchange.is_needed:
        assert group is not None, "one rank needs nothing of others"
        received = exchange.send(own, group).wait()
    rolled = torch.cat([own, received]).index_select(0, held)
    return rolled.view(-1).view(rows.dtype).view(rows.shape)


class _Dispatch(torch.autograd.Function):
    """Local rows of a replicated tensor; backward gathers all ranks' gradients, and is differentiable."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        plan: AttentionPlan,
        group: dist.ProcessGroup | None,
        side: Side,
        padding_value: float = 0,
    ) -> Tensor:
        ctx.given = plan, group, side
        return _take_rows(x, plan, group, side, padding_value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _Undispatch.apply(grad, *ctx.given), None, None, None, None


class _Undispatch(torch.autograd.Function):
    """The whole tensor from all ranks' rows; backward keeps the local rows of the gradient, differentiably."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, plan: AttentionPlan, group: dist.ProcessGroup | None, side: Side
    ) -> Tensor:
        ctx.given = plan, group, side
        return _gather_rows(x, plan, group, side)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _Dispatch.apply(grad, *ctx.given), None, None, None


def _take_rows(
    x: Tensor,
    plan: AttentionPlan,
    group: dist.ProcessGroup | None,
    side: Side,
    padding_value: float,
) -> Tensor:
    ids = plan.tokens_of(side)[0 if group is None else dist.get_rank(group)]
    is_real = ids < plan.length_of(side)
    rows = x.new_full((len(ids), *x.shape[1:]), padding_value)
    places, tokens = upload(
        (torch.from_numpy(np.flatnonzero(is_real)), torch.from_numpy(ids[is_real])), x.device
    ).here()
    rows[places] = x[tokens]
    return rows


def _gather_rows(
    x: Tensor, plan: AttentionPlan, group: dist.ProcessGroup | None, side: Side
) -> Tensor:
    x = x.contiguous()
    parts = [x]
    if group is not None and plan.cp_size > 1:
        mine = _bytes_of(x)
        gathered = [torch.empty_like(mine) for _ in range(plan.cp_size)]
        dist.all_gather(gathered, mine, group=group)
        parts = [one.view(-1).view(x.dtype).view(x.shape) for one in gathered]
    tokens = plan.tokens_of(side)
    whole = x.new_empty((tokens.size, *x.shape[1:]))
    places = upload(tuple(torch.from_numpy(ids.copy()) for ids in tokens), x.device).here()
    for rows, part in zip(places, parts, strict=True):
        whole[rows] = part
    return whole[: plan.length_of(side)]


def _bytes_of(rows: Tensor) -> Tensor:
    """Returns rows with numbers in them as bytes `[rows, bytes of a row]`."""
    row_bytes = math.prod(rows.shape[1:]) * rows.element_size()
    rows = rows.resolve_conj().resolve_neg()  # of which a view may put off the sign
    return rows.contiguous().view(-1).view(torch.uint8).view(len(rows), row_bytes)


def _rows_of(x: Tensor, dim: int) -> str:
    """Returns what rows of ranks must have in common to be put together."""
    return f"{x.dtype} {tuple(x.movedim(dim, 0).shape[1:])}"


def _backward_of(x: Tensor, dim: int) -> str:
    """Returns which backward pass a call has, in which all ranks take part or none."""
    return f" backward {_rows_of(x, dim)}" if needs_grad(x) else ""


def _checked_rank(plan: AttentionPlan, rank: int) -> int:
    if not isinstance(rank, Integral) or not 0 <= rank < plan.cp_size:
        raise ValueError(
            f"rank={rank!r} must be one of the plan's ranks, an integer in [0, {plan.cp_size}); pass the rank in the "
            "context-parallel group"
        )
    return int(rank)


def _check_length(x: Tensor, expected: int, dim: int, name: str) -> None:
    check_tensor(name, x)
    if not isinstance(dim, Integral) or not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim={dim!r} must be a dimension of {name}, which has {x.dim()}")
    if x.shape[dim] != expected:
        raise ValueError(
            f"{name} has {x.shape[dim]} rows along dim {dim}, the plan has {expected}; "
            "pass the tensor of the pack that the plan was made for, or another dim"
        )


def _check_padding(dtype: torch.dtype, value: float) -> None:
    """Raises TypeError for what is no number, ValueError for one that whole numbers of `dtype` lack.

    torch makes 156 of -100 in uint8, a label.
    """
    if not isinstance(value, Real):
        raise TypeError(f"padding_value={value!r} is {type(value).__name__}; it must be a number")
    if dtype.is_floating_point or dtype.is_complex:
        return
    low, high = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    if not (float(value).is_integer() and low <= value <= high):
        raise ValueError(
            f"padding_value={value!r} must be one of the values of {dtype}, whole numbers in [{low}, {high}]; "
            "dispatch x.long(), or give another value"
        )
