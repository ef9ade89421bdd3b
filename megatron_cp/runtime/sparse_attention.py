"""Sparse attention over a whole context: an index picks the keys of each query, wherever they are.

    own latent rows, index keys -> to every rank whose queries may see them -> picked and attended to there
    gradients of received rows  -> home, in fp32, added rank by rank

Which keys are picked depends on content alone, so a plan says what may be picked and where tokens lie; who computes is
the owner of the query. Rows are received again in backward instead of kept. Source: DeepSeek-V3.2, section 2.1.
"""

# T rows of this rank, R keys that it holds; N heads of L columns, J heads of the index with I columns

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp.attn.eager import eager
from megatron_cp.attn.options import accumulation_dtype, as_number
from megatron_cp.attn.sparse import (
    IndexLoss,
    Keys,
    Picked,
    Queries,
    SparseRule,
    attend_to_picked,
    gradients_of_picked,
)
from megatron_cp.plan import AttentionPlan
from megatron_cp.runtime.linear_attention import check_tensors
from megatron_cp.runtime.session import check_plan, open_session
from megatron_cp.runtime.sparse_layout import SparseLayout, sparse_layout

MOST_BYTES = 1 << 28
"""Of scores and picked rows that are held at once; a choice, not measured on a GPU."""


@dataclass(frozen=True, eq=False)
class PickedKeys:
    """Which keys an index has picked for the queries of one rank: for further calls with the same plan."""

    plan_digest: str
    rank: int
    topk: int
    parts: list[tuple[slice, slice, Picked]] = field(default_factory=list, repr=False)
    """Some queries, the keys that any of them sees, and which of these each picked (int32); the first call fills it."""

    @property
    def num_queries(self) -> int:
        """Queries whose keys are picked."""
        return sum(rows.stop - rows.start for rows, _, _ in self.parts)

    def check_are_of(self, call: PickedKeys, num_queries: int) -> None:
        """Raises ValueError where they are not for a call that would pick like this, for so many queries."""
        if (self.plan_digest, self.rank, self.topk) != (call.plan_digest, call.rank, call.topk):
            raise ValueError(
                f"picked is of plan {self.plan_digest[:8]}, rank {self.rank} and topk={self.topk}, this call of plan "
                f"{call.plan_digest[:8]}, rank {call.rank} and topk={call.topk}; give what a call like it returned"
            )
        if self.num_queries != num_queries:
            raise ValueError(
                f"picked has keys of {self.num_queries} queries where {num_queries} see any: its call did not end"
            )


class SparseResult(NamedTuple):
    """Results of `cp_sparse_attention`."""

    out: Tensor
    divergence: Tensor
    picked: PickedKeys


@eager
def cp_sparse_attention(  # noqa: PLR0913  the public signature
    q: Tensor,
    latent: Tensor,
    index_q: Tensor | None,
    index_k: Tensor | None,
    index_weights: Tensor | None,
    plan: AttentionPlan,
    group: dist.ProcessGroup | None,
    *,
    topk: int,
    value_dim: int,
    softmax_scale: float | None = None,
    index_loss: IndexLoss | None = None,
    index_relu: bool = True,
    head_group: dist.ProcessGroup | None = None,
    picked: PickedKeys | None = None,
) -> SparseResult:
    """Returns attention of this rank's queries to the keys that an index picks for them, and what the index did.

    q `[T, N, L]`, latent `[T, L]` -> out `[T, N, value_dim]` in the input dtype. A latent row is the key of all heads;
    its first `value_dim` columns are the value. Of the keys that the plan's mask lets a query see, it attends to the
    `topk` with the largest

        score(t, s) = sum_j index_weights[t, j] relu(index_q[t, j] . index_k[s])

    index_q `[T, J, I]`, index_k `[T, I]`, index_weights `[T, J]`; of equal scores the earlier key is taken. A query
    that sees fewer attends to all. Queries without keys, and padding rows, give 0 and zero gradients.

    The second result, fp32 `[T]` (fp64 for fp64 inputs), is KL(p || softmax(score)) of each query, where p is its
    attention averaged over heads: over the picked keys with `index_loss="picked"`, over all that it sees with
    "visible", 0 without. The index has gradients through it alone, attention through the first result alone.
    `head_group` are ranks that hold other heads of the same queries: p is averaged over theirs too.

    The third result says which keys were picked. `picked` takes it in a later call with the same plan and `topk`, as
    layers do that share what one of them has picked. Such a call has no index: its three tensors are None, and so is
    `index_loss`.

    Products and sums are fp32 (fp64); gradients of rows travel in fp32. On a GPU 16-bit inputs are multiplied in 16
    bits and summed in fp32; **it has never run on one**. Rounding decides between scores that are nearly equal, so
    results may differ where sizes of chunks do.

    Collective over `group` (None for cp_size 1) and, with a loss, `head_group`, forward and backward: every rank calls
    it with the same plan, dtypes, options and wish for gradients.

    Source: DeepSeek-V3.2 (2025), section 2.1.

    Raises:
        ValueError, TypeError: wrong input, before any collective.
        NotImplementedError: for a plan of cross attention.
        PlanMismatchError: on every rank, when the ranks' plans or calls differ.
    """
    check_plan(plan)
    index = {"index_q": index_q, "index_k": index_k, "index_weights": index_weights}
    has_index = picked is None
    if not has_index and (index_loss is not None or any(x is not None for x in index.values())):
        raise ValueError(
            "picked stands for an index; pass None for index_q, index_k, index_weights and index_loss"
        )
    given = {"q": q, "latent": latent, **(index if has_index else {})}
    check_tensors({**given})
    tensors = cast("dict[str, Tensor]", given)
    if plan.key_tokens is not None:
        raise NotImplementedError(
            "the plan is one of cross attention; an index picks among the tokens of one pack: plan self-attention"
        )
    _check_shapes(tensors, plan.tokens_per_rank, topk, value_dim)
    rule = _rule_of(q, topk, value_dim, softmax_scale, index_loss, index_relu, head_group)
    rank = 0 if group is None else dist.get_rank(group)
    layout = sparse_layout(plan, rank, q.device).here()
    picks = PickedKeys(plan.digest(), rank, topk)
    if picked is not None:
        picked.check_are_of(picks, len(layout.rows))
        picks = picked
    wants = [x.requires_grad and torch.is_grad_enabled() for x in tensors.values()]
    shapes = ", ".join(f"{x.dtype} {tuple(x.shape)}" for x in tensors.values())
    settings = (topk, value_dim, rule.scale, index_loss, index_relu, has_index)
    call = f"sparse attention {shapes} {wants} {settings}"
    session = open_session(plan, group, q.device, call)
    if not has_index:  # one without columns
        shapes_of_none = {"index_q": (1, 0), "index_k": (0,), "index_weights": (1,)}
        tensors |= {name: q.new_empty(len(q), *shape) for name, shape in shapes_of_none.items()}
    out, divergence = _SparseAttention.apply(
        *tensors.values(), _Call(rule, layout, session.group, picks)
    )
    return SparseResult(out, divergence, picks)


