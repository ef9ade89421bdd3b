"""The `flex` backend: PyTorch's FlexAttention, compiled, on any GPU. Never run on a GPU yet.

The mask becomes a BlockMask straight from its slices; no pair is looked at one by one. On a CPU
FlexAttention has no backward and, uncompiled, builds all scores: small forward calls only, for
tests of everything that surrounds the kernel.

The backward pass must use `lse` and `delta` of the result merged over all keys, but FlexAttention
differentiates only its own `(out_l, lse_l)`. With `w = exp(lse_l - lse)` the merged gradient is that of

    dout_l = w * dout        dlse_l = w * (rowsum(dout * out_l) - delta)

since p = w p_l makes p_l (dout_l.v - rowsum(dout_l out_l) + dlse_l) equal to p (dout.v - delta).
"""

# Q query rows, K key rows, N query heads, G kv heads, H head dim, Hv value head dim

import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex_attention_module
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from megatron_cp.attn.options import AttendOptions, accumulation_dtype
from megatron_cp.mask import AttentionMask, block_table, to_mask_mod

BLOCK_SIZE = 128
# Uncompiled FlexAttention holds all scores a few times: 4M of them are 16 MB in float32.
MAX_CPU_SCORES = 1 << 22

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def forward(
    q_QNH: Tensor, k_KGH: Tensor, v_KGH: Tensor, mask: AttentionMask, options: AttendOptions
) -> tuple[Tensor, Tensor]:
    """Returns `(out [Q, N, Hv], lse [Q, N])` in the accumulation dtype, (0, -inf) without keys."""
    _check_device(q_QNH, k_KGH)
    dtype = accumulation_dtype(q_QNH.dtype)
    if not mask.num_slices:
        out_shape = (*q_QNH.shape[:2], v_KGH.shape[-1])
        out = q_QNH.new_zeros(out_shape, dtype=dtype)
        return out, q_QNH.new_full(q_QNH.shape[:2], -torch.inf, dtype=dtype)
    q, k, v = _zero_unused_rows(q_QNH, k_KGH, v_KGH, mask)
    out, lse = _call_flex(q, k, v, mask, options)
    return out.to(dtype), lse.to(dtype)


def backward(
    dout_QNH: Tensor,
    q_QNH: Tensor,
    k_KGH: Tensor,
    v_KGH: Tensor,
    lse_QN: Tensor,
    delta_QN: Tensor,
    mask: AttentionMask,
    options: AttendOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns `(dq, dk, dv)` in the accumulation dtype; computes this part's forward pass again.

    Raises: NotImplementedError on a CPU, where FlexAttention has no backward.
    """
    if q_QNH.device.type == "cpu":
        raise NotImplementedError(
            "backend='flex' has no backward pass on device=cpu, only on GPUs; use 'cpu' or 'reference'"
        )
    dtype = accumulation_dtype(q_QNH.dtype)
    if not mask.num_slices:
        dq, dk, dv = (torch.zeros_like(x, dtype=dtype) for x in (q_QNH, k_KGH, v_KGH))
        return dq, dk, dv
    q, k, v = (x.requires_grad_() for x in _zero_unused_rows(q_QNH, k_KGH, v_KGH, mask))
    with torch.enable_grad():
        out, lse = _call_flex(q, k, v, mask, options)
    dout, dlse = local_gradients(
        dout_QNH.to(dtype), out.detach().to(dtype), lse.detach().to(dtype), lse_QN, delta_QN
    )
    dq, dk, dv = torch.autograd.grad(
        (out, lse), (q, k, v), (dout.to(out.dtype), dlse.to(lse.dtype))
    )
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


def local_gradients(
    dout_QNH: Tensor, local_out: Tensor, local_lse: Tensor, lse_QN: Tensor, delta_QN: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns `(dout_l, dlse_l)` of a part whose `out_l, lse_l` were merged into a global result."""
    has_keys = (local_lse > -torch.inf) & (lse_QN > -torch.inf)
    weight = torch.exp(local_lse - lse_QN).masked_fill(~has_keys, 0.0)
    dlse = weight * ((dout_QNH * local_out).sum(dim=-1) - delta_QN)
    dout = dout_QNH * weight.unsqueeze(-1)
    return dout.masked_fill(~has_keys.unsqueeze(-1), 0.0), dlse.masked_fill(~has_keys, 0.0)


def _call_flex(
    q_QNH: Tensor, k_KGH: Tensor, v_KGH: Tensor, mask: AttentionMask, options: AttendOptions
) -> tuple[Tensor, Tensor]:
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_QNH, k_KGH, v_KGH))
    arguments: dict[str, Any] = {
        "score_mod": _softcap_mod(options.softcap) if options.softcap else None,
        "block_mask": _block_mask(mask, q_QNH.device),
        "scale": options.softmax_scale,
        "enable_gqa": q_QNH.shape[1] != k_KGH.shape[1],
    }
    if q_QNH.device.type == "cpu":
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*without torch.compile.*")
            out, lse = _with_lse(flex_attention, q, k, v, arguments)
    else:
        out, lse = _with_lse(_compiled_flex_attention(), q, k, v, arguments)
    return out[0].transpose(0, 1), lse[0].t()


