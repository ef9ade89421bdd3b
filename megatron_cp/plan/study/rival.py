"""MagiAttention as it can be run, beside planner "magi" on our runtime: how much of a lead is over settings only.

    straight        every row from its owner to each rank that needs it: planner "magi"
    per node        a row enters a node once and is passed on inside: planner "magi_hierarchical"
    16 bits         gradients go home in 16 bits, its default; ours travel in fp32
    global order    received rows are put back into the order of tokens, so what is contiguous stays so: fewer slices

Times are predicted by the cost model; putting rows into order costs nothing there, in its favour.
"""

from dataclasses import dataclass, replace

import numpy as np

from megatron_cp.config import CPConfig
from megatron_cp.mask import AttentionMask, interval
from megatron_cp.mask.interval import IntArray
from megatron_cp.plan.hardware.makespan import layer_seconds
from megatron_cp.plan.hardware.rows import FP32_BYTES
from megatron_cp.plan.hardware.simulate import simulate_pass
from megatron_cp.plan.planner import make_plan
from megatron_cp.plan.schema import PASSES, PlanData
from megatron_cp.plan.study.compare import Outcome

RIVALS = ("magi", "magi_hierarchical")
GRADIENT_BYTES = 2


@dataclass(frozen=True)
class RivalForm:
    """One way to run it."""

    name: str
    planner: str
    gradient_bytes: int
    is_in_global_order: bool


FORMS = (
    RivalForm("straight", "magi", FP32_BYTES, False),
    RivalForm("straight, 16 bits", "magi", GRADIENT_BYTES, True),
    RivalForm("per node", "magi_hierarchical", FP32_BYTES, True),
    RivalForm("per node, 16 bits", "magi_hierarchical", GRADIENT_BYTES, True),
)


@dataclass(frozen=True)
class RivalFigures:
    """What a form takes on a mask: forward plus backward of one layer, and most slices in one stage of forward."""

    form: RivalForm
    predicted_ms: float
    slices_max: int


def rival_figures(mask: AttentionMask, cp_size: int, config: CPConfig) -> list[RivalFigures]:
    """Returns the figures of every form."""
    plans = {one: make_plan(mask, cp_size, replace(config, planner=one)) for one in RIVALS}
    found = []
    for form in FORMS:
        plan = plans[form.planner]
        seconds = layer_seconds(plan, form.gradient_bytes)
        found.append(RivalFigures(form, seconds * 1e3, most_slices(plan, form.is_in_global_order)))
    return found


def in_16_bits(outcome: Outcome) -> Outcome:
    """Returns the outcome of one of RIVALS with gradients in 16 bits; any other outcome, or a refusal, as it is."""
    plan = outcome.plan
    if outcome.planner not in RIVALS or plan is None:
        return outcome
    predicted = layer_seconds(plan, GRADIENT_BYTES)
    simulated = [simulate_pass(plan, name, gradient_bytes=GRADIENT_BYTES) for name in PASSES]
    return replace(
        outcome,
        predicted_ms=predicted * 1e3,
        simulated_ms=sum(one.seconds for one in simulated) * 1e3,
    )


def most_slices(plan: PlanData, is_in_global_order: bool = False) -> int:
    """Returns the most slices in one stage of a rank's forward pass, as planned or with received keys in order."""
    as_planned = [list(stage.work) for stage in plan.forward.stages]
    works = work_in_global_order(plan) if is_in_global_order else as_planned
    return max(work.num_slices for stage in works for work in stage)


def work_in_global_order(plan: PlanData) -> list[list[AttentionMask]]:
    """Returns each rank's forward masks if received keys lay in the order of tokens behind its own: `[stages][P]`.

    The same pairs as the plan's work; only key columns change places.
    """
    pass_ = plan.forward
    own = pass_.own_ids(plan.global_from_local)
    held = pass_.held_ids("k", own)
    return [
        [
            _reordered(work, ids, own.shape[1])
            for work, ids in zip(stage.work, held_now, strict=True)
        ]
        for stage, held_now in zip(pass_.stages, held, strict=True)
    ]


def _reordered(work: AttentionMask, ids: IntArray, num_own: int) -> AttentionMask:
    order = np.argsort(ids[num_own:], kind="stable") + num_own
    keys = interval.from_indices(np.concatenate([np.arange(num_own), order]))
    queries = np.array([[0, work.num_queries]])
    return work.gather(queries, keys).merged() if work.num_slices else work
