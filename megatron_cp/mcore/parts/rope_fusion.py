"""Fused RoPE where Transformer Engine is not installed: one compiled kernel rotates a tensor.

Megatron-Core fuses RoPE by Transformer Engine alone. Without it a rotation is a dozen kernels that each
read or write the whole tensor: most of 37 of the 436 ms of a training step of 1.3 B parameters
(benchmarks/results/h200_2026-11-27.md). `torch.compile` makes one kernel of them, as Megatron-Core's other
fusions do. It computes in fp32 and rounds once, as Transformer Engine does; unfused each product is rounded.
Both passes over 32K tokens of 16 heads of 128 take .33 ms instead of 1.90 (H200, h200_second_2026-11-27.md).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.models.common.embeddings import rope_utils


def rotate(t: torch.Tensor, freqs: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """Returns `t` with the halves of its rows rotated; Megatron calls it as it does Transformer Engine's function.

    Args:
        t: `[S, B, H, D]`, of any strides. Columns from R on stay as they are.
        freqs: the angles, fp32 `[S, 1, 1, R]`, or `[S, B, 1, R]` with positions of each sample; R is even.
        interleaved: never True; Megatron-Core refuses to fuse it without Transformer Engine.

    Raises:
        NotImplementedError: for interleaved pairs.
    """
    if interleaved:
        raise NotImplementedError("fused RoPE rotates halves; give --no-rope-fusion for neighbours")
    rotated: torch.Tensor = _Rotation.apply(t, freqs)
    return rotated


def install() -> None:
    """Gives Megatron-Core our rotation if it has none; then `apply_rope_fusion=True` is served."""
    if rope_utils.fused_apply_rotary_pos_emb is None:
        rope_utils.fused_apply_rotary_pos_emb = rotate


def is_installed() -> bool:
    """Returns whether Megatron-Core rotates by our function, which knows samples with positions of their own."""
    return rope_utils.fused_apply_rotary_pos_emb is rotate


class _Rotation(torch.autograd.Function):
    """Keeps the angles alone for the backward: all layers share them, cosines and sines would be each layer's."""

    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(freqs)
        return _compiled()(t.detach(), *_factors(freqs))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (freqs,) = ctx.saved_tensors
        cos, sin = _factors(freqs)
        return _compiled()(grads[0], cos, sin.flip(-2)), None


def _factors(freqs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what each half is multiplied by and what the other half is: `[S, B, 1, 2, R / 2]`, signs included."""
    halves = freqs.unflatten(-1, (2, -1))
    sin = halves.sin()
    sin[..., 0, :].neg_()
    return halves.cos(), sin


@functools.cache
def _compiled() -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    return torch.compile(_rotated)


def _rotated(t: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Returns `t` with its first R columns rotated by `_factors`."""
    width = 2 * cos.shape[-1]
    halves = t[..., :width].unflatten(-1, (2, -1)).float()
    rotated = (halves * cos + halves.flip(-2) * sin).flatten(-2).to(t.dtype)
    return rotated if width == t.shape[-1] else torch.cat([rotated, t[..., width:]], dim=-1)
