"""A training run from its checked arguments to its end.

    arguments -> documents -> process groups -> model, optimizer, schedule -> checkpoint
              -> the loop (loop.py)

Every rank walks through the same lines; what may fail for a reason of the user fails before the
first collective, in one line, on every rank alike.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_cp.attn.options import resolve_options
from megatron_cp.data.batch import PlanRequest
from megatron_cp.data.batch_schedule import BatchSchedule
from megatron_cp.data.loader import PackedLoader
from megatron_cp.errors import PlanMismatchError
from megatron_cp.loggable_text import without_secrets
from megatron_cp.mcore.settings.arguments import head_sizes
from megatron_cp.training import datasets, exit_signal
from megatron_cp.training.arguments import build_parser
from megatron_cp.training.bad_steps.attempt import LocalGradients
from megatron_cp.training.bad_steps.check import EXIT_CODE as BAD_STEP_CODE
from megatron_cp.training.bad_steps.check import BadStepError
from megatron_cp.training.checkpoint.choose import check_checkpoint
from megatron_cp.training.checkpoint.load import (
    begin_with_pretrained,
    follow_release,
    load_checkpoint,
)
from megatron_cp.training.checkpoint.save import SaveError
from megatron_cp.training.config import TrainConfig
from megatron_cp.training.corpora import RunData, open_tokenizer
from megatron_cp.training.held_folders import hold
from megatron_cp.training.held_out import held_out_sets
from megatron_cp.training.logging.flops import ModelFlops
from megatron_cp.training.logging.journal import Journal
from megatron_cp.training.logging.lines import arguments_block, print_rank_0
from megatron_cp.training.logging.loggable import loggable_arguments
from megatron_cp.training.logging.opening import keeps_records
from megatron_cp.training.logging.timers import Timers
from megatron_cp.training.logging.wandb_run import Media
from megatron_cp.training.logits_memory import with_note_of_logits
from megatron_cp.training.loop import Loaders, Run, run_to_end
from megatron_cp.training.optim import build_optimizer, build_scheduler
from megatron_cp.training.replicas import ReplicasDifferError
from megatron_cp.training.run_state import RunState
from megatron_cp.training.same_batches import BatchError
from megatron_cp.training.setup import (
    ModelProvider,
    build_model,
    connect_schedule,
    count_parameters,
    initialize_distributed,
    own_place,
    set_seeds,
)
from megatron_cp.training.step import ForwardStep, Runner
from megatron_cp.training.text_samples import LogitsStep, make_sampler
from megatron_cp.training.together import refused_together
from megatron_cp.training.watchdog import Watchdog
from megatron_cp.training.whole_files import check_writable

FlopsProvider = Callable[[TrainConfig], ModelFlops]
ModelChecker = Callable[[TrainConfig], None]


def pretrain(
    config: TrainConfig,
    *,
    model_provider: ModelProvider,
    forward_step: ForwardStep,
    flops_provider: FlopsProvider,
    model_checker: ModelChecker | None = None,
    make_media: Callable[[Path], Media] | None = None,
    logits_step: LogitsStep | None = None,
) -> None:
    """Trains as the (checked) arguments say; every rank of the job calls it once.

    `model_provider(config, pre_process=, post_process=, vp_stage=)` builds one pipeline stage;
    `forward_step(config, batch, model, device)` runs one micro-batch and returns output and loss
    function; `flops_provider(config)` says what a step computes; `model_checker(config)` raises
    ValueError or NotImplementedError, before any process group, for a model that cannot be built;
    `make_media(run_dir)` gives what wandb shows of the finished run; `logits_step(batch, model, device)`
    gives logits instead of losses, for samples of text.
    """
    with one_line_errors():
        config, data, request = _prepare(config, model_checker)
        if config.steps.plan_only:
            show_plans(config, data, request)
            return
        files = datasets.recorded_files(data)
        device = initialize_distributed(config, datasets.digests(data), files)
        held = _hold_folders(config)
    watchdog = Watchdog(config)
    try:
        with held, _named_hangs(watchdog):
            watchdog.settle(own_place())
            _announce(config)
            if config.data.verify_token_files:
                _verify_token_files(data)
            set_seeds(config)
            loaders = _build_loaders(config, data, request)
            state, timers, gradients = _build(config, model_provider, device)
            with one_line_errors():
                _resume(state, loaders.train, data)
            config = state.config  # a resumed run may have another last step
            runner = Runner(
                config, state.model, device, forward_step, timers, gradients, watchdog.progress
            )
            tokenizer = open_tokenizer(config.data)
            texts, said = make_sampler(runner, data, request, tokenizer, logits_step)
            described = {"data": datasets.describe(data, tokenizer), "text_samples": said}
            journal = Journal(state, flops_provider(config), described, timers, make_media)
            _run_and_close(Run(state, runner, loaders, journal, texts))
    finally:
        watchdog.close()
        dist.destroy_process_group()


def _prepare(
    config: TrainConfig, model_checker: ModelChecker | None
) -> tuple[TrainConfig, RunData, PlanRequest]:
    """Returns the configuration with what files add to it, the documents, and the plans that their batches need.

    Files add the vocabulary, a release to load, and notes. Raises what `one_line_errors` takes for all that can be
    wrong without a process group.
    """
    config, data = datasets.open_data(config)
    config = with_note_of_logits(config)
    request = datasets.plan_request(config, on_cuda=torch.cuda.is_available())
    datasets.check_first_batch(config, data, request)
    check_backend(config)
    if model_checker is not None and not config.steps.plan_only:
        model_checker(config)
    config = begin_with_pretrained(config)
    if config.checkpoint.load is not None:
        config = follow_release(config)
        check_checkpoint(config)
    if not config.steps.plan_only:  # last, as it makes the folders
        check_writable("--save", config.checkpoint.save)
        check_writable("--run-dir", config.records.run_dir)
        check_writable("--tensorboard-dir", config.records.tensorboard_dir)
    return config, data, request


def _hold_folders(config: TrainConfig) -> ExitStack:
    """Returns what holds the folders that this run writes into, until it is closed.

    Collective: every rank calls it. Raises ValueError on every rank alike where another live run holds one.
    """
    with ExitStack() as held:
        with refused_together(ValueError):
            for flag, folder in _written_folders(config) if dist.get_rank() == 0 else ():
                with suppress(OSError):  # no locks there, or a file of another user's
                    held.callback(os.close, hold(flag, Path(folder)))
        return held.pop_all()


def _written_folders(config: TrainConfig) -> Iterator[tuple[str, str]]:
    """Yields flags and folders. An evaluation beside a live training writes into none of its folders."""
    save, run_dir = config.checkpoint.save, config.records.run_dir
    if save is not None and not config.steps.skip_train:
        yield "--save", save
    if run_dir is not None and keeps_records(config):
        yield "--run-dir", run_dir


def _verify_token_files(data: RunData) -> None:
    with one_line_errors(), refused_together(ValueError, OSError):
        datasets.verify_token_files(data)
    print_rank_0("> SHA-256 of all token files are those of their manifests")


def _run_and_close(run: Run) -> None:
    """Trains and evaluates; what ends the run on all ranks alike is one line."""
    try:
        run_to_end(run)
    except (ReplicasDifferError, SaveError, PlanMismatchError, BadStepError, BatchError) as problem:
        sys.stderr.write(f"pretrain_gpt.py: error: {problem}\n")
        code = BAD_STEP_CODE if isinstance(problem, BadStepError) else 1
        raise SystemExit(code) from problem
    finally:
        run.close()


@contextmanager
def _named_hangs(watchdog: Watchdog) -> Iterator[None]:
    """Turns the end of a collective that nobody joined into the line that says who did not."""
    try:
        yield
    except RuntimeError as problem:
        if watchdog.finding is None:
            raise
        sys.stderr.write(f"pretrain_gpt.py: error: {watchdog.finding}\n")
        raise SystemExit(1) from problem


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turns what a user can mend into one line on standard error and exit code 2."""
    try:
        yield
    except (ValueError, NotImplementedError, OSError, PlanMismatchError) as problem:
        text = without_secrets(" ".join(_said_of(problem).split()))
        sys.stderr.write(f"pretrain_gpt.py: error: {text}\n")  # one write: ranks share the stream
        raise SystemExit(2) from problem


