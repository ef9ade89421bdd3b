"""What becomes of each step: applied, left out, or the end of the run. Every rank decides alike.

    forward, backward ──> bad on any rank? ──> the same once more ──> which document ──> told, kept, left out or stop

    loss not finite, gradient not finite        bad: never applied
    10 times the largest of the first 100       striking: applied, and told

Each rank looks at its own numbers; one all-reduce of four numbers makes all of them decide alike.

Source: the modes of `--rerun-mode` are those of Megatron-Core's rerun state machine, with two differences: a bad
result is not computed again on another GPU after a restart, and what caused it is searched for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_cp.data.batch import PlannedBatch, PlanRequest
from megatron_cp.training.bad_steps.attempt import Attempt, Ceiling, Verdict
from megatron_cp.training.bad_steps.probe import Before, Culprit, Probe
from megatron_cp.training.bad_steps.record import Finding, gathered, keep, view_of
from megatron_cp.training.config import TrainConfig
from megatron_cp.training.logging.lines import print_rank_0, told_if_refused
from megatron_cp.training.step import Runner, forward_backward
from megatron_cp.training.together import any_rank

EXIT_CODE = 17
"""Megatron-LM's for a result that was rejected."""


class BadStepError(RuntimeError):
    """A step is bad and ends the run; the same line on every rank."""


@dataclass
class Repeats:
    """How steps differ when they are computed twice (`--rerun-mode report_stats`)."""

    num_steps: int = 0
    num_equal: int = 0
    largest: float = 0.0

    def add(self, first: Attempt, second: Attempt) -> None:
        """Books one step."""
        self.num_steps += 1
        self.num_equal += first.equals(second)
        pairs = zip(first.numbers().tolist(), second.numbers().tolist(), strict=True)
        for one, other in pairs:
            if math.isfinite(one) and math.isfinite(other) and one != other:
                self.largest = max(self.largest, abs(one - other) / max(abs(one), abs(other)))

    def line(self) -> str:
        """Returns what rank 0 prints of its own numbers."""
        return (
            f" steps computed twice: {self.num_steps} | with the same bits: {self.num_equal} | largest "
            f"relative difference of a loss sum or gradient norm: {self.largest:.3E} |"
        )


