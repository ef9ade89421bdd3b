"""The stage loops: attention over a whole context of which every rank holds a part.

    forward                                          backward
      heads <- tokens (if the plan splits heads)       heads <- tokens
      for each stage:                                  for each stage:
        rows of this stage have arrived                  rows of this stage have arrived
        start sending the rows of the next               start sending the rows of the next
        attend onto (out, lse), own and received         attend backward, add to dq, dk, dv
        return the received rows' results                return the received rows' gradients
      tokens <- heads                                  tokens <- heads

Partial results are merged and gradients summed in fp32 in the order of the plan: results repeat bit for
bit and the error does not grow with the number of ranks. Everything a rank does is in its `RankPass`. Both
passes leave an enclosing autocast, as those of one device do.
"""

# T tokens of this rank, R rows of this rank inside the pass (h T under a head split), N query heads,
# G key/value heads, H head dim, Hv value head dim

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp.attn.attend import (
    attend_backward,
    attend_backward_onto_,
    attend_forward,
    attend_forward_last,
    attend_forward_onto_,
    dq_factor,
    finished,
    part_joiner,
    row_deltas,
    row_stats,
)
from megatron_cp.attn.dropout import Dropout, key_words, row_words
from megatron_cp.attn.hopper.passes import RowStats
from megatron_cp.attn.merge import sink_gradient
from megatron_cp.attn.modes import raw_mode
from megatron_cp.attn.once import Saved, first_derivative_only
from megatron_cp.attn.options import AttendOptions, accumulation_dtype
from megatron_cp.comm import Pending
from megatron_cp.comm.packed import PackedRows
from megatron_cp.plan.schema import SIDES, PassName
from megatron_cp.runtime.expansion import ExpandedResults, ExpandedRows, Expansion
from megatron_cp.runtime.session import Quadrant, RankPass, RankStage, Rows, Session
from megatron_cp.runtime.sides import Combination, SideResults, SideRows, adding, merging
from megatron_cp.runtime.spans import span

Arriving = tuple[Pending[PackedRows] | None, Pending[PackedRows] | None]
Returns = list[Pending[None] | None]
Compute = Callable[[Quadrant, Rows, Rows, AttendOptions], None]
SendHome = Callable[[RankStage], Returns]


