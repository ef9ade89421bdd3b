"""`attend` of the Hopper kernels as registered operators, so that compiled graphs may hold them.

`torch.ops.megatron_cp.attention_forward` and `attention_backward` have fake and autograd implementations. Making a
work list is plain Python and breaks the graph before them. A head dim without a backward kernel is refused at the
call where gradients are needed, never computed by something else.
"""

# Q query rows, K key rows, N query heads, G kv heads, H head dim, Hv value head dim

from collections.abc import Callable, Sequence
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
from megatron_cp.attn.hopper.row_stats import preprocess
from megatron_cp.attn.hopper.scores import Scores
from megatron_cp.attn.logits import raise_to_
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
    data, num_tiles, num_segs, _ = work_of(q_QNH, v_KGH, mask, options)
    sink = None if sink_N is None else sink_N.to(torch.float32).contiguous()
    scale, softcap = options.softmax_scale, options.softcap
    operator: Callable[..., tuple[Tensor, Tensor, Tensor]] = torch.ops.megatron_cp.attention_forward
    is_plain = _is_plain(q_QNH, k_KGH, v_KGH)
    grad_data: Tensor | None = None
    counts: list[int] = []
    if needs_grad(q_QNH, k_KGH, v_KGH, sink):
        grad_data, *counts = gradient_work_of(q_QNH, v_KGH, mask, options)
        operator = _PlainAttend.apply if is_plain else operator
    elif is_plain:
        operator = _forward
    work = (data, num_tiles, num_segs, sink, scale, softcap, grad_data, counts)
    out, lse, found = operator(q_QNH, k_KGH, v_KGH, *work, max_logits_N is not None)
    if max_logits_N is not None:
        raise_to_(max_logits_N, found.detach())
    return out, lse


def _is_plain(q_QNH: Tensor, k_KGH: Tensor, v_KGH: Tensor) -> bool:
    """Returns whether nobody wants to see the operator: no compiler, no dispatch mode, no subclass.

    The dispatcher's way to a Python operator costs 8 us, more than the launch (EPYC core, torch 2.13).
    """
    return (
        not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and type(q_QNH) is type(k_KGH) is type(v_KGH) is Tensor
    )


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
    results = empty_results(q_QNH, v_KGH, q_QNH.dtype)
    max_logits = _no_logits(q_QNH, has_max_logits)
    asked = max_logits if has_max_logits else None
    lists = DeviceList(work, num_tiles, num_segs, num_tiles)
    tensors, scores = all_readable(q_QNH, k_KGH, v_KGH), Scores(softmax_scale, softcap)
    launch_forward(tensors, lists, readable_sink(sink_N), scores, results, max_logits_N=asked)
    return *results, max_logits


def _no_logits(q_QNH: Tensor, is_asked: bool) -> Tensor:
    """Returns the largest logits `[N]` of no keys, or an empty tensor where nobody asks."""
    if not is_asked:
        return q_QNH.new_empty(0, dtype=torch.float32)
    return q_QNH.new_full((q_QNH.shape[1],), -torch.inf, dtype=torch.float32)


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


def _backward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, delta = _run_backward(*inputs)
    return dq, dk, dv, delta.contiguous()


def _run_backward(  # noqa: PLR0913  the operator's schema
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
    dout = readable(dout_QNH)
    stats = preprocess(readable(out_QNH), dout, lse_QN, dlse_QN)
    lists = BackwardList._make((work, *counts))
    tensors = all_readable(q_QNH, k_KGH, v_KGH)
    call = BackwardCall(*tensors, dout, stats, lists, Scores(softmax_scale, softcap))
    dq, dk, dv = launch_backward(call, float_grads=False)
    return dq, dk, dv, stats.delta_of_rows(lse_QN.shape[0])


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
    return _gradients(torch.ops.megatron_cp.attention_backward, ctx, ctx.saved_tensors, dout, dlse)


def _gradients(
    operator: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]],
    ctx: Any,
    saved: Saved,
    dout: Tensor,
    dlse: Tensor | None,
) -> Gradients:
    """Returns the gradients of all that the forward operator takes, by the backward one or what it does."""
    q, k, v, sink, out, lse, grad_work = saved
    if grad_work is None:
        raise RuntimeError(
            "attention_forward was called without grad_work, which its gradient needs; call attend()"
        )
    dq, dk, dv, delta = operator(dout, dlse, q, k, v, out, lse, grad_work, ctx.counts, *ctx.scales)
    dsink = None if sink is None else sink_gradient(lse, sink, delta, dlse)
    return dq, dk, dv, None, None, None, dsink, None, None, None, None, None


class _PlainAttend(torch.autograd.Function):
    """What the operators do, where nobody wants to see them: their way through the dispatcher and back costs 170 us."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        results = _forward(*inputs)
        _keep_for_backward(ctx, inputs, results)
        ctx.mark_non_differentiable(results[2])
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    @first_derivative_only("attend")
    def backward(
        ctx: Any, saved: Saved, dout: Tensor | None, dlse: Tensor | None, _: None
    ) -> Gradients:
        dout = torch.zeros_like(saved[4]) if dout is None else dout
        return _gradients(_run_backward, ctx, saved, dout, dlse)


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
