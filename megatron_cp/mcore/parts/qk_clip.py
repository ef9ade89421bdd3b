"""QK-Clip: weights of queries and keys are scaled down where a head's largest logit passed a threshold.

Megatron-Core's attention layers scale their own weights; its `clip_qk` around them takes models in two wrappers only.
This one takes any, and forgets the logits of a step whether it clips or not.
Settings: `qk_clip_threshold` and `qk_clip_alpha` of TransformerConfig. Source: Kimi K2 (arXiv 2507.20534), section 2.1.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state


def clip_qk(model: Sequence[torch.nn.Module], *, clips: bool) -> float:
    """Returns the largest logit of this rank's layers and heads since the last call; 0 without such layers.

    Scales weights if `clips`. `model`: its pipeline chunks, wrapped or not. Collective over data- and
    context-parallel ranks, which hold the same heads: every rank calls it after a step of the optimizer.
    """
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    peaks = [0.0]
    with torch.no_grad():
        for layer in _clippable(model):
            logits = layer.core_attention.current_max_attn_logits
            dist.all_reduce(logits, op=dist.ReduceOp.MAX, group=group)
            peaks.append(float(logits.max()))
            if clips and math.isfinite(peaks[-1]):
                layer.clip_qk()
            layer.core_attention.current_max_attn_logits = None
    return float(torch.tensor(peaks).max())  # NaN if one is


def forget_logits(model: Sequence[torch.nn.Module]) -> None:
    """Drops the logits seen so far: a step that is computed again, or left out, must not scale weights."""
    for layer in _clippable(model):
        layer.core_attention.current_max_attn_logits = None


def _clippable(model: Sequence[torch.nn.Module]) -> list[Any]:
    """Returns the attention layers that saw logits, in the order of the layers: the same on all ranks of a stage."""
    return [
        module
        for chunk in model
        for module in chunk.modules()
        if hasattr(module, "clip_qk")
        and getattr(module.core_attention, "current_max_attn_logits", None) is not None
    ]
