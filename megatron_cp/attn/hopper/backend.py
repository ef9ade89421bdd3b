"""The `hopper` backend: our sm_90a kernels, launched through the driver. Ran on an H100.

    mask -> work list on the device (cached per mask) --+
    q, k, v -> three tensor maps (cached per address) --+-> one launch: every CTA takes query tiles until none is left

The host plans a mask once and afterwards only looks things up; it never waits for the device, and nothing is
proportional to queries x keys. The forward pass is deterministic: every query row is computed by one CTA, in
one order. The backward pass is so with `deterministic=True`. Rows without keys give (0, -inf).

`attend` calls registered operators (`torch.ops.megatron_cp.attention_forward` and `attention_backward`) with
fake and autograd implementations, so that compiled graphs may hold them; making a work list is plain Python
and breaks the graph before it. A head dim without a backward kernel is refused at the call where gradients
are needed, never computed by something else.
"""

# Q query rows, K key rows, N query heads, G kv heads, H head dim, Hv value head dim

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_cp.attn.features import Feature, feature_of
from megatron_cp.attn.graphs import outside_compiled_graphs
from megatron_cp.attn.hopper.backward import add_gradients_, launch_backward
from megatron_cp.attn.hopper.checks import (
    all_readable,
    find_gradient_kernels,
    find_variant,
    readable,
    readable_sink,
)
from megatron_cp.attn.hopper.device_lists import (
    BackwardList,
    DeviceList,
    backward_list,
    forward_list,
)
from megatron_cp.attn.hopper.gradients import BackwardCall
from megatron_cp.attn.hopper.launch import gradient_tiles, launch_forward, raw_stream, tile_shape
from megatron_cp.attn.hopper.row_stats import preprocess, stats_of
from megatron_cp.attn.hopper.rows import add_parts_ as add_parts_
from megatron_cp.attn.hopper.rows import merge_parts_ as merge_parts_
from megatron_cp.attn.hopper.scores import Scores
from megatron_cp.attn.logits import raise_to_
from megatron_cp.attn.merge import sink_gradient
from megatron_cp.attn.once import refusal_of
from megatron_cp.attn.options import AttendOptions, needs_grad
from megatron_cp.mask import AttentionMask


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
    data, num_tiles, num_segs, _ = _work_list(q_QNH, v_KGH, mask, options)
    sink = None if sink_N is None else sink_N.to(torch.float32).contiguous()
    scale, softcap = options.softmax_scale, options.softcap
    operator: Callable[..., tuple[Tensor, Tensor, Tensor]] = torch.ops.megatron_cp.attention_forward
    grad_data: Tensor | None = None
    counts: list[int] = []
    if needs_grad(q_QNH, k_KGH, v_KGH, sink):
        grad_data, *counts = _grad_list(q_QNH, v_KGH, mask, options)
    elif _is_plain(q_QNH, k_KGH, v_KGH):
        operator = _forward
    work = (data, num_tiles, num_segs, sink, scale, softcap, grad_data, counts)
    out, lse, found = operator(q_QNH, k_KGH, v_KGH, *work, max_logits_N is not None)
    if max_logits_N is not None:
        raise_to_(max_logits_N, found.detach())
    return out, lse


