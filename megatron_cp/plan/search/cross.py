"""Planner "auto" for cross attention, whose queries and keys are different tokens.

    one side      where another plan has it, or in order, zigzag, by documents, by area
    the other     where another plan has it, or beside what it meets of the first; either side may be the first
    compute       at every head degree with the queries, or with the keys; on the best few also elsewhere

All of it is planned and priced as the self attention of one stream (`plan/placement/two_sided.py`).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_cp.config import CPConfig
from megatron_cp.mask import AttentionMask
from megatron_cp.plan.hardware.cost import load_bound_seconds
from megatron_cp.plan.placement.placement import Placement
from megatron_cp.plan.placement.two_sided import (
    CrossPlacements,
    KnownSides,
    TwoSidedPlacement,
)
from megatron_cp.plan.price.head_groups import HeadGroups, PassOption, strategy_seconds
from megatron_cp.plan.schema import PASSES, SIDES, Pass, PassName, PlanData, Side
from megatron_cp.plan.search.budget import BUDGET, SearchBudget
from megatron_cp.plan.search.choose import best_of
from megatron_cp.plan.search.degrees import most_moved, searched_degrees
from megatron_cp.plan.search.search import Candidate
from megatron_cp.plan.search.strategies import StrategySource, at_keys, move, move_near_both, stay
from megatron_cp.plan.transfer.two_sided import cross_plan

NAME = "mask"
OTHER: dict[Side, Side] = {"q": "k", "k": "q"}


@dataclass(frozen=True)
class CrossCandidate(Candidate):
    """A placement of both sides, and the options found on it."""

    def plan(
        self, mask: AttentionMask, config: CPConfig, forward: Pass, backward: Pass
    ) -> PlanData:
        """Returns the plan of a mask with these passes, forward and backward, of one stream."""
        assert isinstance(self.placement, TwoSidedPlacement)
        return cross_plan(mask, config, "auto", self.placement, forward, backward)


def best_cross(
    mask: AttentionMask,
    cp_size: int,
    config: CPConfig,
    known: KnownSides,
    budget: SearchBudget = BUDGET,
) -> PlanData:
    """Returns the plan with the smallest predicted time; `known` sides stay where they are."""
    config = replace(config, linear_state_bytes=None)  # no such layer has two sides
    search = _Search(mask, cp_size, config, budget)
    for degree in search.degrees:
        for sides in search.placements(degree, known):
            search.price(sides, degree)
    search.improve()
    found: list[Candidate] = [one for one in search.found.values() if all(one.options.values())]
    return best_of(found, {NAME: (mask, 1.0)}, config, budget)[NAME]


@dataclass(frozen=True)
class _Start:
    """A placement at a head degree, and the least seconds found on it so far."""

    candidate: CrossCandidate
    groups: HeadGroups
    seconds: float = math.inf

    def tried(self, source: StrategySource, limit: float, budget: SearchBudget) -> "_Start":
        """Adds the strategies of a source to the candidate's options."""
        strategies = source(self.groups, limit, budget.stagings)
        self.candidate.add(NAME, strategies)
        return replace(self, seconds=min([self.seconds, *map(strategy_seconds, strategies)]))


class _Search:
    def __init__(self, mask: AttentionMask, cp_size: int, config: CPConfig, budget: SearchBudget):
        self.mask, self.cp_size, self.config, self.budget = mask, cp_size, config, budget
        self.degrees = searched_degrees(cp_size, config)
        self.found: dict[bytes, CrossCandidate] = {}
        self._starts: dict[tuple[bytes, int], _Start] = {}
        masks: dict[Side, AttentionMask] = {"q": mask, "k": mask.transpose()}
        self._places = {
            side: CrossPlacements(
                {NAME: (one, 1.0)}, cp_size, config, self.degrees[0], budget.placements
            )
            for side, one in masks.items()
        }

    def placements(self, degree: int, known: KnownSides) -> Iterator[TwoSidedPlacement]:
        """Yields the placements worth a price at one head degree."""
        for first in SIDES:
            places, other = self._places[first], OTHER[first]
            for placed in [known[first]] if first in known else self._first(places, degree):
                beside = known[other] if other in known else places.beside(placed, degree)
                sides = {first: placed, other: beside}
                yield TwoSidedPlacement.of(sides["q"], sides["k"])

    def _first(self, places: CrossPlacements, degree: int) -> Iterator[Placement]:
        yield places.in_order()
        documents = places.by_documents(degree, self.budget.loose_load)
        if documents is not None:
            yield documents
        if not places.is_even_in_order and degree < self.cp_size:
            yield places.zigzag(degree)
            yield places.by_area(degree)

    def price(self, sides: TwoSidedPlacement, degree: int) -> None:
        """Adds the strategies that compute with the queries and with the keys, if they come near the fastest."""
        key = sides.ids.tobytes(), degree
        if key in self._starts:
            return
        options: dict[tuple[str, PassName], list[PassOption]] = {
            (NAME, which): [] for which in PASSES
        }
        candidate = self.found.setdefault(key[0], CrossCandidate(sides, options))
        groups = HeadGroups.of(sides.one_stream(self.mask), sides, self.config, degree)
        best = min((one.seconds for one in self._starts.values()), default=math.inf)
        limit = math.inf if self.config.max_received_mb else self.budget.hopeless * best
        start = _Start(candidate, groups).tried(stay, limit, self.budget)
        self._starts[key] = start.tried(at_keys, limit, self.budget)

    def improve(self) -> None:
        """Moves compute where it did best so far; then, where links limit, by a local search on the best of these."""
        most = most_moved(self.cp_size, self.degrees, self.config, self.budget)
        can_move = [one for one in self._starts.values() if 1 < one.groups.placed.num_ranks <= most]
        starts = sorted(can_move, key=_seconds_of)[: self.budget.cross_moved]
        moved = sorted((one.tried(move, math.inf, self.budget) for one in starts), key=_seconds_of)
        bound = sum(
            load_bound_seconds(self.mask, self.cp_size, self.config, which) for which in PASSES
        )
        if moved and moved[0].seconds > self.budget.far * bound:
            for one in [one for one in moved if self._is_quick(one)][: self.budget.cross_near]:
                one.tried(move_near_both, math.inf, self.budget)

    def _is_quick(self, start: _Start) -> bool:
        """Returns whether head groups and slices are few enough for a local search."""
        placed = start.groups.placed
        are_few = placed.num_ranks <= self.budget.most_near_groups
        return are_few and placed.has_parts(self.budget.most_near)


def _seconds_of(start: _Start) -> float:
    return start.seconds
