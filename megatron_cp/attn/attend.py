"""Attention of one device on a mask's slices: `attend`, and the raw passes that the distributed runtime calls.

Both passes leave an enclosing autocast: the dtype of q, k and v decides the precision, nothing else.
"""

# Q query rows, K key rows, N query heads, G kv heads, H head dim, Hv value head dim

from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor

from megatron_cp.attn.dropout import Dropout, head_seeds, key_words, row_words
from megatron_cp.attn.eager import eager
from megatron_cp.attn.hopper.passes import Passes, RowStats
from megatron_cp.attn.logits import no_logits, raise_to_, sharp_lse
from megatron_cp.attn.merge import PartJoiner, apply_sink, merge_span_, sink_gradient
from megatron_cp.attn.modes import raw_mode
from megatron_cp.attn.once import Saved, first_derivative_only
from megatron_cp.attn.options import (
    AttendOptions,
    check_grid,
    check_sink,
    resolve_options,
)
from megatron_cp.attn.widths import widen, widen_values
from megatron_cp.mask import AttentionMask

# Imported when first used: a CPU user never loads flex, nor a GPU user the emulator.
_MODULES = {
    "reference": "megatron_cp.attn.reference",
    "cpu": "megatron_cp.attn.cpu.backend",
    "flex": "megatron_cp.attn.flex.backend",
    "flash": "megatron_cp.attn.flash.backend",
    "hopper": "megatron_cp.attn.hopper.backend",
    "emulated": "megatron_cp.attn.emulated.backend",
}
LSE_ONLY = ("flex", "flash")  # whose operators return no largest logits
# Whose kernels add to what is held, add the sink and round: their modules are `Passes`.
OWN_KERNELS = ("hopper", "emulated")
_loaded: dict[str, ModuleType] = {}


