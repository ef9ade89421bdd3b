"""All planners side by side on one mask: predicted and simulated time, balance, rows moved, planning time."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from megatron_cp.config import CPConfig
from megatron_cp.mask import AttentionMask
from megatron_cp.plan.attention_plan import AttentionPlan
from megatron_cp.plan.bounds.best_cases import best_case_seconds, is_built
from megatron_cp.plan.bounds.bounds import time_bound
from megatron_cp.plan.hardware.simulate import simulate_pass
from megatron_cp.plan.planner import forget_plans, make_plan
from megatron_cp.plan.schema import PASSES

NONE = float("nan")
MOST_RANKS = {
    "document_groups": 1024,
    "ultraattn": 1024,
    "dcp": 1024,
    "magi": 2048,
    "magi_hierarchical": 2048,
}


@dataclass(frozen=True)
class Outcome:
    """One planner on one mask: one layer, forward plus backward where nothing else is said.

    What was not counted, because the plan was priced and not built, is NaN. Volumes are in units of one
    rank's query rows.
    """

    planner: str
    predicted_ms: float = NONE
    simulated_ms: float = NONE
    bound_ms: float = NONE
    imbalance: float = NONE
    """Largest time of a rank's pairs over the fair one, forward; equal speeds: largest over mean pairs."""
    volume_mean: float = NONE
    """Inbound per rank, forward."""
    volume_max: float = NONE
    link_max: float = NONE
    """Largest in or out of a rank, forward."""
    slices_max: float = NONE
    messages_max: float = NONE
    plan_ms: float = NONE
    """Processor time of making the plan."""
    is_best_case: bool = False
    """Whether the time is one that the planner cannot beat, and may not reach."""
    refusal: str = ""
    """Why the planner cannot serve this; empty if it can."""
    plan: AttentionPlan | None = None

    @property
    def gap(self) -> float:
        """Returns the predicted time over the bound."""
        return self.predicted_ms / self.bound_ms if self.bound_ms else 1.0


def compare(
    mask: AttentionMask, cp_size: int, config: CPConfig, planners: Iterable[str]
) -> list[Outcome]:
    """Returns how each planner does, in the order given; refusals are kept with their reason.

    Raises ValueError for what no planner serves: an empty or non-square mask, more ranks than tokens.
    """
    if cp_size > mask.num_queries:
        raise ValueError(
            f"cp_size={cp_size} is more than the {mask.num_queries} tokens of the mask; at most one rank per "
            f"token can have work: use {mask.num_queries} ranks or fewer"
        )
    return [measured(mask, cp_size, replace(config, planner=name)) for name in planners]


def measured(mask: AttentionMask, cp_size: int, config: CPConfig) -> Outcome:
    """Returns how the planner of `config` does on a mask."""
    try:
        if cp_size > MOST_RANKS.get(config.planner, cp_size):
            raise NotImplementedError(
                f"planner {config.planner!r} is compared up to {MOST_RANKS[config.planner]} ranks, planning "
                "takes it minutes beyond; use make_plan for it alone"
            )
        if not is_built(config.planner, cp_size):
            return _priced(mask, cp_size, config)
        forget_plans()
        started = time.process_time()
        plan = make_plan(mask, cp_size, config)
        plan_ms = (time.process_time() - started) * 1e3
    except (ValueError, NotImplementedError) as problem:
        return Outcome(config.planner, refusal=" ".join(str(problem).split()))
    except MemoryError:
        return Outcome(config.planner, refusal="out of memory while planning")
    return outcome_of(plan, plan_ms)


def outcome_of(plan: AttentionPlan, plan_ms: float) -> Outcome:
    """Returns the figures of a plan."""
    forward, backward = (plan.stats(name) for name in PASSES)
    simulated = sum(simulate_pass(plan, name).seconds for name in PASSES)
    return Outcome(
        plan.planner,
        predicted_ms=forward["makespan_ms"] + backward["makespan_ms"],
        simulated_ms=simulated * 1e3,
        bound_ms=forward["bound_ms"] + backward["bound_ms"],
        imbalance=forward["imbalance"],
        volume_mean=forward["volume_mean"],
        volume_max=forward["volume_max"],
        link_max=forward["link_max"],
        slices_max=forward["slices_max"],
        messages_max=forward["messages_max"],
        plan_ms=plan_ms,
        plan=plan,
    )


def _priced(mask: AttentionMask, cp_size: int, config: CPConfig) -> Outcome:
    seconds = [best_case_seconds(config.planner, mask, cp_size, config, name) for name in PASSES]
    bounds = [time_bound(mask, cp_size, config, name) for name in PASSES]
    return Outcome(
        config.planner,
        predicted_ms=sum(seconds) * 1e3,
        simulated_ms=sum(seconds) * 1e3,
        bound_ms=sum(bounds) * 1e3,
        is_best_case=True,
    )


def best_other(
    outcomes: Iterable[Outcome], ours: str = "auto", *, is_simulated: bool = False
) -> Outcome | None:
    """Returns the fastest outcome of another planner, predicted or simulated; None if nobody else serves."""
    served = [one for one in outcomes if one.planner != ours and not one.refusal]
    if is_simulated:
        return min(served, key=lambda one: one.simulated_ms, default=None)
    return min(served, key=lambda one: one.predicted_ms, default=None)


def geometric_mean(values: Iterable[float]) -> float:
    """Returns the geometric mean, NaN of nothing."""
    logs = np.log(np.array(list(values), dtype=np.float64))
    return float(np.exp(logs.mean())) if len(logs) else NONE