class DistributedAttention(torch.autograd.Function):
    """Autograd of `cp_attention`; keeps q, k, v, out and lse of this rank's tokens, nothing else."""

    @staticmethod
    def forward(
        ctx: Any,
        q_TNH: Tensor,
        sink_N: Tensor | None,
        session: Session,
        options: AttendOptions,
        kept: tuple[Tensor, ...] | None,
        max_logits_N: Tensor | None,
        expansion: Expansion | None,
        *keys: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """`kept`: the result of an earlier identical call, when a layer is recomputed. Fills `max_logits`.

        `keys` are k and v, or latent rows and what else their `expansion` wants gradients of.
        """
        if kept is None:
            rows = (q_TNH, expansion or keys, sink_N)
            with raw_mode(q_TNH):
                out, lse = forward_pass(*rows, session, options, max_logits_N)
        else:
            out, lse, *logits = (tensor.detach() for tensor in kept)
            if max_logits_N is not None:
                max_logits_N.copy_(logits[0])
        ctx.save_for_backward(q_TNH, sink_N, out, lse, *keys)
        ctx.session, ctx.options = session, options
        # A checkpoint drops what is saved, and nothing else: latent rows are among the keys.
        ctx.expansion = expansion and replace(expansion, latent=expansion.latent.new_empty(0))
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @first_derivative_only("cp_attention")
    def backward(
        ctx: Any, saved: Saved, dout: Tensor | None, dlse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Gradients of q, sink and keys; collective, like forward."""
        q, sink, out, lse, *keys = saved
        # A rank whose out is unused must still take part: its keys serve others' queries.
        dout = torch.zeros_like(out) if dout is None else dout
        delta, stats = row_deltas(dout, out, lse, dlse, ctx.options)
        expansion = ctx.expansion and replace(ctx.expansion, latent=keys[0].detach())
        rows = (dout, q, expansion or tuple(keys), lse, delta)
        with raw_mode(q):
            dq, *dkeys = backward_pass(*rows, ctx.session, ctx.options, stats)
        dsink = None if sink is None else sink_gradient(lse, sink, delta, dlse).to(sink.dtype)
        return dq, dsink, None, None, None, None, None, *dkeys


def forward_pass(
    q_TNH: Tensor,
    keys: Rows | Expansion,
    sink_N: Tensor | None,
    session: Session,
    options: AttendOptions,
    max_logits_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns attention over the whole context: out `[T, N, Hv]` in the input dtype, lse `[T, N]` in fp32 (fp64).

    `keys` are k `[T, G, H]` and v `[T, G, Hv]`, or the expansion of latent rows. `max_logits` is raised, in place, to
    the largest logit of each head over the whole context.
    """
    rank_pass, num_heads = session.forward, q_TNH.shape[1]
    queries, entered = _enter(rank_pass, (q_TNH,), keys, _words(session, options))
    q, key_rows = queries[0], _key_rows(keys, entered)
    value_dim, dtype = key_rows.rows("own")[1].shape[2], accumulation_dtype(q.dtype)
    combination = merging(part_joiner(options, value_dim))
    results = SideResults(q, ((q.shape[1], value_dim), (q.shape[1],)), dtype, combination)
    exchange = rank_pass.exchange
    heads = slice(None) if exchange is None else exchange.own_heads(num_heads)
    logits = None if max_logits_N is None else max_logits_N[heads]
    sink = None if sink_N is None else sink_N[heads]
    complete: Rows | None = None

    def compute(part: Quadrant, query: Rows, key: Rows, options: AttendOptions) -> None:
        nonlocal complete
        (q_held, *_), (k_held, v_held, *_) = query, key
        held = results.of(part.query, q_held.shape[0])
        asked = (q_held, k_held, v_held, part.work, _at(options, query, key))
        if "q" in part.completes:
            complete = attend_forward_last(held, *asked, sink, logits)
            results.drop(part.query)
        elif held is None:
            results.take(part.query, attend_forward(*asked, logits))
        else:
            attend_forward_onto_(held, *asked, logits)

    def send_home(stage: RankStage) -> Returns:
        return [results.send_home(stage.query, session.group)]

    rows = SideRows(queries), key_rows
    _run_stages("forward", (rank_pass, session.group), rows, options, compute, send_home)
    out, lse = complete or finished(results.own(), sink, q.dtype)
    if max_logits_N is not None and session.group is not None:
        dist.all_reduce(max_logits_N, dist.ReduceOp.MAX, group=session.group)
    # Everything is merged, so out can travel in the dtype in which it is returned; lse is exponentiated later.
    out, lse = _leave(rank_pass, (out, lse), ((num_heads, q.dtype), (num_heads, dtype)))
    return out, lse


def backward_pass(
    dout: Tensor,
    q_TNH: Tensor,
    keys: Rows | Expansion,
    lse_TN: Tensor,
    delta_TN: Tensor,
    session: Session,
    options: AttendOptions,
    stats: RowStats | None = None,
) -> Rows:
    """Returns the gradients of q and `keys`, in their dtypes.

    Those of an expansion are for its latent rows and for all that it captures (this rank's share). `lse` and
    `delta = rowsum(dout * out) - dlse` are those of the merged result of this rank's tokens, `stats` their `row_stats`.
    """
    rank_pass = session.backward
    queries_TNH = (q_TNH, dout, lse_TN, delta_TN)
    queries, entered = _enter(rank_pass, queries_TNH, keys, _words(session, options))
    q, key_rows = queries[0], _key_rows(keys, entered, keeps_graph=True)
    if rank_pass.exchange is not None:
        stats = row_stats(queries[1], queries[2], queries[3], options)
    combination = adding(part_joiner(options, q.shape[2]))
    query_results = SideResults(q, (q.shape[1:],), lse_TN.dtype, combination)
    key_results = _key_results(key_rows, lse_TN.dtype, combination)
    rounds_at_once = _rounds_at_once(rank_pass, keys)
    complete: Rows | None = None

    def compute(part: Quadrant, query: Rows, key: Rows, options: AttendOptions) -> None:
        nonlocal complete
        (q_held, dout, lse, delta, *_), (k_held, v_held, *_) = query, key
        held = query_results.of(part.query, q_held.shape[0])
        held_keys = key_results.of(part.key, k_held.shape[0])
        known = stats if part.query == "own" else None
        asked = (dout, q_held, k_held, v_held, lse, delta, part.work, _at(options, query, key))
        if rounds_at_once and part.completes == SIDES and held is held_keys is None:
            complete = attend_backward(*asked, rounded=True, stats=known)
            return
        held_dq = held[0] if held else None
        held_dkeys = (held_keys[0], held_keys[1]) if held_keys else None
        dq, *dkeys = attend_backward_onto_(held_dq, held_dkeys, *asked, known)
        if held is None:
            query_results.take(part.query, (dq,))
        if held_keys is None:
            key_results.take(part.key, tuple(dkeys))

    def send_home(stage: RankStage) -> Returns:
        return [
            query_results.send_home(stage.query, session.group),
            key_results.send_home(stage.key, session.group),
        ]

    rows = SideRows(queries), key_rows
    _run_stages("backward", (rank_pass, session.group), rows, options, compute, send_home)
    if complete is not None:
        dq, dkeys = complete[0], complete[1:]
    else:
        (dq,), dkeys = query_results.own(), key_results.own()
        if (factor := dq_factor(options)) != 1.0:
            # Where it is returned as it is, it is rounded in the same pass.
            stays = rank_pass.exchange is not None or dq.dtype == q.dtype
            dq = torch.mul(dq, factor, out=dq if stays else torch.empty_like(dq, dtype=q.dtype))
    latent = (keys.latent, *keys.captured) if isinstance(keys, Expansion) else ()
    whole = [(x.shape[1], x.dtype) for x in (q_TNH, *_key_tensors(keys))]
    return _leave(rank_pass, (dq, *dkeys), (*whole, *((1, x.dtype) for x in latent)))


def _rounds_at_once(rank_pass: RankPass, keys: Rows | Expansion) -> bool:
    """Returns whether a kernel may round gradients of own rows that it alone computes: they are added to nowhere."""
    if isinstance(keys, Expansion):
        return False
    exchange = rank_pass.exchange
    return exchange is None or keys[0].shape[1] >= len(exchange.members)


def _words(session: Session, options: AttendOptions) -> tuple[Rows, Rows]:
    """Returns the words of dropout of this rank's queries `[T, N]` and of its keys `[T, 1]`, if there is any."""
    if options.dropout_seeds is None:
        return (), ()
    queries, keys = session.places
    return (row_words(options.dropout_seeds, queries),), (key_words(keys).unsqueeze(-1),)


def _at(options: AttendOptions, query: Rows, key: Rows) -> AttendOptions:
    """Returns the options of a call on these rows, of which the words of dropout are the last."""
    if options.dropout_seeds is None:
        return options
    return replace(options, dropout=Dropout(options.dropout_p, query[-1], key[-1].squeeze(-1)))


def _key_tensors(keys: Rows | Expansion) -> Rows:
    """Returns what has heads on the key side: k and v, and nothing of latent rows."""
    return () if isinstance(keys, Expansion) else keys


def _key_rows(keys: Rows | Expansion, entered: Rows, keeps_graph: bool = False) -> SideRows:
    if isinstance(keys, Expansion):
        return ExpandedRows(keys, entered, keeps_graph)
    return SideRows(entered)


def _key_results(rows: SideRows, dtype: torch.dtype, combination: Combination) -> SideResults:
    if isinstance(rows, ExpandedRows):
        return ExpandedResults(rows, dtype, combination)
    k, v, *_ = rows.rows("own")
    return SideResults(k, (k.shape[1:], v.shape[1:]), dtype, combination)


def _run_stages(
    pass_name: PassName,
    where: tuple[RankPass, dist.ProcessGroup | None],
    rows: tuple[SideRows, SideRows],
    options: AttendOptions,
    compute: Compute,
    send_home: SendHome,
) -> None:
    """Runs `compute` stage by stage while the next stage's rows and the last stage's results travel."""
    (rank_pass, group), (queries, keys) = where, rows
    stages = rank_pass.stages
    shares = {stage.sm_share for stage in stages} - {0.0}
    by_share = {0.0: options} | {share: replace(options, sm_share=share) for share in shares}
    travelling: list[Pending[None]] = []

    def start(index: int) -> Arriving:
        with span(pass_name, "send rows", index):
            stage = stages[index]
            return queries.start_cast(stage.query, group), keys.start_cast(stage.key, group)

    def come_home(index: int) -> None:
        if not travelling:
            return
        with span(pass_name, "wait for results", index):
            for pending in travelling:
                pending.wait()

    if stages:
        arriving = start(0)
    for index, stage in enumerate(stages):
        with span(pass_name, "wait for rows", index):
            queries.arrive(stage.query, arriving[0])
            keys.arrive(stage.key, arriving[1])
        if index + 1 < len(stages):
            arriving = start(index + 1)
        with span(pass_name, "attend", index):
            for part in stage.quadrants:
                shared = by_share[stage.sm_share]
                compute(part, queries.rows(part.query), keys.rows(part.key), shared)
        returns = send_home(stage)
        come_home(index - 1)  # they had this stage to come home
        travelling = [pending for pending in returns if pending is not None]
    come_home(len(stages) - 1)


def _enter(
    rank_pass: RankPass, queries: Rows, keys: Rows | Expansion, words: tuple[Rows, Rows]
) -> tuple[Rows, Rows]:
    """Returns the rows of both sides as the stages see them, words behind: heads exchanged if the plan says so.

    Of latent rows, which have no heads, only the words.
    """
    tensors, (of_rows, of_keys) = _key_tensors(keys), words
    exchange = rank_pass.exchange
    if exchange is None:
        queries, tensors = (tuple(x.contiguous() for x in rows) for rows in (queries, tensors))
        return (*queries, *of_rows), (*tensors, *of_keys)
    # All heads have the same words of keys; each gets them, for the exchange.
    for_heads = tuple(x.expand(-1, tensors[0].shape[1]) for x in of_keys)
    entered = exchange.split_heads((*queries, *of_rows, *tensors, *for_heads))
    num_queries = len(queries) + len(of_rows)
    first_words = num_queries + len(tensors)
    own_words = tuple(x[:, :1].clone() for x in entered[first_words:])
    return entered[:num_queries], (*entered[num_queries:first_words], *own_words)


def _leave(rank_pass: RankPass, tensors: Rows, whole: tuple[tuple[int, torch.dtype], ...]) -> Rows:
    """Returns the stages' results for this rank's tokens, with the heads and dtypes of `whole`."""
    if rank_pass.exchange is None:
        pairs = zip(tensors, whole, strict=True)
        return tuple(x if x.dtype == dtype else x.to(dtype) for x, (_, dtype) in pairs)
    return rank_pass.exchange.join_heads(tensors, whole)
