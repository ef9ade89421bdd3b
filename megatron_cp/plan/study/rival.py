"""MagiAttention as it can be run, beside the plain form of planner "magi": how much of a lead is over settings only.

    straight        every row from its owner to each rank that needs it; gradients in fp32; rows source by source
    per node        a row enters a node once and is passed on inside (its hierarchical group-cast)
    16 bits         gradients go home in 16 bits, its default
    global order    received rows are put back into the order of tokens, so what is contiguous stays so: fewer slices

Times are predicted by the cost model; putting rows into order costs nothing there, in its favour.
"""

from dataclasses import dataclass, replace

import numpy as np

from megatron_cp.config import CPConfig
from megatron_cp.mask import AttentionMask, interval
from megatron_cp.mask.interval import IntArray
from megatron_cp.plan.hardware.makespan import makespan_seconds
from megatron_cp.plan.hardware.rows import FP32_BYTES
from megatron_cp.plan.hardware.topology import get_topology
from megatron_cp.plan.schema import PassName, PlanData
from megatron_cp.plan.schemes.magi import plan_magi


@dataclass(frozen=True)
class RivalForm:
    """One way to run it."""

    name: str
    is_per_node: bool
    gradient_bytes: int
    is_in_global_order: bool


FORMS = (
    RivalForm("straight", False, FP32_BYTES, False),
    RivalForm("per node", True, FP32_BYTES, True),
    RivalForm("per node, 16 bits", True, 2, True),
)


@dataclass(frozen=True)
class RivalFigures:
    """What a form takes on a mask: forward plus backward of one layer, and most slices in one stage of forward."""

    form: RivalForm
    predicted_ms: float
    slices_max: int


def rival_figures(mask: AttentionMask, cp_size: int, config: CPConfig) -> list[RivalFigures]:
    """Returns the figures of every form."""
    known = replace(config, planner="magi", topology=get_topology(config.topology))
    found = []
    for form in FORMS:
        plan = plan_magi(mask, cp_size, known, is_per_node=form.is_per_node)
        seconds = makespan_seconds(plan, "forward")
        seconds += makespan_seconds(plan, "backward", form.gradient_bytes)
        found.append(RivalFigures(form, seconds * 1e3, most_slices(plan, form.is_in_global_order)))
    return found


def most_slices(plan: PlanData, is_in_global_order: bool = False) -> int:
    """Returns the most slices in one stage of a rank's forward pass, as planned or with received keys in order."""
    if is_in_global_order:
        works = work_in_global_order(plan, "forward")
    else:
        works = [list(stage.work) for stage in plan.forward.stages]
    return max(work.num_slices for stage in works for work in stage)


def work_in_global_order(plan: PlanData, pass_name: PassName) -> list[list[AttentionMask]]:
    """Returns each rank's masks if received keys lay in the order of tokens behind its own: `[stages][P]`.

    The same pairs as the plan's work; only key columns change places.
    """
    pass_ = plan.get_pass(pass_name)
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
