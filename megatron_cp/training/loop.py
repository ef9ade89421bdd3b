"""The loop: steps, evaluations and checkpoints in between, and when it ends.

    step -> evaluation, if due -> stop? -> checkpoint, if due or if the run stops -> next step

A signal that comes during an evaluation cuts it short (it is not logged; its documents come again), one that
comes during a save lets it end and causes no second one.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from megatron_cp.data.loader import PackedLoader
from megatron_cp.training.bad_steps.check import BadStepError, StepCheck
from megatron_cp.training.checkpoint.save import SaveError, Saver
from megatron_cp.training.config import TrainConfig
from megatron_cp.training.held_out import HeldOut
from megatron_cp.training.logging.journal import Journal
from megatron_cp.training.logging.lines import ProgressBar, print_datetime, print_rank_0, warn
from megatron_cp.training.params_norm import params_norm
from megatron_cp.training.profiling import memory_history, step_profiler
from megatron_cp.training.replicas import ReplicasDifferError, check_replicas
from megatron_cp.training.run_state import RunState
from megatron_cp.training.same_batches import (
    BatchError,
    BatchesDifferError,
    check_same_batches,
)
from megatron_cp.training.step import (
    Runner,
    evaluate,
    try_next_batches,
    update,
    whole_parameters,
)
from megatron_cp.training.stop import ExitConditions
from megatron_cp.training.text_samples import TextSampler
from megatron_cp.training.together import any_rank

ENDS_ALL = (BatchError, BatchesDifferError, BadStepError, ReplicasDifferError)
"""Errors that every rank raises at the same place: collectives still work after them."""


@dataclass(frozen=True)
class Loaders:
    """The loaders of this rank's replica; no validation and no test where a split is empty or not wanted."""

    train: PackedLoader
    valid: tuple[HeldOut, ...]
    test: HeldOut | None

    def close(self) -> None:
        """Ends their workers."""
        self.train.close()
        for held_out in self.held_out():
            held_out.loader.close()

    def held_out(self) -> tuple[HeldOut, ...]:
        """Returns what is evaluated at the end."""
        return self.valid if self.test is None else (*self.valid, self.test)


@dataclass
class Run:
    """What the loop works with."""

    state: RunState
    runner: Runner
    loaders: Loaders
    journal: Journal
    texts: TextSampler | None = None
    exits: ExitConditions = field(init=False)
    check: StepCheck = field(init=False)
    saver: Saver | None = field(init=False)

    def __post_init__(self) -> None:
        config = self.state.config
        self.exits = ExitConditions(config)
        self.check = StepCheck(config, self.loaders.train.request)
        saves = config.checkpoint.save is not None
        self.saver = Saver(self.state, self.journal.saved) if saves else None

    def close(self) -> None:
        """Ends whatever runs beside the loop, after its end or after an error. Not collective."""
        if self.saver is not None:
            self.saver.abandon()
        self.loaders.close()
        self.journal.finish()


def run_to_end(run: Run) -> None:
    """Trains from where the state stands to the end, then evaluates for the last time.

    One that leaves before its last step does not evaluate, as Megatron-LM: its time is over, the next job goes on.
    """
    steps = run.state.config.steps
    with _published_if_all_ranks_end(run):
        print_rank_0("done with setup ...")
        if not steps.skip_train and not run.exits.is_signalled():
            print_rank_0("training ...")
            _train(run)
            print_datetime("after training is done")
        leaves_early = not steps.skip_train and run.state.iteration < steps.train_iters
        if not leaves_early:
            for held_out in run.loaders.held_out():
                if not run.journal.knows(held_out.name) and not run.exits.is_signalled():
                    _evaluate(run, held_out)
            _write_texts(run)
        run.journal.close_well()


def _train(run: Run) -> None:
    """Steps until the arguments say stop, with evaluations and checkpoints in between."""
    state, saver = run.state, run.saver
    steps, save_interval = state.config.steps, state.config.checkpoint.save_interval
    bar = ProgressBar(total=steps.train_iters, done=state.iteration)
    print_datetime("before the start of training step")
    with (
        _collector(state.config) as collect,
        step_profiler(state.config, lambda: state.iteration) as profiler,
        memory_history(state.config),
    ):
        while state.iteration < steps.train_iters:
            if state.iteration + 1 in steps.iterations_to_skip:
                with _saved_if_batches_fail(run):
                    _leave_out(run)
                bar.step(run.journal.tokens_per_s)
                continue
            profiler.before_step(state.iteration)
            with _saved_if_batches_fail(run):
                _step(run)
            profiler.after_step(state.iteration)
            bar.step(run.journal.tokens_per_s)
            _evaluate_if_due(run)
            if _ends(steps.check_weight_hash_across_dp_replicas_interval, state.iteration):
                _compare_replicas(run)
            stops = run.exits.stops_after(state.iteration)
            if saver is not None and (stops or _ends(save_interval, state.iteration)):
                _save(run, saver, is_last=stops)
                stops = stops or run.exits.is_signalled()
            elif saver is not None and saver.is_saving and not any_rank(not saver.is_written())[0]:
                saver.finish()
            collect(state.iteration)
            if stops:
                break
    bar.close()
    if saver is not None:
        if saver.newest != state.iteration:
            _save(run, saver, is_last=True)
        saver.finish(is_last=True)


def _ends(interval: int | None, iteration: int) -> bool:
    """Returns whether an interval ends with this iteration; without one (None or 0) none does."""
    return False if not interval else iteration % interval == 0


