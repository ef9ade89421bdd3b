"""One step, or one evaluation: micro-batches through Megatron's schedule, then the optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_cp.data.batch import PlannedBatch
from megatron_cp.data.loader import PackedLoader
from megatron_cp.data.worker import WorkerError
from megatron_cp.mcore.loss import LOSS_NAME
from megatron_cp.mcore.parts.qk_clip import clip_qk, forget_logits
from megatron_cp.training.bad_steps.attempt import Attempt, LocalGradients, Verdict
from megatron_cp.training.config import TrainConfig
from megatron_cp.training.logging.auxiliary import NO_LOSSES, AuxiliaryLosses, auxiliary_losses
from megatron_cp.training.logging.lines import print_rank_last
from megatron_cp.training.logging.timers import Timers
from megatron_cp.training.same_batches import check_same_batches
from megatron_cp.training.watchdog import Progress

ForwardStep = Callable[[TrainConfig, PlannedBatch, Any, torch.device], tuple[Any, Any]]


@dataclass(frozen=True)
class StepResult:
    """What a step came to. Loss and tokens are of the whole global batch, known on the last pipeline stage alone."""

    num_packs: int
    loss: float | None
    valid_tokens: int
    grad_norm: float | None
    num_zeros: int | None
    updated: bool
    loss_scale: float
    auxiliary: AuxiliaryLosses
    """Of a step that was left out there are none."""
    max_attention_logit: float | None = None
    """The largest of all heads, layers and ranks, where it was asked for."""

    @property
    def loss_is_no_number(self) -> bool:
        """Returns whether there is a loss and it is infinite or NaN."""
        return self.loss is not None and not math.isfinite(self.loss)


@dataclass(frozen=True)
class Runner:
    """How this rank runs micro-batches; shared by training and evaluation."""

    config: TrainConfig
    model: list[Any]
    device: torch.device
    forward_step: ForwardStep
    timers: Timers
    gradients: LocalGradients
    progress: Progress

    def sums(self, batches: list[PlannedBatch], *, forward_only: bool) -> torch.Tensor | None:
        """Returns (loss sum, tokens) of each micro-batch on this rank alone, float64 [M, 2].

        None before the last pipeline stage. Collective: every rank calls it, with the batches of its replica.
        """
        plan = batches[0].plans["full"]
        reports = get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=self._iterators(batches),
            model=self.model if len(self.model) > 1 else self.model[0],
            num_microbatches=len(batches),
            # a rank's share must not vary between packs
            seq_length=plan.tokens_per_rank * self.config.parallel.context_parallel_size,
            micro_batch_size=1,  # packs of a micro-batch are joined into one sequence
            forward_only=forward_only,
        )
        if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            return None
        return torch.stack([report[LOSS_NAME].double() for report in reports])

    def num_packs(self, num_microbatches: int) -> int:
        """Returns the packs of a training step, over all replicas."""
        steps, replicas = self.config.steps, self.config.parallel.data_parallel_size
        return num_microbatches * steps.micro_batch_size * replicas

    def _iterators(self, batches: list[PlannedBatch]) -> Any:
        """Returns one iterator per model chunk.

        Each walks through the same micro-batches at its own pace.
        """
        if len(self.model) == 1:
            return iter(batches)
        return [iter(batches) for _ in self.model]

    def _forward(self, batches: Iterator[PlannedBatch], chunk: Any) -> tuple[Any, Any]:
        """Runs one micro-batch through a chunk: the forward_step_func of Megatron's schedules."""
        self.progress.tick()
        return self.forward_step(self.config, next(batches), chunk, self.device)


def next_batches(loader: PackedLoader) -> list[PlannedBatch]:
    """Returns the micro-batches of the next step."""
    return [next(loader) for _ in range(loader.num_microbatches)]


def try_next_batches(loader: PackedLoader) -> tuple[list[PlannedBatch], Exception | None]:
    """Returns the micro-batches of the next step, or why there are none: all ranks are to hear of it together."""
    try:
        return next_batches(loader), None
    except (ValueError, NotImplementedError, OSError, WorkerError) as problem:
        return [], problem


def over_all_ranks(sums_M2: torch.Tensor | None) -> torch.Tensor | None:
    """Returns the sum over micro-batches, replicas and context ranks, [2]; None for None.

    Collective over the ranks of each pipeline stage.
    """
    if sums_M2 is None:
        return None
    total = sums_M2.sum(dim=0)
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    return total


def forward_backward(runner: Runner, batches: list[PlannedBatch], optimizer: Any) -> Attempt:
    """Returns what forward and backward over one global batch came to; the gradients stay in place.

    Collective: every rank calls it.
    """
    for chunk in runner.model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    if _looks_at_logits(runner.config):
        forget_logits(runner.model)  # of an attempt that was not applied
    sums_M2 = runner.sums(batches, forward_only=False)
    total = over_all_ranks(sums_M2)
    loss, tokens = (None, 0) if total is None else _mean(total)
    return Attempt(loss, tokens, sums_M2, float(runner.gradients.norm))


