"""Finds what made a step bad: micro-batch, document, module. Nothing is updated, no gradient leaves its rank.

    every micro-batch alone ──> the first bad one ──> half of its documents, the other half ... ──> one document

Documents are tried as a batch of their own, so what is found is bad alone. All ranks take every turn of the search
together: replicas where nothing is searched run a micro-batch of theirs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_model_config, unwrap_model

from megatron_cp.comm.groups import agreement_group
from megatron_cp.data.batch import PlannedBatch, PlanRequest, plan_batch
from megatron_cp.training.bad_steps.attempt import gradient_norm
from megatron_cp.training.logging.auxiliary import auxiliary_losses
from megatron_cp.training.random_states import own_random_states, restore_random_states
from megatron_cp.training.step import Runner, whole_parameters


@dataclass(frozen=True)
class Before:
    """What a forward pass reads and changes beside weights: random states, buffers, scales of fp8."""

    random: dict[str, Any]
    buffers: list[torch.Tensor]
    scaling: dict[tuple[int, str, str, str], torch.Tensor]

    @classmethod
    def of(cls, runner: Runner) -> Before:
        """Returns a copy of them."""
        scaling = {place: tensor.clone() for place, tensor in _fp8_scaling(runner).items()}
        return cls(own_random_states(), [x.clone() for x in _module_buffers(runner)], scaling)

    def restore(self, runner: Runner, num_microbatches: int) -> None:
        """Puts them back, and begins the sums of auxiliary losses anew. Collective with experts."""
        restore_random_states(self.random)
        for buffer, value in zip(_module_buffers(runner), self.buffers, strict=True):
            buffer.copy_(value)
        for place, tensor in _fp8_scaling(runner).items():
            if place in self.scaling:  # Transformer Engine makes them in the first pass of all
                tensor.copy_(self.scaling[place])
        auxiliary_losses(runner.config, num_microbatches)


def _module_buffers(runner: Runner) -> list[torch.Tensor]:
    return [buffer for chunk in unwrap_model(runner.model) for buffer in chunk.buffers()]


def _fp8_scaling(runner: Runner) -> dict[tuple[int, str, str, str], torch.Tensor]:
    """Returns the scales and the history that delayed scaling keeps from pass to pass, and changes in place.

    Other recipes find the scales of a tensor in the tensor. Never run on a GPU: by the names of Transformer Engine.
    """
    found = {}
    for number, chunk in enumerate(unwrap_model(runner.model)):
        for module_name, module in chunk.named_modules():
            for key, state in getattr(module, "fp8_meta", {}).items():
                for name in ("scale", "scale_inv", "amax_history"):
                    if torch.is_tensor(tensor := getattr(state, name, None)):
                        found[number, module_name, str(key), name] = tensor
    return found


@dataclass(frozen=True)
class Culprit:
    """Where a bad number comes from: micro-batch `micro_batch` of replica `replica`."""

    replica: int
    micro_batch: int
    documents: tuple[int, ...]
    """Of that micro-batch; several where only together they are bad."""


class Probe:
    """Runs parts of one global batch on all ranks. Every method is collective."""

    def __init__(
        self, runner: Runner, batches: list[PlannedBatch], before: Before, request: PlanRequest
    ) -> None:
        self._runner, self._batches, self._before, self._request = runner, batches, before, request
        # A batch that spans replicas is the same on all of them: they are one.
        spans = batches[0].spans_replicas
        self._replica = 0 if spans else parallel_state.get_data_parallel_rank()
        self._num_replicas = 1 if spans else parallel_state.get_data_parallel_world_size()

    def culprit(self) -> Culprit | None:
        """Returns the first bad micro-batch and its documents; None where each is good by itself."""
        for number, batch in enumerate(self._batches):
            votes = self._votes(self._is_bad(batch))
            if 1 in votes:
                replica = votes.index(1)
                return Culprit(replica, number, self._documents(replica, number))
        return None

    def _documents(self, replica: int, number: int) -> tuple[int, ...]:
        """Returns the smallest half of halves of documents that is still bad; two runs a halving."""
        batch = self._batches[number]
        size = self._votes(len(batch.batch.document_lengths))[replica]
        found = tuple(range(size))
        while len(found) > 1:
            middle = len(found) // 2
            for half in (found[:middle], found[middle:]):
                part = self._part(batch, half) if replica == self._replica else batch
                if self._votes(self._is_bad(part))[replica]:
                    found = half
                    break
            else:
                break
        return found

    def _part(self, batch: PlannedBatch, documents: tuple[int, ...]) -> PlannedBatch:
        request = replace(self._request, cp_size=batch.plans["full"].cp_size)
        part = plan_batch(batch.batch.only(documents), request)
        return replace(part, spans_replicas=batch.spans_replicas)

    def first_module(self, culprit: Culprit) -> tuple[int, str] | None:
        """Returns the first module of this rank that makes what is not finite from what is.

        With its number among the modules that ran; None where no module of this rank does.
        """
        batch = self._batches[culprit.micro_batch]
        if culprit.replica == self._replica:
            batch = self._part(batch, culprit.documents)
        found: list[tuple[int, str]] = []
        calls = itertools.count()

        def hook(name: str) -> Any:
            def look(module: Any, inputs: Any, output: Any) -> None:
                number = next(calls)
                if not found and not _is_finite(output) and _is_finite(inputs):
                    found.append((number, name))

            return look

        with ExitStack() as hooks:
            for chunk in unwrap_model(self._runner.model):
                for name, module in chunk.named_modules():
                    if name:
                        handle = module.register_forward_hook(hook(name))
                        hooks.callback(handle.remove)
            self._is_bad(batch)
        return found[0] if found else None

    def first_parameter(self) -> str | None:
        """Returns the parameter nearest to the loss with a gradient that is not finite in the last run."""
        bad = None
        for chunk in unwrap_model(self._runner.model):
            for name, parameter in chunk.named_parameters():
                if hasattr(parameter, "main_grad") and not _is_finite(parameter.main_grad):
                    bad = name
        return bad

    def _is_bad(self, batch: PlannedBatch) -> bool:
        """Whether this rank sees a loss or gradient that is not finite for this micro-batch alone."""
        runner = self._runner
        # Interleaved stages want as many micro-batches as they take in a row.
        is_interleaved = len(runner.model) > 1
        config = get_model_config(runner.model[0])
        repeats = config.microbatch_group_size_per_vp_stage if is_interleaved else 1
        with whole_parameters(runner), _alone(runner):
            self._before.restore(runner, repeats)
            sums_M2 = runner.sums([batch] * repeats, forward_only=False)
        is_finite = bool(gradient_norm(runner.model).isfinite())
        return not is_finite or (sums_M2 is not None and not _is_finite(sums_M2))

    def _votes(self, own: int) -> list[int]:
        """Returns the largest value that a rank of each replica gives."""
        votes_R = torch.zeros(self._num_replicas, dtype=torch.int64)
        votes_R[self._replica] = own
        assert dist.group.WORLD is not None
        group = agreement_group(dist.group.WORLD)
        dist.all_reduce(votes_R, op=dist.ReduceOp.MAX, group=group)
        return [int(vote) for vote in votes_R]


@contextmanager
def _alone(runner: Runner) -> Iterator[None]:
    """Within the block backward passes keep gradients on their ranks, and begin from zero."""
    config = get_model_config(runner.model[0])
    names = ("finalize_model_grads_func", "no_sync_func", "grad_sync_func")
    kept = {name: getattr(config, name) for name in names}
    for name in names:
        setattr(config, name, None)
    try:
        with ExitStack() as stack:
            for chunk in runner.model:
                chunk.zero_grad_buffer()
                stack.enter_context(chunk.no_sync())
            yield
    finally:
        for name, value in kept.items():
            setattr(config, name, value)


def _is_finite(value: Any) -> bool:
    """Whether all numbers of a tensor, or of tensors in tuples, are finite; what is no tensor is."""
    if isinstance(value, (tuple, list)):
        return all(_is_finite(part) for part in value)
    return not torch.is_tensor(value) or bool(value.isfinite().all())
