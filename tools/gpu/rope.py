"""RoPE in one kernel on a GPU, beside Megatron-Core's operations one by one: right and how fast.

Each check raises AssertionError, or returns what it found.
"""

import functools
from collections.abc import Callable

import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
from torch import Tensor

from megatron_cp.mcore.parts import rope_fusion
from tools.gpu import measure

DEVICE = "cuda"
DIM = 128
SMALL, LONG = (1000, 3), (32768, 16)  # tokens, heads
# Half a unit in the last place of 8 bits, of the larger number of a pair, and what fp32 loses before.
MAX_ERROR = 1.01 * 2.0**-8
SECONDS = 120.0  # of a check: kernels are compiled

Rotate = Callable[[Tensor, Tensor], Tensor]


def checks() -> dict[str, Callable[[], str]]:
    """Returns the checks by what they are called in the report."""
    return {"RoPE, values": values, "RoPE, time": times}


def values() -> str:
    """Compares one kernel's results and gradients with Megatron-Core's operations in float64."""
    qkv, freqs, dout = _drawn(*SMALL)
    found = _both_passes(rope_fusion.rotate, qkv, freqs, dout)
    wanted = _both_passes(_apply_rotary_pos_emb_bshd, *(x.double() for x in (qkv, freqs, dout)))
    errors = [
        ((mine - exact).abs() / _of_pair(exact)).max().item()
        for mine, exact in zip(found, wanted, strict=True)
    ]
    assert max(errors) <= MAX_ERROR, f"off by {max(errors):.1e}, at most {MAX_ERROR:.1e}"
    return "relative errors " + ", ".join(f"{x:.1e}" for x in errors)


def times() -> str:
    """Returns milliseconds of both passes, of one kernel and of operations one by one."""
    drawn = _drawn(*LONG)
    calls: dict[str, Callable[[], object]] = {
        name: functools.partial(_both_passes, rotate, *drawn)
        for name, rotate in (
            ("one kernel", rope_fusion.rotate),
            ("one by one", _apply_rotary_pos_emb_bshd),
        )
    }
    took = measure.interleaved(calls)
    tokens, heads = LONG
    found = ", ".join(f"{name} {one.median_ms:.3f} ms" for name, one in took.items())
    return f"{tokens} tokens, {heads} heads of {DIM}, both passes: {found}"


def _drawn(tokens: int, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns rows of which the middle third rotates, angles, and the gradient of the result."""
    generator = torch.Generator(DEVICE).manual_seed(0)

    def randn(width: int) -> Tensor:
        return torch.randn(tokens, 1, heads, width, generator=generator, device=DEVICE).bfloat16()

    position = torch.arange(tokens, device=DEVICE).view(-1, 1, 1, 1)
    angle = 10000.0 ** (-torch.arange(0, DIM, 2, device=DEVICE) / DIM)
    return randn(3 * DIM), position * torch.cat([angle, angle]), randn(DIM)


def _both_passes(rotate: Rotate, qkv: Tensor, freqs: Tensor, dout: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the rotated rows and their gradient."""
    leaf = qkv[..., DIM : 2 * DIM].detach().requires_grad_()
    out = rotate(leaf, freqs)
    (grad,) = torch.autograd.grad(out, leaf, dout)
    return out.detach(), grad


def _of_pair(x: Tensor) -> Tensor:
    """Returns the larger of the two numbers that were rotated together, for each of them."""
    halves = x.abs().unflatten(-1, (2, -1))
    return halves.amax(dim=-2, keepdim=True).expand(halves.shape).flatten(-2)
