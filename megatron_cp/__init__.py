"""Context-parallel attention for Megatron: mask -> plan -> execution.

`mask` and `plan` need NumPy only, the functions of `api` torch too. Every name is imported on first use, so that a
command which needs nothing starts at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_cp import mask, plan
    from megatron_cp.api import (
        attend,
        checkpoint,
        cp_attention,
        cp_causal_conv1d,
        cp_linear_attention,
        cp_sparse_attention,
        dispatch,
        position_ids,
        roll,
        undispatch,
    )
    from megatron_cp.config import CPConfig, Level, Topology
    from megatron_cp.errors import PlanMismatchError
    from megatron_cp.mask import AttentionMask, MaskSlice
    from megatron_cp.plan import AttentionPlan, make_plan, make_plans

__version__ = "0.2.0"

_HOMES = {
    "api": (
        "attend",
        "checkpoint",
        "cp_attention",
        "cp_causal_conv1d",
        "cp_linear_attention",
        "cp_sparse_attention",
        "dispatch",
        "position_ids",
        "roll",
        "undispatch",
    ),
    "config": ("CPConfig", "Level", "Topology"),
    "errors": ("PlanMismatchError",),
    "mask": ("AttentionMask", "MaskSlice"),
    "plan": ("AttentionPlan", "make_plan", "make_plans"),
}
_MODULES = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in ("mask", "plan"):
        return import_module(f"megatron_cp.{name}")
    if name in _MODULES:
        return getattr(import_module(f"megatron_cp.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'megatron_cp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "AttentionMask",
    "AttentionPlan",
    "CPConfig",
    "Level",
    "MaskSlice",
    "PlanMismatchError",
    "Topology",
    "attend",
    "checkpoint",
    "cp_attention",
    "cp_causal_conv1d",
    "cp_linear_attention",
    "cp_sparse_attention",
    "dispatch",
    "make_plan",
    "make_plans",
    "mask",
    "plan",
    "position_ids",
    "roll",
    "undispatch",
]
