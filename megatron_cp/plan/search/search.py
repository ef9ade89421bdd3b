"""What planner "auto" looks at: placements of tokens, degrees of head exchange, and who computes what.

    look      at every head degree documents and tokens in order, queries at home, and the published schemes on tokens
              in order and zigzag (needed keys, ring, all-gather, double ring, Ulysses, USP); the lowest bound first
    improve   the fastest degree first, a step at a time: documents balanced more tightly or less, chunks by area, or
              zigzag; documents on larger groups of ranks than those that exchange heads; then compute moved away from
              the queries' owners, on the best placements before others; then a local search near what these have,
              where links limit

Whatever looks fastest is priced exactly at once, and what cannot be faster by more than can be told is skipped: a
degree by its bound (load, and the exchange of heads), a first look by the least it takes, a strategy by its busiest
rank. Everything is priced from small arrays; nothing is built here,
and nothing is clocked, so every rank finds the same plan. Placements come from `plan/placement/candidates.py`,
strategies from `strategies.py`, all numbers from `budget.py`.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from megatron_cp.config import CPConfig
from megatron_cp.mask import AttentionMask
from megatron_cp.mask.interval import IntArray
from megatron_cp.plan.hardware.cost import head_split_seconds, hidden_seconds, load_bound_seconds
from megatron_cp.plan.hardware.speeds import is_uneven, rank_speeds, total_speed
from megatron_cp.plan.hardware.topology import get_topology
from megatron_cp.plan.placement.candidates import Family, PlacementCandidates
from megatron_cp.plan.placement.classes import Reordering
from megatron_cp.plan.placement.placement import Placement
from megatron_cp.plan.price.double_ring import double_ring_seconds
from megatron_cp.plan.price.head_groups import HeadGroups, PassOption, Strategy, strategy_seconds
from megatron_cp.plan.schema import PASSES, HeadSplit, OwnRows, Pass, PassName, PlanData
from megatron_cp.plan.search.budget import SearchBudget
from megatron_cp.plan.search.degrees import most_moved, moved_groups, searched_degrees
from megatron_cp.plan.search.strategies import StrategySource, move, move_near_both, published, stay


@dataclass(frozen=True)
class Candidate:
    """A placement, and for every pass of every mask of the family the options found so far."""

    placement: Placement
    options: dict[tuple[str, PassName], list[PassOption]]
    groups: dict[tuple[str, int], HeadGroups] = field(default_factory=dict)
    priced: set[tuple[int, StrategySource]] = field(default_factory=set)
    fastest: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Seconds of each mask at its best, and the head degree."""
    reordering: Reordering | None = None
    """Of tokens; the placement is one of their new places."""

    @property
    def tokens(self) -> IntArray:
        """Returns the tokens of each rank: int64 `[P, T]`."""
        places = self.placement.tokens
        return places if self.reordering is None else self.reordering.tokens_of(places)

    def plan(
        self, mask: AttentionMask, config: CPConfig, forward: Pass, backward: Pass
    ) -> PlanData:
        """Returns the plan of a mask with these passes, forward and backward."""
        return PlanData(mask, config, "auto", self.tokens, forward, backward)

    def add(self, name: str, strategies: Iterable[Strategy]) -> None:
        """Adds strategies for a mask."""
        for strategy in strategies:
            for which, option in strategy.items():
                self.options[name, which].append(option)


@dataclass(frozen=True, eq=False)
class _Step:
    """A placement and a source of strategies that may be worth a price at a head degree."""

    degree: int
    place: Callable[[], Placement | None]
    source: StrategySource
    least: float = 0.0
    """Seconds that it takes at least."""


