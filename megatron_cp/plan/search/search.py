"""What planner "auto" looks at: placements of tokens, degrees of head exchange, and who computes what.

    look      every head degree: one placement by documents or by area, then the published schemes on tokens in
              order and zigzag (needed keys, ring, all-gather, Ulysses, USP) that may come near
    improve   the degree that promises most, a step at a time: other placements (`placement/candidates.py`), and compute
              moved away from the queries' owners by recursive bisection (`compute/bisection.py`); at last on the best
              placement, among the few head groups of a large degree

until effort is spent or a plan is as good as perfect; then an optional solver (`plan/compute/solvers`). Everything is
priced from small arrays; nothing is built here. Effort is counted, not clocked, so every rank finds the same plan.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from megatron_cp.config import CPConfig
from megatron_cp.plan.compute.solvers.solve import Problem, improve, measure
from megatron_cp.plan.hardware.cost import load_bound_seconds, seconds_per_byte
from megatron_cp.plan.hardware.topology import get_topology
from megatron_cp.plan.placement.candidates import Family, PlacementCandidates
from megatron_cp.plan.placement.placement import Placement
from megatron_cp.plan.price.head_groups import HeadGroups, PassOption, Strategy
from megatron_cp.plan.price.keys_move import even_keys_strategy, published_strategies
from megatron_cp.plan.price.pairs_move import assigned_strategy, move_compute, stay_at_home
from megatron_cp.plan.schema import PASSES, PassName
from megatron_cp.plan.transfer.head_split import fits_heads

LOOSE, TIGHT = 1.08, 1.0  # load of a rank by one document, times the fair share
SMALL = (
    16  # head groups; a first placement by area for more, and moving compute among them, takes long
)
FEW = 8  # head groups; moving compute among them is quick, and always tried: or among the fewest there can be
MOST_MOVED = 64  # head groups among which compute is moved although the effort is spent
MANY = 256  # head groups; where heads can be exchanged, more are looked at for tokens in order only
EFFORT, EFFORT_PER_RANK = 13.0, 0.06  # for each mask, in about milliseconds of one core
PATIENCE = 1.02  # times slower, for every step already taken, and another degree has its turn
LINKED = 1.25  # times its pairs alone, and a pass waits for its links
PROMISING = 1.5  # times the fastest way found, without overlap: more stages may win
HOPELESS = 1.1  # times the fastest way found, whose price may be an estimate
DONE = object()
PERFECT = 1.002  # times the load bound: nothing found later could be told from it
GOOD = 1.05  # times the load bound: one more step would not pay
FAR = 2.0  # times the load bound: links limit, and moving compute is worth its time


@dataclass(frozen=True)
class StrategySource:
    """A way to run a mask on a placement, and the effort of pricing it."""

    options: Callable[[HeadGroups, float], list[Strategy]]
    """(mask on head groups, seconds beyond which nothing is of use) -> ways to run it."""
    fixed: float
    per_rank: float
    per_part: float
    """For each slice of the mask cut by owners."""

    def effort(self, groups: HeadGroups) -> float:
        """Returns about the milliseconds that `options` takes."""
        placed = groups.placed
        return self.fixed + self.per_rank * placed.num_ranks + self.per_part * len(placed.parts)


def _stay(groups: HeadGroups, limit: float) -> list[Strategy]:
    if groups.least_seconds() > limit:
        return []
    return [assigned_strategy(groups, stay_at_home(groups)), even_keys_strategy(groups)]


def _move(groups: HeadGroups, limit: float) -> list[Strategy]:
    both = assigned_strategy(groups, move_compute(groups))
    pairs = groups.compute_seconds(groups.mask.area() / groups.placed.num_ranks, ["forward"])
    if both["forward"].seconds <= LINKED * pairs:
        return [both]
    # Rows weigh otherwise forward, where no gradients return: more keys move, fewer queries.
    own = assigned_strategy(groups, move_compute(groups, ["forward"]))
    return [both, {"forward": own["forward"], "backward": both["backward"]}]


def _solved(groups: HeadGroups) -> list[Strategy]:
    """Returns what the config's solver makes of the better of both assignments, if it finds anything."""
    topology = groups.topology
    inner, outer = seconds_per_byte(topology).tolist()
    problem = Problem(
        groups.placed,
        groups.weights(),
        groups.compute_seconds(1.0),
        (inner, outer),
        topology.node_size,
        topology.contention,
    )
    starts = (stay_at_home(groups), move_compute(groups))
    start = min(starts, key=functools.partial(measure, problem))
    improver, effort = groups.config.improver, groups.config.improver_effort
    assert improver is not None
    better = improve(problem, start, improver, effort)
    return [] if better is None else [assigned_strategy(groups, better)]