def _with_lse(
    function: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, arguments: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Returns `(out, lse)`, asking for lse in the way of this torch (it changed in 2.9)."""
    if hasattr(flex_attention_module, "AuxRequest"):
        request = flex_attention_module.AuxRequest(lse=True)
        out, aux = function(q, k, v, **arguments, return_aux=request)
        return out, aux.lse
    out, lse = function(q, k, v, **arguments, return_lse=True)
    return out, lse


@lru_cache(maxsize=1)
def _compiled_flex_attention() -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=True)
    return compiled


@lru_cache(maxsize=8)  # the same function object every time: another one would compile again
def _softcap_mod(softcap: float) -> ScoreMod:
    def cap(score: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        del batch, head, q, k
        return softcap * torch.tanh(score / softcap)

    return cap


def _block_mask(mask: AttentionMask, device: torch.device) -> BlockMask:
    """Returns the mask as FlexAttention's BlockMask, `O(row intervals + blocks)`."""
    table = block_table(mask, BLOCK_SIZE, BLOCK_SIZE)
    counts, indices, full_counts, full_indices = (
        torch.from_numpy(array).to(device)[None, None] for array in table.kv_arrays()
    )
    return BlockMask.from_kv_blocks(
        counts,
        indices,
        full_counts,
        full_indices,
        BLOCK_SIZE=BLOCK_SIZE,
        mask_mod=to_mask_mod(mask, lambda array: torch.from_numpy(array).to(device)),
        seq_lengths=(mask.num_queries, mask.num_keys),
    )


def _zero_unused_rows(
    q_QNH: Tensor, k_KGH: Tensor, v_KGH: Tensor, mask: AttentionMask
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns detached q, k, v, zero in rows outside every slice: a kernel reads them, 0 * nan is nan."""
    unused_q = _outside(mask.array[:, 0:2], mask.num_queries, q_QNH.device)
    unused_k = _outside(mask.array[:, 2:4], mask.num_keys, k_KGH.device)
    q = q_QNH.detach().masked_fill(unused_q, 0.0)
    return q, k_KGH.detach().masked_fill(unused_k, 0.0), v_KGH.detach().masked_fill(unused_k, 0.0)


def _outside(spans: Any, size: int, device: torch.device) -> Tensor:
    """Returns bool `[size, 1, 1]`, True in rows that no span holds."""
    depth = np.bincount(spans[:, 0], minlength=size + 1) - np.bincount(
        spans[:, 1], minlength=size + 1
    )
    return torch.from_numpy(np.cumsum(depth)[:size] == 0).to(device)[:, None, None]


def _check_device(q_QNH: Tensor, k_KGH: Tensor) -> None:
    num_scores = q_QNH.shape[0] * q_QNH.shape[1] * k_KGH.shape[0]
    if q_QNH.device.type == "cpu" and num_scores > MAX_CPU_SCORES:
        raise NotImplementedError(
            f"backend='flex' on device=cpu holds all {num_scores} scores, at most {MAX_CPU_SCORES} are "
            "allowed; use 'cpu' or 'reference'"
        )
    if q_QNH.device.type != "cpu" and q_QNH.dtype == torch.float64:
        raise NotImplementedError(
            "backend='flex' cannot compute dtype=torch.float64 on a GPU, only float32, bfloat16 and "
            "float16; use 'reference'"
        )
