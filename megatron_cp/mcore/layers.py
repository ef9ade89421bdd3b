"""Remembers what the attention layers of this process need of a plan.

A batch is planned before the model sees it, by code that is given the batch only. So each attention layer
registers, when it is built, what a plan depends on: the heads, the windows of the whole model, and how rows
are rounded. All pipeline stages know the same, because it follows from the model's configuration.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from megatron.core.transformer.utils import is_layer_window_attention

from megatron_cp.config import CPConfig
from megatron_cp.data.batch import PlanRequest

_requests: set[PlanRequest] = set()
_wishes: dict[str, Any] = {}


def register(config: Any, plan_config: CPConfig) -> None:
    """Remembers the model of a layer: Megatron's `config`, and the sizes that its attention plans with."""
    windows = [
        is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer)
        for layer in range(1, config.num_layers + 1)
    ]
    _requests.add(
        PlanRequest(
            cp_size=config.context_parallel_size,
            config=replace(
                plan_config,
                token_multiple=config.tensor_model_parallel_size if config.sequence_parallel else 1,
            ),
            num_full_layers=windows.count(False),
            num_window_layers=windows.count(True),
            window=tuple(config.window_size) if any(windows) else None,
        )
    )


def wish(**fields: Any) -> None:
    """Sets fields of `CPConfig` for every plan from now on, such as `planner="zigzag"`."""
    CPConfig(**fields)
    _wishes.update(fields)


def is_known() -> bool:
    """Returns whether a layer with our attention was built in this process."""
    return bool(_requests)


def plan_request(num_samples: int) -> PlanRequest:
    """Returns which plans a micro-batch of `num_samples` samples needs.

    Raises NotImplementedError if models with different attention were built: a batch cannot say whose it is.
    """
    if len(_requests) > 1:
        raise NotImplementedError(
            f"{len(_requests)} models with different heads or windows were built in this process; one batch cannot "
            "be planned for all of them; give each its plan in packed_seq_params"
        )
    (request,) = _requests
    config = replace(
        request.config,
        topology="h100" if torch.cuda.is_available() else "cpu",
        token_multiple=request.config.token_multiple * num_samples,
    )
    return replace(request, config=replace(config, **_wishes))


def forget() -> None:
    """Drops what was registered and wished; for processes that build one model after another."""
    _requests.clear()
    _wishes.clear()
