"""Context-parallel attention for Megatron: mask -> plan -> execution.

`mask` and `plan` need NumPy only; names that need torch are imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatron_cp import mask, plan
from megatron_cp.config import CPConfig, Topology
from megatron_cp.errors import PlanMismatchError
from megatron_cp.mask import AttentionMask, MaskSlice
from megatron_cp.plan import AttentionPlan, make_plan, make_plans

if TYPE_CHECKING:
    from megatron_cp.api import (
        attend,
        checkpoint,
        cp_attention,
        dispatch,
        position_ids,
        roll,
        undispatch,
    )

__version__ = "0.1.0"

_NEEDS_TORCH = (
    "attend",
    "checkpoint",
    "cp_attention",
    "dispatch",
    "position_ids",
    "roll",
    "undispatch",
)


def __getattr__(name: str) -> Any:
    if name in _NEEDS_TORCH:
        return getattr(import_module("megatron_cp.api"), name)
    raise AttributeError(f"module 'megatron_cp' has no attribute {name!r}")


__all__ = [
    "AttentionMask",
    "AttentionPlan",
    "CPConfig",
    "MaskSlice",
    "PlanMismatchError",
    "Topology",
    "attend",
    "checkpoint",
    "cp_attention",
    "dispatch",
    "make_plan",
    "make_plans",
    "mask",
    "plan",
    "position_ids",
    "roll",
    "undispatch",
]
