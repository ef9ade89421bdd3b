"""Where strategies come from: published schemes, pairs that stay at home, pairs that move, an optional solver."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

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


@dataclass(frozen=True)
class StrategySource:
    """Strategies for a mask on head groups, and the effort of pricing them."""

    strategies: Callable[[HeadGroups, float, StagingLimits], list[Strategy]]
    """(mask on head groups, seconds beyond which nothing is of use, limits) -> strategies, none if all are."""
    fixed: float
    per_rank: float
    per_part: float
    """For each slice of the mask cut by owners."""

    def effort(self, groups: HeadGroups) -> float:
        """Returns about the milliseconds that `strategies` takes."""
        placed = groups.placed
        return self.fixed + self.per_rank * placed.num_ranks + self.per_part * len(placed.parts)


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


def _published(groups: HeadGroups, limit: float, stagings: StagingLimits) -> list[Strategy]:
    return published_strategies(groups, limit)


def _stay(groups: HeadGroups, limit: float, stagings: StagingLimits) -> list[Strategy]:
    if groups.least_seconds() > limit:
        return []
    return [assigned_strategy(groups, stay_at_home(groups), stagings)]


def _move(groups: HeadGroups, limit: float, stagings: StagingLimits) -> list[Strategy]:
    found = [move_compute(groups), move_inside_nodes(groups)]
    return [assigned_strategy(groups, one, stagings) for one in found if one is not None]


# About milliseconds of one core: what counts is that they are counted alike on every rank.
PUBLISHED = StrategySource(_published, 0.4, 0.007, 1.2e-4)
STAY = StrategySource(_stay, 0.8, 0.004, 5e-4)
MOVE = StrategySource(_move, 2.5, 0.27, 1.4e-3)
