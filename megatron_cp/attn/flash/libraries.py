"""The operators of flash-attn 2, 3 and 4 where they are installed, and the choice among all.

The three differ in names only (`_Dialect`); each of them fills gradients that it is given. A version whose
signature lacks a name that we pass is not used. Signatures are checked in tests against the published ones.
flash-attn 3's operators ran on an H200; those of 2 and 4 have not run on a GPU yet.

Source: flash_attn_interface.py of flash-attn 2.8.3; hopper/flash_api.cpp (3.0) and flash_attn/cute/interface.py
(4.0) at commit 0251105a.
"""

# rows: packed query rows, keys: packed key rows, N query heads, G kv heads, H head dim, Hv value head dim

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron_cp.attn.flash.grouping import OPEN
from megatron_cp.attn.flash.operators import (
    Gradients,
    Loaded,
    Operator,
    Sequences,
    Wish,
    first_missing,
    missing_of_flash2,
    missing_of_torch,
    torch_operator,
)
from megatron_cp.attn.options import AttendOptions


def find_operator(
    wish: Wish, find_fault: Callable[[Operator], str | None]
) -> tuple[Operator | None, tuple[str, ...]]:
    """Returns the first operator that serves a wish, and why those before it (or all) do not.

    The newest that knows the device comes first: flash-attn 4, 3, 2, then torch. One with a fault is passed over.
    """
    reasons: list[str] = []
    for missing, load in (
        (_missing_of_flash4, _flash4),
        (_missing_of_flash3, _flash3),
        (missing_of_flash2, _flash2),
        (missing_of_torch, torch_operator),
    ):
        found = missing(wish) or load()  # a library that could not serve is not even imported
        if isinstance(found, Operator):
            fault = find_fault(found)
            if fault is None:
                return found, tuple(reasons)
            found = fault
        reasons.append(found)
    return None, tuple(reasons)


@lru_cache(maxsize=1)
def _flash2() -> Loaded:
    """Returns flash-attn 2 (from 8.0 on), or why it cannot be used."""
    module = _load("flash_attn.flash_attn_interface", "flash-attn 2")
    if isinstance(module, str):
        return module
    library = torch.ops.flash_attn  # 2.7 and later register what they export
    forward = getattr(library, "_flash_attn_varlen_forward", None)
    backward = getattr(library, "_flash_attn_varlen_backward", None)
    plain: dict[str, Any] = {"dropout_p": 0.0, "alibi_slopes": None}
    dialect = _Dialect("flash-attn 2", in_forward=plain, in_backward=plain)
    return _operator(dialect, forward, backward)


@lru_cache(maxsize=1)
def _flash3() -> Loaded:
    """Returns flash-attn 3 (Hopper), or why it cannot be used."""
    module = _load("flash_attn_3._C", "flash-attn 3")
    if isinstance(module, str):
        return module
    library = torch.ops.flash_attn_3
    forward, backward = getattr(library, "fwd", None), getattr(library, "bwd", None)
    # One split: the same bits whatever else is in the batch.
    dialect = _Dialect("flash-attn 3", causal="is_causal", in_forward={"num_splits": 1})
    return _operator(dialect, forward, backward)


@lru_cache(maxsize=1)
def _flash4() -> Loaded:
    """Returns flash-attn 4 (CuTe, Blackwell), or why it cannot be used."""
    module = _load("flash_attn.cute.interface", "flash-attn 4")
    if isinstance(module, str):
        return module
    forward = getattr(module, "_flash_attn_fwd", None)
    backward = getattr(module, "_flash_attn_bwd", None)
    dialect = _Dialect("flash-attn 4", lse="lse", open_side=None, in_forward={"return_lse": True})
    return _operator(dialect, forward, backward)


# ---------------------------------------------------------------------- one signature


