"""The training loop.

    arguments -> documents -> process groups -> model, optimizer, schedule -> checkpoint
              -> steps -> evaluation

Every rank walks through the same lines; what may fail for a reason of the user fails before the
first collective, in one line, on every rank alike.
"""

from __future__ import annotations

import gc
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_cp.attn.options import resolve_options
from megatron_cp.data.batch import PlanRequest
from megatron_cp.data.loader import PackedLoader
from megatron_cp.training import datasets
from megatron_cp.training.checkpoint.files import check_writable
from megatron_cp.training.checkpoint.load import check_checkpoint, load_checkpoint
from megatron_cp.training.checkpoint.save import save_checkpoint
from megatron_cp.training.checkpoint.state import RunState
from megatron_cp.training.flops import ModelFlops
from megatron_cp.training.journal import Journal
from megatron_cp.training.log import ProgressBar, arguments_block, print_datetime, print_rank_0
from megatron_cp.training.optim import build_optimizer, build_scheduler
from megatron_cp.training.setup import (
    ModelProvider,
    build_model,
    connect_schedule,
    initialize_distributed,
    set_seeds,
)
from megatron_cp.training.step import (
    ForwardStep,
    Runner,
    evaluate,
    next_batches,
    train_step,
    whole_parameters,
)

FlopsProvider = Callable[[Namespace], ModelFlops]


@dataclass(frozen=True)
class Loaders:
    """The loaders of this rank's replica; None where a split is empty or not wanted."""

    train: PackedLoader
    valid: PackedLoader | None
    test: PackedLoader | None

    def close(self) -> None:
        """Ends their workers."""
        for loader in (self.train, self.valid, self.test):
            if loader is not None:
                loader.close()


def pretrain(
    args: Namespace,
    *,
    model_provider: ModelProvider,
    forward_step: ForwardStep,
    flops_provider: FlopsProvider,
) -> None:
    """Trains as the (checked) arguments say; every rank of the job calls it once.

    ``model_provider(args, pre_process=, post_process=, vp_stage=)`` builds one pipeline stage;
    ``forward_step(args, batch, model, device)`` runs one micro-batch and returns output and loss
    function; ``flops_provider(args)`` says what a step computes.
    """
    with one_line_errors(args):
        data = datasets.open_data(args)
        request = datasets.plan_request(args, on_cuda=torch.cuda.is_available())
        check = datasets.build_loader(
            args, data, request, split="train", dp_rank=0, dp_size=args.data_parallel_size
        )
        assert check is not None
        datasets.check_first_batch(args, data, request)
        check_backend(args)
        if args.load is not None:
            check_checkpoint(args)
        if not args.plan_only:  # last, as it makes the folders
            check_writable("--save", args.save)
            check_writable("--run-dir", args.run_dir)
    if args.plan_only:
        show_plans(args, check)
        return
    device = initialize_distributed(args, datasets.digests(data))
    try:
        _announce(args)
        set_seeds(args)
        loaders = _build_loaders(args, data, request)
        state, runner = _build(args, model_provider, forward_step, device)
        with one_line_errors(args):
            if args.load is not None and load_checkpoint(state) and state.data:
                loaders.train.load_state_dict(state.data)
        journal = Journal(state, flops_provider(args), datasets.describe(data))
        try:
            _run(state, runner, loaders, journal)
        finally:
            loaders.close()
            journal.finish()
    finally:
        dist.destroy_process_group()


@contextmanager
def one_line_errors(args: Namespace) -> Iterator[None]:
    """Turns what a user can mend into one line on standard error and exit code 2."""
    try:
        yield
    except (ValueError, NotImplementedError, OSError) as problem:
        text = " ".join(str(problem).split())
        sys.stderr.write(f"pretrain_gpt.py: error: {text}\n")  # one write: ranks share the stream
        raise SystemExit(2) from problem


def check_backend(args: Namespace) -> None:
    """Raises ValueError or NotImplementedError where ``--cp-backend`` cannot serve this run."""
    on_cuda = torch.cuda.is_available()
    rows = torch.zeros(
        (1, 1, args.kv_channels),
        device=torch.device("cuda", args.local_rank) if on_cuda else torch.device("cpu"),
        dtype=torch.bfloat16 if args.bf16 else torch.float32,
        requires_grad=True,
    )
    resolve_options(
        rows, rows, rows, backend=args.cp_backend, deterministic=args.deterministic_mode
    )


def show_plans(args: Namespace, loader: PackedLoader) -> None:
    """Prints the plans of the first batches on rank 0: the dry run of ``--plan-only``."""
    if args.rank != 0:
        return
    for number in range(args.plan_batches):
        planned = next(loader)
        lengths = planned.batch.document_lengths
        print(
            f"batch {number}: {len(lengths)} documents, lengths {min(lengths)} to {max(lengths)}, "
            f"mask density {planned.batch.mask.density():.4f}"
        )
        for name, plan in planned.plans.items():
            print(f"[{name}]\n{plan}", flush=True)
    loader.close()


