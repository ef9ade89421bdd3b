"""Completes and checks what steps are made of: batch sizes, number of steps, schedules."""

from __future__ import annotations

from argparse import Namespace


def require(args: Namespace, *names: str) -> None:
    """Refuses a missing or non-positive value of the named arguments."""
    for name in names:
        value = getattr(args, name)
        flag = "--" + name.replace("_", "-")
        if value is None:
            raise ValueError(f"{flag} is missing; it has no default")
        if value <= 0:
            raise ValueError(f"{flag} {value} must be positive")


def complete_batch(args: Namespace) -> None:
    """Micro-batches per step, and the number of steps."""
    require(args, "micro_batch_size", "log_interval", "tensorboard_log_interval")
    per_round = args.micro_batch_size * args.data_parallel_size
    if args.global_batch_size is None:
        args.global_batch_size = per_round
    require(args, "global_batch_size")
    if args.global_batch_size % per_round:
        raise ValueError(
            f"--global-batch-size {args.global_batch_size} must be a multiple of micro-batch "
            "size x data-parallel size = "
            f"{args.micro_batch_size} x {args.data_parallel_size} = {per_round}"
        )
    args.num_micro_batches = args.global_batch_size // per_round
    if (
        args.virtual_pipeline_model_parallel_size
        and args.num_micro_batches % args.pipeline_model_parallel_size
    ):
        raise ValueError(
            f"micro-batches per step {args.num_micro_batches} must be a multiple of "
            "--pipeline-model-parallel-size "
            f"{args.pipeline_model_parallel_size} with virtual stages; raise --global-batch-size"
        )
    if (args.train_iters is None) == (args.train_samples is None):
        raise ValueError("give exactly one of --train-iters and --train-samples")
    if args.train_samples is not None:
        require(args, "train_samples")
        args.train_iters = args.train_samples // args.global_batch_size
    if args.train_iters <= 0:
        raise ValueError(f"--train-iters {args.train_iters} must be positive")
    for name in (
        "exit_interval",
        "exit_duration_in_mins",
        "save_interval",
        "eval_interval",
        "save_retain_interval",
    ):
        if getattr(args, name) is not None:
            require(args, name)


def complete_schedule(args: Namespace) -> None:
    """The learning rate's phases, in packs: what Megatron-Core's scheduler counts."""
    if args.lr is None:
        raise ValueError("--lr is missing; it has no default")
    if not 0.0 <= args.min_lr <= args.lr or not 0.0 <= args.lr_warmup_init <= args.lr:
        raise ValueError(
            f"--min-lr {args.min_lr} and --lr-warmup-init {args.lr_warmup_init} must lie in [0, "
            f"--lr {args.lr}]"
        )
    by_samples = args.train_samples is not None
    wrong, right = ("iters", "samples") if by_samples else ("samples", "iters")
    for phase in ("lr_decay", "lr_wsd_decay", "lr_warmup"):
        if getattr(args, f"{phase}_{wrong}"):
            flag = f"--{phase.replace('_', '-')}"
            raise ValueError(
                f"{flag}-{wrong} does not go with --train-{right}; give {flag}-{right}"
            )
    unit = 1 if by_samples else args.global_batch_size
    decay = getattr(args, f"lr_decay_{right}") or getattr(args, f"train_{right}")
    warmup = _warmup(args, right, decay)
    args.lr_decay_steps, args.lr_warmup_steps = decay * unit, warmup * unit
    wsd = getattr(args, f"lr_wsd_decay_{right}")
    args.wsd_decay_steps = None if wsd is None else wsd * unit
    if args.lr_decay_style == "WSD" and (wsd is None or not 0 < wsd <= decay):
        raise ValueError(
            f"--lr-decay-style WSD needs --lr-wsd-decay-{right} in (0, {decay}]; it is {wsd}"
        )
    if args.override_opt_param_scheduler and args.use_checkpoint_opt_param_scheduler:
        raise ValueError(
            "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler exclude "
            "each other; give one"
        )


def _warmup(args: Namespace, unit: str, decay: int) -> float:
    """Length of the warm-up in ``unit`` (iters or samples), from either of its flags."""
    warmup: float = getattr(args, f"lr_warmup_{unit}")
    fraction = args.lr_warmup_fraction
    if fraction is not None:
        if warmup:
            raise ValueError(
                f"--lr-warmup-fraction and --lr-warmup-{unit} exclude each other; give one"
            )
        if not 0.0 <= fraction < 1.0:
            raise ValueError(f"--lr-warmup-fraction {fraction} must lie in [0, 1)")
        warmup = fraction * decay
    if warmup < 0 or decay <= 0 or warmup >= decay:
        raise ValueError(
            f"warm-up of {warmup:g} {unit} must be shorter than the decay of {decay}; lower "
            f"--lr-warmup-{unit}"
        )
    return warmup


def complete_weight_decay(args: Namespace) -> None:
    """Start and end of a growing weight decay."""
    if args.weight_decay_incr_style == "constant":
        if args.start_weight_decay is not None or args.end_weight_decay is not None:
            raise ValueError(
                "--start-weight-decay and --end-weight-decay need --weight-decay-incr-style "
                "linear or cosine"
            )
        args.start_weight_decay = args.end_weight_decay = args.weight_decay
    elif args.start_weight_decay is None or args.end_weight_decay is None:
        raise ValueError(
            f"--weight-decay-incr-style {args.weight_decay_incr_style} needs "
            "--start-weight-decay and --end-weight-decay"
        )
