"""The `flex` backend: PyTorch's FlexAttention on any GPU, compiled (kernel.py). Ran on an H100.

On a CPU FlexAttention has no backward and, uncompiled, builds all scores: small forward calls only, for
tests of everything that surrounds the kernel.

The backward pass must use `lse` and `delta` of the result merged over all keys, but FlexAttention
differentiates only its own `(out_l, lse_l)`. With `w = exp(lse_l - lse)` the merged gradient is that of

    dout_l = w * dout        dlse_l = w * (rowsum(dout * out_l) - delta)

since p = w p_l makes p_l (dout_l.v - rowsum(dout_l out_l) + dlse_l) equal to p (dout.v - delta).
"""

# Q query rows, K key rows, N query heads, G kv heads, H head dim, Hv value head dim

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_cp.attn.flex.kernel import Words, call_compiled, call_uncompiled
from megatron_cp.attn.flex.tables import Part, parts_of
from megatron_cp.attn.merge import merge_partials
from megatron_cp.attn.options import AttendOptions, accumulation_dtype
from megatron_cp.mask import AttentionMask

# Uncompiled FlexAttention holds all scores a few times: 4M of them are 16 MB in float32.
MAX_CPU_SCORES = 1 << 22
COMPILED_ON = ("cuda",)


def forward(
    q_QNH: Tensor, k_KGH: Tensor, v_KGH: Tensor, mask: AttentionMask, options: AttendOptions
) -> tuple[Tensor, Tensor]:
    """Returns `(out [Q, N, Hv], lse [Q, N])` in the accumulation dtype, (0, -inf) without keys."""
    _check_device(q_QNH, k_KGH)
    result: tuple[Tensor, Tensor] | None = None
    for part in parts_of(mask, q_QNH.device):
        inputs = _padded_inputs(q_QNH, k_KGH, v_KGH, part)
        out, lse = (x.detach() for x in _call(inputs, q_QNH.shape[0], part, options))
        result = (out, lse) if result is None else merge_partials(*result, out, lse)
    if result is None:
        dtype, shape = accumulation_dtype(q_QNH.dtype), (*q_QNH.shape[:2], v_KGH.shape[-1])
        nothing = q_QNH.new_full(shape[:2], -torch.inf, dtype=dtype)
        return q_QNH.new_zeros(shape, dtype=dtype), nothing
    return result


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
    if q_QNH.device.type not in COMPILED_ON:
        raise NotImplementedError(
            f"backend='flex' has no backward pass on device={q_QNH.device}, only on GPUs; use 'cpu' or 'reference'"
        )
    _check_device(q_QNH, k_KGH)
    dtype = accumulation_dtype(q_QNH.dtype)
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q_QNH, k_KGH, v_KGH))
    for part in parts_of(mask, q_QNH.device):
        inputs = _padded_inputs(q_QNH, k_KGH, v_KGH, part)
        out, lse = _call(inputs, q_QNH.shape[0], part, options)
        gradients = local_gradients(
            dout_QNH.to(dtype), out.detach(), lse.detach(), lse_QN, delta_QN
        )
        parts = torch.autograd.grad((out, lse), inputs, gradients)
        keys = slice(part.k_start, part.k_end)
        dq += parts[0][: q_QNH.shape[0]]
        dk[keys] += parts[1][: part.k_end - part.k_start]
        dv[keys] += parts[2][: part.k_end - part.k_start]
    return dq, dk, dv


def local_gradients(
    dout_QNH: Tensor, local_out: Tensor, local_lse: Tensor, lse_QN: Tensor, delta_QN: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns `(dout_l, dlse_l)` of a part whose `out_l, lse_l` were merged into a global result."""
    has_keys = (local_lse > -torch.inf) & (lse_QN > -torch.inf)
    weight = torch.exp(local_lse - lse_QN).masked_fill(~has_keys, 0.0)
    dlse = weight * ((dout_QNH * local_out).sum(dim=-1) - delta_QN)
    dout = dout_QNH * weight.unsqueeze(-1)
    return dout.masked_fill(~has_keys.unsqueeze(-1), 0.0), dlse.masked_fill(~has_keys, 0.0)


def _call(
    inputs: tuple[Tensor, Tensor, Tensor], num_rows: int, part: Part, options: AttendOptions
) -> tuple[Tensor, Tensor]:
    """Returns `(out, lse)` of a part in the accumulation dtype, without padded rows."""
    dtype, words = accumulation_dtype(inputs[0].dtype), _padded_words(part, options)
    if inputs[0].device.type in COMPILED_ON:
        # One graph for both passes: with gradients, whoever asks.
        with torch.enable_grad():
            q, k, v = (x.requires_grad_() for x in inputs)
            out, lse = call_compiled(q, k, v, part, options, words)
            return out[:num_rows].to(dtype), lse[:num_rows].to(dtype)
    out, lse = call_uncompiled(*inputs, part, options, words)
    return out[:num_rows].to(dtype), lse[:num_rows].to(dtype)


def _padded_inputs(
    q_QNH: Tensor, k_KGH: Tensor, v_KGH: Tensor, part: Part
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k, v of a part in whole blocks, zero where no pair is: a kernel reads it, 0 * nan is nan."""
    keys = slice(part.k_start, part.k_end)
    sides = ((q_QNH, part.used_rows), (k_KGH[keys], part.used_keys), (v_KGH[keys], part.used_keys))
    q, k, v = (_padded(x.detach(), used) for x, used in sides)
    return q, k, v


def _padded_words(part: Part, options: AttendOptions) -> Words:
    """Returns the words of dropout of a part in whole blocks, if there is any."""
    dropout = options.dropout
    if dropout is None:
        return ()
    keys = dropout.key_words[part.k_start : part.k_end]
    missing = [
        len(used) - len(x)
        for used, x in ((part.used_rows, dropout.row_words), (part.used_keys, keys))
    ]
    return F.pad(dropout.row_words.t(), (0, missing[0])), F.pad(keys, (0, missing[1]))


def _padded(x: Tensor, used: Tensor) -> Tensor:
    whole = x.new_zeros((used.shape[0], *x.shape[1:]))
    whole[: x.shape[0]] = x
    return whole.masked_fill_((used == 0)[:, None, None], 0.0)


def _check_device(q_QNH: Tensor, k_KGH: Tensor) -> None:
    num_scores = q_QNH.shape[0] * q_QNH.shape[1] * k_KGH.shape[0]
    is_compiled = q_QNH.device.type in COMPILED_ON
    if not is_compiled and num_scores > MAX_CPU_SCORES:
        raise NotImplementedError(
            f"backend='flex' on device=cpu holds all {num_scores} scores, at most {MAX_CPU_SCORES} are "
            "allowed; use 'cpu' or 'reference'"
        )
    if is_compiled and q_QNH.dtype == torch.float64:
        raise NotImplementedError(
            "backend='flex' cannot compute dtype=torch.float64 on a GPU, only float32, bfloat16 and "
            "float16; use 'reference'"
        )
