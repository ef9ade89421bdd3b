"""What recomputed layers start from waits in the host's memory: their inputs, and the results of their attention.

    offload_recompute_inputs(model)

Where all layers are recomputed, these are all activations that stay from forward to backward: for each layer two of the
size of the rows. Megatron-Core's own offloading of activations excludes recomputation. Never ran on a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import tensor_parallel

from megatron_cp.mcore.versions.wrapping import put_hook
from megatron_cp.runtime import host_memory


def offload_recompute_inputs(model: Any) -> None:
    """Lets a stage of Megatron keep what its recomputed regions start from on the host, from forward to backward.

    These are the regions of Megatron's `checkpoint`: layers (`recompute_granularity="full"`), or the modules core_attn,
    mlp and moe. What stays on the device: inputs of the small ones (layernorm, moe_act, mla_up_proj).

    Args:
        model: a `GPTModel` or hybrid model of Megatron-Core, without wrappers.

    Raises:
        ValueError: if it recomputes nothing.
        NotImplementedError: in fp8 or fp4, where Transformer Engine keeps the inputs; or with
            `overlap_moe_expert_parallel_comm`, whose schedule runs layers by themselves.
    """
    config = model.config
    if config.recompute_granularity is None:
        raise ValueError(
            'recompute_granularity=None recomputes nothing; give "full" or "selective"'
        )
    if config.fp8 or getattr(config, "fp4", None):
        raise NotImplementedError(
            "inputs of recomputed layers on the host in fp8 or fp4; leave them on the device: the same results"
        )
    if config.overlap_moe_expert_parallel_comm:
        raise NotImplementedError(
            "inputs of recomputed layers on the host beside overlap_moe_expert_parallel_comm; leave out one of the two"
        )
    put_hook(tensor_parallel, "checkpoint", _saving_on_host)
    plain_forward = model.forward

    @functools.wraps(plain_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with host_memory.on_host():
            return plain_forward(*args, **kwargs)

    model.forward = forward


def _saving_on_host(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps Megatron's `checkpoint(function, distribute_saved_activations, *args)`, which saves its arguments alone."""

    def checkpoint(function: Callable[..., Any], distributes: bool, *args: Any) -> Any:
        if not any(isinstance(arg, torch.Tensor) and host_memory.leaves(arg) for arg in args):
            return plain(function, distributes, *args)
        with host_memory.saved_activations():
            return plain(function, distributes, *args)

    return checkpoint
