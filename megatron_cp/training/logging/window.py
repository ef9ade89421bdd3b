"""What the steps since the last line of the log, or since the last row of metrics, came to."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from megatron_cp.mcore.loss import LOSS_NAME
from megatron_cp.training.logging.speed import Clock
from megatron_cp.training.step import StepResult


@dataclass
class Window:
    """Some steps. An evaluation or a save, which is no step, starts the clock anew, and nothing else."""

    clock: Clock = field(default_factory=Clock)
    num_steps: int = 0
    skipped: int = 0
    """Steps without an update."""
    nan: int = 0
    """Steps with a loss that is no number."""
    nonfinite: int = 0
    """Steps with a gradient that is none."""
    hybrid: int = 0
    """Steps whose packs were on the ranks of all replicas."""
    losses: dict[str, list[float]] = field(default_factory=lambda: {LOSS_NAME: []})
    """Those that are numbers, the model's auxiliary ones too."""

    def step(self, result: StepResult, *, is_hybrid: bool) -> None:
        """Books what a step came to; its time is the clock's."""
        self.num_steps += 1
        self.skipped += not result.updated
        self.nan += result.loss_is_no_number
        self.nonfinite += result.grad_norm is not None and not math.isfinite(result.grad_norm)
        self.hybrid += is_hybrid
        if result.loss is not None and not result.loss_is_no_number:
            self.losses[LOSS_NAME].append(result.loss)
        for name, value in result.auxiliary.means.items():
            self.losses.setdefault(name, []).append(value)

    def mean_losses(self) -> dict[str, float]:
        """Returns the mean of each loss; without those of which no token counted, and NaN where one was no number."""
        return {name: _mean(values) for name, values in self.losses.items() if values or self.nan}


def _mean(values: list[float]) -> float:
    """Returns their mean; NaN where there are none."""
    return sum(values) / len(values) if values else float("nan")
