"""AttentionPlan: a plan's data, and what can be said about it."""

from dataclasses import dataclass, fields
from typing import Any

from megatron_cp.plan.explain import explain
from megatron_cp.plan.schema import PASSES, PassName, PlanData
from megatron_cp.plan.stats import pass_stats
from megatron_cp.plan.validation import validate


@dataclass(frozen=True, eq=False, repr=False)
class AttentionPlan(PlanData):
    """Who owns, computes and sends what, for one mask on `cp_size` ranks; equal by `digest()`."""

    @classmethod
    def of(cls, data: PlanData, **changes: Any) -> "AttentionPlan":
        """Returns a planner's plan as users have it, with other values for the fields named."""
        values = {one.name: getattr(data, one.name) for one in fields(PlanData)}
        return cls(**{**values, **changes})

    def stats(self, pass_name: PassName = "forward") -> dict[str, float]:
        """Returns the figures of one pass, counted from the plan itself; see `plan/stats.py`."""
        if pass_name not in PASSES:
            raise ValueError(f"pass_name={pass_name!r} must be 'forward' or 'backward'")
        return pass_stats(self, pass_name)

    def explain(self) -> str:
        """Returns a table for people: area, rows moved and predicted time per rank and stage."""
        return explain(self)

    def __str__(self) -> str:
        return self.explain()

    def validate(self) -> None:
        """Checks that the plan is executable and covers the mask; raises ValueError naming the fault.

        Exact but for one thing: that the pairs computed are *the* pairs of the mask is checked by their
        number (tests check it pair by pair).
        """
        validate(self)
