"""What planner "auto" looks at: placements of tokens, degrees of head exchange, and who computes what.

    look      every head degree: one placement by documents or by area, then the published schemes on tokens in
              order and zigzag (needed keys, ring, all-gather, Ulysses, USP) that may come near
    improve   the degree that promises most, a step at a time: other placements, and compute moved away from the
              queries' owners; at last on the best placement, among the few head groups of a large degree

until effort is spent or a plan is as good as perfect; then an optional solver (`plan/compute/solvers`). Everything is
priced from small arrays; nothing is built here. Effort is counted, not clocked, so every rank finds the same plan.
Placements come from `plan/placement/candidates.py`, strategies from `strategies.py`, all numbers from `budget.py`.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from megatron_cp.config import CPConfig
from megatron_cp.mask import AttentionMask
from megatron_cp.mask.interval import IntArray
from megatron_cp.plan.hardware.cost import load_bound_seconds
from megatron_cp.plan.hardware.speeds import rank_speeds
from megatron_cp.plan.hardware.topology import get_topology
from megatron_cp.plan.placement.candidates import Family, PlacementCandidates
from megatron_cp.plan.placement.classes import Reordering, classes_together
from megatron_cp.plan.placement.placement import Placement, chunk_layout
from megatron_cp.plan.price.head_groups import HeadGroups, PassOption, Strategy
from megatron_cp.plan.schema import PASSES, Pass, PassName, PlanData
from megatron_cp.plan.search.budget import SearchBudget
from megatron_cp.plan.search.strategies import MOVE, PUBLISHED, STAY, StrategySource, solved
from megatron_cp.plan.transfer.head_split import fits_heads

DONE = object()
MANY_SLICES = 4096  # of a mask: merging neighbours takes a microsecond for each


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


def candidates(
    masks: Family, cp_size: int, config: CPConfig, budget: SearchBudget
) -> list[Candidate]:
    """Returns all placements looked at, with their priced options; each mask has at least one on each.

    A chosen chunk size is searched like each coarser one that is legal as well: no finer one does worse. Where classes
    of tokens never meet (a dilated window), their tokens are put together first; if that takes no more slices, nothing
    else is looked at.
    """
    masks = {name: (_merged(mask), weight) for name, (mask, weight) in masks.items()}
    apart = (
        classes_together([mask for mask, _ in masks.values()])
        if _may_reorder(cp_size, config)
        else None
    )
    found: list[Candidate] = []
    if apart is not None:
        weights = [weight for _, weight in masks.values()]
        reordered = dict(zip(masks, zip(apart.masks, weights, strict=True), strict=True))
        found += [
            replace(one, reordering=apart) for one in _searched(reordered, cp_size, config, budget)
        ]
        if _num_slices(reordered) <= _num_slices(masks):
            return found
    for chosen in _with_coarser_chunks(masks, cp_size, config):
        found += _searched(masks, cp_size, chosen, budget)
    return found


def _searched(
    masks: Family, cp_size: int, config: CPConfig, budget: SearchBudget
) -> list[Candidate]:
    search = _Search(masks, cp_size, config, budget)
    search.look()
    search.improve()
    found = [one for one in search.found.values() if all(one.options.values())]
    if config.improver is not None:
        search.solve(found)
    return found


def _merged(mask: AttentionMask) -> AttentionMask:
    """Returns the mask with neighbours merged if it has so many slices that it may pay: a token each of a diagonal."""
    return mask.merged() if mask.num_slices > MANY_SLICES else mask


def _may_reorder(cp_size: int, config: CPConfig) -> bool:
    """Returns whether single tokens may be placed anywhere: not in chunks that the user chose."""
    return cp_size > 1 and config.chunk_size is None


def _num_slices(masks: Family) -> int:
    return sum(mask.num_slices for mask, _ in masks.values())


def _with_coarser_chunks(masks: Family, cp_size: int, config: CPConfig) -> list[CPConfig]:
    """Returns the config, and with a chosen chunk size those of 2, 4 ... times as many tokens that divide a rank's."""
    if config.chunk_size is None:
        return [config]
    chunk, count = chunk_layout(next(iter(masks.values()))[0].num_queries, cp_size, config)
    return [
        replace(config, chunk_size=chunk << n)
        for n in range(count.bit_length())
        if count % (1 << n) == 0
    ]