def forward(
    q_QNH: Tensor,
    k_KGH: Tensor,
    v_KGH: Tensor,
    mask: AttentionMask,
    options: AttendOptions,
    max_logits_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns `(out [Q, N, Hv], lse [Q, N])` in float32, (0, -inf) without keys.

    `max_logits` float32 is raised, in place, to the largest scaled and capped logit of each head.
    """
    results = _allocate(q_QNH, v_KGH, torch.float32)
    _run_forward((q_QNH, k_KGH, v_KGH), mask, options, results, max_logits_N=max_logits_N)
    return results


def forward_onto_(
    out_QNH: Tensor,
    lse_QN: Tensor,
    q_QNH: Tensor,
    k_KGH: Tensor,
    v_KGH: Tensor,
    mask: AttentionMask,
    options: AttendOptions,
    max_logits_N: Tensor | None = None,
) -> None:
    """Merges this part's result into the partial `out` and `lse`, float32, in place.

    Rows without keys in this part keep what they have, and those without any so far hold 0. With `max_logits`, raised
    as by `forward`, the part is computed apart and merged by a second kernel: a row that starts from an earlier result
    does not know its largest logit. That reads the part and `out` once more.
    """
    if max_logits_N is not None:
        part = forward(q_QNH, k_KGH, v_KGH, mask, options, max_logits_N)
        merge_parts_(out_QNH, lse_QN, *part)
        return
    _run_forward((q_QNH, k_KGH, v_KGH), mask, options, (out_QNH, lse_QN), earlier_QNH=out_QNH)


def forward_last(
    held: tuple[Tensor, Tensor] | None,
    q_QNH: Tensor,
    k_KGH: Tensor,
    v_KGH: Tensor,
    mask: AttentionMask,
    options: AttendOptions,
    sink_N: Tensor | None,
    max_logits_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns `(out in the dtype of q, lse float32)` over these keys and those of `held`, sink included.

    `held` is as `forward` returns it and is used up; `max_logits`, raised as by `forward`, goes without.
    """
    out, lse = _allocate(q_QNH, v_KGH, q_QNH.dtype)
    earlier = None
    if held is not None:
        earlier, lse = held[0].contiguous(), held[1]
    asked = {"sink_N": readable_sink(sink_N), "earlier_QNH": earlier, "max_logits_N": max_logits_N}
    _run_forward((q_QNH, k_KGH, v_KGH), mask, options, (out, lse), **asked)
    return out, lse


def _run_forward(
    tensors: tuple[Tensor, Tensor, Tensor],
    mask: AttentionMask,
    options: AttendOptions,
    results: tuple[Tensor, Tensor],
    *,
    sink_N: Tensor | None = None,
    earlier_QNH: Tensor | None = None,
    max_logits_N: Tensor | None = None,
) -> None:
    launch_forward(
        all_readable(*tensors),
        _work_list(tensors[0], tensors[2], mask, options),
        sink_N,
        Scores.of(options),
        results,
        earlier_QNH=earlier_QNH,
        max_logits_N=max_logits_N,
        sm_share=options.sm_share,
    )


def backward(  # noqa: PLR0913  what the pass needs, and how its results are stored
    dout_QNH: Tensor,
    q_QNH: Tensor,
    k_KGH: Tensor,
    v_KGH: Tensor,
    lse_QN: Tensor,
    delta_QN: Tensor,
    mask: AttentionMask,
    options: AttendOptions,
    rounded: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns `(dq, dk, dv)` in float32, or `rounded` to the dtype of q.

    `lse` and `delta` are those of the result merged over all keys.
    """
    call = _backward_call(dout_QNH, q_QNH, k_KGH, v_KGH, lse_QN, delta_QN, mask, options)
    return launch_backward(call, float_grads=not rounded, sm_share=options.sm_share)


def backward_onto_(  # noqa: PLR0913  as backward, and what to add to
    dq_QNH: Tensor | None,
    dkeys: tuple[Tensor, Tensor] | None,
    dout_QNH: Tensor,
    q_QNH: Tensor,
    k_KGH: Tensor,
    v_KGH: Tensor,
    lse_QN: Tensor,
    delta_QN: Tensor,
    mask: AttentionMask,
    options: AttendOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns `(dq, dk, dv)` in float32, `dq` still without softmax_scale; added to those that are given."""
    call = _backward_call(dout_QNH, q_QNH, k_KGH, v_KGH, lse_QN, delta_QN, mask, options)
    dq = q_QNH.new_zeros(q_QNH.shape, dtype=torch.float32) if dq_QNH is None else dq_QNH
    return dq, *add_gradients_(call, dq, dkeys, sm_share=options.sm_share)


def row_products(dout_QNH: Tensor, out_QNH: Tensor, lse_QN: Tensor) -> Tensor:
    """Returns `rowsum(dout * out)` `[Q, N]` float32, 0 for rows without keys."""
    stats = preprocess(out_QNH, readable(dout_QNH), lse_QN, None)
    return stats.delta_of_rows(len(lse_QN)).contiguous()


def _backward_call(
    dout_QNH: Tensor,
    q_QNH: Tensor,
    k_KGH: Tensor,
    v_KGH: Tensor,
    lse_QN: Tensor,
    delta_QN: Tensor,
    mask: AttentionMask,
    options: AttendOptions,
) -> BackwardCall:
    lists = _grad_list(q_QNH, v_KGH, mask, options)
    dout, stats = readable(dout_QNH.to(q_QNH.dtype)), stats_of(lse_QN, delta_QN)
    return BackwardCall(*all_readable(q_QNH, k_KGH, v_KGH), dout, stats, lists, Scores.of(options))


@outside_compiled_graphs
def _work_list(
    q_QNH: Tensor, v_KGH: Tensor, mask: AttentionMask, options: AttendOptions
) -> DeviceList:
    dims = (q_QNH.shape[-1], v_KGH.shape[-1])
    variant = find_variant("forward", q_QNH.dtype, *dims, _feature(options))
    device = q_QNH.device
    return forward_list(mask, *tile_shape(variant.name), device, raw_stream(device.index or 0))


@outside_compiled_graphs
def _grad_list(
    q_QNH: Tensor, v_KGH: Tensor, mask: AttentionMask, options: AttendOptions
) -> BackwardList:
    dims = (q_QNH.shape[-1], v_KGH.shape[-1])
    kernels = find_gradient_kernels(q_QNH.dtype, *dims, _feature(options), options.deterministic)
    device, in_order = q_QNH.device, options.deterministic
    stream = raw_stream(device.index or 0)
    return backward_list(mask, *gradient_tiles(kernels), device, stream, in_order=in_order)


def _feature(options: AttendOptions) -> Feature:
    return feature_of(options.softcap > 0, options.dropout is not None)


def _is_plain(q_QNH: Tensor, k_KGH: Tensor, v_KGH: Tensor) -> bool:
    """Returns whether nobody wants to see the operator: no compiler, no dispatch mode, no subclass.

    The dispatcher's way to a Python operator costs 8 us, more than the launch (EPYC core, torch 2.13).
    """
    return (
        not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and type(q_QNH) is type(k_KGH) is type(v_KGH) is Tensor
    )


def _allocate(q_QNH: Tensor, v_KGH: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    num_rows, num_heads, _ = q_QNH.shape
    shape = (num_rows, num_heads, v_KGH.shape[-1])
    # Without a dtype new_empty is twice as fast.
    out = q_QNH.new_empty(shape) if dtype == q_QNH.dtype else q_QNH.new_empty(shape, dtype=dtype)
    return out, q_QNH.new_empty((num_rows, num_heads), dtype=torch.float32)


# ---------------------------------------------------------------------- the operators

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
    results = _allocate(q_QNH, v_KGH, q_QNH.dtype)
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
    return *_allocate(q_QNH, v_KGH, q_QNH.dtype), _no_logits(q_QNH, has_max_logits)


def _backward(  # noqa: PLR0913  the operator's schema
    dout_QNH: Tensor,
    dlse_QN: Tensor,
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
    stats = preprocess(out_QNH, dout, lse_QN, dlse_QN)
    lists = BackwardList._make((work, *counts))
    tensors = all_readable(q_QNH, k_KGH, v_KGH)
    call = BackwardCall(*tensors, dout, stats, lists, Scores(softmax_scale, softcap))
    dq, dk, dv = launch_backward(call, float_grads=False)
    return dq, dk, dv, stats.delta_of_rows(len(lse_QN)).contiguous()


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


def _differentiate(ctx: Any, dout: Tensor, dlse: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
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


LIBRARY.impl("attention_forward", _forward, "CUDA")
LIBRARY.impl("attention_backward", _backward, "CUDA")
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
