"""What forward and backward over one global batch came to on a rank, before anything is updated.

LocalGradients    reads their norm when backward has ended
Attempt           loss, tokens and that norm
Verdict           the attempt, and what becomes of it (check.py)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

_NUM_FIRST = 100
_FACTOR = 10.0


@dataclass(frozen=True)
class Attempt:
    """What a forward and backward pass came to on this rank."""

    loss: float | None
    """Mean over the tokens of the global batch; None before the last pipeline stage."""
    valid_tokens: int
    sums: torch.Tensor | None
    """(loss sum, tokens) of each micro-batch on this rank alone; None before the last stage."""
    grad_norm: float
    """L2 norm of this rank's gradients, before ranks add theirs where they do so at the end."""

    def equals(self, other: Attempt) -> bool:
        """Whether both have the same bits on this rank; NaN equals NaN."""
        mine, theirs = self.numbers(), other.numbers()
        return torch.equal(mine.view(torch.int64), theirs.view(torch.int64))

    def numbers(self) -> torch.Tensor:
        """Returns loss sums, token counts and gradient norm of this rank, float64."""
        sums = torch.empty(0) if self.sums is None else self.sums.flatten().cpu()
        numbers = torch.cat([sums.double(), torch.tensor([self.grad_norm], dtype=torch.float64)])
        return torch.where(numbers.isnan(), torch.nan, numbers)  # one NaN for all of them


@dataclass(frozen=True)
class Verdict:
    """What a step came to on this rank, and what all ranks make of it."""

    attempt: Attempt
    is_applied: bool
    striking: str | None = None
    """What stands out in the step, one line; None where nothing does."""


@dataclass
class LocalGradients:
    """Norm of this rank's gradients, taken when backward has ended; 0 where nobody looks at it.

    Without `--overlap-grad-reduce` they are what this rank's own tokens gave; with it, ranks have
    added theirs before. The norm of a step is read once over all gradients, as Megatron-LM does.
    """

    is_wanted: bool
    overlaps: bool
    norm: torch.Tensor = field(default_factory=lambda: torch.zeros(()))

    def finalize(self, model: list[Any], *args: Any, **kwargs: Any) -> None:
        """Stands for Megatron-Core's `finalize_model_grads`, which it calls."""
        if self.is_wanted and not self.overlaps:
            self.norm = gradient_norm(model)
        from megatron.core.distributed import finalize_model_grads  # after what stands in for CUDA

        finalize_model_grads(model, *args, **kwargs)
        if self.is_wanted and self.overlaps:
            self.norm = gradient_norm(model)


def gradient_norm(model: list[Any]) -> torch.Tensor:
    """Returns the L2 norm of the gradient buffers of this rank, float32; infinite beyond 1.8e19."""
    norms = [
        torch.linalg.vector_norm(buffer.grad_data, dtype=torch.float32)
        for buffer in _buffers(model)
    ]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())


def _buffers(model: list[Any]) -> Iterator[Any]:
    for chunk in model:
        yield from (*chunk.buffers, *chunk.expert_parallel_buffers)


@dataclass
class Ceiling:
    """Ten times the largest of the first 100 finite values, counted from the start or resumption of a run.

    Source: the rule of Megatron-Core's rerun state machine for unexpectedly large values.
    """

    largest: float = 0.0
    num_seen: int = 0

    def is_reached_by(self, value: float) -> bool:
        """Whether the value strikes; one of the first 100 raises the ceiling instead."""
        if not math.isfinite(value):
            return False
        if self.num_seen < _NUM_FIRST:
            self.num_seen += 1
            self.largest = max(self.largest, abs(value))
            return False
        return abs(value) >= _FACTOR * self.largest
