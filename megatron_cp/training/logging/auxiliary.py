"""Losses beside that of the next token: how evenly experts are used, and predictions further ahead.

Megatron-Core collects them on the ranks where they arise; here they are summed for the log, under
Megatron-LM's names.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import (
    get_moe_layer_wise_logging_tracker,
    track_moe_metrics,
)
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from megatron_cp.training.config import TrainConfig

_NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}


def auxiliary_losses(config: TrainConfig, num_micro_batches: int) -> dict[str, float]:
    """Returns the step's mean auxiliary losses by name; those of prediction on the last stage alone.

    Collective where the model has experts or predicts further tokens: every rank calls it once per
    step, because the sums begin anew.
    """
    arguments, found = config.arguments, dict[str, Any]()
    scale = 1 / num_micro_batches
    if arguments["num_experts"]:
        kinds = arguments["moe_router_load_balancing_type"]
        kinds = [kinds] if isinstance(kinds, str) else kinds
        names = [_NAMES[kind] for kind in kinds if kind in _NAMES]
        if arguments["moe_z_loss_coeff"] is not None:
            names.append("z_loss")
        _begin(names, config.model.num_layers + (arguments["mtp_num_layers"] or 0))
        track_moe_metrics(
            scale,
            0,  # the iteration of a writer that is not given
            total_loss_dict=found,
            track_names=names,
            num_layers=config.model.num_layers,
            moe_layer_freq=arguments["moe_layer_freq"],
            mtp_num_layers=arguments["mtp_num_layers"],
        )
        if "z_loss" in found:
            found["z_loss"] = _mean_over_rows(found["z_loss"])
    if arguments["mtp_num_layers"]:
        MTPLossLoggingHelper.track_mtp_metrics(scale, 0, None, total_loss_dict=found)
    return {name: float(value) for name, value in found.items()}


def _begin(names: list[str], num_layers: int) -> None:
    """Makes the sums that this stage, which may have no experts, has not made: one value per layer.

    Megatron-Core would make them here without the layers of prediction, and stages could not be added; and without
    the ranks whose parts make up a loss, so that a stage without experts would tell a part of it.
    """
    tracker = get_moe_layer_wise_logging_tracker()
    for name in names:
        if name in tracker:
            continue
        group, has_replicas = None, name == _NAMES["global_aux_loss"]
        if has_replicas:
            group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        elif name != "z_loss":
            group = parallel_state.get_tensor_and_context_parallel_group()
        tracker[name] = {
            "values": torch.zeros(num_layers, device=torch.cuda.current_device()),
            "reduce_group": group,
            "avg_group": None,
            "reduce_group_has_dp": has_replicas,
        }


def _mean_over_rows(value: torch.Tensor) -> torch.Tensor:
    """Returns the mean over ranks that hold other tokens; Megatron-Core leaves each its own."""
    group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    total = value.clone()
    dist.all_reduce(total, group=group)
    return total / group.size()
