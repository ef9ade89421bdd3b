"""Completes and checks what steps are made of: batch sizes, number of steps, schedules.

Each check yields its faults as `faults.py` describes.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Generator, Iterator

from megatron_cp.training.arguments.faults import discard, require

_INTERVALS = (
    "exit_interval",
    "exit_duration_in_mins",
    "save_interval",
    "eval_interval",
    "save_retain_interval",
    "log_memory_interval",
    "check_weight_hash_across_dp_replicas_interval",
)


def complete_batch(args: Namespace) -> Iterator[str]:
    """Completes the micro-batches per step."""
    yield from require(args, "micro_batch_size")
    per_round = args.micro_batch_size * args.data_parallel_size
    if args.global_batch_size is None:
        args.global_batch_size = per_round
    yield from require(args, "global_batch_size")
    if args.global_batch_size % per_round:
        yield (
            f"--global-batch-size {args.global_batch_size} must be a multiple of micro-batch "
            "size x data-parallel size = "
            f"{args.micro_batch_size} x {args.data_parallel_size} = {per_round}"
        )
    args.num_micro_batches = args.global_batch_size // per_round


def check_virtual_batches(args: Namespace) -> Iterator[str]:
    """Yields a line if virtual stages cannot deal their micro-batches evenly."""
    if (
        args.virtual_pipeline_model_parallel_size
        and args.num_micro_batches % args.pipeline_model_parallel_size
    ):
        yield (
            f"micro-batches per step {args.num_micro_batches} must be a multiple of "
            "--pipeline-model-parallel-size "
            f"{args.pipeline_model_parallel_size} with virtual stages; raise --global-batch-size"
        )


def complete_steps(args: Namespace) -> Iterator[str]:
    """Completes the number of steps."""
    if (args.train_iters is None) == (args.train_samples is None):
        yield "give exactly one of --train-iters and --train-samples"
        discard(args, "train_iters", "train_samples")
    if args.train_samples is not None:
        yield from require(args, "train_samples")
        args.train_iters = args.train_samples // args.global_batch_size
    if args.train_iters <= 0:
        yield f"--train-iters {args.train_iters} must be positive"


def check_intervals(args: Namespace) -> Iterator[str]:
    """Yields a line for each interval that is given and not positive."""
    yield from require(args, "log_interval", "tensorboard_log_interval")
    yield from require(
        args, *(name for name in _INTERVALS if getattr(args, name, None) is not None)
    )


def check_rates(args: Namespace) -> Iterator[str]:
    """Yields the faults of the learning rates."""
    if args.lr is None:
        yield "--lr is missing; it has no default"
    elif not 0.0 <= args.min_lr <= args.lr or not 0.0 <= args.lr_warmup_init <= args.lr:
        yield (
            f"--min-lr {args.min_lr} and --lr-warmup-init {args.lr_warmup_init} must lie in [0, "
            f"--lr {args.lr}]"
        )


def check_scheduler_source(args: Namespace) -> Iterator[str]:
    """Yields a line if both the flags and the checkpoint are to decide the schedule."""
    if args.override_opt_param_scheduler and args.use_checkpoint_opt_param_scheduler:
        yield (
            "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler exclude "
            "each other; give one"
        )


def complete_schedule(args: Namespace) -> Iterator[str]:
    """Completes the learning rate's phases, in packs: what Megatron-Core's scheduler counts."""
    by_samples = args.train_samples is not None
    wrong, right = ("iters", "samples") if by_samples else ("samples", "iters")
    for phase in ("lr_decay", "lr_wsd_decay", "lr_warmup"):
        if getattr(args, f"{phase}_{wrong}"):
            flag = f"--{phase.replace('_', '-')}"
            yield f"{flag}-{wrong} does not go with --train-{right}; give {flag}-{right}"
            discard(args, f"{phase}_{right}")
    unit = 1 if by_samples else args.global_batch_size
    decay = getattr(args, f"lr_decay_{right}") or getattr(args, f"train_{right}")
    warmup = yield from _warmup(args, right, decay)
    args.lr_decay_steps, args.lr_warmup_steps = decay * unit, warmup * unit
    yield from _complete_wsd(args, right, decay, unit)


def _complete_wsd(args: Namespace, right: str, decay: int, unit: int) -> Iterator[str]:
    """Completes the length of WSD's last phase."""
    wsd = getattr(args, f"lr_wsd_decay_{right}")
    args.wsd_decay_steps = None if wsd is None else wsd * unit
    if args.lr_decay_style == "WSD" and (wsd is None or not 0 < wsd <= decay):
        yield f"--lr-decay-style WSD needs --lr-wsd-decay-{right} in (0, {decay}]; it is {wsd}"


def _warmup(args: Namespace, unit: str, decay: int) -> Generator[str, None, float]:
    """Returns the length of the warm-up in `unit` (iters or samples), from either of its flags."""
    warmup: float = getattr(args, f"lr_warmup_{unit}")
    fraction = args.lr_warmup_fraction
    if fraction is not None:
        if warmup:
            yield f"--lr-warmup-fraction and --lr-warmup-{unit} exclude each other; give one"
            return 0
        if not 0.0 <= fraction < 1.0:
            yield f"--lr-warmup-fraction {fraction} must lie in [0, 1)"
            return 0
        warmup = fraction * decay
    if warmup < 0 or decay <= 0 or warmup >= decay:
        yield (
            f"warm-up of {warmup:g} {unit} must be shorter than the decay of {decay}; lower "
            f"--lr-warmup-{unit}"
        )
    return warmup


def complete_weight_decay(args: Namespace) -> Iterator[str]:
    """Completes start and end of a growing weight decay."""
    if args.weight_decay_incr_style == "constant":
        if args.start_weight_decay is not None or args.end_weight_decay is not None:
            yield (
                "--start-weight-decay and --end-weight-decay need --weight-decay-incr-style "
                "linear or cosine"
            )
        args.start_weight_decay = args.end_weight_decay = args.weight_decay
    elif args.start_weight_decay is None or args.end_weight_decay is None:
        yield (
            f"--weight-decay-incr-style {args.weight_decay_incr_style} needs "
            "--start-weight-decay and --end-weight-decay"
        )