def _said_of(problem: Exception) -> str:
    if isinstance(problem, PermissionError) and problem.filename is not None:
        return (
            f"{problem.filename}: {problem.strerror} for user {os.getuid()}; let this user read it, and write "
            "there if the run is to, or give another path"
        )
    return str(problem)


def check_backend(config: TrainConfig) -> None:
    """Raises ValueError or NotImplementedError where `--cp-backend` cannot serve this run."""
    on_cuda = torch.cuda.is_available()
    keys, values = (
        torch.zeros(
            (1, 1, size),
            device=torch.device("cuda", config.parallel.local_rank) if on_cuda else "cpu",
            dtype=config.model.dtype,
            requires_grad=True,
        )
        for size in head_sizes(config.namespace())
    )
    resolve_options(
        keys,
        keys,
        values,
        backend=config.model.cp_backend,
        deterministic=config.steps.deterministic_mode,
        dropout_p=config.model.attention_dropout,
    )


def show_plans(config: TrainConfig, data: RunData, request: PlanRequest) -> None:
    """Prints the plans of the first batches on rank 0: the dry run of `--plan-only`."""
    if config.parallel.rank != 0:
        return
    replicas = config.parallel.data_parallel_size
    loader = datasets.build_loader(
        config, data, request, split="train", dp_rank=0, dp_size=replicas
    )
    for number in range(config.steps.plan_batches):
        if exit_signal.arrived():
            break
        planned = next(loader)
        lengths = planned.batch.document_lengths
        print(
            f"batch {number}: {len(lengths)} documents, lengths {min(lengths)} to {max(lengths)}, "
            f"mask density {planned.batch.mask.density():.4f}"
        )
        for name, plan in planned.plans.items():
            print(f"[{name}]\n{plan}", flush=True)
    loader.close()


