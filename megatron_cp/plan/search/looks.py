"""Which placements planner "auto" looks at, at which head degrees.

    at first              at every degree documents and tokens in order, pairs where their queries live or their keys,
                          and the published schemes on tokens in order and zigzag
    besides               documents balanced more tightly or less, chunks by area, fine and coarse, or zigzag
    for the fastest       documents balanced for each mask of a family by itself; documents on larger groups of ranks
                          than those that exchange heads: pieces are longer, and fewer rows move

Placements come from `plan/placement/candidates.py`, strategies from `strategies.py`, all numbers from `budget.py`.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatron_cp.config import CPConfig
from megatron_cp.mask import AttentionMask
from megatron_cp.plan.hardware.cost import head_split_seconds, hidden_seconds, load_bound_seconds
from megatron_cp.plan.hardware.speeds import rank_speeds, total_speed
from megatron_cp.plan.placement.candidates import Family, PlacementCandidates
from megatron_cp.plan.placement.placement import Placement
from megatron_cp.plan.price.double_ring import double_ring_seconds
from megatron_cp.plan.price.head_groups import HeadGroups
from megatron_cp.plan.schema import PASSES, HeadSplit, OwnRows
from megatron_cp.plan.search.budget import SearchBudget
from megatron_cp.plan.search.candidate import Candidate
from megatron_cp.plan.search.degrees import searched_degrees
from megatron_cp.plan.search.strategies import StrategySource, at_keys, published, stay

AT_A_SIDE: tuple[StrategySource, ...] = (stay, at_keys)


@dataclass(frozen=True, eq=False)
class Look:
    """A placement that may be worth a price at a head degree."""

    degree: int
    place: Callable[[], Placement | None]
    sources: tuple[StrategySource, ...] = AT_A_SIDE
    least: float = 0.0
    """Seconds that it takes at least."""


class Looks:
    """The placements of a family of masks that may be worth a price."""

    def __init__(self, masks: Family, cp_size: int, config: CPConfig, budget: SearchBudget):
        self.masks, self.cp_size, self.config, self.budget = masks, cp_size, config, budget
        self.degrees = searched_degrees(cp_size, config)
        few = [degree for degree in self.degrees if cp_size // degree <= budget.most_groups]
        self.searched = few or self.degrees[-1:]
        """The degrees at which more than tokens in order is looked at."""
        self.places = PlacementCandidates(
            masks, cp_size, config, min(self.searched), budget.placements
        )
        self.bounds = {
            name: sum(load_bound_seconds(mask, cp_size, config, which) for which in PASSES)
            for name, (mask, _) in masks.items()
        }
        self.bound = sum(weight * self.bounds[name] for name, (_, weight) in masks.items())

    @functools.cached_property
    def exchange(self) -> dict[int, float]:
        """Seconds in which heads are exchanged at each degree, for all masks; 0 for families, which may mix degrees."""
        if len(self.masks) > 1:
            return dict.fromkeys(self.degrees, 0.0)
        (_, weight), *_ = self.masks.values()
        splits = {degree: HeadSplit((tuple(range(degree)),)) for degree in self.degrees}
        return {
            degree: weight
            * sum(head_split_seconds(split, self.own_rows, self.config, name) for name in PASSES)
            for degree, split in splits.items()
        }

    @property
    def own_rows(self) -> OwnRows:
        """Returns how many rows a rank owns, at least."""
        return OwnRows.of_tokens(self.places.rows)

    def candidate(self, placement: Placement) -> Candidate:
        """Returns a placement without options."""
        return Candidate(placement, {(name, which): [] for name in self.masks for which in PASSES})

    def mask_on(self, name: str, placement: Placement) -> AttentionMask:
        """Returns a mask as it is planned on a placement."""
        return self.masks[name][0]

    def at_first(self, degree: int) -> Iterator[Look]:
        """Yields what is looked at before all else; each with the least time it may take."""
        is_searched = degree in self.searched
        if is_searched:
            yield Look(
                degree,
                self._documents(degree, self.budget.loose_load),
                least=self.bound + self.exchange[degree],
            )
        least = self._least_in_order(degree)
        yield Look(degree, self.places.in_order, least=least)
        if self.config.num_stages is not None:
            return
        if degree == 1:
            yield Look(degree, self.places.in_order, (published,), least)
        if is_searched:
            zigzag = functools.partial(self.places.zigzag, degree)
            yield Look(degree, zigzag, (published,), self._least_with_all_keys(degree))

    def besides(self, degree: int) -> Iterator[Look]:
        """Yields what is worth a price besides at a degree that is searched, the cheap and likely first."""
        if degree == self.cp_size:
            return
        if self.places.by_documents(degree, self.budget.loose_load) is not None:
            for load in (self.budget.tight_load, self.budget.wide_load):
                yield Look(degree, self._documents(degree, load))
        else:
            yield Look(degree, functools.partial(self.places.zigzag, degree))
        for is_coarse in (False, True):
            yield Look(degree, functools.partial(self.places.by_area, degree, is_coarse))

    def for_fastest(self, degree: int) -> Iterator[Look]:
        """Yields documents balanced for each mask of a family by itself, and documents on larger groups."""
        if not self.places.has_documents:
            return
        loads = (self.budget.loose_load, self.budget.tight_load)
        for balance, load in itertools.product(range(1, len(self.places.balances)), loads):
            yield Look(degree, self._documents(degree, load, balance))
        larger = [n for n in range(degree + 1, self.cp_size) if self.cp_size % n == 0]
        for group, load in itertools.product(larger, loads):
            yield Look(degree, self._documents(group, load))

    def to_move_on(self, degree: int) -> Placement | None:
        """Returns a placement on which moving compute is worth it however slow it is without: loose, or in order."""
        documents = self.places.by_documents(degree, self.budget.loose_load)
        return self.places.in_order() if documents is None else documents

    def _documents(
        self, group: int, load: float, balance: int = 0
    ) -> Callable[[], Placement | None]:
        return functools.partial(self.places.by_documents, group, load, balance)

    def _least_in_order(self, degree: int) -> float:
        """Returns the least time at a degree if tokens lie in order and pairs stay with their queries."""
        groups = self.cp_size // degree
        speeds = rank_speeds(self.config, groups)
        seconds = 0.0
        for name, (mask, weight) in self.masks.items():
            share = self.places.areas_in_order[name].reshape(groups, degree).sum(axis=1)
            longest = (share / speeds).max() * total_speed(self.config, groups)
            seconds += weight * self.bounds[name] * longest / max(1, mask.area())
        return seconds + self.exchange[degree]

    def _least_with_all_keys(self, degree: int) -> float:
        """Returns the least time at a degree if every head group gets all keys, or the double ring goes round."""
        mask, _ = next(iter(self.masks.values()))
        groups = HeadGroups.of(mask, self.places.in_order(), self.config, degree)
        layers = sum(weight for _, weight in self.masks.values())
        moved = layers * min(groups.all_keys_seconds(), double_ring_seconds(groups))
        return float(hidden_seconds(self.config, self.bound, moved)) + self.exchange[degree]
