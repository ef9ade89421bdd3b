"""Losses beside that of the next token: how evenly experts are used, and predictions further ahead.

Megatron-Core collects them on the ranks where they arise; here they are summed for the log, under
Megatron-LM's names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from megatron_cp.mcore.mixing.indexer import take_indexer_loss
from megatron_cp.mcore.settings.layer_patterns import expert_layers, experts_of_predictions
from megatron_cp.mcore.settings.sparse_settings import is_sparse, num_indexes
from megatron_cp.mcore.versions import compat
from megatron_cp.training.config import TrainConfig

_NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}


class AuxiliaryLosses(NamedTuple):
    """Means over the micro-batches of a step, by name."""

    means: dict[str, float]
    """Over layers."""
    by_layer: dict[str, float]
    """Of single layers, where `--moe-per-layer-logging` asks for them."""


NO_LOSSES = AuxiliaryLosses({}, {})


def auxiliary_losses(config: TrainConfig, num_micro_batches: int) -> AuxiliaryLosses:
    """Returns the step's auxiliary losses; those of prediction on the last stage alone.

    Collective where the model has experts or predicts further tokens: every rank calls it once per
    step, because the sums begin anew.
    """
    arguments, found, by_layer = config.arguments, dict[str, Any](), dict[str, float]()
    if any([*expert_layers(arguments), *experts_of_predictions(arguments)]):
        found, by_layer = _losses_of_experts(arguments, num_micro_batches)
    if arguments["mtp_num_layers"]:
        scale = 1 / num_micro_batches
        MTPLossLoggingHelper.track_mtp_metrics(scale, 0, None, total_loss_dict=found)
    if is_sparse(config.namespace()) and arguments["dsa_indexer_loss_coeff"]:
        found["indexer loss"] = take_indexer_loss(num_indexes(arguments), num_micro_batches)
    return AuxiliaryLosses({name: float(value) for name, value in found.items()}, by_layer)


def _losses_of_experts(
    arguments: Mapping[str, Any], num_micro_batches: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the means over layers, and those of each layer; begins the sums anew. Collective.

    All layers of a prediction have one sum, behind those of the decoder.

    Megatron-Core has a function for it, but a stage without experts has no sums there; how to make them differs from
    version to version, and where the stages make them unlike the all-reduce waits for ever.
    """
    kinds = arguments["moe_router_load_balancing_type"]
    kinds = [kinds] if isinstance(kinds, str) else kinds
    names = [_NAMES[kind] for kind in kinds if kind in _NAMES]
    if arguments["moe_z_loss_coeff"] is not None:
        names.append("z_loss")
    num_layers = [*map(int, expert_layers(arguments)), *experts_of_predictions(arguments)]
    sums = compat.sums_of_expert_losses()
    totals = torch.zeros(
        len(names), len(num_layers), dtype=torch.float64, device=torch.cuda.current_device()
    )
    for place, name in enumerate(names):
        if name in sums:  # not on a stage without experts
            totals[place, : len(sums[name])] = sums[name].double()
            sums[name].zero_()
    rows = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    for group in (parallel_state.get_pipeline_model_parallel_group(), rows):
        dist.all_reduce(totals, group=group)
    # Tensor and context ranks hold parts of a replica's loss, all ranks parts of the global one, and each rank a
    # z-loss of its own rows.
    parts = dict.fromkeys(names, parallel_state.get_data_parallel_world_size())
    parts.update({_NAMES["global_aux_loss"]: 1, "z_loss": rows.size()})
    means, by_layer = dict[str, float](), dict[str, float]()
    for name, total in zip(names, totals.tolist(), strict=True):
        share = 1 / (parts[name] * num_micro_batches)
        means[name] = sum(total) * share / sum(num_layers)
        if arguments["moe_per_layer_logging"]:
            layers = zip(total, num_layers, strict=True)
            by_layer |= {
                f"moe/{name}_layer_{layer}": loss * share / count
                for layer, (loss, count) in enumerate(layers)
                if count
            }
    return means, by_layer