def _announce(config: TrainConfig) -> None:
    """What Megatron-LM prints before it builds anything."""
    layout = config.parallel
    print_rank_0(
        f"using world size: {layout.world_size}, data-parallel size: {layout.data_parallel_size}, "
        f"context-parallel size: {layout.context_parallel_size}, "
        f"tensor-model-parallel size: {layout.tensor_model_parallel_size}, "
        f"pipeline-model-parallel size: {layout.pipeline_model_parallel_size}"
    )
    for note in config.notes:
        print_rank_0(f"note: {note}")
    defaults = loggable_arguments(vars(build_parser().parse_args([])))
    print_rank_0(
        arguments_block(loggable_arguments(config.arguments), defaults, _all_arguments(config))
    )


def _all_arguments(config: TrainConfig) -> str:
    """Returns where all arguments stand: in the run's records, or else with the flags."""
    if config.records.run_dir is None:
        return "pretrain_gpt.py --help names them; --run-dir keeps all in run.json"
    records = Path(config.records.run_dir) / "run.json"
    if not keeps_records(config):
        return f"pretrain_gpt.py --help names them; {records} stays that of the training"
    return str(records)


def _build_loaders(config: TrainConfig, data: RunData, request: PlanRequest) -> Loaders:
    """Returns the loaders of this rank's replica."""
    print_rank_0("> building train, validation, and test datasets ...")
    place = {
        "dp_rank": parallel_state.get_data_parallel_rank(),
        "dp_size": config.parallel.data_parallel_size,
    }
    train = datasets.build_loader(config, data, request, split="train", **place)
    valid, test = held_out_sets(config, data, request, **place)
    return Loaders(train, valid, test)


def _resume(state: RunState, loader: PackedLoader, data: RunData) -> None:
    """Goes on where a checkpoint ended, if there is one."""
    config = state.config
    if config.checkpoint.load is not None and load_checkpoint(state):
        datasets.resume_loader(loader, data, state)
        _count_steps_anew(state)


def _count_steps_anew(state: RunState) -> None:
    """Takes the samples that are left of --train-samples, whatever size the steps before had."""
    config, samples = state.config, state.config.steps.train_samples
    if not samples:
        return
    schedule = BatchSchedule(config.steps.batch_schedule)
    last = state.iteration + schedule.num_steps(samples, state.consumed_samples)
    if last != config.steps.train_iters:
        print_rank_0(
            f"> {state.consumed_samples} of --train-samples {samples} were taken in {state.iteration} steps; the last "
            f"step is now {last}"
        )
        state.config = replace(config, steps=replace(config.steps, train_iters=last))


def _build(
    config: TrainConfig, model_provider: ModelProvider, device: torch.device
) -> tuple[RunState, Timers, LocalGradients]:
    """Returns model, optimizer and schedule, connected with each other and with what looks at them."""
    model = build_model(config, model_provider, device)
    optimizer = build_optimizer(config, model)
    scheduler = build_scheduler(config, optimizer)
    looks = config.steps.looks_at_gradients
    gradients = connect_schedule(model, optimizer, looks_at_gradients=looks)
    timers = Timers(config)
    timers.connect(model, optimizer)
    state = RunState(config, model, optimizer, scheduler, count_parameters(model))
    return state, timers, gradients
