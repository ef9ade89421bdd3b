"""Predicted seconds of assignments: which route rows take, in how many stages, forward and backward each for itself.

Areas and rows are exact. How they divide over stages is first taken to be even; a choice that wins by that
estimate is refined: its stagings are priced exactly, stage by stage.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_cp.config import CPConfig
from megatron_cp.mask.interval import IntArray
from megatron_cp.plan.assignment import Assignment, assign
from megatron_cp.plan.cost import Movement, StageLoad
from megatron_cp.plan.heads import split_heads
from megatron_cp.plan.overlap import AssignedMask, Staging
from megatron_cp.plan.pricing import PASSES, Choice, HeadGroups, imbalance
from megatron_cp.plan.routing import (
    ID_START,
    ID_STOP,
    SRC,
    Route,
    ThroughNodes,
    direct,
    enters_twice,
    tree,
)
from megatron_cp.plan.schema import SIDES, Pass, PassName, Side

STAGE_COUNTS = (1, 2, 4, 8)
PRICED_STAGE_COUNTS = (0, 1, 4)  # enough for an estimate
FEW_STAGES = 2  # so few may do without local pairs at the end: better where latency decides
STAGINGS_PRICED = 3  # exactly, once an estimate has won
HUB = 2.0  # an owner that sends so many times the mean is worth a tree


def stay_at_home(groups: HeadGroups) -> Assignment:
    """Returns the assignment of every pair to the rank that owns its query."""
    return Assignment(groups.placed.parts, groups.placed.q_owner)


def move_compute(groups: HeadGroups) -> Assignment:
    """Returns the assignment by search: equal areas, few rows moved on both sides."""
    placed, even = groups.placed, np.ones(groups.placed.num_ranks)
    node_size = groups.topology.node_size
    return assign(groups.mask, placed.owners, node_size, groups.weights(), even)


def assigned_choice(groups: HeadGroups, assignment: Assignment) -> Choice:
    """Returns the way to run an assignment; forward and backward are staged each for itself, as is predicted best."""
    assigned = AssignedMask(groups.placed, assignment)
    straight: dict[Side, list[IntArray]] = {s: assigned.arriving(s, direct) for s in SIDES}
    rows = {side: sum(map(_num_rows, hops)) for side, hops in straight.items()}
    options = {name: _stagings(groups.config, name, rows) for name in PASSES}
    ways = [_Way(groups, assigned, route) for route in _routes(groups, straight)]
    prices = [sum(way.even_seconds(options[name], name) for name in PASSES) for way in ways]
    way = ways[prices.index(min(prices))]
    choice = Choice(
        min(prices),
        groups.moved_bytes(rows),
        imbalance(assigned.areas),
        is_published=False,
        build=lambda: refined().build(),
    )

    def refined() -> Choice:
        found = [way.best_staging(options[name], name) for name in PASSES]
        forward, backward = (staging for staging, _ in found)
        return replace(
            choice,
            seconds=sum(seconds for _, seconds in found),
            build=lambda: (way.build(forward), way.build(backward)),
            refine=None,
        )

    return replace(choice, refine=refined)


def _routes(groups: HeadGroups, arriving: dict[Side, list[IntArray]]) -> list[Route]:
    """Returns the routes worth a price, given what arrives when owners send themselves."""
    num_ranks, node_size = groups.placed.num_ranks, groups.topology.node_size
    stride = groups.placed.space.stride
    has_nodes = 1 < node_size < num_ranks and any(
        enters_twice(hop, node_size, stride) for hops in arriving.values() for hop in hops
    )
    found: list[Route] = [ThroughNodes(node_size) if has_nodes else direct]
    for requests in (hop for hops in arriving.values() for hop in hops):
        rows = requests[:, ID_STOP] - requests[:, ID_START]
        sent = np.bincount(requests[:, SRC], rows, num_ranks)
        if len(rows) and sent.max() > HUB * sent.mean():
            found.append(ThroughNodes(node_size, tree=True) if has_nodes else tree)
            break
    return found


@dataclass(frozen=True)
class _Way:
    """An assignment and a route."""

    groups: HeadGroups
    assigned: AssignedMask
    route: Route

    @functools.cached_property
    def _moves(self) -> dict[Side, Movement | None]:
        return {
            side: self.groups.movement(self.assigned.arriving(side, self.route)) for side in SIDES
        }

    def even_seconds(self, stagings: Sequence[Staging], name: PassName) -> float:
        """Returns about the time of the best staging, as if rows were spread evenly over stages."""
        some = [one for one in stagings if one.num_remote in PRICED_STAGE_COUNTS] or stagings
        return min(self._even_price(one, name) for one in some)

    def _even_price(self, staging: Staging, name: PassName) -> float:
        return self.groups.seconds(self._even_loads(staging), name)

    def best_staging(self, stagings: Sequence[Staging], name: PassName) -> tuple[Staging, float]:
        """Returns the best staging and its price; only those that look best are priced exactly."""
        promising = sorted(stagings, key=lambda one: self._even_price(one, name))[:STAGINGS_PRICED]
        prices = [self.groups.seconds(self._exact_loads(one), name) for one in promising]
        return promising[prices.index(min(prices))], min(prices)

    def build(self, staging: Staging) -> Pass:
        """Returns the pass of a staging."""
        return split_heads(self.assigned.build(staging, self.route), self.groups.degree)

    def _even_loads(self, staging: Staging) -> list[StageLoad]:
        local, count = self.assigned.local_areas, staging.num_remote
        remote = self.assigned.areas - local
        parts = {side: move and move.part(max(1, count)) for side, move in self._moves.items()}
        loads = [StageLoad(local / 2 if staging.keeps_rest else local)]
        for index in range(1, count + 1):
            kept = staging.keeps(index)
            loads.append(
                StageLoad(remote / count, parts["k"], parts["q"], kept == "k", kept == "q")
            )
        return loads + [StageLoad(local / 2)] * staging.keeps_rest

    def _exact_loads(self, staging: Staging) -> list[StageLoad]:
        movement = self.groups.movement
        return [
            StageLoad(
                stage.areas,
                movement(stage.arriving["k"]),
                movement(stage.arriving["q"]),
                stage.keeps == "k",
                stage.keeps == "q",
            )
            for stage in self.assigned.stages(staging, self.route)
        ]


def _num_rows(requests: IntArray) -> float:
    return float((requests[:, ID_STOP] - requests[:, ID_START]).sum())


def _stagings(config: CPConfig, name: PassName, rows: dict[Side, float]) -> list[Staging]:
    """Returns the stagings that compete in a pass, given how many rows of each side move."""
    if not any(rows.values()):
        return [Staging(0, keeps_rest=False, kept="k")]
    counts = STAGE_COUNTS if config.num_stages is None else (config.num_stages,)
    sides: list[Side] = ["k"] if name == "forward" else ["q"]
    if name == "backward" and rows["q"]:
        sides.append("k")
    late = [Staging(n, True, kept) for n in counts for kept in (sides if n > 1 else sides[:1])]
    return late + [replace(one, keeps_rest=False) for one in late if one.num_remote <= FEW_STAGES]
