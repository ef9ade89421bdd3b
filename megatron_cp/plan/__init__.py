"""Plans: who owns, computes and sends what. Pure functions from a mask to frozen data; NumPy only."""

from megatron_cp.plan.attention_plan import AttentionPlan
from megatron_cp.plan.planner import (
    PLANNERS,
    forget_plans,
    make_plan,
    make_plans,
    plan_on_placement,
)
from megatron_cp.plan.schema import HeadSplit, Hop, Pass, Stage, Transfer

__all__ = [
    "PLANNERS",
    "AttentionPlan",
    "HeadSplit",
    "Hop",
    "Pass",
    "Stage",
    "Transfer",
    "forget_plans",
    "make_plan",
    "make_plans",
    "plan_on_placement",
]
