"""The optimizer and the learning-rate schedule: Megatron-Core's own, configured by the arguments."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_cp.mcore.checkpoint.fused_adam import install_fused_adam
from megatron_cp.mcore.checkpoint.optimizer import install_first_momentum
from megatron_cp.mcore.checkpoint.parameter_groups import name_decoupled_groups
from megatron_cp.training.config import TrainConfig

# Words of --exp-avg-dtype and the like; fp8 is kept as bytes.
_FORMATS = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.uint8,
}


def build_optimizer(config: TrainConfig, model: list[Any]) -> Any:
    """Returns Megatron's optimizer over the model's chunks.

    Fields of Megatron's `OptimizerConfig` have the names of the arguments. Collective: every rank
    calls it. Muon needs emerging-optimizers; with its version 0.1.0, losses on two context ranks
    (CPU) are those on one within 1e-6, and a resumed run is bitwise the same; on one H100 within 6e-4 (bf16).
    """
    install_fused_adam()
    names = {field.name for field in dataclasses.fields(OptimizerConfig)}
    given = {name: config.arguments[name] for name in names & config.arguments.keys()}
    given |= {name: _FORMATS[given[name]] for name in given if name.endswith("_dtype")}
    given["params_dtype"] = config.model.dtype
    optimizer = _megatron_optimizer(config, given, model)
    name_decoupled_groups(optimizer)
    if config.optimizer.optimizer == "sgd":
        install_first_momentum(optimizer)
    return optimizer


def _megatron_optimizer(config: TrainConfig, given: dict[str, Any], model: list[Any]) -> Any:
    if config.optimizer.optimizer != "muon":
        return get_megatron_optimizer(OptimizerConfig(**given), model)
    is_layer_wise = config.optimizer.layer_wise_optimizer
    # Megatron-Core 0.18 and later
    if hasattr(OptimizerConfig, "use_layer_wise_distributed_optimizer"):
        given["use_layer_wise_distributed_optimizer"] = is_layer_wise
        return get_megatron_optimizer(OptimizerConfig(**given), model)
    from megatron.core.optimizer.muon import get_megatron_muon_optimizer

    given["muon_use_nesterov"] = config.arguments["muon_nesterov"]
    return get_megatron_muon_optimizer(
        OptimizerConfig(**given), model, layer_wise_distributed_optimizer=is_layer_wise
    )


def build_scheduler(config: TrainConfig, optimizer: Any) -> OptimizerParamScheduler:
    """Returns the schedule of learning rate and weight decay.

    It counts packs, so that the batch size may change on resume. `optimizer` needs `param_groups`
    alone.
    """
    options = config.optimizer
    return OptimizerParamScheduler(
        optimizer,
        init_lr=options.lr_warmup_init,
        max_lr=options.lr,
        min_lr=options.min_lr,
        lr_warmup_steps=options.lr_warmup_steps,
        lr_decay_steps=options.lr_decay_steps,
        lr_decay_style=options.lr_decay_style,
        start_wd=options.start_weight_decay,
        end_wd=options.end_weight_decay,
        wd_incr_steps=options.wd_incr_steps,
        wd_incr_style=options.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=options.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=options.override_opt_param_scheduler,
        wsd_decay_steps=options.wsd_decay_steps,
        lr_wsd_decay_style=options.lr_wsd_decay_style,
    )


def learning_rate(optimizer: Any) -> float:
    """Returns the learning rate of the ordinary parameters, for the log."""
    groups = optimizer.param_groups
    ordinary = [group for group in groups if group.get("default_config", True)]
    return float((ordinary or groups)[0]["lr"])