@dataclass
class StepCheck:
    """Computes steps and judges them. Every rank calls it for every step."""

    config: TrainConfig
    request: PlanRequest
    in_a_row: int = 0
    repeats: Repeats = field(default_factory=Repeats)
    loss_ceiling: Ceiling = field(default_factory=Ceiling)
    gradient_ceiling: Ceiling = field(default_factory=Ceiling)

    def compute(
        self, runner: Runner, optimizer: Any, iteration: int, batches: list[PlannedBatch]
    ) -> Verdict:
        """Returns what forward and backward of step `iteration` came to, and whether it is to be applied.

        Collective. Raises BadStepError on every rank where a bad step ends the run.
        """
        steps = self.config.steps
        checks = steps.check_for_nan_in_loss_and_grad
        twice = steps.rerun_mode == "report_stats"
        before = Before.of(runner) if checks or twice else None
        attempt = forward_backward(runner, batches, optimizer)
        if twice:
            assert before is not None
            again = _again(runner, batches, optimizer, before)
            self.repeats.add(attempt, again)
            if iteration % self.config.records.log_interval == 0:
                print_rank_0(self.repeats.line())
        what, striking = self._judge(attempt, iteration)
        if not checks or what is None:
            self.in_a_row = 0
            return Verdict(attempt, True, striking)
        assert before is not None
        self.in_a_row += 1
        differs = None
        if steps.rerun_mode == "validate_results":
            differs = not attempt.equals(_again(runner, batches, optimizer, before))
        probe = Probe(runner, batches, before, self.request)
        culprit = probe.culprit()
        found = {} if culprit is None else self._found(probe, culprit, batches, iteration)
        views = gathered(view_of(attempt, differs=differs, **found))
        self._tell(Finding(iteration, what, views, culprit))
        before.restore(runner, len(batches))  # routers count tokens for the update that is not made
        return Verdict(attempt, False, striking)

    def _judge(self, attempt: Attempt, iteration: int) -> tuple[str | None, str | None]:
        """Returns what is bad on any rank and what strikes, each None where nothing does. Collective."""
        steps, loss, norm = self.config.steps, attempt.loss, attempt.grad_norm
        wants = (steps.check_for_spiky_loss, steps.check_for_large_grads)
        if not (steps.check_for_nan_in_loss_and_grad or any(wants)):
            return None, None
        bad_loss, bad_gradient, spike, large = any_rank(
            loss is not None and not math.isfinite(loss),
            not math.isfinite(norm),
            wants[0] and loss is not None and self.loss_ceiling.is_reached_by(loss),
            wants[1] and self.gradient_ceiling.is_reached_by(norm),
        )
        striking = _striking(attempt, iteration, is_loss=spike) if spike or large else None
        if striking is not None:
            print_rank_0(f"warning: {striking}")
        if bad_loss and bad_gradient:
            return "the loss and the gradient are", striking
        return "the loss is" if bad_loss else "the gradient is" if bad_gradient else None, striking

    def _found(
        self, probe: Probe, culprit: Culprit, batches: list[PlannedBatch], iteration: int
    ) -> dict[str, Any]:
        """Returns what this rank knows of the cause; the first of the replica keeps the batch."""
        found: dict[str, Any] = {"module": probe.first_module(culprit)}
        found["parameter"] = probe.first_parameter()
        is_first = (
            parallel_state.get_context_parallel_rank() == 0
            and parallel_state.get_model_parallel_group().rank() == 0
        )
        if is_first and parallel_state.get_data_parallel_rank() == culprit.replica:
            batch = batches[culprit.micro_batch].batch
            found["documents"] = tuple(batch.document_names[i] for i in culprit.documents)
            folder = self.config.records.run_dir
            if folder is not None:
                with told_if_refused(f"the micro-batch of step {iteration}"):
                    found["kept"] = keep(Path(folder), iteration, batch)
        return found

    def _tell(self, finding: Finding) -> None:
        """Prints a bad step that is left out. Raises BadStepError where it ends the run."""
        steps, folder, line = self.config.steps, self.config.records.run_dir, finding.line()
        if folder is not None and dist.get_rank() == 0:
            with told_if_refused(f"the record of step {finding.iteration}"):
                finding.write(Path(folder))
        if steps.on_bad_step == "stop":
            raise BadStepError(
                f"{line}; nothing was updated: mend the document, lower --lr, or leave such steps "
                "out with --on-bad-step skip"
            )
        if self.in_a_row >= steps.bad_steps_in_a_row:
            raise BadStepError(
                f"{line}; {self.in_a_row} bad steps in a row, --bad-steps-in-a-row allows fewer: go "
                "back with --ckpt-step, or lower --lr"
            )
        print_rank_0(f"warning: {line}; the step is left out")


def _again(runner: Runner, batches: list[PlannedBatch], optimizer: Any, before: Before) -> Attempt:
    """Returns the same step computed once more."""
    before.restore(runner, len(batches))
    return forward_backward(runner, batches, optimizer)


def _striking(attempt: Attempt, iteration: int, *, is_loss: bool) -> str:
    """Returns a line on the rank with the largest number. Collective."""
    views = gathered(view_of(attempt))
    name, flag = ("gradient norm", "--check-for-large-grads")
    view = max(views, key=lambda view: view.grad_norm)
    value = f"{view.grad_norm:.4g} on {view.place}"
    if is_loss:
        name, flag = ("loss", "--check-for-spiky-loss")
        view = max(views, key=lambda view: max(view.losses, default=-math.inf))
        most = max(view.losses)
        value = f"{most:.4g} in micro-batch {view.losses.index(most)} of {view.place}"
    return (
        f"step {iteration}: the {name} is at least 10 times the largest of the first 100 "
        f"steps ({flag}); the most is {value}; the step is applied"
    )
