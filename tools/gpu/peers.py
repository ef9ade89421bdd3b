"""Who is timed: our kernels, cuDNN and FlashAttention-2 through torch, FlexAttention, FA3 and FA4 if importable.

A contender is prepared once per case: layouts, masks and compilation are outside what is timed. Traps that
published comparisons fell into, and what is done here:

- FlexAttention gets the block mask alone (a score_mod beside it masks twice), made from slices, closed-form
  mask functions where the mask has one and otherwise two table look-ups per row; compiled for each shape,
  with the recompile limit raised and Dynamo's caches dropped between masks, so that no case falls back to
  uncompiled code.
- cuDNN gets [batch, heads, rows, dim] contiguous, its own GQA, and is left out where torch refuses it.
- FA3 and FA4 get variable-length inputs for documents, and a window for windows.
"""

import ctypes
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention

from megatron_cp.attn import attend
from megatron_cp.attn.flex.kernel import block_mask as block_mask_of
from megatron_cp.attn.flex.tables import parts_of
from megatron_cp.mask import AttentionMask
from megatron_cp.plan.study.workloads import WINDOW, document_lengths
from tools.gpu.cases import KILO, Case

# T tokens, N query heads, G kv heads, H head dim, Hv value head dim
Call = Callable[[], Any]


@dataclass(frozen=True)
class Inputs:
    """Random tensors of one case; zeros would run faster and hide errors."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


@dataclass(frozen=True)
class Contender:
    """One implementation on one case. `forward` returns `out` (any layout), `backward` gradients."""

    name: str
    forward: Call
    backward: Call | None
    rows: Callable[[Any], Tensor]  # from what `forward` returns to `[T, N, Hv]`


def draw(case: Case, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> Inputs:
    """Returns normal random inputs, seed 0."""
    generator = torch.Generator(device).manual_seed(0)
    t, n, g = case.num_tokens, case.num_heads, case.num_kv_heads
    shapes = (
        (t, n, case.head_dim),
        (t, g, case.head_dim),
        (t, g, case.value_dim),
        (t, n, case.value_dim),
    )
    return Inputs(*(torch.randn(s, generator=generator, device=device).to(dtype) for s in shapes))


FEATURES: dict[str, dict[str, Any]] = {"softcap": {"softcap": 20.0}, "dropout": {"dropout_p": 0.1}}
FEATURE_DIMS = (64, 128)  # which have kernels of all features


def with_features(case: Case, mask: AttentionMask, x: Inputs) -> list[Contender]:
    """Returns our kernels with softcap and with dropout, on causal masks of head dims that have both."""
    if case.mask_name != "causal" or case.head_dim not in FEATURE_DIMS:
        return []
    return [hopper(case, mask, x, name, **wishes) for name, wishes in FEATURES.items()]


def hopper(case: Case, mask: AttentionMask, x: Inputs, what: str = "", **wishes: Any) -> Contender:
    """Returns our kernels with these wishes; without `backward` while the package refuses gradients."""

    def forward() -> Tensor:
        with torch.no_grad():
            return attend(x.q, x.k, x.v, mask, backend="hopper", **wishes)[0]

    name = f"hopper, {what}" if what else "hopper"
    try:
        q, k, v = _leaves(x.q, x.k, x.v)
        out, _ = attend(q, k, v, mask, backend="hopper", **wishes)
        backward: Call | None = _grad(out, (q, k, v), x.dout)
    except NotImplementedError:
        backward = None
    return Contender(name, forward, backward, lambda out: out)


def cudnn(case: Case, mask: AttentionMask, x: Inputs) -> Contender | None:
    """Returns torch's scaled_dot_product_attention on cuDNN; None for masks that it has no name for."""
    return _sdpa("cudnn", SDPBackend.CUDNN_ATTENTION, case, x)


def flash2(case: Case, mask: AttentionMask, x: Inputs) -> Contender | None:
    """Returns torch's scaled_dot_product_attention on FlashAttention-2; None as for cuDNN, and beyond 8K.

    It is far behind the others on Hopper, and its minutes are better spent on them.
    """
    if case.num_tokens > 8 * KILO:
        return None
    return _sdpa("fa2", SDPBackend.FLASH_ATTENTION, case, x)


def _sdpa(name: str, backend: SDPBackend, case: Case, x: Inputs) -> Contender | None:
    if case.mask_name not in ("full", "causal"):
        return None
    q, k, v, dout = (y.transpose(0, 1).unsqueeze(0).contiguous() for y in (x.q, x.k, x.v, x.dout))

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=case.mask_name == "causal", enable_gqa=True
            )

    leaves = _leaves(q, k, v)
    return Contender(
        name,
        lambda: call(q, k, v),
        _grad(call(*leaves), leaves, dout),
        lambda out: out[0].transpose(0, 1),
    )