PUBLISHED = StrategySource(published_strategies, 0.4, 0.007, 1.2e-4)
STAY = StrategySource(_stay, 0.8, 0.004, 5e-4)
MOVE = StrategySource(_move, 2.5, 0.27, 1.4e-3)
BY_AREA_EFFORT, BY_AREA_EFFORT_PER_RANK = 1.5, 0.004
HOPELESS_EFFORT = 0.3


@dataclass(frozen=True)
class Candidate:
    """A placement, and for every pass of every mask of the family the ways to run it found so far."""

    placement: Placement
    options: dict[tuple[str, PassName], list[PassOption]]
    groups: dict[tuple[str, int], HeadGroups] = field(default_factory=dict)
    priced: set[tuple[int, StrategySource]] = field(default_factory=set)
    fastest: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Seconds of each mask at its best, and the head degree."""

    def add(self, name: str, ways: Iterable[Strategy]) -> None:
        """Adds ways to run a mask."""
        for way in ways:
            for which, choice in way.items():
                if not any(choice is known for known in self.options[name, which]):
                    self.options[name, which].append(choice)


def candidates(masks: Family, cp_size: int, config: CPConfig) -> list[Candidate]:
    """Returns all placements looked at, with their priced options; each mask has at least one on each."""
    search = _Search(masks, cp_size, config)
    search.look()
    search.improve()
    found = [one for one in search.found.values() if all(one.options.values())]
    if config.improver is not None:
        search.solve(found)
    return found


class _Search:
    def __init__(self, masks: Family, cp_size: int, config: CPConfig):
        self.masks, self.cp_size, self.config = masks, cp_size, config
        self.degrees = _head_degrees(cp_size, config)
        searched = [degree for degree in self.degrees if cp_size // degree <= MANY]
        self.searched = searched or self.degrees[-1:]
        moved = [n for d in self.searched if 1 < (n := cp_size // d) <= MOST_MOVED]
        self.always_moved = max((n for n in moved if n <= FEW), default=min(moved, default=1))
        self.placements = PlacementCandidates(masks, cp_size, config, min(self.searched))
        self.bounds = {
            key: sum(load_bound_seconds(mask, cp_size, config, name) for name in PASSES)
            for key, (mask, _) in masks.items()
        }
        self.bound = sum(weight * self.bounds[key] for key, (_, weight) in masks.items())
        self.found: dict[bytes, Candidate] = {}
        self.fastest = dict.fromkeys(self.degrees, math.inf)
        self.promise = dict.fromkeys(self.degrees, math.inf)
        self.by_mask = {name: dict.fromkeys(self.degrees, math.inf) for name in masks}
        self._by_area = {degree: self.placements.by_area(degree) for degree in self.searched}
        self.effort = 0.0

    def look(self) -> None:
        """Prices the published schemes exactly, and one placement by documents or by area per degree."""
        for degree in self.degrees:
            by_documents = (
                self.placements.by_documents(degree, LOOSE) if degree in self.searched else None
            )
            if by_documents is not None:
                self._price(by_documents, degree, STAY)
            elif self.placements.is_even_in_order:
                self._price(self.placements.in_order(), degree, STAY)
            elif degree in self.searched and 1 < self.cp_size // degree <= SMALL:
                self._price_next_by_area(degree)
        needed = {}
        for degree in self.searched if self.config.num_stages is None else ():
            needed[degree] = self._price(self.placements.in_order(), degree, PUBLISHED)
            self._price(self.placements.zigzag(degree), degree, PUBLISHED)
        best = min(needed, key=needed.__getitem__, default=None)
        if best is not None and needed[best] <= PROMISING * min(self.fastest.values()):
            # Windows: tokens in order need the fewest rows there can be.
            self._price(self.placements.in_order(), best, STAY)

    def _limit(self) -> float:
        """Returns the seconds beyond which a way is no use; none where masks share a placement or memory is short."""
        if len(self.masks) > 1 or self.config.max_received_mb is not None:
            return math.inf
        return HOPELESS * min(self.fastest.values())

    def improve(self) -> None:
        """Takes steps of the degree that promises most; one that is nearly as good has its turn as well."""
        steps = {degree: self._steps(degree) for degree in self.searched}
        taken = dict.fromkeys(self.searched, 0)
        while steps and not self._is_over():
            degree = min(steps, key=lambda one: self.promise[one] * PATIENCE ** taken[one])
            taken[degree] += 1
            if next(steps[degree], DONE) is DONE:
                del steps[degree]
        self._move_on_best()

    def _steps(self, degree: int) -> Iterator[None]:
        """Prices more and more for one degree of head exchange, a placement and a way at a time."""
        in_order = self.placements.in_order()
        if self.cp_size == degree:
            self._price(in_order, degree, STAY)
            yield
            return
        loose, tight = (self.placements.by_documents(degree, load) for load in (LOOSE, TIGHT))
        first = loose or (
            in_order if self.placements.is_even_in_order else self.placements.zigzag(degree)
        )
        self._price(tight or first, degree, STAY)
        yield
        moved = functools.partial(self._move_if_worthwhile, first, degree)
        by_area = functools.partial(self._price_next_by_area, degree)
        stays = functools.partial(self._price, in_order, degree, STAY)
        moves = functools.partial(self._move_if_worthwhile, in_order, degree)
        steps: list[Callable[[], object]] = [moved, by_area, by_area, stays, moves]
        if loose is not None and self.cp_size // degree > SMALL:
            # Moving compute among many takes longest, and whole documents leave little to move.
            steps = [by_area, by_area, stays, moved, moves]
        for step in steps:
            step()
            yield
        while by_area():
            yield

    def _move_if_worthwhile(self, placement: Placement, degree: int) -> None:
        groups = self.cp_size // degree
        has_time = MOVE.fixed + MOVE.per_rank * groups <= self._effort_left()
        if has_time or groups <= self.always_moved or not self._is_within(FAR):
            self._price(placement, degree, MOVE)

    def _move_on_best(self) -> None:
        if self.always_moved == 1 or self._is_within(GOOD):
            return
        best = self._best(self.found.values())
        least = self.cp_size // self.always_moved
        for degree in {max(best.fastest[name][1], least): None for name in self.masks}:
            if degree < self.cp_size:
                self._price(best.placement, degree, MOVE)

    def _best(self, candidates: Iterable[Candidate]) -> Candidate:
        """Returns the candidate on which all masks together are fastest."""
        unknown = (math.inf, 0)

        def seconds(one: Candidate) -> float:
            fastest = [(one.fastest.get(name, unknown), w) for name, (_, w) in self.masks.items()]
            return sum(weight * least for (least, _), weight in fastest)

        return min(candidates, key=seconds)

    def _price_next_by_area(self, degree: int) -> bool:
        """Returns whether there was one more placement by area to price."""
        self.effort += BY_AREA_EFFORT + BY_AREA_EFFORT_PER_RANK * self.cp_size
        placement = next(self._by_area[degree], None)
        if placement is not None:
            self._price(placement, degree, STAY)
        return placement is not None

    def solve(self, found: list[Candidate]) -> None:
        """Lets the config's solver assign the compute of the best candidate anew."""
        best = self._best(found)
        for name in self.masks:
            groups = self._groups_of(best, name, best.fastest[name][1])
            best.add(name, _solved(groups))

    def _is_over(self) -> bool:
        """Returns whether nothing better can be expected, or enough has been tried."""
        return self._is_within(PERFECT) or self._effort_left() < 0

    def _effort_left(self) -> float:
        """Returns what may still be spent on each mask."""
        return EFFORT + EFFORT_PER_RANK * self.cp_size - self.effort / len(self.masks)

    def _is_within(self, factor: float) -> bool:
        """Returns whether a plan was found that takes no more than `factor` times the load bound."""
        return min(self.fastest.values()) <= factor * self.bound

    def _price(self, placement: Placement, degree: int, way: StrategySource) -> float:
        """Adds the ways to run all masks on a placement, with this head degree or the one that suits a mask best.

        Returns the price, or the best of the degree where these ways are known already. A degree promises what its
        fastest way would take if nobody waited for the busiest rank.
        """
        new = Candidate(placement, {(name, which): [] for name in self.masks for which in PASSES})
        candidate = self.found.setdefault(placement.ids.tobytes(), new)
        if (degree, way) in candidate.priced:
            return self.fastest[degree]
        candidate.priced.add((degree, way))
        total = promise = 0.0
        for name, (_, weight) in self.masks.items():
            ways = []
            for each in {degree: None, self._favourite(name, degree, way): None}:
                groups = self._groups_of(candidate, name, each)
                found = way.options(groups, self._limit())
                self.effort += way.effort(groups) if found else HOPELESS_EFFORT
                if not found:
                    return math.inf
                candidate.add(name, found)
                ways += found
                seconds = _seconds(min(found, key=_seconds))
                self.by_mask[name][each] = min(self.by_mask[name][each], seconds)
                known = candidate.fastest.get(name, (math.inf, 0))
                candidate.fastest[name] = min(known, (seconds, each))
            best = min(ways, key=_seconds)
            total += weight * _seconds(best)
            waiting = self.bounds[name] * (best["forward"].imbalance - 1)
            promise += weight * max(self.bounds[name], _seconds(best) - waiting)
        self.fastest[degree] = min(self.fastest[degree], total)
        self.promise[degree] = min(self.promise[degree], total if way is PUBLISHED else promise)
        return total

    def _groups_of(self, candidate: Candidate, name: str, degree: int) -> HeadGroups:
        """Returns a mask on the head groups of a candidate; placed once for all ways."""
        if (name, degree) not in candidate.groups:
            mask, _ = self.masks[name]
            groups = HeadGroups.of(mask, candidate.placement, self.config, degree)
            candidate.groups[name, degree] = groups
        return candidate.groups[name, degree]

    def _favourite(self, name: str, degree: int, way: StrategySource) -> int:
        """Returns the degree at which a mask did best so far; masks of one plan need not share it."""
        by_degree = self.by_mask[name]
        if len(self.masks) == 1 or way is PUBLISHED:
            return degree
        return min(by_degree, key=by_degree.__getitem__)


def _seconds(way: Strategy) -> float:
    return sum(choice.seconds for choice in way.values())


def _head_degrees(cp_size: int, config: CPConfig) -> list[int]:
    """Returns the head degrees worth a look: those inside a node, and all ranks (Ulysses)."""
    node_size = get_topology(config.topology).node_size
    inside = [d for d in range(1, min(node_size, cp_size) + 1) if cp_size % d == 0]
    aligned = [d for d in inside if cp_size <= node_size or node_size % d == 0]
    return [d for d in sorted({*aligned, cp_size}) if fits_heads(d, config)]
