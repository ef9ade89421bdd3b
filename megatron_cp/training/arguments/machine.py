"""What a command line is judged for: the machine it is started on, or another one by its parts."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

import torch

from megatron_cp.mcore import compat


@dataclass(frozen=True)
class Machine:
    """What decides whether a flag can be served, beside other flags."""

    has_cuda: bool
    has_transformer_engine: bool
    has_emerging_optimizers: bool
    has_einops: bool
    has_nvml: bool


GPU_MACHINE = Machine(
    has_cuda=True,
    has_transformer_engine=True,
    has_emerging_optimizers=True,
    has_einops=True,
    has_nvml=True,
)
"""Where most published commands are made for."""


def this_machine() -> Machine:
    """Returns the machine of this process."""
    return Machine(
        torch.cuda.is_available(),
        compat.has_transformer_engine(),
        find_spec("emerging_optimizers") is not None,
        find_spec("einops") is not None,
        find_spec("pynvml") is not None,
    )
