"""The public face of the runtime: one call from local q, k, v to local out and lse."""

# T tokens of this rank, N query heads, G key/value heads, H head dim, Hv value head dim

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp.attn.attend import attend
from megatron_cp.attn.dropout import head_seeds
from megatron_cp.attn.eager import eager
from megatron_cp.attn.logits import no_logits
from megatron_cp.attn.options import (
    AttendOptions,
    check_sink,
    check_tensor,
    needs_grad,
    resolve_options,
)
from megatron_cp.plan import AttentionPlan
from megatron_cp.runtime.causal_conv import cp_causal_conv1d
from megatron_cp.runtime.checkpoint import checkpoint, record_result, recorded_result
from megatron_cp.runtime.dist_attn import DistributedAttention
from megatron_cp.runtime.expansion import Expand, Expansion
from megatron_cp.runtime.linear_attention import cp_linear_attention
from megatron_cp.runtime.session import check_plan, open_session
from megatron_cp.runtime.shards import dispatch, position_ids, roll, undispatch
from megatron_cp.runtime.sparse_attention import cp_sparse_attention


class Call(NamedTuple):
    """What every rank asks for alike, besides the plan."""

    dtype: torch.dtype
    q: torch.Size
    k: torch.Size
    value: torch.Size
    options: AttendOptions
    has_sink: bool
    has_max_logits: bool
    has_expansion: bool
    has_backward: bool
    """A rank without a backward pass would leave the others waiting for it there."""


@eager
def cp_attention(  # noqa: PLR0913  the public signature
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    plan: AttentionPlan,
    group: dist.ProcessGroup | None,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    backend: str | None = None,
    deterministic: bool = False,
    return_max_logits: bool = False,
    expand: Expand | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Returns attention over the whole context for the tokens of this rank, in the plan's local order.

    q `[T, N, H]`, k `[T, G, H]`, v `[T, G, Hv]` -> out `[T, N, Hv]` in the input dtype, lse `[T, N]` fp32
    (fp64 for fp64 inputs), natural log, including `sink` `[N]` when there is one. In cross attention k and v have
    the rows of side "k" of the plan, `[S, ...]`. Rows without keys give
    out 0, lse -inf (or the sink) and zero gradients. Differentiable in q, k, v and sink, through out and
    lse. `sink` is replicated: its gradient is this rank's share, to be summed over the group like that of
    any replicated parameter.

    With `return_max_logits` a third result: the largest scaled and capped logit of each head over the whole
    context, fp32 `[N]`, the same on every rank, without a gradient, not counting the sink (QK-Clip).

    With `expand`, `k` are latent rows `[T, ...]` and `v` is None: rows travel as they are, and
    `expand(rows [R, ...]) -> (k [R, G, H], v [R, G, Hv])`, each row for itself, makes keys and values of them on the
    rank that attends to them, forward and again backward: what it reads must stay the same until then. Gradients flow
    through it to the latent rows and to the leaf tensors that it captures (weights), all of which it must use for the
    first row; each rank has its share of theirs, to be summed over the group. Plan with `CPConfig(latent_dim=...)`:
    such rows cannot be split by heads.

    With `dropout_p` each pair of the mask is dropped with that probability, and the others count 1/(1 - dropout_p)
    times, in out and not in lse. Which pairs depends on their tokens, their head and `dropout_seed`, not on the plan or
    the number of ranks: int64 `[1]`, or `[N]` for a seed of each head; None draws one from the default generator of the
    device, which should be in the same state on every rank. (If it is not, the result is one of other pairs, forward
    and backward alike.)

    Collective over `group` (None for cp_size 1), forward and backward: every rank calls it with the same
    plan, dtypes, options and wish for gradients.

    Raises:
        ValueError, NotImplementedError: wrong input, before any collective.
        PlanMismatchError: on every rank, when the ranks' plans or calls differ.
        RuntimeError: in backward, when `expand` is another function than in forward.
    """
    check_plan(plan)
    for name, x in (("q", q), ("k", k)):
        check_tensor(name, x)
    own = plan.own_rows
    if (len(q), len(k)) != (own.q, own.k):
        raise ValueError(
            f"q and k have {len(q)} and {len(k)} rows, the plan gives every rank {own.q} and {own.k}; "
            "dispatch(x, plan, group) makes the local rows"
        )
    expansion = None if expand is None else _expansion(expand, k, v, plan)
    keys, values = (k, v) if expansion is None else expansion.like
    if values is None:
        raise ValueError("v is None; give values, or expand=..., which makes them of latent rows")
    options = resolve_options(
        q, keys, values, softmax_scale, softcap, backend, deterministic, dropout_p
    )
    check_sink(q, sink)
    for degree in {plan.forward.head_degree, plan.backward.head_degree} - {1}:
        _check_heads(q.shape[1], k.shape[1], degree)
    given = (k, values) if expansion is None else (k, *expansion.captured)
    call = Call(
        *(q.dtype, q.shape, k.shape, values.shape[1:], options),
        *(sink is not None, return_max_logits, expand is not None, needs_grad(q, sink, *given)),
    )
    # Drawn in a recomputed layer too: its next dropout draws from where this one leaves off.
    seeds = head_seeds(dropout_seed, q) if dropout_p > 0 else None
    session = open_session(plan, group, q.device, call)
    kept = recorded_result()
    if seeds is not None:
        if kept is not None:
            kept, seeds = kept[:-1], kept[-1]
        options = replace(options, dropout_seeds=seeds)
    max_logits = no_logits(q) if return_max_logits else None
    out, lse = DistributedAttention.apply(
        q, sink, session, options, kept, max_logits, expansion, *given
    )
    result = (out, lse) if max_logits is None else (out, lse, max_logits)
    record_result(result if seeds is None else (*result, seeds))
    return result


def _expansion(expand: Expand, latent: Tensor, v: Tensor | None, plan: AttentionPlan) -> Expansion:
    if not callable(expand):
        raise TypeError(
            f"expand={expand!r} is {type(expand).__name__}; it must be a function of latent rows that returns (k, v)"
        )
    if v is not None:
        raise ValueError(
            "v is given beside expand=...; pass None: values are made of the latent rows"
        )
    if any(p.head_degree > 1 for p in (plan.forward, plan.backward)):
        raise ValueError(
            "the plan exchanges heads, which latent rows do not have; make it with CPConfig(latent_dim=...)"
        )
    return Expansion.of(expand, latent)


def _check_heads(num_heads: int, num_kv_heads: int, degree: int) -> None:
    if num_heads % degree or (num_kv_heads % degree and degree % num_kv_heads):
        raise ValueError(
            f"the plan splits heads {degree} ways, q has {num_heads} and k has {num_kv_heads} heads; "
            "make the plan with CPConfig(num_heads=..., num_kv_heads=...) of this model"
        )


__all__ = [
    "attend",
    "checkpoint",
    "cp_attention",
    "cp_causal_conv1d",
    "cp_linear_attention",
    "cp_sparse_attention",
    "dispatch",
    "position_ids",
    "roll",
    "undispatch",
]
