"""Attention of one device on a mask's slices: `attend`, and the raw passes that the distributed runtime calls.

Both passes leave an enclosing autocast: the dtype of q, k and v decides the precision, nothing else.
"""

# Q query rows, K key rows, N query heads, G kv heads, H head dim, Hv value head dim

from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_cp.attn.merge import apply_sink, sink_gradient
from megatron_cp.attn.options import (
    AttendOptions,
    accumulation_dtype,
    check_mask,
    check_sink,
    resolve_options,
)
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
_loaded: dict[str, ModuleType] = {}


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
) -> tuple[Tensor, Tensor]:
    """Returns `(out [Q, N, Hv] in the dtype of q, lse [Q, N] float32 (float64 for float64 inputs))`.

    Shapes: q `[Q, N, H]`, k `[K, G, H]`, v `[K, G, Hv]`; query head n uses kv head `n // (N // G)`.
    `lse` is the natural log of the softmax denominator and includes `sink` `[N]`, a learned logit per
    head without a value. Rows without keys give `out = 0`, `lse = -inf` (`sink` if there is one) and
    exactly zero gradients. Rows of q, k, v outside every slice influence nothing. Differentiable once
    in q, k, v and sink, through `out` and through `lse`.

    Raises: ValueError for wrong input, NotImplementedError for a backend that cannot serve the call.
    """
    options = resolve_options(q, k, v, softmax_scale, softcap, backend, deterministic)
    check_mask(q, k, mask)
    check_sink(q, sink)
    if options.backend in (
        "hopper",
        "emulated",
    ):  # their kernel adds the sink and writes the dtype of q itself
        return backend_module(options.backend).attend(q, k, v, mask, sink, options)
    out, lse = _Attend.apply(q, k, v, sink, mask, options)
    return out, lse


def attend_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, options: AttendOptions
) -> tuple[Tensor, Tensor]:
    """Returns `(out [Q, N, Hv], lse [Q, N])` in the accumulation dtype, without autograd and without a sink."""
    check_mask(q, k, mask)
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        out, lse = backend_module(options.backend).forward(q, k, v, mask, options)
    return out, lse


def attend_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    mask: AttentionMask,
    options: AttendOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns `(dq, dk, dv)` in the accumulation dtype.

    `lse` and `delta = rowsum(dout * out) - dlse`, both `[Q, N]`, are those of the result merged over
    *all* keys, of which `k` and `v` may be a part. Rows with `lse = -inf` get and give exactly 0.
    """
    check_mask(q, k, mask)
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        dq, dk, dv = backend_module(options.backend).backward(
            dout, q, k, v, lse, delta, mask, options
        )
    return dq, dk, dv


def backend_module(backend: str) -> ModuleType:
    """Returns the module with the passes of a backend, imported on its first use."""
    module = _loaded.get(backend)
    if module is None:
        module = _loaded[backend] = import_module(_MODULES[backend])
    return module


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
    ) -> tuple[Tensor, Tensor]:
        out, lse = attend_forward(q, k, v, mask, options)
        if sink is not None:
            out, lse = apply_sink(out, lse, sink)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sink, out, lse)
        ctx.mask, ctx.options = mask, options
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, sink, out, lse = ctx.saved_tensors
        delta = torch.zeros_like(lse)
        if dout is None:
            dout = torch.zeros_like(out)
        else:
            dtype = accumulation_dtype(q.dtype)
            delta += (dout.to(dtype) * out.to(dtype)).sum(dim=-1)
        if dlse is not None:
            delta -= dlse
        dq, dk, dv = attend_backward(dout, q, k, v, lse, delta, ctx.mask, ctx.options)
        dsink = None if sink is None else sink_gradient(lse, sink, delta).to(sink.dtype)
        dq = dq.to(q.dtype)  # one after another: each frees its float32 twin
        dk = dk.to(k.dtype)
        dv = dv.to(v.dtype)
        return dq, dk, dv, dsink, None, None
