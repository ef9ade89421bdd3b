"""`attend` of the Hopper kernels as registered operators, so that compiled graphs may hold them.

`torch.ops.megatron_cp.attention_forward` and `attention_backward` have fake and autograd implementations. Their work
lists are made before a graph, and `attend` breaks it. A head dim without a backward kernel is refused at the call where
gradients are needed, never computed by something else.
"""

# Q query rows, K key rows, N query heads, G kv heads, H head dim, Hv value head dim

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_cp.attn.hopper.backward import launch_backward
from megatron_cp.attn.hopper.checks import all_readable, readable, readable_sink
from megatron_cp.attn.hopper.device_lists import (
    BackwardList,
    DeviceList,
    gradient_work_of,
    work_of,
)
from megatron_cp.attn.hopper.gradients import BackwardCall
from megatron_cp.attn.hopper.launch import empty_results, launch_forward
from megatron_cp.attn.hopper.passes import RowStats
from megatron_cp.attn.hopper.row_stats import preprocess
from megatron_cp.attn.hopper.scores import Scores
from megatron_cp.attn.logits import no_logits, raise_to_
from megatron_cp.attn.merge import sink_gradient
from megatron_cp.attn.once import Gradients, Saved, first_derivative_only, refusal_of
from megatron_cp.attn.options import AttendOptions, needs_grad
from megatron_cp.mask import AttentionMask

# The work lists are tensors, so that a graph holds them as inputs; grad_work is what the backward needs.
LIBRARY = torch.library.Library("megatron_cp", "DEF")
LIBRARY.define(
    "attention_forward(Tensor q, Tensor k, Tensor v, Tensor work, SymInt num_tiles, SymInt num_segs, Tensor? sink, "
    "float softmax_scale, float softcap, Tensor? grad_work, SymInt[] grad_counts, bool has_max_logits=False) "
    "-> (Tensor, Tensor, Tensor)"
)
LIBRARY.define(
    "attention_backward(Tensor dout, Tensor dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    "Tensor work, SymInt[] counts, float softmax_scale, float softcap) -> (Tensor, Tensor, Tensor, Tensor)"
)


