"""Attention of each query to the keys that an index picks for it: some queries of one rank at a time, plain torch.

    index scores of all visible keys -> the largest `topk` -> softmax attention to those alone
                                     -> how far the index is from attention (the loss that trains it)

All heads share a key, whose first columns are its value: latent attention in its absorbed form. Source: DeepSeek-V3.2
(sparse attention, lightning indexer), section 2.1.
"""

# c queries of a chunk, n keys that any of them may see, k of them picked; N heads of L columns (V of the value),
# J heads of the index with I columns

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp.attn.options import accumulation_dtype

IndexLoss = Literal["picked", "visible"]


@dataclass(frozen=True)
class SparseRule:
    """How keys are picked and what is made of them; the same for all queries."""

    topk: int
    value_dim: int
    scale: float
    loss: IndexLoss | None
    """Keys over which index and attention are compared: those picked, all visible, or no comparison."""
    has_relu: bool
    """Whether a head of the index counts where it is positive alone."""
    head_group: dist.ProcessGroup | None
    """Ranks that hold other heads of the same queries."""


class Queries(NamedTuple):
    """Of some tokens: `[c, N, L]`, and of the index `[c, J, I]` and the weights `[c, J]` of its heads."""

    q: Tensor
    index_q: Tensor
    index_weights: Tensor

    def part(self, rows: slice) -> "Queries":
        """Returns those of some rows."""
        return Queries(*(x[rows] for x in self))


class Keys(NamedTuple):
    """Of some tokens: `[n, L]`, and of the index `[n, I]`."""

    latent: Tensor
    index_k: Tensor

    def part(self, rows: slice) -> "Keys":
        """Returns those of some rows."""
        return Keys(*(x[rows] for x in self))


class Picked(NamedTuple):
    """The keys of each query, in order: `[c, k]` of n, and how many are any, `[c]`; the others are its first again."""

    keys: Tensor
    size: Tensor

    @property
    def is_any(self) -> Tensor:
        """Which of them are any, `[c, k]`."""
        places = torch.arange(self.keys.shape[1], device=self.keys.device)
        return places < self.size.unsqueeze(1)


def visible_keys(intervals: Tensor, num_keys: int) -> Tensor:
    """Returns which keys each query sees, `[c, n]`, from `[m, 2, c]`: it sees those of m intervals."""
    key = torch.arange(num_keys, device=intervals.device)
    first, stop = intervals[:, 0, :, None], intervals[:, 1, :, None]
    seen = (first[0] <= key) & (key < stop[0])
    for one in range(1, len(intervals)):
        seen |= (first[one] <= key) & (key < stop[one])
    return seen


def index_scores(queries: Queries, index_k: Tensor, rule: SparseRule) -> Tensor:
    """Returns what the index gives each key, `[c, n]` in fp32 (fp64): the weighted sum over its heads."""
    by_head = _by_head(queries.index_q, index_k)
    if rule.has_relu:
        by_head.relu_()
    return (queries.index_weights.to(by_head.dtype).unsqueeze(1) @ by_head).squeeze(1)


def pick(scores: Tensor, visible: Tensor, topk: int) -> Picked:
    """Returns the `topk` visible keys with the largest scores; of equal ones the first, on every machine.

    Fewer where a query sees fewer; it sees one at least.
    """
    count = min(topk, scores.shape[1])
    scores = torch.where(visible, scores, -torch.inf)
    least = scores.topk(count, dim=1, sorted=True).values[:, -1:]
    above, level = scores > least, (scores == least) & visible
    room = count - above.sum(dim=1, keepdim=True)
    chosen = above | (level & (level.cumsum(dim=1) <= room))
    # Of `count` places and one more, for all that are not picked.
    places = torch.where(chosen, chosen.cumsum(dim=1) - 1, count)
    keys = torch.arange(scores.shape[1], device=scores.device).expand_as(scores)
    found = keys.new_zeros(len(scores), count + 1).scatter_(1, places, keys)[:, :count]
    picked = Picked(found, chosen.sum(dim=1))
    return picked._replace(keys=torch.where(picked.is_any, found, found[:, :1]))