def update(
    runner: Runner, verdict: Verdict, num_microbatches: int, optimizer: Any, scheduler: Any
) -> StepResult:
    """Clips and updates, and returns what the step came to; a step that is not to be applied changes nothing.

    Collective: every rank calls it, behind forward and backward of `num_microbatches`.
    """
    config, attempt = runner.config, verdict.attempt
    updated, grad_norm, num_zeros, largest = False, attempt.grad_norm, None, None
    if verdict.is_applied:
        runner.progress.at("update")
        runner.timers("optimizer").start(barrier=config.records.barrier_with_L1_time)
        updated, grad_norm, num_zeros = optimizer.step()
        largest = _clip_logits(runner, clips=updated)
        runner.timers("optimizer").stop()
    num_packs = runner.num_packs(num_microbatches)
    if updated:
        scheduler.step(increment=num_packs)
    return StepResult(
        num_packs=num_packs,
        loss=attempt.loss,
        valid_tokens=attempt.valid_tokens,
        grad_norm=None if grad_norm is None else float(grad_norm),
        num_zeros=None if num_zeros is None else int(num_zeros),
        updated=bool(updated),
        loss_scale=float(optimizer.get_loss_scale()),
        auxiliary=auxiliary_losses(config, num_microbatches) if verdict.is_applied else NO_LOSSES,
        max_attention_logit=largest,
    )


def _clip_logits(runner: Runner, *, clips: bool) -> float | None:
    """Returns the largest attention logit of the step, after QK-Clip; None where neither was asked for.

    A step that updated nothing (fp16 overflowed) clips nothing.
    """
    if not _looks_at_logits(runner.config):
        return None
    largest = clip_qk(runner.model, clips=clips and runner.config.model.qk_clip)
    over_all = torch.tensor(largest, device=runner.device)
    dist.all_reduce(over_all, op=dist.ReduceOp.MAX)
    return float(over_all)


def _looks_at_logits(config: TrainConfig) -> bool:
    """Returns whether attention keeps its largest logits."""
    return config.model.qk_clip or config.model.log_max_attention_logit


def _mean(total: torch.Tensor) -> tuple[float | None, int]:
    """Returns mean loss and number of tokens from (sum, count); None where no token counts."""
    loss_sum, count = total.tolist()
    if count == 0 and loss_sum == 0:
        return None, 0
    return loss_sum / max(count, 1.0), int(count)


def evaluate(
    runner: Runner, loader: PackedLoader, num_batches: int, *, is_cut: Callable[[], bool]
) -> float | None:
    """Returns mean loss per token over the next `num_batches` batches; the loader goes back afterwards.

    None before the last pipeline stage, and where no token counts. It ends early, on every rank, where `is_cut()` holds
    on every rank. Collective: every rank calls it. Raises BatchError and BatchesDifferError as `check_same_batches`.
    """
    start = loader.state_dict()
    for chunk in runner.model:
        chunk.eval()
    total = None
    with torch.no_grad(), without_jitter(runner.model):
        for number in range(num_batches):
            if is_cut():
                break
            batches, failure = try_next_batches(loader)
            check_same_batches(batches, f"evaluation batch {number}", failure=failure)
            part = over_all_ranks(runner.sums(batches, forward_only=True))
            if part is not None:
                total = part if total is None else total + part
    for chunk in runner.model:
        chunk.train()
    loader.load_state_dict(start)
    if total is None:
        return None
    loss, _ = _mean(total)
    if loss is None:
        print_rank_last("warning: no token of the evaluation counts in the loss: there is none")
    return loss


@contextmanager
def without_jitter(chunks: list[Any]) -> Iterator[None]:
    """Routes tokens as the weights say.

    Megatron jitters the input of a router in evaluation too, and draws from the random stream of training for it.
    """
    modules = (module for chunk in chunks for module in chunk.modules())
    configs = {id(module.config): module.config for module in modules if hasattr(module, "config")}
    kept = [
        (config, config.moe_input_jitter_eps)
        for config in configs.values()
        if getattr(config, "moe_input_jitter_eps", None) is not None
    ]
    try:
        for config, _ in kept:
            config.moe_input_jitter_eps = None
        yield
    finally:
        for config, eps in kept:
            config.moe_input_jitter_eps = eps


@contextmanager
def whole_parameters(runner: Runner) -> Iterator[None]:
    """Inside, every rank holds complete parameters, also with --overlap-param-gather, which gathers them in forward."""
    if not runner.config.parallel.overlap_param_gather:
        yield
        return
    for chunk in runner.model:
        chunk.disable_forward_pre_hook()
    try:
        yield
    finally:
        for chunk in runner.model:
            chunk.enable_forward_pre_hook()