class Search:
    """One search: placements looked at, the options found on them, and what is still worth a look."""

    def __init__(self, masks: Family, cp_size: int, config: CPConfig, budget: SearchBudget):
        self.masks, self.cp_size, self.config, self.budget = masks, cp_size, config, budget
        self.degrees = searched_degrees(cp_size, config)
        searched = [degree for degree in self.degrees if cp_size // degree <= budget.most_groups]
        self.searched = searched or self.degrees[-1:]
        self.is_uneven = is_uneven(config, cp_size)
        self.most_moved = most_moved(cp_size, self.searched, config, budget)
        of_groups = functools.partial(moved_groups, cp_size, self.searched, self.most_moved)
        self.always_moved = of_groups(budget.always_moved)
        # Memory may be short, states of linear layers travel too, and measured kernels are slower than nominal ones.
        has_rates = get_topology(config.topology).kernels is not None
        self.is_by_time = not (config.max_received_mb or config.linear_state_bytes or has_rates)
        # All own equally many tokens, so a slow rank has too many pairs wherever they are placed: pairs have to move.
        self.must_move = of_groups(cp_size) if self.is_uneven else self.always_moved
        self.placements = PlacementCandidates(
            masks, cp_size, config, min(self.searched), budget.placements
        )
        self.bounds = {
            key: sum(load_bound_seconds(mask, cp_size, config, name) for name in PASSES)
            for key, (mask, _) in masks.items()
        }
        self.bound = sum(weight * self.bounds[key] for key, (_, weight) in masks.items())
        self.exchange = {degree: self._exchange_seconds(degree) for degree in self.degrees}
        self.found: dict[bytes, Candidate] = {}
        self.fastest = dict.fromkeys(self.degrees, math.inf)
        self.known = math.inf
        """Seconds of the fastest plan whose price is exact: what is skipped cannot beat it."""
        self.leader: Candidate | None = None
        """The placement of that plan."""
        self.by_mask = {name: dict.fromkeys(self.degrees, math.inf) for name in masks}

    def _exchange_seconds(self, degree: int) -> float:
        """Returns what heads take to be exchanged, for all masks together; 0 for families, which may mix degrees."""
        if len(self.masks) > 1:
            return 0.0
        split = HeadSplit((tuple(range(degree)),))
        own = OwnRows.of_tokens(self.placements.rows)
        seconds = (head_split_seconds(split, own, self.config, name) for name in PASSES)
        return sum(weight for _, weight in self.masks.values()) * sum(seconds)

    def look(self) -> None:
        """Prices documents, tokens in order and zigzag, in the order of what each may reach at best."""
        steps = [step for degree in self.degrees for step in self._first_steps(degree)]
        for step in sorted(steps, key=lambda one: one.least):
            if step.least <= self._limit():
                self._take(step)
        self._settle()
        if self.leader is None:
            raise ValueError(self._too_many_parts())

    def _first_steps(self, degree: int) -> Iterator[_Step]:
        """Yields what is worth a look at a degree: queries at home, and the published schemes."""
        places, is_searched = self.placements, degree in self.searched
        if is_searched:
            documents = functools.partial(places.by_documents, degree, self.budget.loose_load)
            yield _Step(degree, documents, stay, self.bound + self.exchange[degree])
        least = self._least_in_order(degree)
        yield _Step(degree, places.in_order, stay, least)
        if self.config.num_stages is not None:
            return
        if degree == 1:
            yield _Step(degree, places.in_order, published, least)
        if is_searched:
            zigzag = functools.partial(places.zigzag, degree)
            yield _Step(degree, zigzag, published, self._least_with_all_keys(degree))

    def _least_in_order(self, degree: int) -> float:
        """Returns the least time at a degree if tokens lie in order and queries stay at home."""
        groups = self.cp_size // degree
        speeds = rank_speeds(self.config, groups)
        seconds = 0.0
        for name, (mask, weight) in self.masks.items():
            share = self.placements.areas_in_order[name].reshape(groups, degree).sum(axis=1)
            longest = (share / speeds).max() * total_speed(self.config, groups)
            seconds += weight * self.bounds[name] * longest / max(1, mask.area())
        return seconds + self.exchange[degree]

    def _least_with_all_keys(self, degree: int) -> float:
        """Returns the least time at a degree if every head group gets all keys, or the double ring goes round."""
        first = next(iter(self.masks))
        groups = self._groups_of(self._candidate(self.placements.in_order()), first, degree)
        layers = sum(weight for _, weight in self.masks.values())
        moved = layers * min(groups.all_keys_seconds(), double_ring_seconds(groups))
        return float(hidden_seconds(self.config, self.bound, moved)) + self.exchange[degree]

    def improve(self) -> None:
        """Looks at other placements, queries at home; then moves compute, on the best placement first."""
        steps = [step for degree in self.searched for step in self._steps(degree)]
        self._take_while_worth([step for step in steps if step.source is stay])
        self._balance_otherwise()
        starts = self._with_leader([])
        self._place_on_larger_groups()
        starts = self._with_leader(starts)
        self._move_on(starts)
        self._settle()
        self._take_while_worth([step for step in steps if step.source is move])
        self._move_near(self._with_leader(starts))
        self._settle()

    def _take_while_worth(self, steps: list[_Step]) -> None:
        """Takes steps, those of the fastest degree first, as long as one may lead to a faster plan."""
        while worth := [step for step in steps if self._is_worth(step)]:
            step = min(worth, key=lambda one: self.fastest[one.degree])
            steps.remove(step)
            self._take(step)
            self._settle()

    def _take(self, step: _Step) -> None:
        placement = step.place()
        if placement is not None:
            self._price(placement, step.degree, step.source)

    def _steps(self, degree: int) -> list[_Step]:
        """Returns what is worth a price at a degree besides, the cheap and likely first."""
        places, budget = self.placements, self.budget
        if degree == self.cp_size or self._is_cut_up(degree):
            return []
        zigzag = functools.partial(places.zigzag, degree)
        by_area = _Step(degree, functools.partial(places.by_area, degree), stay)
        whole = places.by_documents(degree, budget.loose_load)
        if whole is None:
            in_order = _Step(degree, places.in_order, move)
            return [_Step(degree, zigzag, stay), by_area, in_order]
        tight, wide = (
            _Step(degree, functools.partial(places.by_documents, degree, load), stay)
            for load in (budget.tight_load, budget.wide_load)
        )
        steps = [tight, wide, by_area, _Step(degree, zigzag, move)]
        return [*steps, _Step(degree, lambda: whole, move)] if self.is_uneven else steps

    def _is_worth(self, step: _Step) -> bool:
        """Returns whether a step may win."""
        if not self._is_open(step.degree):
            return False
        if step.source is stay:
            return True
        may_pay = self.is_uneven or not self.is_by_time or not self._is_within(self.budget.far)
        return may_pay and self.cp_size // step.degree <= self.most_moved

    def _is_open(self, degree: int) -> bool:
        """Returns whether a plan of a degree may still be faster, by more than can be told, than the fastest."""
        reached = self.budget.perfect * (self.bound + self.exchange[degree])
        return not self.is_by_time or reached < self.known

    def _limit(self) -> float:
        """Returns the seconds beyond which a strategy is of no use; none where its time alone does not decide.

        So it is with masks of a family, which share a placement.
        """
        if len(self.masks) > 1 or not self.is_by_time:
            return math.inf
        return self.budget.hopeless * min(self.known, *self.fastest.values())

    def _settle(self) -> None:
        """Replaces estimates by prices for whatever looks fastest, until the fastest has none."""
        while True:
            self.known, candidate = math.inf, None
            fastest: dict[tuple[str, PassName], PassOption] = {}
            for one in self.found.values():
                if all(one.options.values()):
                    best = {
                        key: min(options, key=_price_of) for key, options in one.options.items()
                    }
                    seconds = sum(self.masks[name][1] * o.seconds for (name, _), o in best.items())
                    if seconds < self.known:
                        self.known, candidate, fastest = seconds, one, best
            estimates = {key: one for key, one in fastest.items() if one.is_estimate}
            self.leader = candidate
            if candidate is None or not estimates:
                return
            for key, option in estimates.items():
                options = candidate.options[key]
                assert option.refine is not None
                options[options.index(option)] = option.refine()

    def _balance_otherwise(self) -> None:
        """Prices documents balanced for each mask of a family by itself, at the two degrees that did best."""
        degrees = sorted(self.searched, key=self.fastest.__getitem__)[:2]
        loads = (self.budget.loose_load, self.budget.tight_load)
        others = range(1, len(self.placements.balances))
        for balance, load, degree in itertools.product(others, loads, degrees):
            placement = self.placements.by_documents(degree, load, balance)
            if placement is not None:
                self._price(placement, degree, stay)

    def _place_on_larger_groups(self) -> None:
        """Prices documents on larger groups than those that exchange heads: pieces are longer, and fewer rows move."""
        if self._is_within(self.budget.perfect):
            return
        degree = min(self.searched, key=self.fastest.__getitem__)
        larger = [n for n in range(degree + 1, self.cp_size) if self.cp_size % n == 0]
        for group, load in itertools.product(
            larger, (self.budget.loose_load, self.budget.tight_load)
        ):
            placement = self.placements.by_documents(group, load)
            if placement is not None:
                self._price(placement, degree, stay)

    def _with_leader(self, starts: list[Candidate]) -> list[Candidate]:
        """Returns placements on which compute is worth moving, and the best one now."""
        self._settle()
        assert self.leader is not None
        return [one for one in starts if one is not self.leader] + [self.leader]

    def _move_on(self, starts: list[Candidate]) -> None:
        """Moves compute on placements, among few head groups."""
        if self.always_moved == 1 or self._is_within(self.budget.perfect):
            return
        for start in starts:
            for most in dict.fromkeys((self.always_moved, self.must_move)):
                self._price_on(start, most, move)

    def _move_near(self, starts: list[Candidate]) -> None:
        """Searches near the assignments on placements, where links limit; among few head groups and slices."""
        is_quick = 1 < self.always_moved <= self.budget.most_near_groups
        if is_quick and not self._is_within(self.budget.far):
            for start in starts:
                self._price_on(start, self.always_moved, move_near_both)

    def _price_on(self, start: Candidate, most: int, source: StrategySource) -> None:
        """Prices a source on a placement, with `most` head groups, or as many as did best if their exchange is long."""
        for name in self.masks:
            best = start.fastest[name][1]
            degree = max(best, self.cp_size // most)
            degree = degree if self._is_open(degree) else best
            if 1 < self.cp_size // degree <= self.most_moved:
                self._price(start.placement, degree, source)

    def _is_within(self, factor: float) -> bool:
        """Returns whether a plan was found that takes no more than `factor` times the load bound."""
        return self.known <= factor * self.bound

    def _price(self, placement: Placement, degree: int, source: StrategySource) -> None:
        """Adds strategies for all masks on a placement, with this head degree or the one that suits a mask best."""
        candidate = self._candidate(placement)
        if (degree, source) in candidate.priced:
            return
        candidate.priced.add((degree, source))
        total = 0.0
        for name, (_, weight) in self.masks.items():
            strategies = []
            for each in {degree: None, self._favourite(name, degree, source): None}:
                groups = self._groups_of(candidate, name, each)
                if not groups.placed.has_parts(self._most_parts(groups, source)):
                    return
                found = source(groups, self._limit(), self.budget.stagings)
                if not found:
                    return
                candidate.add(name, found)
                strategies += found
                seconds = strategy_seconds(min(found, key=strategy_seconds))
                self.by_mask[name][each] = min(self.by_mask[name][each], seconds)
                known = candidate.fastest.get(name, (math.inf, 0))
                candidate.fastest[name] = min(known, (seconds, each))
            total += weight * min(map(strategy_seconds, strategies))
        self.fastest[degree] = min(self.fastest[degree], total)

    def _is_cut_up(self, degree: int) -> bool:
        """Returns whether tokens in order cut a mask into too many parts already; other placements cut it further."""
        in_order = self._candidate(self.placements.in_order())
        every = [self._groups_of(in_order, name, degree) for name in self.masks]
        return not all(one.placed.has_parts(self._most_parts(one, stay)) for one in every)

    def _most_parts(self, groups: HeadGroups, source: StrategySource) -> int:
        """Returns into how many parts the mask may be cut for a source.

        Something must be found: what others publish, or with a chosen number of stages tokens in order.
        """
        if source is move_near_both:
            return self.budget.most_near
        in_order = len(groups.placed.owners.ids) == groups.placed.num_ranks
        is_only = in_order and source is stay and self.config.num_stages is not None
        must = source is published or is_only
        most = self.budget.most_parts_published if must else self.budget.most_parts
        return max(most, 2 * groups.mask.num_slices, len(groups.placed.owners.ids) ** 2)

    def _too_many_parts(self) -> str:
        slices = max(mask.num_slices for mask, _ in self.masks.values())
        way = "describe it in fewer, larger slices"
        if self.config.chunk_size is not None:
            way += (
                ", or leave out chunk_size: classes of tokens that never meet are put together then"
            )
        return (
            f"a mask of {slices} slices cannot be planned for {self.cp_size} ranks: cut where their tokens end it has "
            f"more than {self.budget.most_parts_published}, which fill memory; {way}"
        )

    def _candidate(self, placement: Placement) -> Candidate:
        new = Candidate(placement, {(name, which): [] for name in self.masks for which in PASSES})
        return self.found.setdefault(placement.ids.tobytes(), new)

    def _groups_of(self, candidate: Candidate, name: str, degree: int) -> HeadGroups:
        """Returns a mask on the head groups of a candidate; placed once for all strategies."""
        if (name, degree) not in candidate.groups:
            mask, _ = self.masks[name]
            groups = HeadGroups.of(mask, candidate.placement, self.config, degree)
            candidate.groups[name, degree] = groups
        return candidate.groups[name, degree]

    def _favourite(self, name: str, degree: int, source: StrategySource) -> int:
        """Returns the degree at which a mask did best so far; masks of one plan need not share it."""
        by_degree = self.by_mask[name]
        if len(self.masks) == 1 or source is published:
            return degree
        return min(by_degree, key=by_degree.__getitem__)


def _price_of(option: PassOption) -> float:
    return option.seconds
