"""Completes and checks what steps are made of: batch sizes, number of steps, schedules.

Each check yields its faults as `faults.py` describes.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Generator, Iterator

from megatron_cp.data.batch_schedule import BatchSchedule, constant, parse_steps, ramp
from megatron_cp.training.arguments.faults import discard, require

_INTERVALS = (
    "exit_interval",
    "exit_duration_in_mins",
    "save_interval",
    "eval_interval",
    "eval_micro_batch_size",
    "save_retain_interval",
    "log_memory_interval",
    "check_weight_hash_across_dp_replicas_interval",
    "bad_steps_in_a_row",
)


def complete_batch(args: Namespace) -> Iterator[str]:
    """Completes packs and micro-batches per step, in training and evaluation."""
    yield from require(args, "micro_batch_size")
    sizes = yield from _batch_sizes(args, args.micro_batch_size * args.data_parallel_size)
    args.global_batch_size, args.batch_schedule = sizes.steps[-1][1], sizes.steps
    yield from _whole_rounds(args, "", sizes.sizes())
    is_own = args.eval_global_batch_size is not None or args.eval_micro_batch_size is not None
    if args.eval_global_batch_size is None:
        args.eval_global_batch_size = args.global_batch_size
    if args.eval_micro_batch_size is None:
        args.eval_micro_batch_size = args.micro_batch_size
    if is_own:
        yield from require(args, "eval_global_batch_size", "eval_micro_batch_size")
        yield from _whole_rounds(args, "eval_", [args.eval_global_batch_size])


def _whole_rounds(args: Namespace, use: str, sizes: list[int]) -> Iterator[str]:
    """Yields a line if a batch is not so many micro-batches on every replica; `use` begins the arguments' names."""
    micro, replicas = getattr(args, f"{use}micro_batch_size"), args.data_parallel_size
    for size in sizes:
        if size % (micro * replicas):
            yield (
                f"--{use.replace('_', '-')}global-batch-size {size} must be a multiple of "
                f"{use.replace('_', ' ')}micro-batch size x data-parallel size = {micro} x {replicas} = "
                f"{micro * replicas}"
            )
            return


def _batch_sizes(args: Namespace, per_round: int) -> Generator[str, None, BatchSchedule]:
    """Returns the packs of every step: constant, in a ramp, or in steps."""
    size, growing, steps = (
        args.global_batch_size,
        args.rampup_batch_size,
        args.step_batch_size_schedule,
    )
    if growing is not None and steps is not None:
        yield "--rampup-batch-size and --step-batch-size-schedule exclude each other; give one"
    if (growing is not None or steps is not None) and args.train_samples is None:
        yield "a batch size that changes needs --train-samples instead of --train-iters"
    try:
        if steps is not None:
            if size is not None:
                yield "--step-batch-size-schedule says the batch size; leave out --global-batch-size"
            return parse_steps(" ".join(steps), args.seq_length)
        args.global_batch_size = per_round if size is None else size
        yield from require(args, "global_batch_size")
        if growing is not None:
            if len(growing) != 3:
                yield f"--rampup-batch-size has {len(growing)} numbers; give start, increment, packs"
            else:
                start, increment, packs = growing
                return ramp(start, increment, packs, args.global_batch_size)
    except ValueError as problem:
        flag = "--step-batch-size-schedule" if steps is not None else "--rampup-batch-size"
        yield f"{flag}: {problem}"
        return constant(per_round)
    return constant(args.global_batch_size)


def check_virtual_batches(args: Namespace) -> Iterator[str]:
    """Yields a line if virtual stages cannot deal their micro-batches evenly."""
    if not args.virtual_pipeline_model_parallel_size:
        return
    stages = args.pipeline_model_parallel_size
    group = args.microbatch_group_size_per_vp_stage or stages
    sizes = BatchSchedule(args.batch_schedule).sizes()
    named = [("--global-batch-size", size, args.micro_batch_size) for size in sizes]
    if args.eval_iters or args.full_validation:
        evaluated = (args.eval_global_batch_size, args.eval_micro_batch_size)
        named.append(("--eval-global-batch-size", *evaluated))
    for flag, size, micro in named:
        count = size // (micro * args.data_parallel_size)
        if not stages <= group <= count or 0 < count % group < stages:
            yield (
                f"{flag} {size} is {count} micro-batches a replica; with virtual stages they must be a multiple of "
                f"--pipeline-model-parallel-size {stages}, or go into groups of at least {stages} "
                "(--microbatch-group-size-per-virtual-pipeline-stage); give another size, in every step of a ramp"
            )
            return


