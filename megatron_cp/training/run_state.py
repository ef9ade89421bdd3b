"""What a run is made of, and where it stands."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron_cp.training.config import TrainConfig


@dataclass
class RunState:
    """Model, optimizer, schedule and counters. The loop advances them, a checkpoint keeps them."""

    config: TrainConfig
    model: list[Any]
    optimizer: Any
    scheduler: Any
    num_parameters: int = 0
    iteration: int = 0
    consumed_samples: int = 0
    consumed_valid_samples: int = 0
    flops: int = 0
    restarts: int = 0
    data: dict[str, Any] = field(default_factory=dict)
    """State of the training loader after `iteration` steps (JSON)."""
    foreign_arguments: dict[str, Any] = field(default_factory=dict)
    """Those of Megatron-LM, where the run goes on from its checkpoint."""
