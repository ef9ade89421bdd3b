"""The packs that a run kept, planned again: its own plan, if it comes out the same, and everybody else's.

Nobody plans baselines while a model trains; plans are pure, so the report can.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from megatron_cp.config import CPConfig
from megatron_cp.plan import PLANNERS, AttentionPlan, make_plan
from megatron_cp.plan.hardware.makespan import layer_seconds
from megatron_cp.plan.schema import PASSES
from megatron_cp.plan.study.compare import NONE, Outcome, best_other, measured, outcome_of
from megatron_cp.report.figures.planners import mean_outcome
from megatron_cp.report.figures.view import USUAL, PackView, view_of_plan
from megatron_cp.report.run.record import Run, config_of
from megatron_cp.report.sources import Tell

MOST_RANKS_OF_THREE = (
    32  # up to which two baselines are drawn: three matrices of 64 ranks are 2.8 MB of page
)


@dataclass(frozen=True)
class KeptPacks:
    """What the kept packs say; every figure is of this sample."""

    packs: tuple[PackView, ...]
    outcomes: tuple[Outcome, ...] = ()
    """Every planner, means over the packs, ours first; none where no pack was kept or there is one rank."""
    one_rank_ms: float = NONE
    """Predicted attention of one layer on one rank, mean over the packs."""
    one_rank_mb: float = NONE
    """The most megabytes that attention of the pack drawn allocates at once on one rank, one layer and pass."""
    is_rebuilt: bool = True
    """Whether our plans came out as the run recorded them; else pictures show the record."""

    @property
    def ours(self) -> Outcome | None:
        """Returns the outcome of the run's own planner."""
        return self.outcomes[0] if self.outcomes else None

    @property
    def drawn(self) -> PackView | None:
        """Returns the pack with the most documents, the first of equals: it shows most."""
        return max(self.packs, key=lambda pack: len(pack.document_lengths), default=None)


def kept_words(kept: KeptPacks) -> str:
    """Returns the sample in words."""
    return "the kept pack" if len(kept.packs) == 1 else f"the {len(kept.packs)} kept packs"


def plan_again(run: Run, tell: Tell) -> KeptPacks:
    """Returns the kept packs with baselines; plans every pack with every planner, so `tell` hears of each."""
    if not run.packs or run.packs[0].ours.cp_size == 1:
        return KeptPacks(run.packs)
    config = config_of(run)
    names = [config.planner, *(name for name in PLANNERS if name != config.planner)]
    made: dict[str, list[Outcome]] = {name: [] for name in names}
    alone = []
    for number, pack in enumerate(run.packs, 1):
        tell(f"every planner on kept pack {number} of {len(run.packs)}")
        alone.append(make_plan(pack.mask, 1, replace(config, chunk_size=None)))
        for name in names:
            made[name].append(_outcome(pack, name, config))
    outcomes = tuple(mean_outcome(one) for one in made.values())
    best = best_other(outcomes, config.planner)
    baselines = [USUAL]
    if (
        best is not None
        and best.planner != USUAL
        and run.packs[0].ours.cp_size <= MOST_RANKS_OF_THREE
    ):
        baselines.append(best.planner)
    packs = tuple(
        _with_plans(pack, made[config.planner][index], [made[name][index] for name in baselines])
        for index, pack in enumerate(run.packs)
    )
    same = all(pack.ours.computed is not None for pack in packs)
    kept = KeptPacks(packs, outcomes, float(np.mean([_milliseconds(one) for one in alone])))
    drawn = alone[packs.index(kept.drawn)] if kept.drawn is not None else alone[0]
    peak = max(drawn.stats(name)["peak_mb_max"] for name in PASSES)
    return replace(kept, one_rank_mb=peak, is_rebuilt=same)


def _milliseconds(plan: AttentionPlan) -> float:
    return layer_seconds(plan) * 1e3


def _outcome(pack: PackView, name: str, config: CPConfig) -> Outcome:
    """Returns how a planner does on a pack; the run's own from its record where the plan differs today."""
    if name != config.planner:
        wanted = replace(config, planner=name, chunk_size=None, num_stages=None)
        return measured(pack.mask, pack.ours.cp_size, wanted)
    plan = make_plan(pack.mask, pack.ours.cp_size, config)
    if plan.digest() == pack.digest:
        return outcome_of(plan, plan.plan_ms)
    forward, backward = (pack.ours.stats[one] for one in ("forward", "backward"))
    return Outcome(
        name,
        predicted_ms=forward["makespan_ms"] + backward["makespan_ms"],
        bound_ms=forward["bound_ms"] + backward["bound_ms"],
        imbalance=forward["imbalance"],
        volume_mean=forward["volume_mean"],
        volume_max=forward["volume_max"],
        plan_ms=forward["plan_ms"],
    )


def _with_plans(pack: PackView, ours: Outcome, others: list[Outcome]) -> PackView:
    """Returns the pack with our plan in full, if it came out the same, and the baselines that were built."""
    built = [one.plan for one in others if one.plan is not None and one.planner != ours.planner]
    return replace(
        pack,
        ours=pack.ours if ours.plan is None else view_of_plan(ours.plan),
        others=tuple(view_of_plan(plan) for plan in built),
    )
