"""The variable-length attention operators of torch and flash-attn 2, 3 and 4, behind one signature.

    forward(q, k, v, seqs, softmax_scale, softcap)                 -> out, lse
    backward(dout, q, k, v, out, lse, seqs, scale, softcap, deterministic) -> dq, dk, dv

Facts that all four share, read from their sources: packed rows, `cu_seqlens` int32, windows that hang on the
bottom right corner, `lse` a natural log in fp32 `[N, rows]`, results in the dtype of q. A version whose
signature lacks something that we pass is not used; what an operator cannot do is refused before it is called
(`missing`). Of these only signatures and shapes could be checked: nothing here has run on a GPU yet.

Source: flash_api.cpp and flash_attn_interface.py of flash-attn 2.8.3, hopper/flash_api.cpp (3.0) and
flash_attn/cute/interface.py (4.0) at commit 0251105a, `_flash_attention_forward` of torch 2.8 to 2.13.
"""

# rows: packed query rows, keys: packed key rows, N query heads, G kv heads, H head dim, Hv value head dim

import importlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

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


@dataclass(frozen=True)
class Operator:
    """One library's operators. `missing` returns what a wish asks for in vain, None if nothing."""

    name: str
    forward: Callable[[Tensor, Tensor, Tensor, Sequences, float, float], tuple[Tensor, Tensor]]
    backward: Callable[..., Gradients]
    missing: Callable[[Wish], str | None]


def find_operator(wish: Wish) -> tuple[Operator | None, tuple[str, ...]]:
    """Returns the first operator that serves a wish, and why those before it (or all) do not.

    The newest that knows the device comes first: flash-attn 4, 3, 2, then torch.
    """
    reasons = []
    for load in (_flash4, _flash3, _flash2, _torch):
        operator = load()
        reason = operator if isinstance(operator, str) else operator.missing(wish)
        if reason is None:
            assert isinstance(operator, Operator)
            return operator, tuple(reasons)
        reasons.append(reason)
    return None, tuple(reasons)


# ---------------------------------------------------------------------- torch


@lru_cache(maxsize=1)
def _torch() -> Operator | str:
    """Returns torch's own flash-attn 2, or why it cannot be used."""
    forward, backward = (
        torch.ops.aten._flash_attention_forward.default,
        torch.ops.aten._flash_attention_backward.default,
    )
    sides = ("window_size_left", "window_size_right", "scale")
    lacking = [side for op in (forward, backward) for side in _lacks(_names(op), sides)]
    if lacking:
        return f"torch {torch.__version__} has no {lacking[0]} in its operator (2.8 and later have)"

    def run_forward(
        q: Tensor, k: Tensor, v: Tensor, seqs: Sequences, softmax_scale: float, softcap: float
    ) -> tuple[Tensor, Tensor]:
        assert not softcap
        window = {"window_size_left": seqs.left, "window_size_right": seqs.right}
        lengths = seqs[:4]
        out, lse, *_ = forward(
            q, k, v, *lengths, 0.0, seqs.is_causal, False, scale=softmax_scale, **window
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
        softmax_scale: float,
        *_: object,
    ) -> Gradients:
        window = {"window_size_left": seqs.left, "window_size_right": seqs.right}
        rng_state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of no dropout
        unused = q.new_empty(0)
        lengths, causal = seqs[:4], seqs.is_causal
        dq, dk, dv = backward(
            *(dout, q, k, v, out, lse, *lengths, 0.0, causal, rng_state, unused),
            scale=softmax_scale,
            **window,
        )
        return dq, dk, dv

    def missing(wish: Wish) -> str | None:
        if wish.has_softcap:
            return "torch's operator has no softcap"
        if wish.deterministic and wish.needs_grad and not _torch_is_deterministic():
            return "torch's operator is deterministic under torch.use_deterministic_algorithms(True) only"
        return _missing_of_flash2("torch's operator", wish)

    return Operator("torch", run_forward, run_backward, missing)


def _torch_is_deterministic() -> bool:
    return (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    )


