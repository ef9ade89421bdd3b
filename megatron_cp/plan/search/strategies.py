"""Where strategies come from: published schemes, pairs that stay at home, pairs that move, an optional solver."""

import functools
from collections.abc import Callable

from megatron_cp.plan.compute.solvers.solve import Problem, improve, measure
from megatron_cp.plan.hardware.topology import get_topology
from megatron_cp.plan.price.head_groups import HeadGroups, Strategy
from megatron_cp.plan.price.keys_move import published_strategies
from megatron_cp.plan.price.pairs_move import (
    StagingLimits,
    assigned_strategy,
    move_compute,
    move_inside_nodes,
    stay_at_home,
)

StrategySource = Callable[[HeadGroups, float, StagingLimits], list[Strategy]]
"""(mask on head groups, seconds beyond which nothing is of use, limits) -> strategies; none if no one is of use."""


def published(groups: HeadGroups, limit: float, stagings: StagingLimits) -> list[Strategy]:
    """Returns the schemes of others."""
    return published_strategies(groups, limit)


def stay(groups: HeadGroups, limit: float, stagings: StagingLimits) -> list[Strategy]:
    """Returns the strategy in which every pair is computed where its query lives."""
    if groups.least_seconds() > limit:
        return []
    return [assigned_strategy(groups, stay_at_home(groups), stagings)]


def move(groups: HeadGroups, limit: float, stagings: StagingLimits) -> list[Strategy]:
    """Returns the strategies in which pairs move: among all head groups, and inside nodes alone."""
    found = [move_compute(groups), move_inside_nodes(groups)]
    return [assigned_strategy(groups, one, stagings) for one in found if one is not None]


def solved(groups: HeadGroups, stagings: StagingLimits) -> list[Strategy]:
    """Returns what the config's solver makes of the better of both assignments, if it finds anything."""
    inner, outer = groups.links.seconds_per_byte[:2].tolist()
    problem = Problem(
        groups.placed,
        groups.weights(),
        groups.compute_seconds(1.0),
        (inner, outer),
        groups.links.node_size,
        get_topology(groups.config.topology).contention,
        groups.speeds,
    )
    starts = (stay_at_home(groups), move_compute(groups))
    start = min(starts, key=functools.partial(measure, problem))
    solver, effort = groups.config.improver, groups.config.improver_effort
    assert solver is not None
    better = improve(problem, start, solver, effort)
    return [] if better is None else [assigned_strategy(groups, better, stagings)]
