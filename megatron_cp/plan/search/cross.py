"""Planner "auto" for cross attention, whose queries and keys are different tokens.

    queries    where another plan has them, or in order, zigzag, by documents, by area
    keys       where another plan has them, or beside the queries that see them
    compute    with the queries, at every head degree; on the best few also elsewhere: few queries travel to many keys

All of it is planned and priced as the self attention of one stream (`plan/placement/two_sided.py`).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_cp.config import CPConfig
from megatron_cp.mask import AttentionMask
from megatron_cp.plan.placement.placement import Placement
from megatron_cp.plan.placement.two_sided import (
    CrossPlacements,
    KnownSides,
    TwoSidedPlacement,
)
from megatron_cp.plan.price.head_groups import HeadGroups, PassOption, strategy_seconds
from megatron_cp.plan.schema import PASSES, Pass, PassName, PlanData
from megatron_cp.plan.search.budget import BUDGET, SearchBudget
from megatron_cp.plan.search.choose import best_of
from megatron_cp.plan.search.degrees import most_moved, searched_degrees
from megatron_cp.plan.search.search import Candidate
from megatron_cp.plan.search.strategies import move, move_near_both, stay
from megatron_cp.plan.transfer.two_sided import cross_plan

NAME = "mask"
MOST_MOVED = 3  # placements and head degrees on which compute is moved


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


class _Search:
    def __init__(self, mask: AttentionMask, cp_size: int, config: CPConfig, budget: SearchBudget):
        self.mask, self.cp_size, self.config, self.budget = mask, cp_size, config, budget
        self.degrees = searched_degrees(cp_size, config)
        self.found: dict[bytes, CrossCandidate] = {}
        self.priced: list[tuple[float, HeadGroups, CrossCandidate]] = []
        self._placements = CrossPlacements(
            {NAME: (mask, 1.0)}, cp_size, config, self.degrees[0], budget.placements
        )

    def placements(self, degree: int, known: KnownSides) -> Iterator[TwoSidedPlacement]:
        """Yields the placements worth a price at one head degree."""
        for queries in [known["q"]] if "q" in known else self._queries(degree):
            keys = known["k"] if "k" in known else self._placements.keys(queries, degree)
            yield TwoSidedPlacement.of(queries, keys)

    def _queries(self, degree: int) -> Iterator[Placement]:
        places = self._placements
        yield places.in_order()
        documents = places.by_documents(degree, self.budget.loose_load)
        if documents is not None:
            yield documents
        if not places.is_even_in_order and degree < self.cp_size:
            yield places.zigzag(degree)
            yield places.by_area(degree)

    def price(self, sides: TwoSidedPlacement, degree: int) -> None:
        """Adds the strategy whose queries stay at home, unless it cannot come near the fastest."""
        options: dict[tuple[str, PassName], list[PassOption]] = {
            (NAME, which): [] for which in PASSES
        }
        candidate = self.found.setdefault(sides.ids.tobytes(), CrossCandidate(sides, options))
        groups = HeadGroups.of(sides.one_stream(self.mask), sides, self.config, degree)
        best = min((seconds for seconds, _, _ in self.priced), default=math.inf)
        limit = math.inf if self.config.max_received_mb else self.budget.hopeless * best
        strategies = stay(groups, limit, self.budget.stagings)
        candidate.add(NAME, strategies)
        self.priced += [(strategy_seconds(one), groups, candidate) for one in strategies]

    def improve(self) -> None:
        """Moves compute where queries at home did best; among few head groups also by a local search."""
        best = sorted(self.priced, key=lambda one: one[0])
        most = most_moved(self.cp_size, self.degrees, self.config, self.budget)
        can_move = [one for one in best if 1 < one[1].placed.num_ranks <= most]
        for _, groups, candidate in can_move[:MOST_MOVED]:
            candidate.add(NAME, move(groups, math.inf, self.budget.stagings))
            if groups.placed.num_ranks <= self.budget.always_moved:
                candidate.add(NAME, move_near_both(groups, math.inf, self.budget.stagings))
