"""Linear attention and the gated delta rule over a whole context, tokens where the plan put them.

Each rank reduces its segments to maps of their states, maps of cut documents travel once, and every segment starts from
the right state. What travels does not grow with the tokens, and is under way while outputs are computed as if every
segment started from nothing. Source: LASP-2 (arXiv 2502.07563), which gathers the states of equal pieces; here pieces
are what a placement left of documents, and a state goes to those who read it.
"""

# T tokens of this rank, H heads, K key dim, V value dim

import hashlib
import math
from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp.attn import linear_fla
from megatron_cp.attn.eager import eager
from megatron_cp.attn.linear import Maps, reduce_chunks, scan
from megatron_cp.attn.options import DTYPES, accumulation_dtype, as_number, check_tensor
from megatron_cp.plan import AttentionPlan
from megatron_cp.plan.segments import check_document_lengths
from megatron_cp.runtime.linear_layout import (
    LinearLayout,
    Runs,
    SegmentRuns,
    Telling,
    linear_layout,
    segment_runs,
)
from megatron_cp.runtime.session import check_plan, open_session


@eager
def cp_linear_attention(  # noqa: PLR0913  the public signature
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: AttentionPlan,
    group: dist.ProcessGroup | None,
    *,
    document_lengths: Sequence[int],
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    backend: Literal["torch", "fla"] | None = None,
) -> Tensor:
    """Returns causal linear attention inside each document for the tokens of this rank, in the plan's local order.

    q, k `[T, H, K]`, v `[T, H, V]` -> `[T, H, V]` in the input dtype. In each head a document starts from a state S = 0
    `[K, V]`; token by token

        S = exp(g) S                   g: log of the decay, finite, at most 0; `[T, H]`, or by key channel `[T, H, K]`
        S = S + k v^T                  without beta
        S = S + beta k (v - S^T k)^T   with beta `[T, H]`: the (gated) delta rule, for k of length 1 and beta in [0, 2]
        out = scale S^T q              scale: default 1 / sqrt(K)

    `document_lengths` are those of the pack in the order of tokens and add up to the plan's tokens; the plan's mask is
    not looked at. Padding rows give 0 and zero gradients. States that travel are fp32 (fp64 for fp64 inputs).
    Differentiable in q, k, v, g and beta.

    `backend="torch"` is plain torch on every device: everything inside is fp32 (fp64), in a fixed order. "fla" are the
    Triton kernels of flash-linear-attention for one decay for each head, with beta or without, in 16 bits on a GPU.
    None takes them where they serve the call and agree with the recurrence on a small case. On a GPU plain torch ran on
    one H100; the kernels have never computed.

    Collective over `group` (None for cp_size 1) where a document lies on several ranks, forward and backward: every
    rank calls it with the same plan, lengths, dtypes, options and `requires_grad`.

    Source: GLA (arXiv 2312.06635), Gated DeltaNet (arXiv 2412.06464); shapes and signs are flash-linear-attention's.

    Raises:
        ValueError, TypeError: wrong input, before any collective.
        PlanMismatchError: on every rank, when the ranks' plans or calls differ.
    """
    check_plan(plan)
    check_tensors({"q": q, "k": k, "v": v, "g": g, "beta": beta})
    lengths = check_document_lengths(document_lengths, plan)
    _check_rows(q, k, v, plan.tokens_per_rank)
    _check_gates(k, g, beta)
    scale = _resolve_scale(scale, q.shape[-1])
    tensors = (q, k, v, g, beta)
    chosen = _resolve_backend(backend, k, v, g, beta)
    call = f"linear attention {describe_call(tensors, lengths)} {scale} {chosen}"
    session = open_session(plan, group, q.device, call)
    rank = 0 if group is None else dist.get_rank(group)
    layout = linear_layout(plan, lengths, q.shape[-1], rank, q.device).here()
    with torch.autocast(q.device.type, enabled=False):
        if chosen == "torch":
            out = _attend(tensors, scale, layout, session.group)
        else:
            assert g is not None
            runs = segment_runs(plan, lengths, rank, q.device).here()
            out = _attend_runs((q, k, v, g, beta), scale, layout, runs, session.group)
    return out.to(q.dtype)


