"""Variable-length attention operators behind one signature, and which of them serves a call.

    forward(q, k, v, seqs, options)                  -> out, lse
    backward(dout, q, k, v, out, lse, seqs, options) -> dq, dk, dv

What they share: rows of all sequences packed, `cu_seqlens` int32, windows that hang on the bottom right
corner, `lse` a natural log in fp32 `[N, rows]`, results in the dtype of q. What one cannot do is refused before
it is called (`missing_of_...`). torch's own is here, those of flash-attn are in libraries.py. Signatures and shapes
are checked in tests; torch 2.11's own ran on an H100.

Source: `_flash_attention_forward`, `_flash_attention_backward` of torch 2.13 and their flash_api.cpp.
"""

# rows: packed query rows, keys: packed key rows, N query heads, G kv heads, H head dim, Hv value head dim

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_cp.attn.options import AttendOptions

Gradients = tuple[Tensor, Tensor, Tensor]
Capability = tuple[int, int]


class Sequences(NamedTuple):
    """The sequences of one call on the device; as `grouping.VarlenCall`."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_q: int
    max_k: int
    left: int
    right: int

    @property
    def is_causal(self) -> bool:
        """Returns whether the window is the causal one; then flash-attn takes quicker kernels."""
        return self.left == -1 and self.right == 0


class Wish(NamedTuple):
    """What a call needs of an operator."""

    capability: Capability
    head_dim: int
    value_dim: int
    has_softcap: bool
    deterministic: bool
    needs_grad: bool
    torch_is_deterministic: bool


@dataclass(frozen=True)
class Operator:
    """One library's operators, for any wish of which its `missing_of_...` has nothing to say."""

    name: str
    forward: Callable[[Tensor, Tensor, Tensor, Sequences, AttendOptions], tuple[Tensor, Tensor]]
    backward: Callable[..., Gradients]


Loaded = Operator | str  # or why there is none


@lru_cache(maxsize=1)
def torch_operator() -> Loaded:
    """Returns torch's own flash-attn 2, or why it cannot be used."""
    forward, backward = (
        torch.ops.aten._flash_attention_forward.default,
        torch.ops.aten._flash_attention_backward.default,
    )
    sides = ("window_size_left", "window_size_right", "scale")
    for operator in (forward, backward):
        names = {argument.name for argument in operator._schema.arguments}
        if lacking := first_missing(names, sides):
            return f"torch {torch.__version__} has no {lacking} in its operator; 2.8 and later have"

    def run_forward(
        q: Tensor, k: Tensor, v: Tensor, seqs: Sequences, options: AttendOptions
    ) -> tuple[Tensor, Tensor]:
        assert not options.softcap
        window = {"window_size_left": seqs.left, "window_size_right": seqs.right}
        lengths, causal = seqs[:4], seqs.is_causal
        out, lse, *_ = forward(
            q, k, v, *lengths, 0.0, causal, False, scale=options.softmax_scale, **window
        )
        return out, lse

    def run_backward(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        seqs: Sequences,
        options: AttendOptions,
    ) -> Gradients:
        assert not options.softcap
        window = {"window_size_left": seqs.left, "window_size_right": seqs.right}
        rng_state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of no dropout
        unused = q.new_empty(0)
        lengths, causal = seqs[:4], seqs.is_causal
        dq, dk, dv = backward(
            *(dout, q, k, v, out, lse, *lengths, 0.0, causal, rng_state, unused),
            scale=options.softmax_scale,
            **window,
        )
        return dq, dk, dv

    return Operator("torch", run_forward, run_backward)


def missing_of_torch(wish: Wish) -> str | None:
    """Returns what torch's operator cannot do of a wish."""
    if wish.has_softcap:
        return "torch's operator has no softcap"
    if wish.deterministic and wish.needs_grad and not wish.torch_is_deterministic:
        return (
            "torch's operator is deterministic under torch.use_deterministic_algorithms(True) only"
        )
    return missing_of_flash2(wish, "torch's operator")


def missing_of_flash2(wish: Wish, name: str = "flash-attn 2") -> str | None:
    """Returns what flash-attn 2's kernels, alone or in torch, cannot do of a wish."""
    if wish.capability < (8, 0):
        return f"{name} needs compute capability 8.0"
    if wish.value_dim != wish.head_dim:
        return f"{name} has one head dim for q, k and v"
    if wish.head_dim % 8 or wish.head_dim > 256:
        return f"{name} has head dims that are multiples of 8 up to 256"
    if wish.needs_grad and 192 < wish.head_dim <= 224 and wish.capability not in ((8, 0), (9, 0)):
        return f"{name} trains head dims of 193 to 224 on compute capability 8.0 and 9.0 only"
    return None


def first_missing(names: set[str], needed: Iterable[str]) -> str | None:
    """Returns the first needed name that is not there."""
    return next((name for name in needed if name not in names), None)
