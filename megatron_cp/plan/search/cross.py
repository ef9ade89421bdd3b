"""Planner "auto" for cross attention, whose queries and keys are different tokens.

    one side      where another plan has it, or in order, zigzag, by documents, by area
    the other     where another plan has it, or beside what it meets of the first; either side may be the first

All of it is searched and priced as the self attention of one stream (`plan/placement/two_sided.py`).
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from megatron_cp.config import CPConfig
from megatron_cp.mask import AttentionMask
from megatron_cp.plan.placement.placement import Placement
from megatron_cp.plan.placement.two_sided import (
    CrossPlacements,
    KnownSides,
    TwoSidedPlacement,
)
from megatron_cp.plan.schema import PASSES, SIDES, OwnRows, Pass, PlanData, Side
from megatron_cp.plan.search.budget import BUDGET, SearchBudget
from megatron_cp.plan.search.candidate import Candidate
from megatron_cp.plan.search.choose import best_of
from megatron_cp.plan.search.looks import Look, Looks
from megatron_cp.plan.search.search import Search
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
    looks = CrossLooks(mask, cp_size, config, budget, known)
    return best_of(Search(looks, budget).run(), looks.masks, config, budget)[NAME]


class CrossLooks(Looks):
    """Placements of both sides that may be worth a price."""

    def __init__(
        self,
        mask: AttentionMask,
        cp_size: int,
        config: CPConfig,
        budget: SearchBudget,
        known: KnownSides,
    ):
        super().__init__({NAME: (mask, 1.0)}, cp_size, config, budget)
        self.known = known
        masks: dict[Side, AttentionMask] = {"q": mask, "k": mask.transpose()}
        self.sides = {
            side: CrossPlacements(
                {NAME: (one, 1.0)}, cp_size, config, self.degrees[0], budget.placements
            )
            for side, one in masks.items()
        }

    @property
    def own_rows(self) -> OwnRows:
        """Returns how many rows of each side a rank owns, at least."""
        mask, _ = self.masks[NAME]
        return OwnRows(-(-mask.num_queries // self.cp_size), -(-mask.num_keys // self.cp_size))

    def candidate(self, placement: Placement) -> Candidate:
        """Returns a placement without options."""
        return CrossCandidate(placement, {(NAME, which): [] for which in PASSES})

    def mask_on(self, name: str, placement: Placement) -> AttentionMask:
        """Returns the mask as that of one stream."""
        assert isinstance(placement, TwoSidedPlacement)
        return placement.one_stream(self.masks[name][0])

    def at_first(self, degree: int) -> Iterator[Look]:
        """Yields all placements of both sides."""
        least = self.bound + self.exchange[degree]
        yield Look(degree, self._in_order, least=least)
        for first in SIDES:
            for place in self._first(first, degree):
                yield Look(degree, functools.partial(self._both, first, place, degree), least=least)

    def besides(self, degree: int) -> Iterator[Look]:
        """Yields nothing more."""
        return iter(())

    def for_fastest(self, degree: int) -> Iterator[Look]:
        """Yields nothing more."""
        return iter(())

    def to_move_on(self, degree: int) -> None:
        """Returns nothing more."""

    def _in_order(self) -> TwoSidedPlacement:
        """Returns each side where another plan has it, or in order."""
        sides = {
            side: self.known[side] if side in self.known else places.in_order()
            for side, places in self.sides.items()
        }
        return TwoSidedPlacement.of(sides["q"], sides["k"])

    def _both(
        self, first: Side, place: Callable[[], Placement | None], degree: int
    ) -> TwoSidedPlacement | None:
        """Returns a placement of one side, and beside it the other; None if there is none."""
        placed, other = place(), OTHER[first]
        if placed is None:
            return None
        beside = (
            self.known[other] if other in self.known else self.sides[first].beside(placed, degree)
        )
        sides = {first: placed, other: beside}
        return TwoSidedPlacement.of(sides["q"], sides["k"])

    def _first(self, side: Side, degree: int) -> Iterator[Callable[[], Placement | None]]:
        places = self.sides[side]
        if side in self.known:
            yield lambda: self.known[side]
            return
        yield places.in_order
        yield functools.partial(places.by_documents, degree, self.budget.loose_load)
        if not places.is_even_in_order and degree < self.cp_size:
            yield functools.partial(places.zigzag, degree)
            yield functools.partial(places.by_area, degree)