def complete_steps(args: Namespace) -> Iterator[str]:
    """Completes the number of steps, and what may end them sooner."""
    args.exit_interval = args.exit_interval or None  # Megatron-LM: 0 is never
    args.exit_duration_in_mins = args.exit_duration_in_mins or None
    if (args.train_iters is None) == (args.train_samples is None):
        yield "give exactly one of --train-iters and --train-samples"
        discard(args, "train_iters", "train_samples")
    if args.train_samples is not None:
        yield from require(args, "train_samples")
        args.train_iters = BatchSchedule(args.batch_schedule).num_steps(args.train_samples)
    args.wd_incr_steps = args.train_samples or args.train_iters * args.global_batch_size
    if args.train_iters <= 0:
        yield f"--train-iters {args.train_iters} must be positive"


def check_intervals(args: Namespace) -> Iterator[str]:
    """Yields a line for each interval that is given and not positive."""
    yield from require(args, "log_interval", "tensorboard_log_interval")
    yield from require(
        args, *(name for name in _INTERVALS if getattr(args, name, None) is not None)
    )
    if args.start_eval_at_iter is not None and args.start_eval_at_iter < 0:
        yield f"--start-eval-at-iter {args.start_eval_at_iter} must not be negative"
    for step in args.iterations_to_skip:
        if step < 1:
            yield f"--iterations-to-skip {step} must be positive: steps are counted from 1"


def check_validation(args: Namespace) -> Iterator[str]:
    """Yields a line for each wish for more than the first batches of validation that cannot be met."""
    has_own_corpora = args.valid_data_path or args.per_split_data_args_path
    if args.full_validation and args.fim_data:
        yield (
            "--full-validation with --fim-data is not served: marks that are put in push tokens out of their packs, "
            "and not every token would count; leave out one"
        )
    if args.multiple_validation_sets and not args.full_validation:
        yield "--multiple-validation-sets needs --full-validation, as in Megatron-LM 0.20; give it too"
    if args.multiple_validation_sets and not has_own_corpora:
        yield (
            "--multiple-validation-sets needs corpora of validation alone; give --valid-data-path, or "
            "--per-split-data-args-path"
        )
    names = args.validation_set_names
    if names and not args.multiple_validation_sets:
        yield "--validation-set-names needs --multiple-validation-sets; give it too"
    if names and len(set(names)) < len(names):
        yield f"--validation-set-names {' '.join(names)} must differ: each names a loss"


def check_rates(args: Namespace) -> Iterator[str]:
    """Yields the faults of the learning rates."""
    if args.lr is None:
        yield "--lr is missing; it has no default"
    elif not 0.0 <= args.min_lr <= args.lr or not 0.0 <= args.lr_warmup_init <= args.lr:
        yield (
            f"--min-lr {args.min_lr} and --lr-warmup-init {args.lr_warmup_init} must lie in [0, "
            f"--lr {args.lr}]"
        )


def check_decoupled_rates(args: Namespace) -> Iterator[str]:
    """Yields a line if the rate of embedding and output layer would lie above its largest: Megatron-Core lets it."""
    most, least = args.decoupled_lr, args.decoupled_min_lr
    if most is None:
        return
    least, flag = (args.min_lr, "--min-lr") if least is None else (least, "--decoupled-min-lr")
    if least > most:
        yield (
            f"{flag} {least} is above --decoupled-lr {most}: the rate of embedding and output layer would grow to it; "
            f"give a --decoupled-min-lr of at most {most}"
        )
    if args.lr_warmup_init > most:
        yield (
            f"--lr-warmup-init {args.lr_warmup_init} is above --decoupled-lr {most}: the rate of embedding and output "
            f"layer would begin there; give one of at most {most}"
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
    elif args.start_weight_decay > args.end_weight_decay:
        yield (
            f"--start-weight-decay {args.start_weight_decay} must be at most --end-weight-decay "
            f"{args.end_weight_decay}: Megatron-Core's schedule lets it grow alone"
        )