def _rule_of(
    q: Tensor,
    topk: int,
    value_dim: int,
    softmax_scale: float | None,
    index_loss: IndexLoss | None,
    index_relu: bool,
    head_group: dist.ProcessGroup | None,
) -> SparseRule:
    """Returns what the call's options mean. Raises ValueError for those that mean nothing."""
    if index_loss not in (None, "picked", "visible"):
        raise ValueError(f"index_loss={index_loss!r} must be 'picked', 'visible' or None")
    scale = (
        1 / math.sqrt(q.shape[-1])
        if softmax_scale is None
        else as_number("softmax_scale", softmax_scale)
    )
    if not math.isfinite(scale):
        raise ValueError(f"softmax_scale={softmax_scale} must be finite; pass None for 1/sqrt(L)")
    if head_group is not None and head_group.size() == 1:
        head_group = None
    return SparseRule(topk, value_dim, scale, index_loss, index_relu, head_group)


@dataclass(frozen=True)
class _Call:
    """What is no tensor of a call."""

    rule: SparseRule
    layout: SparseLayout
    group: dist.ProcessGroup | None
    picks: PickedKeys
    """Empty until the index of a first call has picked."""

    def hold(self, latent: Tensor, index_k: Tensor) -> Keys:
        """Returns the keys that this rank's queries may see, in the order of tokens. Collective."""
        own = torch.cat([latent, index_k], dim=1)
        held = own
        if self.layout.exchange.is_needed:
            assert self.group is not None, "a plan for one rank moves nothing"
            held = torch.cat([own, self.layout.exchange.send(own, self.group).wait()])
        held = held.index_select(0, self.layout.held)
        return Keys(*held.split([latent.shape[1], index_k.shape[1]], dim=1))

    def at_home(self, x: Tensor, num_rows: int) -> Tensor:
        """Returns rows of tokens where they lie among a rank's rows; the others are zero."""
        return x.new_zeros(num_rows, *x.shape[1:]).index_copy_(0, self.layout.rows, x)

    def bring_home(self, gradients: Keys, num_rows: int) -> Keys:
        """Returns the gradients of own rows, given those of the keys held here, from all ranks. Collective."""
        exchange, widths = self.layout.exchange, [x.shape[1] for x in gradients]
        flat = torch.cat(list(gradients), dim=1)
        held = flat.new_zeros(num_rows + sum(exchange.recv_splits), flat.shape[1])
        held.index_copy_(0, self.layout.held, flat)
        own = held[:num_rows]
        if exchange.is_needed:
            assert self.group is not None
            back = exchange.send_back(held[num_rows:], self.group).wait()
            own = own + exchange.summed(back, num_rows)
        return Keys(*own.split(widths, dim=1))

    def chunks(self, queries: Queries) -> Iterator[tuple[slice, slice, Picked | None]]:
        """Yields the chunks in which pairs are looked at, and what was picked where that is known."""
        if self.picks.parts:
            for rows, keys, picked in self.picks.parts:
                yield rows, keys, picked._replace(keys=picked.keys.long())
            return
        heads = queries.index_q.shape[1]
        if self.rule.loss == "visible":
            heads += queries.q.shape[1]
        size = accumulation_dtype(queries.q.dtype).itemsize
        width = queries.q.shape[2] + queries.index_q.shape[2]

        def bytes_of_row(num_keys: int) -> int:
            num_picked = min(num_keys, self.rule.topk)  # each query has copies of their rows
            return 2 * size * (heads * num_keys + width * num_picked)

        for rows, keys in self.layout.chunks(bytes_of_row, MOST_BYTES):
            yield rows, keys, None


