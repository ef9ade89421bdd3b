"""Where strategies come from: published schemes, pairs that stay at home, pairs that move."""

from collections.abc import Callable

from megatron_cp.plan.compute.bisection import Assignment
from megatron_cp.plan.price.head_groups import HeadGroups, Strategy
from megatron_cp.plan.price.keys_move import published_strategies
from megatron_cp.plan.price.pairs_move import (
    StagingLimits,
    assigned_strategy,
    go_to_keys,
    move_compute,
    move_inside_nodes,
    move_near,
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


def at_keys(groups: HeadGroups, limit: float, stagings: StagingLimits) -> list[Strategy]:
    """Returns the strategy in which every pair is computed where its key lives."""
    if groups.least_seconds_at_keys() > limit:
        return []
    return [assigned_strategy(groups, go_to_keys(groups), stagings)]


def move(groups: HeadGroups, limit: float, stagings: StagingLimits) -> list[Strategy]:
    """Returns the strategies in which pairs move: among all head groups, and inside nodes alone."""
    found = [move_compute(groups), move_inside_nodes(groups)]
    return [assigned_strategy(groups, one, stagings) for one in found if one is not None]


def _near(start: Callable[[HeadGroups], Assignment]) -> StrategySource:
    """Returns the source of the strategy that a local search finds near an assignment."""

    def source(groups: HeadGroups, limit: float, stagings: StagingLimits) -> list[Strategy]:
        return [assigned_strategy(groups, move_near(groups, start(groups)), stagings)]

    return source


NEAR = {stay: _near(stay_at_home), move: _near(move_compute)}
"""The local search near what each of two sources finds."""