def _announce(args: Namespace) -> None:
    """What Megatron-LM prints before it builds anything."""
    print_rank_0(
        f"using world size: {args.world_size}, data-parallel size: {args.data_parallel_size}, "
        f"context-parallel size: {args.context_parallel_size}, "
        f"tensor-model-parallel size: {args.tensor_model_parallel_size}, "
        f"pipeline-model-parallel size: {args.pipeline_model_parallel_size}"
    )
    for note in args.notes:
        print_rank_0(f"note: {note}")
    print_rank_0(arguments_block(args))


def _build_loaders(args: Namespace, data: datasets.RunData, request: PlanRequest) -> Loaders:
    """The loaders of this rank's replica."""
    print_rank_0("> building train, validation, and test datasets ...")
    place = {"dp_rank": parallel_state.get_data_parallel_rank(), "dp_size": args.data_parallel_size}
    train = datasets.build_loader(args, data, request, split="train", **place)
    assert train is not None
    if not args.eval_iters:
        return Loaders(train, None, None)
    valid = datasets.build_loader(args, data, request, split="valid", **place)
    test = datasets.build_loader(args, data, request, split="test", **place)
    return Loaders(train, valid, test)


def _build(
    args: Namespace, model_provider: ModelProvider, forward_step: ForwardStep, device: torch.device
) -> tuple[RunState, Runner]:
    """Model, optimizer and schedule, connected."""
    model = build_model(args, model_provider, device)
    optimizer = build_optimizer(args, model)
    scheduler = build_scheduler(args, optimizer)
    connect_schedule(model, optimizer)
    return RunState(args, model, optimizer, scheduler), Runner(args, model, device, forward_step)


def _run(state: RunState, runner: Runner, loaders: Loaders, journal: Journal) -> None:
    """Training from where the state stands to the end, then the last evaluations."""
    args = state.args
    print_rank_0("done with setup ...")
    if not args.skip_train:
        print_rank_0("training ...")
        _train(state, runner, loaders, journal)
        print_datetime("after training is done")
    for split, loader in (("validation", loaders.valid), ("test", loaders.test)):
        if loader is not None and not journal.knows(split):
            _evaluate(
                state, runner, loader, journal, split=split, where=f"iteration {state.iteration}"
            )


def _train(state: RunState, runner: Runner, loaders: Loaders, journal: Journal) -> None:
    """Steps until the arguments say stop, with evaluations and checkpoints in between."""
    args = state.args
    start = time.monotonic()
    saved_at = state.iteration if args.load is not None else None
    bar = ProgressBar(total=args.train_iters, done=state.iteration)
    print_datetime("before the start of training step")
    with _collector(args) as collect:
        while state.iteration < args.train_iters:
            batches = next_batches(loaders.train)
            result = train_step(runner, batches, state.optimizer, state.scheduler)
            state.iteration += 1
            state.consumed_samples += args.global_batch_size
            state.data = loaders.train.state_dict()
            journal.step(batches, result, runner.device)
            bar.step()
            if (
                args.eval_interval
                and state.iteration % args.eval_interval == 0
                and loaders.valid is not None
            ):
                _evaluate(
                    state,
                    runner,
                    loaders.valid,
                    journal,
                    split="validation",
                    where=f"iteration {state.iteration}",
                )
            wanted = args.save and args.save_interval and state.iteration % args.save_interval == 0
            stop = _should_stop(args, state.iteration, start)
            if wanted or (stop and args.save):
                _save(state, runner, journal)
                saved_at = state.iteration
            collect(state.iteration)
            if stop:
                break
    bar.close()
    if args.save and saved_at != state.iteration:
        _save(state, runner, journal)


def _should_stop(args: Namespace, iteration: int, start: float) -> bool:
    """Whether an exit condition holds; the same on every rank.

    Collective with ``--exit-duration-in-mins``.
    """
    if args.exit_interval and iteration % args.exit_interval == 0:
        print_rank_0(f"exiting program at iteration {iteration}")
        return True
    if args.exit_duration_in_mins is None:
        return False
    late = torch.tensor(
        [time.monotonic() - start > args.exit_duration_in_mins * 60], dtype=torch.int
    )
    late = late.to(torch.cuda.current_device())
    dist.all_reduce(late, op=dist.ReduceOp.MAX)
    if late.item():
        print_rank_0(
            f"exiting program after {args.exit_duration_in_mins} minutes at iteration {iteration}"
        )
    return bool(late.item())


def _save(state: RunState, runner: Runner, journal: Journal) -> None:
    """A checkpoint, timed."""
    with whole_parameters(runner):
        seconds = save_checkpoint(state)
    journal.saved(seconds)


def _evaluate(
    state: RunState,
    runner: Runner,
    loader: PackedLoader,
    journal: Journal,
    *,
    split: str,
    where: str,
) -> None:
    """The loss on held-out documents, logged."""
    with whole_parameters(runner):
        loss = evaluate(runner, loader, state.args.eval_iters)
    journal.evaluated(split, where, loss)


@contextmanager
def _collector(args: Namespace) -> Iterator[Callable[[int], None]]:
    """A function that collects garbage where ``--manual-gc`` wants it.

    Python's own collector is off meanwhile.
    """
    if not args.manual_gc:
        yield lambda iteration: None
        return
    gc.disable()
    gc.collect()

    def collect(iteration: int) -> None:
        if args.manual_gc_interval and iteration % args.manual_gc_interval == 0:
            gc.collect()

    try:
        yield collect
    finally:
        gc.enable()
