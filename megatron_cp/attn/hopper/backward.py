"""The launches of the backward pass.

out, dout, lse, dlse -> preprocess -> delta, lse in base 2     [4, N, rows]: what each row's scores need

most variants (`find_gradient_kernels`):
q, k, v, dout, delta, lse -> main -> dk, dv; dq as a float sum that key tiles add to, in any order
dq sum -> postprocess -> dq                                    scaled, in the type asked for

all others, and `deterministic`:
q, k, v, dout, delta, lse -> main -> dk, dv
q, k, v, dout, delta, lse -> dq                                from query tiles, added to by no one else
"""

import torch
from torch import Tensor

from megatron_cp.attn.hopper import gradients
from megatron_cp.attn.hopper.checks import find_variant
from megatron_cp.attn.hopper.gradients import BackwardCall, added_to
from megatron_cp.attn.hopper.launch import kernel_for, launch_rows, num_blocks
from megatron_cp.attn.hopper.machine import Memory
from megatron_cp.kernels.params import ADD_FLOATS


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
    kernel = kernel_for(call.q, call.kernels.main.name)
    num_sms = num_blocks(kernel, kernel.num_sms, sm_share)
    apart = call.of_heads_apart(num_sms)
    if apart is not None:
        of_heads = _launch_main(apart, dq_sum, torch.float32, sm_share)
        sums = call.sums_of_heads(of_heads, dtype)
        return sums if held is None else added_to(held, sums)
    heads = call.heads_per_item(num_sms)
    dk, dv = held or call.room_for_gradients(dtype, heads)
    params = call.main_params(kernel, (dq_sum, dk, dv), heads, held is not None)
    num_items = params.num_tiles * (call.q.shape[1] // heads)

    def memory() -> Memory:
        sums, dkeys = {"dq": dq_sum}, {"dk": dk, "dv": dv}
        if params.store == ADD_FLOATS:
            return Memory.of(call.read(), {}, sums | dkeys)
        return Memory.of(call.read(), dkeys, sums)

    kernel.launch(min(num_items, num_sms), params, memory)
    return (dk, dv) if dk.dtype == dtype else (dk.to(dtype), dv.to(dtype))


def _launch_dq(call: BackwardCall, dq: Tensor, sm_share: float, *, adds: bool) -> None:
    """Fills `dq` from query tiles, or adds to it, then without softmax_scale."""
    if not call.lists.dq_segs:
        return
    variant = call.kernels.dq
    assert variant is not None, "the list has query tiles"
    kernel = kernel_for(call.q, variant.name)
    params = call.dq_params(kernel, dq)
    params.accumulate = adds
    params.factor = 1.0 if adds else call.scores.softmax_scale
    params.num_tiles = call.lists.dq_with_keys if adds else call.lists.dq_tiles
    blocks = num_blocks(kernel, params.num_tiles * call.q.shape[1], sm_share)

    def memory() -> Memory:
        made = {"dq": dq}
        return Memory(call.read(), {}, made) if adds else Memory(call.read(), made, {})

    kernel.launch(blocks, params, memory)


def _postprocess(dq_sum: Tensor, dq: Tensor, dtype: torch.dtype, softmax_scale: float) -> None:
    name = find_variant("backward_postprocess", dtype, dq.shape[2], None, None).name
    params = gradients.postprocess_params(dq_sum, dq, softmax_scale)
    num_items = dq.shape[0] * dq.shape[1]

    def memory() -> Memory:
        made = {"dq": dq}
        return Memory({}, {}, made) if dq is dq_sum else Memory({"dq sum": dq_sum}, made, {})

    launch_rows(name, dq, num_items, params, memory)
