"""What our layers, recurrent and of sparse attention, ask of those who call them and of the modules that they hold."""

from __future__ import annotations

from typing import Any

import torch


def refuse_inference(inference_context: Any, inference_params: Any) -> None:
    """Raises NotImplementedError where a layer is called to generate."""
    if inference_context is not None or inference_params is not None:
        raise NotImplementedError("inference is not served here; use Megatron's own layer")


def weight_of(module: Any) -> torch.Tensor:
    """Returns the weight of a module that is read instead of called.

    What runs before a call runs first: it may have to bring the weight, as `--overlap-param-gather` does.
    """
    for hook in module._forward_pre_hooks.values():
        hook(module, ())
    weight: torch.Tensor = module.weight
    return weight
