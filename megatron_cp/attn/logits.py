"""The largest logit of each head over all pairs of a mask, scaled and capped, without the sink (QK-Clip)."""

# Q query rows, N query heads

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from megatron_cp.attn.options import AttendOptions
from megatron_cp.mask import AttentionMask

# lse of logits that are this much larger, over the same number, is between the largest and ln(keys)/16384 above it.
# 2^24 would be sharper, but kernels that exponentiate x*scale - rounded(max*scale) overflow from logits of 10 on;
# here from 10^5.
SHARPNESS = 2.0**14


def no_logits(q: Tensor) -> Tensor:
    """Returns the largest logit of each head of `q` `[Q, N, H]` over no keys: -inf, fp32 `[N]`."""
    return torch.full((q.shape[1],), -torch.inf, dtype=torch.float32, device=q.device)


def raise_to_(max_logits: Tensor, found: Tensor) -> None:
    """Raises the largest logits per head `[N]`, in place, to those found over other keys or rows."""
    torch.maximum(max_logits, found.to(max_logits.dtype), out=max_logits)


def sharp_lse(
    forward: Callable[..., tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    options: AttendOptions,
) -> Tensor:
    """Returns the largest logits `[N]` from a forward pass that returns nothing but `(out, lse [Q, N])`.

    At the cost of one more pass: at a temperature close to 0, `lse` is the maximum. At most ln(keys)/16384 too large.
    """
    scale, softcap = SHARPNESS * options.softmax_scale, SHARPNESS * options.softcap
    sharp = replace(options, softmax_scale=scale, softcap=softcap, dropout=None)
    _, lse_QN = forward(q, k, v, mask, sharp)
    return lse_QN.amax(dim=0) / SHARPNESS if len(q) else no_logits(q)