def attend(
    q_QNH: Tensor,
    k_KGH: Tensor,
    v_KGH: Tensor,
    mask: AttentionMask,
    sink_N: Tensor | None,
    options: AttendOptions,
    max_logits_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns `(out [Q, N, Hv] in the dtype of q, lse [Q, N] float32)`, sink included; differentiable.

    `max_logits` float32 is raised, in place, to the largest scaled and capped logit of each head, without a gradient.
    """
    tensors, lists = (q_QNH, k_KGH, v_KGH), work_of(q_QNH, v_KGH, mask, options)
    sink = None if sink_N is None else sink_N.to(torch.float32).contiguous()
    scores = Scores(options.softmax_scale, options.softcap)
    grad_lists: BackwardList | None = None
    if needs_grad(*tensors, sink):
        grad_lists = gradient_work_of(q_QNH, v_KGH, mask, options)
    if not _is_plain(*tensors):
        return _ask_operator(tensors, lists, sink, scores, grad_lists, max_logits_N)
    if grad_lists is None:
        return _run_forward(tensors, lists, sink, scores, max_logits_N)
    results: tuple[Tensor, Tensor] = _PlainAttend.apply(
        *tensors, sink, (lists, grad_lists), scores, max_logits_N
    )
    return results


def _is_plain(q_QNH: Tensor, k_KGH: Tensor, v_KGH: Tensor) -> bool:
    """Returns whether nobody wants to see the operator: no compiler, no dispatch mode, no subclass.

    The dispatcher's way to a Python operator costs 8 us, more than the launch (EPYC core, torch 2.13).
    """
    return (
        not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and type(q_QNH) is type(k_KGH) is type(v_KGH) is Tensor
    )


def _ask_operator(
    tensors: tuple[Tensor, Tensor, Tensor],
    lists: DeviceList,
    sink_N: Tensor | None,
    scores: Scores,
    grad_lists: BackwardList | None,
    max_logits_N: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Returns what `_run_forward` does, by the operator that compiled graphs and dispatch modes see."""
    grad_data, *counts = (None,) if grad_lists is None else grad_lists
    numbers = (scores.softmax_scale, scores.softcap, grad_data, counts)
    asked = (*lists[:3], sink_N, *numbers, max_logits_N is not None)
    out, lse, found = torch.ops.megatron_cp.attention_forward(*tensors, *asked)
    if max_logits_N is not None:
        raise_to_(max_logits_N, found.detach())
    return out, lse


def _run_forward(
    tensors: tuple[Tensor, Tensor, Tensor],
    lists: DeviceList,
    sink_N: Tensor | None,
    scores: Scores,
    max_logits_N: Tensor | None,
) -> tuple[Tensor, Tensor]:
    q_QNH, _, v_KGH = tensors
    results = empty_results(q_QNH, v_KGH, q_QNH.dtype)
    given = (tensors, lists, readable_sink(sink_N), scores)
    launch_forward(*given, results, max_logits_N=max_logits_N)
    return results


def _forward(  # noqa: PLR0913  the operator's schema
    q_QNH: Tensor,
    k_KGH: Tensor,
    v_KGH: Tensor,
    work: Tensor,
    num_tiles: int,
    num_segs: int,
    sink_N: Tensor | None,
    softmax_scale: float,
    softcap: float,
    grad_work: Tensor | None,
    grad_counts: Sequence[int],
    has_max_logits: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    max_logits = _no_logits(q_QNH, has_max_logits)
    asked = max_logits if has_max_logits else None
    lists, scores = DeviceList(work, num_tiles, num_segs, num_tiles), Scores(softmax_scale, softcap)
    return *_run_forward((q_QNH, k_KGH, v_KGH), lists, sink_N, scores, asked), max_logits


def _no_logits(q_QNH: Tensor, is_asked: bool) -> Tensor:
    """Returns the largest logits `[N]` of no keys, or an empty tensor where nobody asks."""
    return no_logits(q_QNH) if is_asked else q_QNH.new_empty(0, dtype=torch.float32)


def _forward_fake(  # noqa: PLR0913  the operator's schema
    q_QNH: Tensor,
    k_KGH: Tensor,
    v_KGH: Tensor,
    work: Tensor,
    num_tiles: int,
    num_segs: int,
    sink_N: Tensor | None,
    softmax_scale: float,
    softcap: float,
    grad_work: Tensor | None,
    grad_counts: Sequence[int],
    has_max_logits: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    return *empty_results(q_QNH, v_KGH, q_QNH.dtype), _no_logits(q_QNH, has_max_logits)


def _backward(  # noqa: PLR0913  the operator's schema
    dout_QNH: Tensor,
    dlse_QN: Tensor | None,
    q_QNH: Tensor,
    k_KGH: Tensor,
    v_KGH: Tensor,
    out_QNH: Tensor,
    lse_QN: Tensor,
    work: Tensor,
    counts: Sequence[int],
    softmax_scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lists, scores = BackwardList._make((work, *counts)), Scores(softmax_scale, softcap)
    results = (out_QNH, lse_QN)
    made, stats = _run_backward((dout_QNH, dlse_QN), (q_QNH, k_KGH, v_KGH), results, lists, scores)
    return *made, stats.delta_of_rows(lse_QN.shape[0]).contiguous()


def _run_backward(
    gradients: tuple[Tensor, Tensor | None],
    tensors: tuple[Tensor, Tensor, Tensor],
    results: tuple[Tensor, Tensor],
    lists: BackwardList,
    scores: Scores,
) -> tuple[tuple[Tensor, Tensor, Tensor], RowStats]:
    """Returns the gradients of q, k and v from those of the results, and the rows' statistics."""
    (dout, dlse), (out, lse) = gradients, results
    dout = readable(dout)
    stats = preprocess(readable(out), dout, lse, dlse)
    call = BackwardCall(*all_readable(*tensors), dout, stats, lists, scores)
    return launch_backward(call, float_grads=False), stats


def _backward_fake(
    dout_QNH: Tensor,
    dlse_QN: Tensor,
    q_QNH: Tensor,
    k_KGH: Tensor,
    v_KGH: Tensor,
    out_QNH: Tensor,
    lse_QN: Tensor,
    *_: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (x.new_empty(x.shape) for x in (q_QNH, k_KGH, v_KGH))
    return dq, dk, dv, lse_QN.new_empty(lse_QN.shape)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, _, _, _, sink, softmax_scale, softcap, grad_work, grad_counts, _ = inputs
    ctx.save_for_backward(q, k, v, sink, *output[:2], grad_work)
    ctx.counts, ctx.scales = grad_counts, (softmax_scale, softcap)


def _differentiate(ctx: Any, dout: Tensor, dlse: Tensor, _: Tensor) -> Gradients:
    q, k, v, sink, out, lse, grad_work = ctx.saved_tensors
    if grad_work is None:
        raise RuntimeError(
            "attention_forward was called without grad_work, which its gradient needs; call attend()"
        )
    dq, dk, dv, delta = torch.ops.megatron_cp.attention_backward(
        dout, dlse, q, k, v, out, lse, grad_work, ctx.counts, *ctx.scales
    )
    dsink = None if sink is None else sink_gradient(lse, sink, delta, dlse)
    return dq, dk, dv, None, None, None, dsink, None, None, None, None, None


class _PlainAttend(torch.autograd.Function):
    """What the operators do, where nobody wants to see them: their way through the dispatcher and back costs 170 us."""

    @staticmethod
    def forward(
        ctx: Any,
        q_QNH: Tensor,
        k_KGH: Tensor,
        v_KGH: Tensor,
        sink_N: Tensor | None,
        work: tuple[DeviceList, BackwardList],
        scores: Scores,
        max_logits_N: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        tensors = (q_QNH, k_KGH, v_KGH)
        lists, ctx.lists = work
        results = _run_forward(tensors, lists, sink_N, scores, max_logits_N)
        ctx.save_for_backward(*tensors, sink_N, *results)
        ctx.scores = scores
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    @first_derivative_only("attend")
    def backward(ctx: Any, saved: Saved, dout: Tensor | None, dlse: Tensor | None) -> Gradients:
        q, k, v, sink, out, lse = saved
        dout = torch.zeros_like(out) if dout is None else dout
        given = ((dout, dlse), (q, k, v), (out, lse))
        made, stats = _run_backward(*given, ctx.lists, ctx.scores)
        dsink = None
        if sink is not None:
            dsink = sink_gradient(lse, sink, stats.delta_of_rows(lse.shape[0]), dlse)
        return *made, dsink, None, None, None


def implement_operators(dispatch_key: str) -> None:
    """Lets the operators take tensors of a kind of device: CUDA, and the CPU where the emulator stands for a GPU."""
    LIBRARY.impl("attention_forward", _forward, dispatch_key)
    LIBRARY.impl("attention_backward", _backward, dispatch_key)


implement_operators("CUDA")
torch.library.register_fake("megatron_cp::attention_forward", _forward_fake, lib=LIBRARY)
torch.library.register_fake("megatron_cp::attention_backward", _backward_fake, lib=LIBRARY)
torch.library.register_autograd(
    "megatron_cp::attention_forward",
    _differentiate,
    setup_context=_keep_for_backward,
    lib=LIBRARY,
)
torch.library.register_autograd(
    "megatron_cp::attention_backward", refusal_of("attend"), lib=LIBRARY
)