@dataclass(frozen=True)
class _Dialect:
    """What a library calls things, and what it wants besides."""

    name: str
    causal: str = "causal"
    lse: str = "softmax_lse"
    open_side: int | None = OPEN
    in_forward: dict[str, Any] = field(default_factory=dict)
    in_backward: dict[str, Any] = field(default_factory=dict)

    def keywords(self, seqs: Sequences, options: AttendOptions) -> dict[str, Any]:
        """Returns the keywords that both passes take."""
        left, right = (self.open_side if side == OPEN else side for side in (seqs.left, seqs.right))
        return {
            "cu_seqlens_q": seqs.cu_seqlens_q,
            "cu_seqlens_k": seqs.cu_seqlens_k,
            "max_seqlen_q": seqs.max_q,
            "max_seqlen_k": seqs.max_k,
            "softmax_scale": options.softmax_scale,
            self.causal: seqs.is_causal,
            "window_size_left": left,
            "window_size_right": right,
            "softcap": options.softcap,
        }


def _operator(
    dialect: _Dialect,
    forward: Callable[..., Any] | None,
    backward: Callable[..., Any] | None,
) -> Loaded:
    """Returns the operator, or what its signatures lack."""
    unfit = f"the installed {dialect.name} has no"
    if forward is None or backward is None:
        return f"{unfit} variable-length functions where newer ones have them"
    nothing = Sequences(torch.empty(0), torch.empty(0), 0, 0, OPEN, OPEN)
    common = [*dialect.keywords(nothing, AttendOptions(1.0)), "q", "k", "v"]
    gradients = ["dout", "out", dialect.lse, "dq", "dk", "dv", "deterministic"]
    for function, needed in (
        (forward, [*common, *dialect.in_forward]),
        (backward, [*common, *gradients, *dialect.in_backward]),
    ):
        lacking = first_missing(_names(function), needed)
        if lacking is not None:
            return f"{unfit} {lacking}; install a newer one"

    def run_forward(
        q: Tensor, k: Tensor, v: Tensor, seqs: Sequences, options: AttendOptions
    ) -> tuple[Tensor, Tensor]:
        keywords = dialect.keywords(seqs, options)
        out, lse, *_ = forward(q=q, k=k, v=v, **keywords, **dialect.in_forward)
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
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        tensors = {"dout": dout, "q": q, "k": k, "v": v, "out": out, dialect.lse: lse}
        tensors |= {"dq": dq, "dk": dk, "dv": dv}
        keywords = dialect.keywords(seqs, options)
        determinism = {"deterministic": options.deterministic}
        backward(**tensors, **keywords, **determinism, **dialect.in_backward)
        return dq, dk, dv

    return Operator(dialect.name, run_forward, run_backward)


def _load(module: str, name: str) -> ModuleType | str:
    """Returns a module, or why there is none."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        return f"{name} is not installed"
    except (ImportError, OSError) as error:
        return f"the installed {name} does not load ({error})"


def _names(function: Any) -> set[str]:
    """Returns the parameter names of an operator or a function."""
    if isinstance(function, torch._ops.OpOverloadPacket):
        return {argument.name for argument in function.default._schema.arguments}
    return set(inspect.signature(function).parameters)


# ---------------------------------------------------------------------- what they cannot do


def _missing_of_flash3(wish: Wish) -> str | None:
    if wish.capability != (9, 0):
        return "flash-attn 3 needs compute capability 9.0"
    dims = (wish.head_dim, wish.value_dim)
    is_latent = 128 < dims[0] <= 192 and 96 < dims[1] <= 128
    if any(dim % 8 or dim > 256 for dim in dims) or not (dims[0] == dims[1] or is_latent):
        return (
            "flash-attn 3 has head dims that are multiples of 8 up to 256, for values the same, or 104 to 128 under "
            "136 to 192"
        )
    if wish.deterministic and wish.needs_grad and wish.head_dim > 192:
        return "flash-attn 3 is deterministic up to head dim 192"
    return None


def _missing_of_flash4(wish: Wish) -> str | None:
    """Narrower than what it says of itself: the plain cases, until it has run here."""
    if wish.capability not in ((10, 0), (10, 3)):
        return "flash-attn 4 is used on compute capability 10.0 and 10.3"
    if wish.has_softcap or wish.deterministic:
        return "flash-attn 4 is used without softcap and determinism"
    if wish.head_dim != wish.value_dim or wish.head_dim % 8 or wish.head_dim > 128:
        return "flash-attn 4 is used for one head dim of q, k and v, a multiple of 8 up to 128"
    return None
