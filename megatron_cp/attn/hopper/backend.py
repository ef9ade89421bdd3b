"""The `hopper` backend: our sm_90a kernels, launched through the driver. Ran on an H100.

    mask -> work list on the device (cached per mask) --+
    q, k, v -> three tensor maps (cached per address) --+-> one launch: every CTA takes query tiles until none is left

The host plans a mask once and afterwards only looks things up; it never waits for the device, and nothing is
proportional to queries x keys. The forward pass is deterministic: every query row is computed by one CTA, in
one order. The backward pass is so with `deterministic=True`. Rows without keys give (0, -inf).

The device of the tensors says where kernels run (machine.py): the emulator takes those of the CPU. `attend`, which
is differentiable, stands in operators.py.
"""

# Q query rows, K key rows, N query heads, G kv heads, H head dim, Hv value head dim

import torch
from torch import Tensor

from megatron_cp.attn.hopper.backward import add_gradients_, launch_backward
from megatron_cp.attn.hopper.checks import all_readable, readable, readable_sink
from megatron_cp.attn.hopper.device_lists import gradient_work_of, work_of
from megatron_cp.attn.hopper.gradients import BackwardCall
from megatron_cp.attn.hopper.launch import empty_results, launch_forward
from megatron_cp.attn.hopper.operators import attend as attend
from megatron_cp.attn.hopper.passes import RowStats
from megatron_cp.attn.hopper.row_stats import empty_stats, preprocess
from megatron_cp.attn.hopper.row_stats import row_stats as row_stats
from megatron_cp.attn.hopper.rows import add_parts_ as add_parts_
from megatron_cp.attn.hopper.rows import merge_parts_ as merge_parts_
from megatron_cp.attn.hopper.scores import Scores
from megatron_cp.attn.options import AttendOptions
from megatron_cp.mask import AttentionMask


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
    into = empty_results(q_QNH, v_KGH, torch.float32)
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
    """Merges this part's result into the partial `out` and `lse`, float32, in place.

    Rows without keys in this part keep what they have, and those without any so far hold 0. With `max_logits`, raised
    as by `forward`, the part is computed apart and merged by a second kernel: a row that starts from an earlier result
    does not know its largest logit. That reads the part and `out` once more.
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

    `held` is as `forward` returns it and is used up; `max_logits`, raised as by `forward`, goes without.
    """
    out, lse = empty_results(q_QNH, v_KGH, q_QNH.dtype)
    earlier = None
    if held is not None:
        earlier, lse = held[0].contiguous(), held[1]
    run_forward(
        *(q_QNH, k_KGH, v_KGH, mask, options),
        into=(out, lse),
        sink_N=sink_N,
        earlier_QNH=earlier,
        max_logits_N=max_logits_N,
    )
    return out, lse


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
    """Fills `into = (out [Q, N, Hv] float32 or the dtype of q, lse [Q, N] float32)`; raises `max_logits`, as `forward`.

    `earlier`, float32 with the strides of `out` or `out` itself, and what `lse` holds are a partial result over other
    keys, 0 and -inf in rows without, onto which this one is merged: not with `max_logits`, and a sink not in place.

    Raises: ValueError for strides or addresses of `into` that the kernel cannot write.
    """
    launch_forward(
        (q_QNH, k_KGH, v_KGH),
        work_of(q_QNH, v_KGH, mask, options),
        readable_sink(sink_N),
        Scores.of(options),
        into,
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
    stats: RowStats | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns `(dq, dk, dv)` in float32, or `rounded` to the dtype of q.

    `lse` and `delta` are those of the result merged over all keys; `stats` what `row_stats` makes of them, if known.
    """
    rows = (dout_QNH, lse_QN, delta_QN, stats)
    call = _backward_call(rows, (q_QNH, k_KGH, v_KGH), mask, options)
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
    stats: RowStats | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns `(dq, dk, dv)` in float32, `dq` still without softmax_scale; added to those that are given."""
    rows = (dout_QNH, lse_QN, delta_QN, stats)
    call = _backward_call(rows, (q_QNH, k_KGH, v_KGH), mask, options)
    dq = q_QNH.new_zeros(q_QNH.shape, dtype=torch.float32) if dq_QNH is None else dq_QNH
    return dq, *add_gradients_(call, dq, dkeys, sm_share=options.sm_share)


def stats_of_result(
    dout_QNH: Tensor, out_QNH: Tensor, lse_QN: Tensor, dlse_QN: Tensor | None
) -> RowStats:
    """Returns the row statistics of a whole result, with `delta = rowsum(dout * out) - dlse`."""
    return preprocess(readable(out_QNH), readable(dout_QNH), lse_QN, dlse_QN)


def _backward_call(
    rows: tuple[Tensor, Tensor, Tensor, RowStats | None],
    tensors: tuple[Tensor, Tensor, Tensor],
    mask: AttentionMask,
    options: AttendOptions,
) -> BackwardCall:
    """`rows`: dout, lse, delta and what is known of both; `tensors`: q, k and v."""
    (dout, lse, delta, stats), (q, _, v) = rows, tensors
    lists = gradient_work_of(q, v, mask, options)
    dout = readable(dout if dout.dtype == q.dtype else dout.to(q.dtype))
    if stats is None:
        stats = row_stats(dout, lse, delta) if lists.num_segs else empty_stats(lse)
    return BackwardCall(*all_readable(*tensors), dout, stats, lists, Scores.of(options))