@eager
def attend(  # noqa: PLR0913  the public signature of DESIGN section 9
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    backend: str | None = None,
    deterministic: bool = False,
    return_max_logits: bool = False,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Returns `(out [Q, N, Hv] in the dtype of q, lse [Q, N] float32 (float64 for float64 inputs))`.

    Shapes: q `[Q, N, H]`, k `[K, G, H]`, v `[K, G, Hv]`; query head n uses kv head `n // (N // G)`.
    `lse` is the natural log of the softmax denominator and includes `sink` `[N]`, a learned logit per
    head without a value. Rows without keys give `out = 0`, `lse = -inf` (`sink` if there is one) and
    exactly zero gradients. Rows of q, k, v outside every slice influence nothing. Differentiable once
    in q, k, v and sink, through `out` and through `lse`.

    With `return_max_logits` a third result: the largest scaled and capped logit of each head over all pairs of the
    mask, fp32 `[N]`, -inf without pairs, without a gradient, not counting the sink (QK-Clip).

    With `dropout_p` each pair of the mask is dropped with that probability, and the others count 1/(1 - dropout_p)
    times, in `out` and not in `lse`. Which pairs depends on the rows, the heads and `dropout_seed` alone: int64 `[1]`,
    or `[N]` for a seed of each head; None draws one from the default generator of the device.

    Raises: ValueError for wrong input, NotImplementedError for a backend that cannot serve the call.
    """
    options = resolve_options(q, k, v, softmax_scale, softcap, backend, deterministic, dropout_p)
    check_grid(q, k, mask)
    check_sink(q, sink)
    if dropout_p > 0:
        places_q, places_k = (torch.arange(len(x), device=q.device) for x in (q, k))
        words = row_words(head_seeds(dropout_seed, q), places_q), key_words(places_k)
        options = replace(options, dropout=Dropout(dropout_p, *words))
    max_logits = no_logits(q) if return_max_logits else None
    if options.backend not in OWN_KERNELS or options.dropout is not None:
        out, lse = _Attend.apply(q, k, v, sink, mask, options, max_logits)
    else:
        own_attend = backend_module(options.backend).attend
        asked = (mask, sink, options, max_logits)
        if options.wide_dims is None:
            out, lse = own_attend(q, k, v, *asked)
        else:
            out, lse = own_attend(*widen(options.wide_dims, q, k, v), *asked)
            out = out[..., : v.shape[-1]].contiguous()
    return (out, lse) if max_logits is None else (out, lse, max_logits)


def attend_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    options: AttendOptions,
    max_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns `(out [Q, N, Hv], lse [Q, N])` in the accumulation dtype, without autograd and without a sink.

    `max_logits` fp32 `[N]` is raised, in place, to the largest logit of each head.
    """
    _check(q, k, mask, options)
    with raw_mode(q):
        forward = backend_module(options.backend).forward
        wide = (q, k, v) if options.wide_dims is None else widen(options.wide_dims, q, k, v)
        if max_logits is not None and options.backend in LSE_ONLY:
            raise_to_(max_logits, sharp_lse(forward, *wide, mask, options))
            max_logits = None
        asked = (mask, options) if max_logits is None else (mask, options, max_logits)
        out, lse = forward(*wide, *asked)
    return (out if options.wide_dims is None else out[..., : v.shape[-1]]), lse


def attend_forward_onto_(
    held: tuple[Tensor, ...],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    options: AttendOptions,
    max_logits: Tensor | None = None,
) -> None:
    """Merges attention over these keys into `held`, `(out [Q, N, Hv], lse [Q, N])` over other keys, in place.

    Both are in the accumulation dtype. Rows without keys here keep what they have. `max_logits` as `attend_forward`.
    """
    out, lse = held
    own = _own_passes(options)
    with raw_mode(q):
        if own is not None:
            _check(q, k, mask, options)
            own.forward_onto_(out, lse, q, k, v, mask, options, max_logits)  # its kernel merges
        else:
            merge_span_(out, lse, *attend_forward(q, k, v, mask, options, max_logits))


def attend_forward_last(
    held: tuple[Tensor, ...] | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    options: AttendOptions,
    sink: Tensor | None,
    max_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns `(out [Q, N, Hv] in the dtype of q, lse [Q, N])` over these keys, which are the last, and `sink` `[N]`.

    `held`, `(out, lse)` over other keys in the accumulation dtype if there are any, is used up. `max_logits` as
    `attend_forward`.
    """
    own = _own_passes(options)
    if own is not None and (held is None or max_logits is None):  # adds the sink and rounds
        _check(q, k, mask, options)
        with raw_mode(q):
            known = None if held is None else (held[0], held[1])
            return own.forward_last(known, q, k, v, mask, options, sink, max_logits)
    if held is None:
        held = attend_forward(q, k, v, mask, options, max_logits)
    else:
        attend_forward_onto_(held, q, k, v, mask, options, max_logits)
    return finished(held, sink, q.dtype)


def finished(
    whole: tuple[Tensor, ...], sink: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns `(out, lse)` over all keys with the sink, `out` in the dtype in which a caller gets it."""
    out, lse = whole
    if sink is not None:
        out, lse = apply_sink(out, lse, sink)
    return out.to(dtype), lse


def attend_backward(  # noqa: PLR0913  what the pass needs, and how its results are stored
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    mask: AttentionMask,
    options: AttendOptions,
    rounded: bool = False,
    stats: RowStats | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns `(dq, dk, dv)` in the accumulation dtype, or `rounded` to that of the inputs.

    `lse` and `delta = rowsum(dout * out) - dlse`, both `[Q, N]`, are those of the result merged over
    *all* keys, of which `k` and `v` may be a part. Rows with `lse = -inf` get and give exactly 0. `stats` is what
    `row_stats` has made of these rows, for rows that several calls have.
    """
    _check(q, k, mask, options)
    own = _own_passes(options)
    with raw_mode(q):
        if own is not None:
            return own.backward(dout, q, k, v, lse, delta, mask, options, rounded, stats)
        backward = backend_module(options.backend).backward
        if options.wide_dims is not None:
            wide = widen(options.wide_dims, q, k, v)
            dout = widen_values(options.wide_dims, dout)
            dq, dk, dv = backward(dout, *wide, lse, delta, mask, options)
            dq, dk, dv = dq[..., : q.shape[-1]], dk[..., : k.shape[-1]], dv[..., : v.shape[-1]]
        else:
            dq, dk, dv = backward(dout, q, k, v, lse, delta, mask, options)
    if rounded:
        dq = dq.to(q.dtype)  # one after another: each frees its float32 twin, if that lies alone
        dk = dk.to(k.dtype)
        dv = dv.to(v.dtype)
    return dq, dk, dv


def backend_module(backend: str) -> ModuleType:
    """Returns the module with the passes of a backend, imported on its first use."""
    module = _loaded.get(backend)
    if module is None:
        module = _loaded[backend] = import_module(_MODULES[backend])
    return module


def attend_backward_onto_(  # noqa: PLR0913  as attend_backward, and what to add to
    dq: Tensor | None,
    dkeys: tuple[Tensor, Tensor] | None,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    mask: AttentionMask,
    options: AttendOptions,
    stats: RowStats | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns `(dq, dk, dv)` as `attend_backward`, `dq` still to be multiplied by `dq_factor(options)`.

    Where `dq` holds such a sum over other keys, it is the one returned, with this one added to it; and where `dkeys`
    holds `(dk, dv)` of other queries, so are they.
    """
    own = _own_passes(options)
    with raw_mode(q):
        if own is not None:
            _check(q, k, mask, options)
            rows = (dout, q, k, v, lse, delta)
            return own.backward_onto_(dq, dkeys, *rows, mask, options, stats)
        parts = attend_backward(dout, q, k, v, lse, delta, mask, options)
        held = (dq, *(dkeys or (None, None)))
        sums = [x if h is None else h.add_(x) for h, x in zip(held, parts, strict=True)]
    return sums[0], sums[1], sums[2]


def row_deltas(
    dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, options: AttendOptions
) -> tuple[Tensor, RowStats | None]:
    """Returns `rowsum(dout * out) - dlse` `[Q, N]` of a whole result in the dtype of `lse`, and its `row_stats`."""
    own = _own_passes(options)
    with raw_mode(out):
        if own is not None:
            stats = own.stats_of_result(dout, out, lse, dlse)
            return stats.delta_of_rows(lse.shape[0]).contiguous(), stats
        delta = (dout * out.to(lse.dtype)).sum(dim=-1)
        return (delta if dlse is None else delta - dlse), None


def row_stats(dout: Tensor, lse: Tensor, delta: Tensor, options: AttendOptions) -> RowStats | None:
    """Returns what a backend's own kernels read of rows in the backward pass; None where there are no such kernels."""
    own = _own_passes(options)
    if own is None:
        return None
    with raw_mode(lse):
        return own.row_stats(dout, lse, delta)


def part_joiner(options: AttendOptions, width: int) -> PartJoiner | None:
    """Returns the backend's kernels that join results for the same rows, None where torch does that.

    The kernels take results in pairs of columns, so `width` of a head is even.
    """
    has_joiner = options.backend in OWN_KERNELS and width % 2 == 0
    return cast(Passes, backend_module(options.backend)) if has_joiner else None


def dq_factor(options: AttendOptions) -> float:
    """Returns what the sums of `attend_backward_onto_` are to be multiplied by, once, in the end."""
    return 1.0 if _own_passes(options) is None else options.softmax_scale


def _own_passes(options: AttendOptions) -> Passes | None:
    """Returns the passes of a backend with kernels of its own; None for others, and for rows to be widened."""
    if options.backend not in OWN_KERNELS or options.wide_dims is not None:
        return None
    return cast(Passes, backend_module(options.backend))


def _check(q: Tensor, k: Tensor, mask: AttentionMask, options: AttendOptions) -> None:
    """Raises as `check_grid`, and ValueError where a rate would be forgotten: a raw pass is told which rows it has."""
    check_grid(q, k, mask)
    if (options.dropout_p > 0) != (options.dropout is not None):
        raise ValueError(
            f"dropout_p={options.dropout_p} needs the words of the rows and keys at hand (attn/dropout.py); give "
            "options.dropout, or call attend or cp_attention"
        )


class _Attend(torch.autograd.Function):
    """Attention of one device with its sink; nothing is kept but the inputs, `out` and `lse`."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        mask: AttentionMask,
        options: AttendOptions,
        max_logits: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        out, lse = attend_forward_last(None, q, k, v, mask, options, sink, max_logits)
        ctx.save_for_backward(q, k, v, sink, out, lse)
        ctx.mask, ctx.options = mask, options
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @first_derivative_only("attend")
    def backward(
        ctx: Any, saved: Saved, dout: Tensor | None, dlse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        q, k, v, sink, out, lse = saved
        dout = torch.zeros_like(out) if dout is None else dout
        delta, stats = row_deltas(dout, out, lse, dlse, ctx.options)
        rows = (dout, q, k, v, lse, delta)
        dq, dk, dv = attend_backward(*rows, ctx.mask, ctx.options, rounded=True, stats=stats)
        dsink = None if sink is None else sink_gradient(lse, sink, delta, dlse).to(sink.dtype)
        return dq, dk, dv, dsink, None, None, None