class _Search:
    def __init__(self, masks: Family, cp_size: int, config: CPConfig, budget: SearchBudget):
        self.masks, self.cp_size, self.config, self.budget = masks, cp_size, config, budget
        self.degrees = head_degrees(cp_size, config)
        searched = [degree for degree in self.degrees if cp_size // degree <= budget.most_groups]
        self.searched = searched or self.degrees[-1:]
        moved = [n for d in self.searched if 1 < (n := cp_size // d) <= budget.most_moved]
        self.always_moved = max(
            (n for n in moved if n <= budget.always_moved), default=min(moved, default=1)
        )
        # All own equally many tokens, so a slow rank has too many pairs wherever they are placed: pairs have to move.
        speeds = rank_speeds(config, cp_size)
        is_uneven = bool((speeds != speeds[0]).any())
        self.must_move = max(moved, default=1) if is_uneven else self.always_moved
        self.placements = PlacementCandidates(
            masks, cp_size, config, min(self.searched), budget.placements
        )
        self.bounds = {
            key: sum(load_bound_seconds(mask, cp_size, config, name) for name in PASSES)
            for key, (mask, _) in masks.items()
        }
        self.bound = sum(weight * self.bounds[key] for key, (_, weight) in masks.items())
        self.found: dict[bytes, Candidate] = {}
        self.fastest = dict.fromkeys(self.degrees, math.inf)
        self.promise = dict.fromkeys(self.degrees, math.inf)
        self.by_mask = {name: dict.fromkeys(self.degrees, math.inf) for name in masks}
        self._by_area: dict[int, Placement] = {}
        self.needed_in_order: dict[int, float] = {}
        self.effort = 0.0

    def look(self) -> None:
        """Prices the published schemes exactly, and one placement by documents or by area per degree."""
        loose, few = self.budget.loose_load, self.budget.by_area_at_once
        for degree in self.degrees:
            is_searched = degree in self.searched
            documents = self.placements.by_documents(degree, loose) if is_searched else None
            if documents is not None:
                self._price(documents, degree, STAY)
                if self.config.chunk_size is None:
                    continue  # tokens of documents are placed one by one
            if self.placements.is_even_in_order:
                self._price(self.placements.in_order(), degree, STAY)
            elif is_searched and 1 < self.cp_size // degree <= few:
                self._price_by_area(degree)
        needed = self.needed_in_order
        for degree in self.searched if self.config.num_stages is None else ():
            needed[degree] = self._price(self.placements.in_order(), degree, PUBLISHED)
            self._price(self.placements.zigzag(degree), degree, PUBLISHED)
        for degree in self._promising_in_order()[:1]:
            # Windows: tokens in order need the fewest rows there can be.
            self._price(self.placements.in_order(), degree, STAY)

    def _promising_in_order(self) -> list[int]:
        """Returns the degrees at which needed keys alone, tokens in order, come near the fastest, best first."""
        limit = self.budget.promising * min(self.fastest.values())
        needed = self.needed_in_order
        return [one for one in sorted(needed, key=needed.__getitem__) if needed[one] <= limit]

    def _limit(self) -> float:
        """Returns the seconds beyond which a strategy is of no use; none in families and where memory is short."""
        if len(self.masks) > 1 or self.config.max_received_mb is not None:
            return math.inf
        return self.budget.hopeless * min(self.fastest.values())

    def improve(self) -> None:
        """Takes steps of the degree that promises most; one that is nearly as good has its turn as well."""
        steps = {degree: self._steps(degree) for degree in self.searched}
        taken = dict.fromkeys(self.searched, 0)
        patience = self.budget.patience
        while steps and not self._is_over():
            degree = min(steps, key=lambda one: self.promise[one] * patience ** taken[one])
            taken[degree] += 1
            if next(steps[degree], DONE) is DONE:
                del steps[degree]
        for degree in (
            [] if self._is_within(self.budget.perfect) else self._promising_in_order()[:2]
        ):
            self._price(self.placements.in_order(), degree, STAY)
        self._balance_otherwise()
        self._move_on_best()

    def _balance_otherwise(self) -> None:
        """Prices documents balanced for each mask of a family by itself, at the degree that did best."""
        degree = min(self.searched, key=self.fastest.__getitem__)
        others = range(1, len(self.placements.balances))
        loads = (self.budget.loose_load, self.budget.tight_load)
        for balance, load in itertools.product(others, loads):
            placement = self.placements.by_documents(degree, load, balance)
            if placement is not None:
                self._price(placement, degree, STAY)

    def _steps(self, degree: int) -> Iterator[None]:
        """Prices more and more for one degree of head exchange, a placement and a strategy at a time."""
        in_order = self.placements.in_order()
        if self.cp_size == degree:
            self._price(in_order, degree, STAY)
            yield
            return
        loose = self.placements.by_documents(degree, self.budget.loose_load)
        tight = self.placements.by_documents(degree, self.budget.tight_load)
        first = loose or (
            in_order if self.placements.is_even_in_order else self.placements.zigzag(degree)
        )
        self._price(tight or first, degree, STAY)
        yield
        moved = functools.partial(self._move_if_worthwhile, first, degree)
        by_area = functools.partial(self._price_by_area, degree)
        stays = functools.partial(self._price, in_order, degree, STAY)
        moves = functools.partial(self._move_if_worthwhile, in_order, degree)
        steps: list[Callable[[], object]] = [moved, by_area, stays, moves]
        if loose is not None and self.cp_size // degree > self.budget.by_area_at_once:
            # Moving compute among many takes longest, and whole documents leave little to move.
            steps = [by_area, stays, moved, moves]
        for step in steps:
            step()
            yield

    def _move_if_worthwhile(self, placement: Placement, degree: int) -> None:
        groups = self.cp_size // degree
        has_time = MOVE.fixed + MOVE.per_rank * groups <= self._effort_left()
        if has_time or groups <= self.must_move or not self._is_within(self.budget.far):
            self._price(placement, degree, MOVE)

    def _move_on_best(self) -> None:
        if self.always_moved == 1 or self._is_within(self.budget.good):
            return
        best = self._best(self.found.values())
        degrees = [best.fastest[name][1] for name in self.masks]
        for most in dict.fromkeys((self.always_moved, self.must_move)):
            for degree in dict.fromkeys(max(one, self.cp_size // most) for one in degrees):
                if degree < self.cp_size:
                    self._price(best.placement, degree, MOVE)

    def _best(self, candidates: Iterable[Candidate]) -> Candidate:
        """Returns the candidate on which all masks together are fastest."""
        unknown = (math.inf, 0)

        def seconds(one: Candidate) -> float:
            fastest = [(one.fastest.get(name, unknown), w) for name, (_, w) in self.masks.items()]
            return sum(weight * least for (least, _), weight in fastest)

        return min(candidates, key=seconds)

    def _price_by_area(self, degree: int) -> None:
        if degree not in self._by_area:
            self.effort += self.budget.by_area_effort
            self._by_area[degree] = self.placements.by_area(degree)
        self._price(self._by_area[degree], degree, STAY)

    def solve(self, found: list[Candidate]) -> None:
        """Lets the config's solver assign the compute of the best candidate anew."""
        best = self._best(found)
        for name in self.masks:
            groups = self._groups_of(best, name, best.fastest[name][1])
            best.add(name, solved(groups, self.budget.stagings))

    def _is_over(self) -> bool:
        """Returns whether nothing better can be expected, or enough has been tried."""
        return self._is_within(self.budget.perfect) or self._effort_left() < 0

    def _effort_left(self) -> float:
        """Returns what may still be spent on each mask."""
        all_of_it = self.budget.effort + self.budget.effort_per_rank * self.cp_size
        return all_of_it - self.effort / len(self.masks)

    def _is_within(self, factor: float) -> bool:
        """Returns whether a plan was found that takes no more than `factor` times the load bound."""
        return min(self.fastest.values()) <= factor * self.bound

    def _price(self, placement: Placement, degree: int, source: StrategySource) -> float:
        """Adds strategies for all masks on a placement, with this head degree or the one that suits a mask best.

        Returns the price, or the best of the degree where it is known already. A degree promises what its
        fastest strategy would take if nobody waited for the busiest rank.
        """
        new = Candidate(placement, {(name, which): [] for name in self.masks for which in PASSES})
        candidate = self.found.setdefault(placement.ids.tobytes(), new)
        if (degree, source) in candidate.priced:
            return self.fastest[degree]
        candidate.priced.add((degree, source))
        total = promise = 0.0
        for name, (_, weight) in self.masks.items():
            strategies = []
            for each in {degree: None, self._favourite(name, degree, source): None}:
                groups = self._groups_of(candidate, name, each)
                found = source.strategies(groups, self._limit(), self.budget.stagings)
                if not found:
                    return math.inf
                self.effort += source.effort(groups)
                candidate.add(name, found)
                strategies += found
                seconds = _seconds(min(found, key=_seconds))
                self.by_mask[name][each] = min(self.by_mask[name][each], seconds)
                known = candidate.fastest.get(name, (math.inf, 0))
                candidate.fastest[name] = min(known, (seconds, each))
            best = min(strategies, key=_seconds)
            total += weight * _seconds(best)
            waiting = self.bounds[name] * (best["forward"].imbalance - 1)
            promise += weight * max(self.bounds[name], _seconds(best) - waiting)
        self.fastest[degree] = min(self.fastest[degree], total)
        self.promise[degree] = min(self.promise[degree], total if source is PUBLISHED else promise)
        return total

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
        if len(self.masks) == 1 or source is PUBLISHED:
            return degree
        return min(by_degree, key=by_degree.__getitem__)


def _seconds(strategy: Strategy) -> float:
    return sum(option.seconds for option in strategy.values())


def head_degrees(cp_size: int, config: CPConfig) -> list[int]:
    """Returns the head degrees worth a look: those inside a node, and all ranks (Ulysses)."""
    node_size = get_topology(config.topology).node_size
    inside = [d for d in range(1, min(node_size, cp_size) + 1) if cp_size % d == 0]
    aligned = [d for d in inside if cp_size <= node_size or node_size % d == 0]
    return [d for d in sorted({*aligned, cp_size}) if fits_heads(d, config)]
