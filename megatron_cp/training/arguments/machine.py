"""What a command line is judged for: the machine it is started on, or another one by its parts."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch

from megatron_cp.mcore import compat


@dataclass(frozen=True)
class Machine:
    """What decides whether a flag can be served, beside other flags."""

    has_cuda: bool
    has_transformer_engine: bool
    has_einops: bool = True


GPU_MACHINE = Machine(has_cuda=True, has_transformer_engine=True)
"""Where most published commands are made for."""


def this_machine() -> Machine:
    """Returns the machine of this process."""
    has_einops = importlib.util.find_spec("einops") is not None
    return Machine(torch.cuda.is_available(), compat.has_transformer_engine(), has_einops)