def _evaluate_if_due(run: Run) -> None:
    """Every set of validation, and samples of text, where an interval ends; none before --start-eval-at-iter."""
    steps, iteration = run.state.config.steps, run.state.iteration
    is_due = _ends(steps.eval_interval, iteration) and iteration >= (steps.start_eval_at_iter or 0)
    if not run.loaders.valid or not is_due:
        return
    for held_out in run.loaders.valid:
        _evaluate(run, held_out)
    _write_texts(run)


def _leave_out(run: Run) -> None:
    """Consumes the packs of a step of --iterations-to-skip; nothing follows it, as in Megatron-LM, not even a save."""
    state, progress = run.state, run.runner.progress
    number = state.iteration + 1
    progress.at("batches", number)
    batches, failure = try_next_batches(run.loaders.train)
    check_same_batches(batches, f"step {number}", failure=failure)
    num_packs = run.runner.num_packs(len(batches))
    state.iteration = number
    state.consumed_samples += num_packs
    state.data = run.loaders.train.state_dict()
    print_rank_0(
        f" iteration {number} is left out (--iterations-to-skip): {num_packs} packs are consumed"
    )


def _step(run: Run) -> None:
    """One step, booked."""
    state = run.state
    busy, started, progress = run.journal.stragglers, time.perf_counter(), run.runner.progress
    progress.at("batches", state.iteration + 1)
    with run.runner.timers.measure("batch-generator"), busy.waiting():
        batches, failure = try_next_batches(run.loaders.train)
    waited_s = time.perf_counter() - started
    progress.at("comparison of batches")
    where = f"step {state.iteration + 1}"
    run.journal.name_slow_ranks(check_same_batches(batches, where, busy.told(), failure))
    progress.at("forward and backward")
    try:
        with busy.computing():
            verdict = run.check.compute(run.runner, state.optimizer, state.iteration + 1, batches)
            result = update(run.runner, verdict, len(batches), state.optimizer, state.scheduler)
    except BadStepError as problem:
        run.journal.alert("a bad step ended the run", str(problem))
        raise
    if verdict.striking is not None:
        run.journal.alert("a step stands out", verdict.striking)
    state.iteration += 1
    state.consumed_samples += result.num_packs
    state.data = run.loaders.train.state_dict()
    progress.at("log")
    norm = params_norm(run.runner) if state.config.records.log_params_norm else None
    run.journal.step(batches, result, run.runner.device, waited_s=waited_s, params_norm=norm)


@contextmanager
def _saved_if_batches_fail(run: Run) -> Iterator[None]:
    """Saves the steps before batches that cannot be read, or differ: they were right."""
    try:
        yield
    except (BatchError, BatchesDifferError) as problem:
        if run.saver is not None and run.saver.newest != run.state.iteration:
            try:
                _save(run, run.saver, is_last=True)
            except SaveError as failure:
                raise BatchError(f"{problem}; {failure}") from failure
        raise


@contextmanager
def _published_if_all_ranks_end(run: Run) -> Iterator[None]:
    """Completes what is written in the background where an error ends all ranks together; it was right."""
    try:
        yield
    except ENDS_ALL:
        if run.saver is not None:
            try:
                run.saver.finish()
            except SaveError as failure:
                warn(str(failure))
        raise


def _compare_replicas(run: Run) -> None:
    """Raises ReplicasDifferError on every rank if ranks that share weights hold different ones."""
    with whole_parameters(run.runner):
        check_replicas(run.state.model, run.state.iteration)
    print_rank_0(f" weights of all replicas are equal after {run.state.iteration} iterations")


def _save(run: Run, saver: Saver, *, is_last: bool) -> None:
    """A checkpoint of the run as it is now, or its beginning."""
    run.runner.progress.at("save")
    with whole_parameters(run.runner), run.runner.timers.measure("save-checkpoint"):
        saver.save(is_last=is_last)


def _evaluate(run: Run, held_out: HeldOut) -> None:
    """The loss on held-out documents, logged; nothing if the exit signal comes before its end."""
    signalled = run.exits.is_signalled
    run.runner.progress.at(f"evaluation ({held_out.name})")
    with (
        _saved_if_batches_fail(run),
        whole_parameters(run.runner),
        run.runner.timers.measure("evaluate"),
    ):
        loss = evaluate(run.runner, held_out.loader, held_out.num_batches, is_cut=signalled)
    if not signalled():
        run.journal.evaluated(held_out.name, f"iteration {run.state.iteration}", loss)


def _write_texts(run: Run) -> None:
    """Samples of the model as it is now, once; none where the run is told to leave."""
    iteration = run.state.iteration
    if run.texts is None or run.journal.has_texts_of(iteration) or run.exits.is_signalled():
        return
    run.runner.progress.at("samples of text")
    run.journal.wrote(run.texts.sample(iteration))


@contextmanager
def _collector(config: TrainConfig) -> Iterator[Callable[[int], None]]:
    """A function that collects garbage where `--manual-gc` wants it.

    Python's own collector is off meanwhile.
    """
    if not config.steps.manual_gc:
        yield lambda iteration: None
        return
    gc.disable()
    gc.collect()

    def collect(iteration: int) -> None:
        if _ends(config.steps.manual_gc_interval, iteration):
            gc.collect()

    try:
        yield collect
    finally:
        gc.enable()
