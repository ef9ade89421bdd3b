"""The optimizer and the learning-rate schedule.

Megatron-Core's own, configured from the arguments.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_cp.mcore.optimizer import install_foreach_adam


def build_optimizer(args: Namespace, model: list[Any]) -> Any:
    """Megatron's optimizer over the model's chunks.

    Clipping, fp32 main copies, sharded state where asked for.

    Collective: every rank calls it.
    """
    install_foreach_adam()
    config = OptimizerConfig(
        optimizer=args.optimizer,
        lr=args.lr,
        min_lr=args.min_lr,
        weight_decay=args.weight_decay,
        adam_beta1=args.adam_beta1,
        adam_beta2=args.adam_beta2,
        adam_eps=args.adam_eps,
        sgd_momentum=args.sgd_momentum,
        bf16=args.bf16,
        params_dtype=torch.bfloat16 if args.bf16 else torch.float32,
        use_distributed_optimizer=args.use_distributed_optimizer,
        overlap_param_gather=args.overlap_param_gather,
        clip_grad=args.clip_grad,
        log_num_zeros_in_grad=args.log_num_zeros_in_grad,
    )
    return get_megatron_optimizer(config, model)


def build_scheduler(args: Namespace, optimizer: Any) -> OptimizerParamScheduler:
    """The schedule of learning rate and weight decay.

    It counts packs, so that the batch size may change on resume.

    ``optimizer`` needs ``param_groups`` alone.
    """
    return OptimizerParamScheduler(
        optimizer,
        init_lr=args.lr_warmup_init,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=args.lr_warmup_steps,
        lr_decay_steps=args.lr_decay_steps,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.start_weight_decay,
        end_wd=args.end_weight_decay,
        wd_incr_steps=args.train_iters * args.global_batch_size,
        wd_incr_style=args.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=args.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=args.override_opt_param_scheduler,
        wsd_decay_steps=args.wsd_decay_steps,
        lr_wsd_decay_style=args.lr_wsd_decay_style,
    )


def learning_rate(optimizer: Any) -> float:
    """The learning rate of the ordinary parameters, for the log."""
    groups = optimizer.param_groups
    ordinary = [group for group in groups if group.get("default_config", True)]
    return float((ordinary or groups)[0]["lr"])