def attend_to_picked(
    queries: Queries, keys: Keys, intervals: Tensor, rule: SparseRule, picked: Picked | None = None
) -> tuple[Tensor, Tensor, Picked]:
    """Returns out `[c, N, V]` and the divergence `[c]` of the index from attention, fp32 (fp64), and what was picked.

    The divergence is KL(attention, averaged over heads || softmax of the index's scores); 0 without `rule.loss`. With
    `picked` there is no index, and no loss.
    """
    if picked is not None:
        out, _ = _attended(queries.q, keys.latent, picked, rule)
        return out, out.new_zeros(len(out)), picked
    visible = visible_keys(intervals, len(keys.latent))
    scores = index_scores(queries, keys.index_k, rule)
    picked = pick(scores, visible, rule.topk)
    out, weights = _attended(queries.q, keys.latent, picked, rule)
    # A score that is no number picks nothing; it must not look like a query without keys.
    out.masked_fill_((scores.isnan() & visible).any(dim=1)[:, None, None], torch.nan)
    if rule.loss is None:
        return out, out.new_zeros(len(out)), picked
    if rule.loss == "picked":
        scores, seen = scores.gather(1, picked.keys), picked.is_any
    else:
        seen = visible
        weights = _softmax(_logits(queries.q, keys.latent, rule), seen.unsqueeze(1))
    target, guess = _target(weights, rule), _log_softmax(scores, seen)
    return out, (torch.xlogy(target, target) - target * guess).sum(dim=1), picked


def _attended(q: Tensor, latent: Tensor, picked: Picked, rule: SparseRule) -> tuple[Tensor, Tensor]:
    """Returns out `[c, N, V]` and the weights of attention to the picked keys `[c, N, k]`."""
    selected = _rows(latent, picked.keys)
    weights = _softmax(_logits(q, selected, rule), picked.is_any.unsqueeze(1))
    return _product(weights, selected[..., : rule.value_dim], q.dtype), weights


class ChunkGradients(NamedTuple):
    """Gradients of one chunk: of its queries, and of the keys that `attend_to_picked` was given."""

    queries: Queries
    keys: Keys


def gradients_of_picked(
    queries: Queries,
    keys: Keys,
    intervals: Tensor,
    picked: Picked,
    given: tuple[Tensor, Tensor],
    rule: SparseRule,
) -> ChunkGradients:
    """Returns the gradients, given those of out and divergence; what is not kept is computed again.

    Attention has no gradient through the choice of keys, and the index none but that of the divergence. All are fp32
    (fp64).
    """
    d_out, d_divergence = given
    d_q, d_latent, weights = _gradients_of_attention(queries.q, keys.latent, picked, d_out, rule)
    if rule.loss is None:
        of_index = tuple(torch.zeros_like(x, dtype=d_q.dtype) for x in (*queries[1:], keys.index_k))
    elif rule.loss == "picked":
        of_index = _gradients_of_index(
            queries, _rows(keys.index_k, picked.keys), weights, picked.is_any, d_divergence, rule
        )
    else:
        seen = visible_keys(intervals, len(keys.latent))
        weights = _softmax(_logits(queries.q, keys.latent, rule), seen.unsqueeze(1))
        of_index = _gradients_of_index(queries, keys.index_k, weights, seen, d_divergence, rule)
    d_index_q, d_index_weights, d_index_k = of_index
    if d_index_k.dim() == 3:
        d_rows, d_index_k = d_index_k, d_index_k.new_zeros(keys.index_k.shape)
        _add_rows(d_index_k, picked.keys, d_rows)
    return ChunkGradients(Queries(d_q, d_index_q, d_index_weights), Keys(d_latent, d_index_k))