def _resolve_backend(
    backend: str | None, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None
) -> str:
    """Returns "torch" or "fla". Raises NotImplementedError for a wish that cannot be served."""
    if backend not in (None, "torch", "fla"):
        raise ValueError(f"backend={backend!r} must be 'torch', 'fla' or None")
    if backend == "torch":
        return backend
    reason = linear_fla.why_not(k, v, g, beta)
    if backend == "fla" and reason is not None:
        raise NotImplementedError(f"backend='fla' cannot be taken: {reason}; leave it out")
    return "fla" if reason is None else "torch"


def describe_call(tensors: Sequence[Tensor | None], document_lengths: tuple[int, ...]) -> str:
    """Returns what must be equal on all ranks: dtypes, shapes, which gradients are wanted, and the documents."""
    words = ["-" if x is None else f"{x.dtype} {tuple(x.shape)} {x.requires_grad}" for x in tensors]
    digest = hashlib.sha256(str(document_lengths).encode()).hexdigest()[:12]
    return f"{', '.join(words)} {torch.is_grad_enabled()} documents {digest}"


def _attend(
    tensors: tuple[Tensor | None, ...],
    scale: float,
    layout: LinearLayout,
    group: dist.ProcessGroup | None,
) -> Tensor:
    assert tensors[0] is not None
    exact = accumulation_dtype(tensors[0].dtype)
    q, k, v, g, beta = (None if x is None else x.to(exact) for x in tensors)
    assert q is not None and k is not None and v is not None
    if g is None:
        g = q.new_zeros(q.shape[:2])
    g = g if g.dim() == 3 else g.unsqueeze(-1)
    into_chunks = layout.chunking.into_chunks
    chunks = reduce_chunks(
        into_chunks(q * scale),
        into_chunks(k),
        into_chunks(v),
        into_chunks(g),
        None if beta is None else into_chunks(beta.unsqueeze(-1)),
    )
    told = _maps_of_segments(chunks.maps, layout.telling)
    flight = layout.exchange.start(told, group)
    outputs = chunks.without_state()  # while the maps travel
    initial = _states_before_segments(told, flight.wait(), v.shape[-1], layout)
    before, _ = scan(chunks.maps, initial, layout.chunking.chains)
    return layout.chunking.from_chunks(outputs.after(before), len(q))


def _attend_runs(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None],
    scale: float,
    layout: LinearLayout,
    runs: SegmentRuns,
    group: dist.ProcessGroup | None,
) -> Tensor:
    """As `_attend`, by kernels that take a state before each run of tokens and give the one behind it."""
    rows = layout.chunking.rows
    every = _rows_of(tensors, rows)
    q, k, v = (x for x in every[:3] if x is not None)
    # What hangs on no token hangs on this in autograd's graph, as maps do elsewhere: all ranks go the way back.
    gates = (x[:0].float().sum() for x in every[1:] if x is not None)
    nothing = sum(gates, q.new_zeros(()).float())
    transition_width = 1 if tensors[-1] is None else k.shape[-1]
    told = nothing.expand(len(runs.told), *k.shape[1:], transition_width + v.shape[-1])
    if len(told):
        k_, v_, g_, beta_ = _rows_of(every[1:], runs.told.tokens)
        assert k_ is not None and v_ is not None and g_ is not None
        transition, added = linear_fla.map_of_runs(k_, v_, g_, beta_, runs.told.bounds)
        told = torch.cat([added, transition], dim=-1)
    flight = layout.exchange.start(told, group)
    empty = told.new_zeros((len(runs.first), *told.shape[1:-1], v.shape[-1]))
    flat = _outputs(every, runs.first, empty, scale, torch.zeros_like(v))  # while the maps travel
    initial = _states_before_segments(told, flight.wait(), v.shape[-1], layout)
    flat = _outputs(every, runs.later, initial[layout.folding.begun], scale, flat)
    flat = flat + (nothing + q[:0].float().sum() + initial[:0].sum()).to(flat.dtype)
    return flat.new_zeros((len(tensors[0]), *flat.shape[1:])).index_copy(0, rows, flat)


def _rows_of(tensors: Sequence[Tensor | None], index: Tensor) -> list[Tensor | None]:
    """Returns these rows of each tensor that there is."""
    return [None if x is None else x.index_select(0, index) for x in tensors]