def _missing_of_flash2(name: str, wish: Wish) -> str | None:
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


# ---------------------------------------------------------------------- flash-attn 2


@lru_cache(maxsize=1)
def _flash2() -> Operator | str:
    """Returns flash-attn 2, or why it cannot be used."""
    module = _module("flash_attn.flash_attn_interface")
    forward = getattr(module, "_flash_attn_varlen_forward", None)
    backward = getattr(module, "_flash_attn_varlen_backward", None)
    if forward is None or backward is None:
        return "flash-attn 2 is not installed"
    needed = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale")
    needed += ("causal", "window_size_left", "window_size_right", "softcap", "alibi_slopes")
    lacking = _lacks(_names(forward), needed)
    lacking += _lacks(_names(backward), (*needed, "deterministic", "dq", "dk", "dv"))
    if lacking:
        return f"the installed flash-attn 2 has no {lacking[0]} (2.7 and later have)"

    def options(seqs: Sequences, softmax_scale: float, softcap: float) -> dict[str, Any]:
        return {
            **_lengths(seqs),
            "dropout_p": 0.0,
            "softmax_scale": softmax_scale,
            "causal": seqs.is_causal,
            "window_size_left": seqs.left,
            "window_size_right": seqs.right,
            "softcap": softcap,
            "alibi_slopes": None,
        }

    def run_forward(
        q: Tensor, k: Tensor, v: Tensor, seqs: Sequences, softmax_scale: float, softcap: float
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = forward(q, k, v, **options(seqs, softmax_scale, softcap))
        return out, lse

    def run_backward(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        seqs: Sequences,
        softmax_scale: float,
        softcap: float,
        deterministic: bool,
    ) -> Gradients:
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        backward(
            *(dout, q, k, v, out, lse, dq, dk, dv),
            **options(seqs, softmax_scale, softcap),
            deterministic=deterministic,
        )
        return dq, dk, dv

    def missing(wish: Wish) -> str | None:
        return _missing_of_flash2("flash-attn 2", wish)

    return Operator("flash-attn 2", run_forward, run_backward, missing)


# ---------------------------------------------------------------------- flash-attn 3


@lru_cache(maxsize=1)
def _flash3() -> Operator | str:
    """Returns flash-attn 3 (Hopper), or why it cannot be used."""
    _module("flash_attn_3._C")
    library = torch.ops.flash_attn_3
    forward, backward = getattr(library, "fwd", None), getattr(library, "bwd", None)
    if forward is None or backward is None:
        return "flash-attn 3 is not installed"
    needed = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale")
    needed += ("is_causal", "window_size_left", "window_size_right", "softcap")
    lacking = _lacks(_names(forward.default), (*needed, "num_splits"))
    lacking += _lacks(_names(backward.default), (*needed, "deterministic", "dq", "dk", "dv"))
    if lacking:
        return f"the installed flash-attn 3 has no {lacking[0]}; install a newer one"

    def options(seqs: Sequences, softmax_scale: float, softcap: float) -> dict[str, Any]:
        return {
            **_lengths(seqs),
            "softmax_scale": softmax_scale,
            "is_causal": seqs.is_causal,
            "window_size_left": seqs.left,
            "window_size_right": seqs.right,
            "softcap": softcap,
        }

    def run_forward(
        q: Tensor, k: Tensor, v: Tensor, seqs: Sequences, softmax_scale: float, softcap: float
    ) -> tuple[Tensor, Tensor]:
        # One split: the same bits whatever else is in the batch.
        out, lse, *_ = forward(q, k, v, num_splits=1, **options(seqs, softmax_scale, softcap))
        return out, lse

    def run_backward(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        seqs: Sequences,
        softmax_scale: float,
        softcap: float,
        deterministic: bool,
    ) -> Gradients:
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        backward(
            *(dout, q, k, v, out, lse),
            **{"dq": dq, "dk": dk, "dv": dv, "deterministic": deterministic},
            **options(seqs, softmax_scale, softcap),
        )
        return dq, dk, dv

    return Operator("flash-attn 3", run_forward, run_backward, _missing_of_flash3)


def _missing_of_flash3(wish: Wish) -> str | None:
    if wish.capability != (9, 0):
        return "flash-attn 3 needs compute capability 9.0"
    dims = (wish.head_dim, wish.value_dim)
    is_latent = 128 < dims[0] <= 192 and 96 < dims[1] <= 128
    if any(dim % 8 or dim > 256 for dim in dims) or not (dims[0] == dims[1] or is_latent):
        return (
            "flash-attn 3 has head dims that are multiples of 8 up to 256, for values the same, or 97 to 128 under "
            "129 to 192"
        )
    if wish.deterministic and wish.needs_grad and wish.head_dim > 192:
        return "flash-attn 3 is deterministic up to head dim 192"
    return None


# ---------------------------------------------------------------------- flash-attn 4


@lru_cache(maxsize=1)
def _flash4() -> Operator | str:
    """Returns flash-attn 4 (CuTe, Blackwell), or why it cannot be used."""
    module = _module("flash_attn.cute.interface")
    forward = getattr(module, "_flash_attn_fwd", None)
    backward = getattr(module, "_flash_attn_bwd", None)
    if forward is None or backward is None:
        return "flash-attn 4 is not installed"
    needed = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale")
    needed += ("causal", "window_size_left", "window_size_right")
    lacking = _lacks(_names(forward), (*needed, "return_lse"))
    lacking += _lacks(_names(backward), needed)
    if lacking:
        return f"the installed flash-attn 4 has no {lacking[0]}; install a newer one"

    def options(seqs: Sequences, softmax_scale: float) -> dict[str, Any]:
        sides = [None if side == -1 else side for side in (seqs.left, seqs.right)]
        return {
            **_lengths(seqs),
            "softmax_scale": softmax_scale,
            "causal": seqs.is_causal,
            "window_size_left": sides[0],
            "window_size_right": sides[1],
        }

    def run_forward(
        q: Tensor, k: Tensor, v: Tensor, seqs: Sequences, softmax_scale: float, softcap: float
    ) -> tuple[Tensor, Tensor]:
        assert not softcap
        out, lse, *_ = forward(q, k, v, return_lse=True, **options(seqs, softmax_scale))
        return out, lse

    def run_backward(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        seqs: Sequences,
        softmax_scale: float,
        *_: object,
    ) -> Gradients:
        dq, dk, dv, *_rest = backward(q, k, v, out, dout, lse, **options(seqs, softmax_scale))
        return dq, dk, dv

    return Operator("flash-attn 4", run_forward, run_backward, _missing_of_flash4)


def _missing_of_flash4(wish: Wish) -> str | None:
    if wish.capability not in ((10, 0), (10, 3)):
        return "flash-attn 4 is used on compute capability 10.0 and 10.3"
    if wish.has_softcap or wish.deterministic:
        return "flash-attn 4 is used without softcap and determinism"
    if wish.head_dim != wish.value_dim or wish.head_dim % 8 or wish.head_dim > 128:
        return "flash-attn 4 is used for one head dim of q, k and v, a multiple of 8 up to 128"
    return None


# ---------------------------------------------------------------------- what is installed


def _module(name: str) -> Any:
    """Returns a module, None where it is not installed; an installed one that fails to load raises."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and name.startswith(error.name):
            return None
        raise


def _names(function: Any) -> set[str]:
    """Returns the parameter names of an operator or function."""
    if isinstance(function, torch._ops.OpOverload):
        return {argument.name for argument in function._schema.arguments}
    return set(inspect.signature(function).parameters)


def _lacks(names: set[str], needed: Iterable[str]) -> list[str]:
    return [name for name in needed if name not in names]


def _lengths(seqs: Sequences) -> dict[str, Any]:
    return {
        "cu_seqlens_q": seqs.cu_seqlens_q,
        "cu_seqlens_k": seqs.cu_seqlens_k,
        "max_seqlen_q": seqs.max_q,
        "max_seqlen_k": seqs.max_k,
    }
