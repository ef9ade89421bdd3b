"""Losses beside that of the next token: how evenly experts are used, and predictions further ahead.

Megatron-Core collects them on the ranks where they arise; here they are summed for the log, under
Megatron-LM's names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from megatron_cp.mcore import compat
from megatron_cp.training.config import TrainConfig
from megatron_cp.training.logging.flops import expert_layers

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
    if arguments["num_experts"]:
        found.update(_losses_of_experts(arguments, num_micro_batches))
    if arguments["mtp_num_layers"]:
        scale = 1 / num_micro_batches
        MTPLossLoggingHelper.track_mtp_metrics(scale, 0, None, total_loss_dict=found)
    return {name: float(value) for name, value in found.items()}


def _losses_of_experts(arguments: Mapping[str, Any], num_micro_batches: int) -> dict[str, float]:
    """Returns the means over layers, micro-batches and replicas; begins the sums anew. Collective.

    Megatron-Core has a function for it, but a stage without experts has no sums there; how to make them differs from
    version to version, and where the stages make them unlike the all-reduce waits for ever.
    """
    kinds = arguments["moe_router_load_balancing_type"]
    kinds = [kinds] if isinstance(kinds, str) else kinds
    names = [_NAMES[kind] for kind in kinds if kind in _NAMES]
    if arguments["moe_z_loss_coeff"] is not None:
        names.append("z_loss")
    sums = compat.sums_of_expert_losses()
    totals = torch.zeros(len(names), dtype=torch.float64, device=torch.cuda.current_device())
    for place, name in enumerate(names):
        if name in sums:  # not on a stage without experts
            totals[place] = sums[name].double().sum()
            sums[name].zero_()
    rows = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    for group in (parallel_state.get_pipeline_model_parallel_group(), rows):
        dist.all_reduce(totals, group=group)
    # Tensor and context ranks hold parts of a replica's loss, all ranks parts of the global one, and each rank a
    # z-loss of its own rows.
    parts = dict.fromkeys(names, parallel_state.get_data_parallel_world_size())
    parts.update({_NAMES["global_aux_loss"]: 1, "z_loss": rows.size()})
    num_layers = sum(expert_layers(arguments)) + (arguments["mtp_num_layers"] or 0)
    return {
        name: total / (parts[name] * num_layers * num_micro_batches)
        for name, total in zip(names, totals.tolist(), strict=True)
    }
