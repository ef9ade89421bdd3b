"""The launches of the backward pass.

out, dout, lse, dlse -> preprocess -> delta, lse in base 2     [4, N, rows]: what each row's scores need

head dims up to 128:
q, k, v, dout, delta, lse -> main -> dk, dv; dq as a float sum that key tiles add to, in any order
dq sum -> postprocess -> dq                                    scaled, in the type asked for

head dims above, and `deterministic`:
q, k, v, dout, delta, lse -> main -> dk, dv
q, k, v, dout, delta, lse -> dq                                from query tiles, added to by no one else
"""

import torch
from torch import Tensor

from megatron_cp.attn.hopper import gradients
from megatron_cp.attn.hopper.checks import find_variant
from megatron_cp.attn.hopper.gradients import BackwardCall, added_to
from megatron_cp.attn.hopper.launch import (
    counters,
    device_guard,
    launch_rows,
    load_kernel,
    raw_stream,
)


def launch_backward(
    call: BackwardCall, *, float_grads: bool, sm_share: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns `(dq, dk, dv)` of (q, k, v), in float32 or their dtype, from the current stream of their device.

    `sm_share` of the multiprocessors stays free for transfers.

    Raises: ValueError for layouts that the copy engine cannot read.
    """
    q, lists = call.q, call.lists
    dtype = torch.float32 if float_grads else q.dtype
    if lists.dq_tiles and lists.num_segs:
        dq = gradients.empty_gradient(q, dtype)
        dk, dv = _launch_main(call, None, dtype, sm_share)
        _launch_dq(call, dq, sm_share, adds=False)
        return dq, dk, dv
    dq_sum = q.new_zeros(q.shape, dtype=torch.float32)
    dk, dv = _launch_main(call, dq_sum, dtype, sm_share)
    dq = dq_sum if float_grads else gradients.empty_gradient(dq_sum, dtype)
    if lists.num_segs:
        _postprocess(dq_sum, dq, q.dtype, call.scores.softmax_scale)
    elif not float_grads:
        dq.zero_()
    return dq, dk, dv


def add_gradients_(
    call: BackwardCall, dq_sum: Tensor, held: tuple[Tensor, Tensor] | None, *, sm_share: float
) -> tuple[Tensor, Tensor]:
    """Adds to `dq_sum` (float32, contiguous, without softmax_scale) and returns `(dk, dv)` in float32.

    They are those `held`, with these added to them, where there are any.
    """
    if not call.lists.dq_tiles:
        return _launch_main(call, dq_sum, torch.float32, sm_share, held)
    dkeys = _launch_main(call, None, torch.float32, sm_share, held)
    _launch_dq(call, dq_sum, sm_share, adds=True)
    return dkeys


def _launch_main(
    call: BackwardCall,
    dq_sum: Tensor | None,
    dtype: torch.dtype,
    sm_share: float,
    held: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns `(dk, dv)` in `dtype`; adds to `dq_sum` and to `held`, float32 sums, if they are given."""
    if not call.lists.num_segs:
        if held is not None:
            return held
        dk, dv = (x.new_zeros(x.shape, dtype=dtype) for x in (call.k, call.v))
        return dk, dv
    device = call.q.device.index or 0
    with device_guard(device):
        kernel, stream = load_kernel(call.kernels.main.name, device), raw_stream(device)
        num_sms = kernel.num_blocks(kernel.num_sms, sm_share)
        apart = call.of_heads_apart(num_sms)
        if apart is not None:
            of_heads = _launch_main(apart, dq_sum, torch.float32, sm_share)
            sums = call.sums_of_heads(of_heads, dtype)
            return sums if held is None else added_to(held, sums)
        heads = call.heads_per_item(num_sms)
        dk, dv = held or call.room_for_gradients(dtype, heads)
        params = call.main_params(kernel, (dq_sum, dk, dv), heads, held is not None)
        pair = counters(device, stream)
        params.counters = pair.address
        num_items = params.num_tiles * (call.q.shape[1] // heads)
        kernel.launch(kernel.num_blocks(num_items, sm_share), stream, params, device)
    return dk.to(dtype), dv.to(dtype)


def _launch_dq(call: BackwardCall, dq: Tensor, sm_share: float, *, adds: bool) -> None:
    """Fills `dq` from query tiles, or adds to it, then without softmax_scale."""
    if not call.lists.dq_segs:
        return
    device = call.q.device.index or 0
    variant = call.kernels.dq
    assert variant is not None, "the list has query tiles"
    with device_guard(device):
        kernel, stream = load_kernel(variant.name, device), raw_stream(device)
        params = call.dq_params(kernel, dq)
        pair = counters(device, stream)
        params.counters, params.accumulate = pair.address, adds
        params.factor = 1.0 if adds else call.scores.softmax_scale
        params.num_tiles = call.lists.dq_with_keys if adds else call.lists.dq_tiles
        num_items = params.num_tiles * call.q.shape[1]
        kernel.launch(kernel.num_blocks(num_items, sm_share), stream, params, device)


def _postprocess(dq_sum: Tensor, dq: Tensor, dtype: torch.dtype, softmax_scale: float) -> None:
    name = find_variant("backward_postprocess", dtype, dq.shape[2], None, None).name
    num_items = dq.shape[0] * dq.shape[1]
    launch_rows(name, dq, num_items, gradients.postprocess_params(dq_sum, dq, softmax_scale))