def _gradients_of_attention(
    q: Tensor, latent: Tensor, picked: Picked, d_out: Tensor, rule: SparseRule
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of `q` and `latent`, and the weights of attention to the picked keys `[c, N, k]`."""
    selected, seen = _rows(latent, picked.keys), picked.is_any.unsqueeze(1)
    weights = _softmax(_logits(q, selected, rule), seen)
    d_weights = _product(d_out, selected[..., : rule.value_dim].transpose(1, 2), q.dtype)
    d_logits = weights * (d_weights - (weights * d_weights).sum(dim=2, keepdim=True)) * rule.scale
    d_selected = _product(d_logits.transpose(1, 2), q, q.dtype)
    d_selected[..., : rule.value_dim].add_(_product(weights.transpose(1, 2), d_out, q.dtype))
    d_latent = d_selected.new_zeros(latent.shape)
    _add_rows(d_latent, picked.keys, d_selected)
    return _product(d_logits, selected, q.dtype), d_latent, weights


def _gradients_of_index(
    queries: Queries,
    index_k: Tensor,
    weights: Tensor,
    seen: Tensor,
    d_divergence: Tensor,
    rule: SparseRule,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of queries, weights and keys of the index, over the keys that are compared.

    `index_k` `[n, I]`, or `[c, k, I]` of each query, has a gradient of its own shape; `weights` are attention's.
    """
    dtype, by_head = queries.q.dtype, _by_head(queries.index_q, index_k)
    counted = by_head.relu() if rule.has_relu else by_head
    head_weights = queries.index_weights.to(by_head.dtype)
    guess = _softmax((head_weights.unsqueeze(1) @ counted).squeeze(1), seen)
    d_scores = (guess - _target(weights, rule)) * d_divergence.unsqueeze(1)
    d_index_weights = (counted @ d_scores.unsqueeze(2)).squeeze(2)
    d_by_head = head_weights.unsqueeze(2) * d_scores.unsqueeze(1)
    if rule.has_relu:
        d_by_head.masked_fill_(by_head <= 0, 0)
    if index_k.dim() == 3:
        d_index_q = _product(d_by_head, index_k, dtype)
        return (
            d_index_q,
            d_index_weights,
            _product(d_by_head.transpose(1, 2), queries.index_q, dtype),
        )
    flat = d_by_head.flatten(0, 1)
    d_index_q = _product(flat, index_k, dtype).view(queries.index_q.shape)
    return d_index_q, d_index_weights, _product(flat.t(), queries.index_q.flatten(0, 1), dtype)


def _by_head(index_queries: Tensor, index_keys: Tensor) -> Tensor:
    """Returns the products of each head of the index, `[c, J, n]`; keys are `[n, I]`, or `[c, n, I]` of each query."""
    if index_keys.dim() == 3:
        return _product(index_queries, index_keys.transpose(1, 2), index_queries.dtype)
    flat = _product(index_queries.flatten(0, 1), index_keys.t(), index_queries.dtype)
    return flat.view(*index_queries.shape[:2], -1)


def _logits(q: Tensor, latent: Tensor, rule: SparseRule) -> Tensor:
    """Returns the scaled logits `[c, N, n]` of keys `[n, L]`, or `[c, n, L]` of each query."""
    if latent.dim() == 3:
        return _product(q, latent.transpose(1, 2), q.dtype) * rule.scale
    return (_product(q.flatten(0, 1), latent.t(), q.dtype) * rule.scale).view(*q.shape[:2], -1)


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `a @ b` in fp32 (fp64). On a GPU 16-bit inputs, of `dtype`, are multiplied as such: its tensor cores."""
    exact = accumulation_dtype(dtype)
    if a.device.type == "cuda" and exact != dtype:
        multiply = torch.bmm if a.dim() == 3 else torch.mm
        return multiply(a.to(dtype).contiguous(), b.to(dtype), out_dtype=exact)
    return a.to(exact) @ b.to(exact)


def _softmax(logits: Tensor, seen: Tensor) -> Tensor:
    """Returns the softmax over what is seen; zero in a row that sees nothing."""
    return torch.where(seen, torch.where(seen, logits, -torch.inf).softmax(dim=-1), 0)


def _log_softmax(scores: Tensor, seen: Tensor) -> Tensor:
    """Returns its logarithm; zero where nothing is seen."""
    return torch.where(seen, torch.where(seen, scores, -torch.inf).log_softmax(dim=-1), 0)


def _target(weights: Tensor, rule: SparseRule) -> Tensor:
    """Returns attention averaged over all heads, `[c, n]`, adding up to 1. Collective over the ranks of heads."""
    total = weights.sum(dim=1)
    if rule.head_group is not None:
        dist.all_reduce(total, group=rule.head_group)
    whole = total.sum(dim=1, keepdim=True)
    return total / torch.where(whole > 0, whole, 1)


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """Returns the rows of `x` `[n, L]` at each place of `index` `[c, k]`: `[c, k, L]`."""
    return x.index_select(0, index.flatten()).view(*index.shape, -1)


def _add_rows(total: Tensor, rows: Tensor, values: Tensor) -> None:
    """Adds `values` `[c, k, ...]` to these rows of `total`, in one order each time."""
    index, flat = rows.flatten(), values.flatten(0, 1)
    if total.device.type == "cuda":
        total.index_put_((index,), flat, accumulate=True)  # sorts, where index_add_ would race
    else:
        total.index_add_(0, index, flat)
