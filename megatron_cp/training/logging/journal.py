"""Keeps the run's books: counts, averages between log lines, prints Megatron-LM's lines and feeds the trackers."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_cp.comm.groups import agreement_group
from megatron_cp.data.batch import PlannedBatch
from megatron_cp.data.prompts import TextSample
from megatron_cp.mcore.loss import LOSS_NAME
from megatron_cp.training.checkpoint.save import Saved
from megatron_cp.training.logging.closing import Summary, closing_box, flag_of_more, next_lines
from megatron_cp.training.logging.energy import EnergyMeter
from megatron_cp.training.logging.flops import ModelFlops
from megatron_cp.training.logging.lines import (
    StepReport,
    evaluation_lines,
    print_rank_last,
    progress_line,
    told_if_refused,
    training_line,
)
from megatron_cp.training.logging.metrics import (
    memory_line,
    memory_metrics,
    plan_metrics,
    work_of_step,
)
from megatron_cp.training.logging.opening import device_name, open_tracker
from megatron_cp.training.logging.records import plan_sample
from megatron_cp.training.logging.speed import Clock, Speed, peak_tflops
from megatron_cp.training.logging.stragglers import Stragglers
from megatron_cp.training.logging.timers import Timers
from megatron_cp.training.logging.tracking import Tracker
from megatron_cp.training.logging.wandb_run import Media
from megatron_cp.training.logging.window import Window
from megatron_cp.training.optim import learning_rate
from megatron_cp.training.run_state import RunState
from megatron_cp.training.setup import own_place
from megatron_cp.training.step import StepResult
from megatron_cp.training.whole_files import append_whole


class Journal:
    """The books of one run. Every rank calls every method; the last rank prints and tracks."""

    def __init__(
        self,
        state: RunState,
        flops: ModelFlops,
        described: dict[str, Any],
        timers: Timers,
        make_media: Callable[[Path], Media] | None = None,
    ) -> None:
        """Opens the trackers on the last rank; `described` is what run.json says of data and samples of text."""
        self._make_media = make_media
        self._state, self._flops, self._timers = state, flops, timers
        stage = parallel_state.get_pipeline_model_parallel_rank()
        self.stragglers = Stragglers(stage, state.config.records.log_interval)
        self._energy = EnergyMeter() if state.config.records.log_energy else None
        self._peak = peak_tflops(device_name(), bf16=state.config.model.bf16)
        self._keeps = dist.get_rank() == dist.get_world_size() - 1
        self._tracker = open_tracker(state, described) if self._keeps else Tracker()
        self._line, self._row = Window(), Window()
        self._last: dict[str, Any] = {}
        self._summary = Summary()
        self._evaluated: dict[str, int] = {}
        self._newest_texts = -1
        self.tokens_per_s = 0.0  # of the newest step, a mean since the last log line

    def step(
        self,
        batches: list[PlannedBatch],
        result: StepResult,
        device: torch.device,
        *,
        waited_s: float = 0.0,
        params_norm: float | None = None,
    ) -> None:
        """Books one training step, and prints a line every `--log-interval` steps.

        `waited_s`: how long this rank waited for the batches, inside the step.
        """
        config, state = self._state.config, self._state
        work = work_of_step(batches, device, self._flops.most_keys)
        operations = self._flops.of_step(work.num_tokens, work.area, work.read)
        state.flops += operations
        self._summary.step(result.loss, work.num_tokens)
        for window in (self._line, self._row):
            window.clock.step(work.num_tokens, operations, waited_s)
            window.step(result, is_hybrid=batches[0].spans_replicas)
        if result.loss_is_no_number:
            self.alert("loss is not finite", f"step {state.iteration}: lm loss {result.loss}")
        self.tokens_per_s = self._line.clock.tokens_per_s()
        if state.iteration % config.records.tensorboard_log_interval == 0:
            if self._keeps:
                self._track(batches, result, params_norm, device)
            self._row = Window()
        self._sample(batches)
        if state.iteration % config.records.log_interval == 0:
            self._print(result, params_norm)

    def name_slow_ranks(self, told: list[list[int]]) -> None:
        """Names ranks that stay behind, from what every rank told of itself; nothing where none did."""
        for slow in self.stragglers.stay_behind(told) if told[0] else ():
            where = [f"{own_place()} on {socket.gethostname()}"]
            assert dist.group.WORLD is not None
            group = agreement_group(dist.group.WORLD)
            dist.broadcast_object_list(where, src=slow.rank, group=group)
            print_rank_last(f"warning: step {self._state.iteration}: {where[0]} {slow}")
            self.alert("a rank is slow", f"{where[0]} {slow}")

    def alert(self, title: str, text: str) -> None:
        """Tells those who watch the run in wandb that something needs them."""
        self._tracker.alert(title, text)

    def _track(
        self,
        batches: list[PlannedBatch],
        result: StepResult,
        norm: float | None,
        device: torch.device,
    ) -> None:
        """One row under Megatron-LM's keys, and ours."""
        config, state = self._state.config, self._state
        clock = self._row.clock
        row: dict[str, Any] = {
            LOSS_NAME: result.loss,
            **result.auxiliary.means,
            **result.auxiliary.by_layer,
            "learning-rate": learning_rate(state.optimizer),
            "grad-norm": result.grad_norm,
            "num-zeros": result.num_zeros,
            "params-norm": norm,
            "max_attention_logit": result.max_attention_logit,
            "batch-size": result.num_packs,
            "loss-scale": result.loss_scale,
            "samples vs steps": state.consumed_samples,
            "iteration-time": clock.seconds,
            "throughput": clock.tflops(config.parallel.world_size),
            **self._speed(self._row).row(),
            "loss/valid_tokens": result.valid_tokens,
            "grad/nonfinite": float(self._row.nonfinite),
            "grad/skipped": float(self._row.skipped),
            "data/wait_s": clock.waited_s / clock.steps,
            "data/cursor": float(_documents_drawn(state.data)),
            "restart/count": float(state.restarts),
            **plan_metrics(config, batches),
        }
        if config.records.log_world_size_to_tensorboard:
            row["world-size"] = config.parallel.world_size
        if config.records.log_memory_to_tensorboard:
            row |= memory_metrics(device)
        row = {key: value for key, value in row.items() if value is not None}
        self._last = row
        self._summary.row(row)
        self._tracker.log(state.iteration, row, samples=state.consumed_samples)

    def _sample(self, batches: list[PlannedBatch]) -> None:
        """Keeps the packs of the first steps for the report."""
        for item in batches[: self._tracker.num_wanted_plan_samples]:
            batch, plan = item.batch, item.plans[self._state.config.model.shown_mask]
            sample = plan_sample(
                self._state.iteration,
                plan.mask,
                plan,
                batch.document_lengths,
                batch.document_kinds,
            )
            self._tracker.add_plan_sample(sample)

    def _speed(self, window: Window) -> Speed:
        config, clock = self._state.config, window.clock
        world_size = config.parallel.world_size
        return Speed(
            tokens_per_s=clock.tokens_per_s(),
            world_size=world_size,
            mfu=None if self._peak is None else clock.tflops(world_size) / self._peak,
            hybrid_steps=window.hybrid if config.parallel.spans_replicas else None,
            remaining_s=clock.seconds * (config.steps.train_iters - self._state.iteration),
        )

    def _print(self, result: StepResult, norm: float | None) -> None:
        """Megatron-LM's line over the steps since the last one."""
        config, state, line = self._state.config, self._state, self._line
        report = StepReport(
            iteration=state.iteration,
            train_iters=config.steps.train_iters,
            consumed_samples=state.consumed_samples,
            elapsed_ms=line.clock.seconds * 1e3,
            tflops=line.clock.tflops(config.parallel.world_size)
            if config.records.log_throughput
            else None,
            learning_rate=learning_rate(state.optimizer),
            global_batch_size=result.num_packs,
            losses=line.mean_losses(),
            grad_norm=result.grad_norm,
            num_zeros=None if result.num_zeros is None else float(result.num_zeros),
            params_norm=norm,
            loss_scale=result.loss_scale,
            skipped_iterations=line.skipped,
            nan_iterations=line.nan,
            speed=self._speed(line).fields(),
        )
        print_rank_last(training_line(report))
        self._print_where_time_went()
        self._line = Window()
        self._start_energy()

    def _print_where_time_went(self) -> None:
        """Timers, slow ranks and energy since the last line, where they are asked for."""
        options, state, num_steps = self._state.config.records, self._state, self._line.num_steps
        text, row = self._timers.report(num_steps)
        lines = [text] if text else []
        if options.log_straggler:
            line, slow = self.stragglers.report(num_steps, options.straggler_minmax_count)
            lines.append(line)
            row |= slow
        if self._energy is not None:
            clock, world_size = self._line.clock, self._state.config.parallel.world_size
            line, used = self._energy.report(clock.steps, clock.seconds, world_size)
            lines.append(line)
            row |= used
        if options.log_memory_interval and state.iteration % options.log_memory_interval == 0:
            lines.append(memory_line())
        if lines:
            print_rank_last("\n".join(lines))
        if row:
            self._tracker.log(state.iteration, row, samples=state.consumed_samples)

    def restart_clock(self) -> None:
        """The next steps are timed from now on."""
        self._row.clock, self._line.clock = Clock(), Clock()
        self._start_energy()

    def _start_energy(self) -> None:
        if self._energy is not None:
            self._energy.start()

    def evaluated(self, split: str, where: str, loss: float | None) -> None:
        """Books the loss on `split` documents; its time is not that of a step."""
        self.restart_clock()
        self._evaluated[split] = self._state.iteration
        if loss is None:
            return
        if split != "test":
            self._summary.evaluated(split, self._state.iteration, loss)
        perplexity = math.exp(min(20.0, loss))
        print_rank_last(evaluation_lines(where, split, {LOSS_NAME: loss}, {LOSS_NAME: perplexity}))
        row = {f"{LOSS_NAME} {split}": loss}
        if self._state.config.records.log_validation_ppl_to_tensorboard:
            row[f"{LOSS_NAME} {split} ppl"] = perplexity
        self._last |= row
        self._tracker.log(self._state.iteration, row, samples=self._state.consumed_samples)

    def knows(self, split: str) -> bool:
        """Whether the model as it is now has been evaluated on `split`; the same on every rank."""
        return self._evaluated.get(split) == self._state.iteration

    def wrote(self, texts: list[TextSample]) -> None:
        """Books samples of text of the model as it is now."""
        self.restart_clock()
        self._newest_texts = self._state.iteration
        self._tracker.add_texts([one.row() for one in texts])

    def has_texts_of(self, iteration: int) -> bool:
        """Whether samples of the model after so many steps were written; the same on every rank."""
        return self._newest_texts == iteration

    def saved(self, saved: Saved) -> None:
        """Books a checkpoint; the time that training waited for it is not that of a step."""
        self.restart_clock()
        config, state = self._state.config, self._state
        row = {"ckpt/save_s": saved.save_s, "ckpt/blocked_s": saved.blocked_s}
        self._tracker.log(state.iteration, row, samples=state.consumed_samples)
        folder = config.checkpoint.save
        if config.records.log_progress and folder is not None and dist.get_rank() == 0:
            line = progress_line(config.parallel.world_size, saved.iteration, saved.flops)
            with told_if_refused("progress.txt"):
                append_whole(Path(folder) / "progress.txt", line)

    def close_well(self) -> None:
        """Prints the box of a run that came to its end; nothing where no step was taken."""
        config, steps = self._state.config, self._state.iteration
        if self._summary.num_tokens:
            folder, more = self._tracker.offline_folder, flag_of_more(config, steps)
            lines = next_lines(
                config.records.run_dir,
                config.checkpoint.save,
                folder,
                more,
                self._tracker.wandb_run_id,
            )
            print_rank_last(closing_box(self._summary, steps, lines))

    def finish(self) -> None:
        """Closes the trackers."""
        run_dir, make_media = self._state.config.records.run_dir, self._make_media
        self._tracker.finish(
            {
                "iteration": self._state.iteration,
                "consumed_samples": self._state.consumed_samples,
                "flops": self._state.flops,
                **self._last,
            },
            None if run_dir is None or make_media is None else lambda: make_media(Path(run_dir)),
        )


def _documents_drawn(data: dict[str, Any]) -> int:
    """Returns the documents drawn in the epochs that the corpora are in; samples of Megatron's packing."""
    corpora = data.get("corpora", [data])
    return sum(int(corpus.get("cursor", corpus.get("position", 0))) for corpus in corpora)
