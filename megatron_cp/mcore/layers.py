"""Remembers what the attention layers of this process need of a plan.

A batch is planned before the model sees it, by code that is given the batch only. So each attention layer
registers, when it is built, what a plan depends on: the heads, the windows of the whole model, and how rows
are rounded. All pipeline stages know the same, because it follows from the model's configuration: a stage that
holds the embedding or the loss alone has no such layer, and cuts its batches all the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from megatron.core.transformer.utils import is_layer_window_attention

from megatron_cp.config import CPConfig
from megatron_cp.data.batch import PlanRequest, make_batch_plans
from megatron_cp.mask import AttentionMask
from megatron_cp.mcore.parts.mtp import install_order_roll
from megatron_cp.mcore.settings.arguments import head_sizes, rows_multiple
from megatron_cp.mcore.settings.mixers import (
    SOFTMAX,
    layer_mixers,
    linear_state_bytes,
    prediction_mixers,
)
from megatron_cp.mcore.settings.sparse_settings import planner_of
from megatron_cp.plan import AttentionPlan

_requests: set[PlanRequest] = set()
_requests_without_layers: set[PlanRequest] = set()
_wishes: dict[str, Any] = {}
_thd_splits: set[str] = set()


def attention_sizes(
    config: Any, tp_size: int, k_channels: int | None = None, v_channels: int | None = None
) -> CPConfig:
    """Returns the sizes that the attention of one tensor rank plans with; None: as `config` has them."""
    head_dim, value_head_dim = head_sizes(config)
    head_dim, value_head_dim = k_channels or head_dim, v_channels or value_head_dim
    return CPConfig(
        num_heads=config.num_attention_heads // tp_size,
        num_kv_heads=max(1, config.num_query_groups // tp_size),
        head_dim=head_dim,
        value_head_dim=None if value_head_dim == head_dim else value_head_dim,
        element_bytes=config.params_dtype.itemsize,
    )


def register(config: Any, plan_config: CPConfig) -> None:
    """Remembers the model of a layer: Megatron's `config`, and the sizes that its attention plans with."""
    _requests.add(_request_of(config, plan_config))


def register_stage(config: Any) -> None:
    """Remembers the model of a stage that may hold no softmax attention; layers that it holds are believed first.

    Such a stage may hold the loss of multi-token prediction, which follows the plans then as with layers of ours.
    """
    sizes = attention_sizes(config, config.tensor_model_parallel_size)
    _requests_without_layers.add(_request_of(config, sizes))
    if getattr(config, "mtp_num_layers", None):
        install_order_roll()


def note_thd_split(thd_split: str | None) -> None:
    """Remembers how a layer was told that thd batches are cut over the context ranks; None: it was not."""
    if thd_split is not None:
        _thd_splits.add(thd_split)


def cuts_each_document() -> bool:
    """Returns whether layers were told that the loop cuts thd batches by itself, each document zigzag."""
    return "per_document" in _thd_splits


def has_our_attention(spec: Any) -> bool:
    """Returns whether a spec of Megatron, or a part of one, names our attention."""
    if isinstance(spec, type):
        return bool(getattr(spec, "follows_plans", False))
    if isinstance(spec, list | tuple):
        return any(map(has_our_attention, spec))
    if dataclasses.is_dataclass(spec):
        return any(has_our_attention(getattr(spec, f.name)) for f in dataclasses.fields(spec))
    return False


def _request_of(config: Any, plan_config: CPConfig) -> PlanRequest:
    windows = [
        is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer + 1)
        for layer, mixer in enumerate(layer_mixers(config))
        if mixer == SOFTMAX
    ]
    if getattr(config, "hybrid_layer_pattern", None) is not None:
        windows += [config.window_size is not None] * prediction_mixers(config).count(SOFTMAX)
    return PlanRequest(
        cp_size=config.context_parallel_size,
        config=replace(
            plan_config,
            token_multiple=config.tensor_model_parallel_size if config.sequence_parallel else 1,
            linear_state_bytes=linear_state_bytes(config, config.tensor_model_parallel_size),
            planner=planner_of(config, plan_config.planner),
        ),
        num_full_layers=windows.count(False),
        num_window_layers=windows.count(True),
        window=tuple(config.window_size) if any(windows) else None,
    )


def wish(**fields: Any) -> None:
    """Sets fields of `CPConfig` for every plan from now on, such as `planner="zigzag"`."""
    CPConfig(**fields)
    _wishes.update(fields)


def are_ours() -> bool:
    """Returns whether a model with our attention was built in this process, or its stage without layers."""
    return bool(_requests or _requests_without_layers)


def plan_request(num_samples: int) -> PlanRequest:
    """Returns which plans a micro-batch of `num_samples` samples needs.

    Raises NotImplementedError if models with different attention were built: a batch cannot say whose it is.
    """
    requests = _requests or _requests_without_layers
    if len(requests) > 1:
        raise NotImplementedError(
            f"{len(requests)} models with different heads or windows were built in this process; one batch cannot "
            "be planned for all of them; give each its plan in packed_seq_params"
        )
    (request,) = requests
    return _on_this_machine(request, request.config.token_multiple * num_samples)


def plans_of_mask(mask: AttentionMask, config: Any) -> Mapping[str, AttentionPlan]:
    """Returns the plans of a mask for a model with Megatron's `config`, by kind of layer, all on one placement.

    "full" always, and "window" where some layers slide a window: `packed_seq_params` wants both. Every rank makes the
    same ones. No collective.
    """
    tp_size = config.tensor_model_parallel_size
    request = _request_of(config, attention_sizes(config, tp_size))
    return make_batch_plans(mask, _on_this_machine(request, rows_multiple(config, tp_size)))


def _on_this_machine(request: PlanRequest, token_multiple: int) -> PlanRequest:
    """Returns the request for the hardware of this process, with what `wish` was told."""
    topology = "h100" if torch.cuda.is_available() else "cpu"
    config = replace(request.config, topology=topology, token_multiple=token_multiple)
    return replace(request, config=replace(config, **_wishes))


def forget() -> None:
    """Drops what was registered and wished; for processes that build one model after another."""
    _requests.clear()
    _requests_without_layers.clear()
    _wishes.clear()
    _thd_splits.clear()