class _SparseAttention(torch.autograd.Function):
    """Keeps own rows and what was picked; receives rows again in backward."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        *tensors, call = given
        q, latent, index_q, index_k, index_weights = tensors
        held, layout = call.hold(latent, index_k), call.layout
        queries = Queries(*(x.index_select(0, layout.rows) for x in (q, index_q, index_weights)))
        exact = accumulation_dtype(q.dtype)
        outs = [q.new_zeros(0, q.shape[1], call.rule.value_dim)]
        divergences = [q.new_zeros(0, dtype=exact)]
        ctx.call = call
        for rows, keys, picked in call.chunks(queries):
            intervals = layout.intervals[:, :, rows] - keys.start
            out, divergence, found = attend_to_picked(
                queries.part(rows), held.part(keys), intervals, call.rule, picked
            )
            outs.append(out.to(q.dtype))
            divergences.append(divergence)
            if picked is None:
                call.picks.parts.append((rows, keys, found._replace(keys=found.keys.int())))
        ctx.save_for_backward(*tensors)
        out, divergence = (call.at_home(torch.cat(parts), len(q)) for parts in (outs, divergences))
        return out, divergence

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_out: Tensor, d_divergence: Tensor) -> tuple[Tensor | None, ...]:
        q, latent, index_q, index_k, index_weights = ctx.saved_tensors
        call, layout = ctx.call, ctx.call.layout
        held, exact = call.hold(latent, index_k), accumulation_dtype(q.dtype)
        own = (q, index_q, index_weights)
        queries = Queries(*(x.index_select(0, layout.rows) for x in own))
        d_out, d_divergence = (x.index_select(0, layout.rows) for x in (d_out, d_divergence))
        d_queries = [Queries(*(x.new_zeros((0, *x.shape[1:]), dtype=exact) for x in queries))]
        d_held = Keys(*(torch.zeros_like(x, dtype=exact) for x in held))
        for rows, keys, picked in call.chunks(queries):
            gradients = gradients_of_picked(
                *(queries.part(rows), held.part(keys)),
                layout.intervals[:, :, rows] - keys.start,
                picked,
                (d_out[rows], d_divergence[rows]),
                call.rule,
            )
            d_queries.append(gradients.queries)
            for total, part in zip(d_held, gradients.keys, strict=True):
                total[keys].add_(part)
        d_latent, d_index_k = call.bring_home(d_held, len(latent))
        d_q, d_index_q, d_index_weights = (
            call.at_home(torch.cat(parts), len(q)) for parts in zip(*d_queries, strict=True)
        )
        found = (d_q, d_latent, d_index_q, d_index_k, d_index_weights)
        returned = (x.to(like.dtype) for x, like in zip(found, ctx.saved_tensors, strict=True))
        return (*returned, None)


def _check_shapes(tensors: dict[str, Tensor], num_rows: int, topk: int, value_dim: int) -> None:
    dims = {"q": 3, "latent": 2, "index_q": 3, "index_k": 2, "index_weights": 2}
    for name, x in tensors.items():
        if x.dim() != dims[name] or x.shape[0] != num_rows or not all(x.shape[1:]):
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, it must have {dims[name]} dimensions and the {num_rows} rows that "
                "the plan gives every rank; dispatch(x, plan, group) makes the local rows"
            )
    for rows, heads in (("latent", "q"), ("index_k", "index_q")):
        if rows in tensors and tensors[rows].shape[1] != tensors[heads].shape[2]:
            raise ValueError(
                f"rows of {rows} are {tensors[rows].shape[1]} wide, heads of {heads} {tensors[heads].shape[2]}; they "
                "must be equal: bring queries into the space of latent rows"
            )
    if "index_q" in tensors and tensors["index_weights"].shape[1] != tensors["index_q"].shape[1]:
        raise ValueError(
            f"index_weights has {tensors['index_weights'].shape[1]} columns, index_q {tensors['index_q'].shape[1]} "
            "heads; give one weight a head"
        )
    if len({x.dtype for x in tensors.values()}) > 1:
        dtypes = ", ".join(f"{name} {x.dtype}" for name, x in tensors.items())
        raise ValueError(f"dtypes {dtypes} must be equal; cast them to one of them")
    for name, value, most in (
        ("topk", topk, None),
        ("value_dim", value_dim, tensors["latent"].shape[1]),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r} must be a positive integer")
        if most is not None and value > most:
            raise ValueError(
                f"{name}={value} must be at most the {most} columns of latent; give that"
            )
