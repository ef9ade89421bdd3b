"""The `emulated` backend: the Hopper kernels' own source on the CPU, instructions emulated; g++ only.

For tests and for looking into a kernel, not for speed: a 512-token forward takes a fraction of a second, training
is out of the question. The emulator keeps to the documented semantics and raises EmulatorError where a kernel does
what hardware leaves undefined (docs/emulator.md). Values say nothing about any GPU beyond those semantics.

    mask -> work list   q, k, v -> tensor maps   parameters      the host code of the GPU path (attn/hopper/)
    kernels/attn/*.cu compiled with g++, CTAs on host threads    instead of cubins and a driver

Backward: preprocess, main and postprocess kernels, or that for dq alone. `Settings` and `running` choose seed, grid
and host threads.
"""

# Q query rows, K key rows, N query heads, G kv heads, H head dim, Hv value head dim

from typing import Any

import torch
from torch import Tensor

from megatron_cp.attn.emulated.checks import find_variant
from megatron_cp.attn.emulated.kernels import EmulatedKernel, Settings, running
from megatron_cp.attn.hopper.checks import (
    all_readable,
    find_gradient_kernels,
    readable,
    readable_sink,
)
from megatron_cp.attn.hopper.device_lists import backward_list, forward_list
from megatron_cp.attn.hopper.gradients import BackwardCall, added_to, postprocess_params
from megatron_cp.attn.hopper.launch import (
    fill_without_keys,
    forward_params,
    gradient_tiles,
    max_logits_address,
    tile_shape,
)
from megatron_cp.attn.hopper.row_stats import (
    RowStats,
    empty_stats,
    preprocess_params,
    stats_of,
)
from megatron_cp.attn.hopper.rows import ADD, MERGE, add_params, merge_params
from megatron_cp.attn.hopper.scores import Scores
from megatron_cp.attn.merge import ByRow, sink_gradient
from megatron_cp.attn.once import Saved, first_derivative_only
from megatron_cp.attn.options import AttendOptions
from megatron_cp.kernels import build
from megatron_cp.kernels.emulator.library import EmulatorError
from megatron_cp.mask import AttentionMask

__all__ = ["Settings", "attend", "backward", "backward_onto_", "forward", "run_forward", "running"]

# Registers that hold nothing, as the emulator marks them; arithmetic keeps all but the sign and the quiet bit.
POISON = (0x7FA1BEEF, 0x7FA57FA5)
POISON_MASK = 0x7FBFFFFF
CPU = torch.device("cpu")


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
    out, lse = _Attend.apply(q_QNH, k_KGH, v_KGH, sink_N, mask, options, max_logits_N)
    return out, lse