def _outputs(
    tensors: Sequence[Tensor | None], runs: Runs, initial: Tensor, scale: float, flat: Tensor
) -> Tensor:
    """Returns `flat` `[tokens, H, V]` with the outputs of these runs, which start from `initial`."""
    if not len(runs):
        return flat
    q, k, v, g, beta = _rows_of(tensors, runs.tokens)
    assert q is not None and k is not None and v is not None and g is not None
    out, _ = linear_fla.rule_of_runs(q, k, v, g, beta, runs.bounds, initial, scale)
    return flat.index_copy(0, runs.tokens, out)


def _maps_of_segments(chunk_maps: Maps, telling: Telling) -> Tensor:
    """Returns the maps (B, P) `[n, H, K, V + (1 or K)]` of own segments that somebody wants."""
    identity = chunk_maps.identity(telling.chains.num_chains)
    _, after = scan(chunk_maps.widened(telling.chunks), identity, telling.chains)
    return after.index_select(0, telling.last_links)


def _states_before_segments(
    told: Tensor, received: Tensor, value_dim: int, layout: LinearLayout
) -> Tensor:
    """Returns the state `[H, K, V]` that each own segment starts from, given the maps told and received.

    Every rank's result hangs on the exchange in autograd's graph, also where it receives nothing, so that all ranks
    take part in the way back.
    """
    folding = layout.folding
    maps = Maps.unpacked(torch.cat([told, received]).index_select(0, folding.sources), value_dim)
    state = maps.added.new_zeros((layout.num_segments, *maps.added.shape[1:]))
    nothing = state.new_zeros((folding.chains.num_chains, *state.shape[1:]))
    _, after = scan(maps, nothing, folding.chains)
    return state.index_copy(0, folding.begun, after.index_select(0, folding.links))


def check_tensors(tensors: dict[str, Tensor | None]) -> None:
    """Raises TypeError for what is no tensor, ValueError for one that is not computed with or lies elsewhere.

    The first is needed and says on which device all must be; others may be None.
    """
    first = next(iter(tensors))
    for name, x in tensors.items():
        if x is not None or name == first:
            check_tensor(name, x)
    device = tensors[first].device  # type: ignore[union-attr]
    for name, x in tensors.items():
        if x is not None and (x.dtype not in DTYPES or x.device != device):
            allowed = ", ".join(str(dtype) for dtype in DTYPES)
            raise ValueError(
                f"{name} is {x.dtype} on {x.device}, it must be one of {allowed}, on {device}; convert it"
            )


def _check_rows(q: Tensor, k: Tensor, v: Tensor, num_rows: int) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3 or not all(x.shape[1:]):
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, it must be [tokens, heads, dim] with one head and dim at least; "
                "merge batch and tokens, and give the heads of this rank"
            )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"dtypes of q, k, v = {q.dtype}, {k.dtype}, {v.dtype} must be equal; cast them to one of them"
        )
    if q.shape[0] != num_rows:
        raise ValueError(
            f"q has {q.shape[0]} rows, the plan gives every rank {num_rows}; "
            "dispatch(x, plan, group) makes the local rows"
        )
    if k.shape != q.shape or v.shape[:2] != q.shape[:2]:
        raise ValueError(
            f"k has shape {tuple(k.shape)} and v {tuple(v.shape)}, q has {tuple(q.shape)}; k must have the shape of q, "
            "v its tokens and heads: repeat shared heads with repeat_interleave(times, dim=1)"
        )


def _check_gates(k: Tensor, g: Tensor | None, beta: Tensor | None) -> None:
    by_head, by_channel = tuple(k.shape[:2]), tuple(k.shape)
    for name, x, allowed in (("g", g, (by_head, by_channel)), ("beta", beta, (by_head,))):
        if x is not None and tuple(x.shape) not in allowed:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, for this k it must be {' or '.join(map(str, allowed))}; "
                "give one number for each token and head"
            )


def _resolve_scale(scale: float | None, key_dim: int) -> float:
    resolved = 1 / math.sqrt(key_dim) if scale is None else as_number("scale", scale)
    if not math.isfinite(resolved):
        raise ValueError(f"scale={scale} must be finite; pass None for 1/sqrt(K)")
    return resolved