def flex_attention(case: Case, mask: AttentionMask, x: Inputs) -> Contender:
    """Returns FlexAttention, compiled for this shape."""
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 64
    compiled = torch.compile(torch_flex_attention, dynamic=False)
    block_mask = None
    if case.mask_name != "full":
        (part,) = parts_of(mask, x.q.device)
        sizes = (mask.num_queries, mask.num_keys)
        block_mask = block_mask_of(part.blocks, part.starts, part.ends, sizes)
    closed = _closed_form(case)
    if block_mask is not None and closed is not None:
        block_mask.mask_mod = closed
    q, k, v, dout = (y.transpose(0, 1).unsqueeze(0).contiguous() for y in (x.q, x.k, x.v, x.dout))

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return compiled(q, k, v, block_mask=block_mask, enable_gqa=True)

    leaves = _leaves(q, k, v)
    return Contender(
        "flex",
        lambda: call(q, k, v),
        _grad(call(*leaves), leaves, dout),
        lambda out: out[0].transpose(0, 1),
    )


def _closed_form(case: Case) -> Callable[..., Tensor] | None:
    """Returns the mask function that a user would write by hand, where it is simpler than tables."""
    if case.mask_name == "causal":
        return lambda b, h, q, k: k <= q
    if case.mask_name == "sliding_window_causal":
        return lambda b, h, q, k: (k <= q) & (q - k <= WINDOW)
    if case.mask_name == "sliding_window":
        return lambda b, h, q, k: (k - q <= WINDOW) & (q - k <= WINDOW)
    return None


def flash3(case: Case, mask: AttentionMask, x: Inputs) -> Contender | None:
    """Returns FlashAttention-3; None where it is neither importable nor a library, or has no such mask."""
    try:
        from flash_attn_interface import flash_attn_func, flash_attn_varlen_func
    except ImportError:
        operators = _flash3_operators()
        if operators is None:
            return None
        flash_attn_func, flash_attn_varlen_func = flash3_functions(operators)
    return _flash("fa3", flash_attn_func, flash_attn_varlen_func, case, x)


def _flash3_operators() -> Any:
    """Returns the operators of a bare `flash_attn_3/_C.so`, as some packages carry it; None without one."""
    spec = importlib.util.find_spec("flash_attn_3")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for library in Path(folder).glob("_C*.so"):
            for runtime in Path(folder).parent.glob("nvidia/*/lib/libcudart.so.12"):
                ctypes.CDLL(str(runtime), ctypes.RTLD_GLOBAL)
            torch.ops.load_library(str(library))
            return torch.ops.flash_attn_3
    return None


def flash3_functions(operators: Any) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Returns differentiable (dense, varlen) functions over FlashAttention-3's raw operators."""

    class Flash3(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
            out, lse, *_ = operators.fwd(q, k, v, **options)
            ctx.save_for_backward(q, k, v, out, lse)
            ctx.options = options
            return out

        @staticmethod
        def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
            dq, dk, dv, *_ = operators.bwd(dout.contiguous(), *ctx.saved_tensors, **ctx.options)
            return dq, dk, dv, None

    def dense(
        q: Tensor, k: Tensor, v: Tensor, causal: bool, window_size: tuple[int, int] = (-1, -1)
    ) -> Tensor:
        left, right = window_size
        options = {"is_causal": causal, "window_size_left": left, "window_size_right": right}
        return Flash3.apply(q, k, v, options)

    def varlen(q: Tensor, k: Tensor, v: Tensor, causal: bool, **lengths: Any) -> Tensor:
        return Flash3.apply(q, k, v, {"is_causal": causal, **lengths})

    return dense, varlen


def flash4(case: Case, mask: AttentionMask, x: Inputs) -> Contender | None:
    """Returns FlashAttention-4 (CuTe); None as for FlashAttention-3."""
    try:
        from flash_attn.cute import flash_attn_func, flash_attn_varlen_func
    except ImportError:
        return None
    return _flash("fa4", flash_attn_func, flash_attn_varlen_func, case, x)


def _flash(name: str, dense: Any, varlen: Any, case: Case, x: Inputs) -> Contender | None:
    causal = case.mask_name not in ("full", "full_document", "sliding_window")
    if case.mask_name in ("full_document", "causal_document"):
        lengths = document_lengths("longca", case.num_tokens)
        ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        cu_seqlens, longest = torch.from_numpy(ends).to(x.q.device), int(lengths.max())

        def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
            sums = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
            most = {"max_seqlen_q": longest, "max_seqlen_k": longest}
            return varlen(q, k, v, **sums, **most, causal=causal)

        inputs, dout = (x.q, x.k, x.v), x.dout
    elif case.mask_name in ("full", "causal", "sliding_window", "sliding_window_causal"):
        sides = {"sliding_window": (WINDOW, WINDOW), "sliding_window_causal": (WINDOW, 0)}
        window = {"window_size": sides[case.mask_name]} if case.mask_name in sides else {}

        def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
            return dense(q, k, v, causal=causal, **window)

        inputs, dout = (x.q[None], x.k[None], x.v[None]), x.dout[None]
    else:
        return None
    leaves = _leaves(*inputs)
    out = _first(call(*leaves))
    return Contender(
        name,
        lambda: call(*inputs),
        _grad(out, leaves, dout),
        lambda result: _first(result).view(x.q.shape[0], x.q.shape[1], -1),
    )


Make = Callable[[Case, AttentionMask, Inputs], Contender | None]
PEERS: tuple[Make, ...] = (cudnn, flash2, flex_attention, flash3, flash4)


def _first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def _leaves(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.detach().requires_grad_() for x in tensors)


def _grad(out: Tensor, leaves: tuple[Tensor, ...], dout: Tensor) -> Call:
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)