def forward(
    q_QNH: Tensor,
    k_KGH: Tensor,
    v_KGH: Tensor,
    mask: AttentionMask,
    options: AttendOptions,
    max_logits_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns `(out [Q, N, Hv], lse [Q, N])` in float32, (0, -inf) without keys; raises `max_logits` as `attend`."""
    into = _floats(*q_QNH.shape[:2], v_KGH.shape[2]), _floats(*q_QNH.shape[:2])
    run_forward(q_QNH, k_KGH, v_KGH, mask, options, into=into, max_logits_N=max_logits_N)
    return into


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
    """Merges this part's result into the partial `out` and `lse`, in place, in the kernel.

    With `max_logits`, raised as by `attend`, in a second kernel, as in `hopper`.
    """
    if max_logits_N is not None:
        part = forward(q_QNH, k_KGH, v_KGH, mask, options, max_logits_N)
        merge_parts_(out_QNH, lse_QN, *part)
        return
    into = (out_QNH, lse_QN)
    run_forward(q_QNH, k_KGH, v_KGH, mask, options, into=into, earlier_QNH=out_QNH)


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

    `held` is as `forward` returns it and is used up; `max_logits`, raised as by `attend`, goes without.
    """
    out = q_QNH.new_empty(*q_QNH.shape[:2], v_KGH.shape[2])
    earlier, lse = held or (None, _floats(*q_QNH.shape[:2]))
    run_forward(
        q_QNH,
        k_KGH,
        v_KGH,
        mask,
        options,
        into=(out, lse),
        sink_N=sink_N,
        earlier_QNH=None if earlier is None else earlier.contiguous(),
        max_logits_N=max_logits_N,
    )
    return out, lse


def merge_parts_(
    out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor, by_row: ByRow | None = None
) -> None:
    """Merges partial results into rows of `out` and `lse`, in place, by the kernel that does it on a GPU."""
    params, num_items = merge_params(out, lse, part_out, part_lse, by_row)
    if num_items:
        EmulatedKernel(build.variants()[MERGE]).run(params, num_items, {})


def add_parts_(total: Tensor, part: Tensor, by_row: ByRow) -> None:
    """Adds rows of `part` to rows of `total`, in place, by the kernel that does it on a GPU."""
    params, num_items = add_params(total, part, by_row)
    if num_items:
        EmulatedKernel(build.variants()[ADD]).run(params, num_items, {})


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
    tensors, stats = (q_QNH, k_KGH, v_KGH), stats_of(lse_QN, delta_QN)
    call = _backward_call(dout_QNH.to(q_QNH.dtype), tensors, stats, mask, options)
    return _run_backward(call, dtype=q_QNH.dtype if rounded else torch.float32)


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
    tensors, stats = (q_QNH, k_KGH, v_KGH), stats_of(lse_QN, delta_QN)
    call = _backward_call(dout_QNH.to(q_QNH.dtype), tensors, stats, mask, options)
    dq = _floats(*q_QNH.shape).zero_() if dq_QNH is None else dq_QNH
    if not call.lists.num_segs:
        dkeys = dkeys or (_floats(*k_KGH.shape).zero_(), _floats(*v_KGH.shape).zero_())
    elif call.kernels.dq is None:
        dkeys = _run_main(call, dq, torch.float32, dkeys)
    else:
        dkeys = _run_main(call, None, torch.float32, dkeys)
        _run_dq(call, dq, adds=True)
    return dq, *dkeys


def run_forward(  # noqa: PLR0913  everything the kernel can be asked for
    q_QNH: Tensor,
    k_KGH: Tensor,
    v_KGH: Tensor,
    mask: AttentionMask,
    options: AttendOptions,
    *,
    into: tuple[Tensor, Tensor],
    sink_N: Tensor | None = None,
    earlier_QNH: Tensor | None = None,
    max_logits_N: Tensor | None = None,
) -> None:
    """Fills `into = (out [Q, N, Hv] float32 or the dtype of q, lse [Q, N] float32)`; raises `max_logits`, as `attend`.

    `earlier`, float32 with the strides of `out` or `out` itself, and what `lse` holds are a partial result over other
    keys, 0 and -inf in rows without, onto which this one is merged: not with `max_logits`, and a sink not in place.

    Raises: EmulatorBuildError without g++; EmulatorError for a defect of the kernel; ValueError for strides or
    addresses of `into` that the kernel cannot write.
    """
    out, lse = into
    if earlier_QNH is not out:
        out.fill_(torch.nan)
    if earlier_QNH is None:
        lse.fill_(torch.nan)
    scores = Scores.of(options)
    variant = find_variant("forward", q_QNH, v_KGH.shape[2], scores.feature)
    lists = forward_list(mask, *tile_shape(variant.name), CPU, 0)
    if not lists.num_segs:
        fill_without_keys(out, lse, sink_N, earlier_QNH)
        return
    tensors = all_readable(q_QNH, k_KGH, v_KGH)
    sink = readable_sink(None if sink_N is None else sink_N.detach())
    kernel, counters = EmulatedKernel(variant), torch.zeros(2, dtype=torch.int32)
    params = forward_params(kernel, tensors, lists, sink, scores, (out, lse), earlier_QNH)
    params.counters = counters.data_ptr()
    params.max_logits = max_logits_address(max_logits_N, earlier_QNH)
    touched = dict(zip("qkv", tensors, strict=True)) | {"work list": lists.data} | scores.touched()
    if sink is not None:
        touched["sink"] = sink
    kernel.run(params, params.num_tiles * q_QNH.shape[1], touched)
    results = {"out": out, "lse": lse}
    if max_logits_N is not None:
        results["max_logits"] = max_logits_N
    _check_results(results, counters)


def _backward_call(
    dout_QNH: Tensor,
    tensors: tuple[Tensor, Tensor, Tensor],
    stats: RowStats,
    mask: AttentionMask,
    options: AttendOptions,
) -> BackwardCall:
    q, k, v = all_readable(*tensors)
    dims, scores = (q.shape[2], v.shape[2]), Scores.of(options)
    in_order = options.deterministic
    kernels = find_gradient_kernels(q.dtype, *dims, scores.feature, in_order)
    lists = backward_list(mask, *gradient_tiles(kernels), CPU, 0, in_order=in_order)
    return BackwardCall(q, k, v, readable(dout_QNH), stats, lists, scores)


def _run_backward(call: BackwardCall, *, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Returns `(dq, dk, dv)` from the main kernel and the postprocess kernel, or that for dq alone."""
    if not call.lists.num_segs:
        dq, dk, dv = (torch.zeros(x.shape, dtype=dtype) for x in (call.q, call.k, call.v))
        return dq, dk, dv
    dq = torch.full(call.q.shape, torch.nan, dtype=dtype)
    if call.kernels.dq is not None:
        dk, dv = _run_main(call, None, dtype)
        _run_dq(call, dq, adds=False)
        return dq, dk, dv
    dq_sum = _floats(*call.q.shape).zero_()
    dk, dv = _run_main(call, dq_sum, dtype)
    last = EmulatedKernel(find_variant("backward_postprocess", call.q, None, None))
    last.run(postprocess_params(dq_sum, dq, call.scores.softmax_scale), dq.numel(), {})
    return dq, dk, dv


def _run_main(
    call: BackwardCall,
    dq_sum: Tensor | None,
    dtype: torch.dtype,
    held: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns `(dk, dv)`; adds to `dq_sum` and to `held` if they are given."""
    kernel = EmulatedKernel(call.kernels.main)
    apart = call.of_heads_apart(kernel.num_sms)
    if apart is not None:
        sums = call.sums_of_heads(_run_main(apart, dq_sum, torch.float32), dtype)
        return sums if held is None else added_to(held, sums)
    heads = call.heads_per_item(kernel.num_sms)
    dk, dv = held or call.room_for_gradients(dtype, heads)
    if held is None and heads == call.group:  # nothing is added to them
        dk.fill_(torch.nan)
        dv.fill_(torch.nan)
    counters = torch.zeros(2, dtype=torch.int32)
    params = call.main_params(kernel, (dq_sum, dk, dv), heads, held is not None)
    params.counters = counters.data_ptr()
    touched, results = _touched(call), {"dk": dk, "dv": dv}
    if dq_sum is not None:
        touched["dq"] = results["dq"] = dq_sum
    kernel.run(params, params.num_tiles * (call.q.shape[1] // heads), touched)
    _check_results(results, counters)
    return dk.to(dtype), dv.to(dtype)


def _run_dq(call: BackwardCall, dq: Tensor, *, adds: bool) -> None:
    """Fills `dq` from query tiles, or adds to it, then without softmax_scale."""
    variant, counters = call.kernels.dq, torch.zeros(2, dtype=torch.int32)
    assert variant is not None, "the list has query tiles"
    kernel = EmulatedKernel(variant)
    params = call.dq_params(kernel, dq)
    params.counters, params.accumulate = counters.data_ptr(), adds
    params.factor = 1.0 if adds else call.scores.softmax_scale
    params.num_tiles = call.lists.dq_with_keys if adds else call.lists.dq_tiles
    touched = _touched(call) | ({"dq": dq} if adds else {})
    kernel.run(params, params.num_tiles * dq.shape[1], touched)
    _check_results({"dq": dq}, counters)


def _touched(call: BackwardCall) -> dict[str, Tensor]:
    """Returns what the backward kernels may read."""
    read = {"q": call.q, "k": call.k, "v": call.v, "dout": call.dout} | call.scores.touched()
    return read | {"work list": call.lists.data, "lse": call.stats.lse_2, "delta": call.stats.delta}


def row_products(dout_QNH: Tensor, out_QNH: Tensor, lse_QN: Tensor) -> Tensor:
    """Returns `rowsum(dout * out)` `[Q, N]` float32, 0 for rows without keys, by the preprocess kernel."""
    stats = _row_stats(readable(out_QNH), readable(dout_QNH), lse_QN, None)
    return stats.delta_of_rows(len(lse_QN)).contiguous()


def _row_stats(out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None) -> RowStats:
    """Returns what the preprocess kernel makes of a whole result."""
    stats = empty_stats(lse)
    params, _kept = preprocess_params(out, dout, lse, dlse, stats)
    kernel = EmulatedKernel(find_variant("backward_preprocess", dout, dout.shape[2], None))
    if lse.numel():
        kernel.run(params, lse.numel(), {})
    return stats


class _Attend(torch.autograd.Function):
    """The backend with its kernels' own sink, output type and row statistics, as on a GPU."""

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
        out = torch.empty(*q.shape[:2], v.shape[2], dtype=q.dtype)
        lse = _floats(*q.shape[:2])
        into = (out, lse)
        run_forward(q, k, v, mask, options, into=into, sink_N=sink, max_logits_N=max_logits)
        ctx.save_for_backward(q, k, v, sink, out, lse)
        ctx.mask, ctx.options = mask, options
        return out, lse

    @staticmethod
    @first_derivative_only("the emulated backend")
    def backward(ctx: Any, saved: Saved, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sink, out, lse = saved
        dout = readable(dout)
        stats = _row_stats(out, dout, lse, dlse)
        call = _backward_call(dout, (q, k, v), stats, ctx.mask, ctx.options)
        grads = _run_backward(call, dtype=q.dtype)
        dsink = None
        if sink is not None:
            dsink = sink_gradient(lse, sink, stats.delta_of_rows(len(lse)), dlse).to(sink.dtype)
        return *grads, dsink, None, None, None


def _floats(*shape: int) -> Tensor:
    """Returns room for what kernels write in float32, whatever torch's default is."""
    return torch.empty(shape, dtype=torch.float32)


def _check_results(results: dict[str, Tensor], counters: Tensor) -> None:
    """Raises EmulatorError if a register without a value was stored, or the work counters were left set."""
    for name, x in results.items():
        if x.dtype == torch.float32:
            bits = x.contiguous().view(torch.int32) & POISON_MASK
            if any((bits == value).any() for value in POISON):
                raise EmulatorError(
                    f"{name} holds values of registers that were never written, or read in flight"
                )
    if counters.any():
        raise EmulatorError(f"the kernel left its work counters at {counters.tolist()}")
