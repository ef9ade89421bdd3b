"""How planner "auto" searches: placements are looked at, then compute moves on the best of them.

    look      placements at head degrees (`looks.py`), pairs with their queries or their keys, and published schemes:
              the lowest bound first, then what is left at the fastest degree, and so on
    move      pairs among all head groups, or inside nodes, on the best placement of the fastest degrees
    near      a local search near these assignments on the best of all, where links limit

Whatever looks fastest is priced exactly at once, and what cannot be faster by more than can be told is skipped: a
degree by its bound (load, and the exchange of heads), a first look by the least it takes, a strategy by its busiest
rank. Everything is priced from small arrays; nothing is built here, and nothing is clocked, so every rank finds the
same plan. Self attention, families of masks and cross attention are searched alike; all numbers are in `budget.py`.
"""

import math
from collections.abc import Iterable

from megatron_cp.plan.hardware.speeds import is_uneven
from megatron_cp.plan.hardware.topology import get_topology
from megatron_cp.plan.placement.placement import Placement
from megatron_cp.plan.price.head_groups import HeadGroups, PassOption, strategy_seconds
from megatron_cp.plan.schema import PassName
from megatron_cp.plan.search.budget import SearchBudget
from megatron_cp.plan.search.candidate import Candidate, Trial
from megatron_cp.plan.search.degrees import most_moved
from megatron_cp.plan.search.looks import Look, Looks
from megatron_cp.plan.search.strategies import (
    NEAR,
    StrategySource,
    move,
    published,
    stay,
)


class Search:
    """One search: placements looked at, and the options found on them."""

    def __init__(self, looks: Looks, budget: SearchBudget):
        self.looks, self.budget = looks, budget
        self.cp_size, self.config = looks.cp_size, looks.config
        self.most_moved = most_moved(self.cp_size, looks.searched, self.config, budget)
        has_rates = get_topology(self.config.topology).kernels is not None
        self.is_by_time = not (
            self.config.max_received_mb or self.config.linear_state_bytes or has_rates
        )
        """Whether prices here decide, so that what is slower by them is skipped. They do not where memory may be short,
        where states of linear layers travel too, and where measured kernels are slower than nominal ones."""
        self.is_thorough = is_uneven(self.config, self.cp_size) or not self.is_by_time
        """Whether compute is moved however good a plan is known: all own equally many tokens, so a slow rank has too
        many pairs wherever they are placed."""
        # Placements are known by the bytes of their token ids.
        self.found: dict[bytes, Candidate] = {}
        self.trials: dict[tuple[bytes, int], Trial] = {}  # at a head degree
        self.groups: dict[tuple[bytes, str, int], HeadGroups] = {}  # of a mask, at a head degree
        self.known = math.inf
        """Seconds of the fastest plan so far; exact after `_settle`: what is skipped cannot beat it."""

    def run(self) -> list[Candidate]:
        """Returns all placements looked at on which every mask has options."""
        self._look()
        self._move()
        self._move_near()
        return [one for one in self.found.values() if all(one.options.values())]

    def _look(self) -> None:
        """Prices pairs where their queries or keys live, and published schemes."""
        looks = self.looks
        first = [look for degree in looks.degrees for look in looks.at_first(degree)]
        self._take(sorted(first, key=lambda look: look.least))
        if self.known == math.inf:
            raise ValueError(self._too_many_parts())
        for degree in self._fastest_degrees():
            for look in looks.besides(degree):
                if self._is_open(degree):
                    self._take([look])
        for degree in self._fastest_degrees()[: len(looks.masks)]:  # each mask may favour one
            if not self._is_within(self.budget.perfect):
                self._take(looks.for_fastest(degree))

    def _take(self, looks: Iterable[Look]) -> None:
        for look in looks:
            if look.least <= self._limit() and (placement := look.place()) is not None:
                trial = self._trial(placement, look.degree)
                for source in look.sources:
                    self._price(trial, source)
        self._settle()

    def _move(self) -> None:
        """Moves compute where it is likely to be worth it: once at every degree, then as long as links limit."""
        moved: set[int] = set()
        for trial in self._to_move_on():
            enough = self.budget.far if trial.degree in moved else self.budget.perfect
            if self._is_within(enough) and not self.is_thorough:
                continue
            if self._is_open(trial.degree):
                self._price(trial, move)
                self._settle()
            moved.add(trial.degree)

    def _to_move_on(self) -> list[Trial]:
        """Returns the best placements of the fastest degrees at which compute can move, and those that suit it anyway.

        Where degrees are few, the next best follow.
        """
        can_move = [
            trial
            for trial in sorted(self.trials.values(), key=self._seconds)
            if 1 < self.cp_size // trial.degree <= self.most_moved and self._is_open(trial.degree)
        ]
        first: dict[int, Trial] = {}
        for trial in can_move:
            first.setdefault(trial.degree, trial)
        found: dict[Trial, None] = {}
        for degree, trial in first.items():
            found[trial] = None
            other = self.looks.to_move_on(degree)
            if other is not None:
                found[self._trial(other, degree)] = None
        if self.is_thorough:
            return list(found)
        most = self.budget.moved_starts
        return list(dict.fromkeys([*list(found)[:most], *can_move]))[:most]

    def _move_near(self) -> None:
        """Searches near the assignments on the best placements, where links limit; among few head groups and slices."""
        if self._is_within(self.budget.far):
            return
        left, starts = self.budget.most_near_groups, self.budget.near_starts
        for trial in sorted(self.trials.values(), key=self._seconds):
            groups = self.cp_size // trial.degree
            if starts and 1 < groups <= left and self._is_open(trial.degree):
                starts -= 1
                for source in sorted(NEAR, key=lambda one: trial.priced.get(one, math.inf)):
                    if groups <= left:
                        left -= groups
                        self._price(trial, NEAR[source])
        self._settle()

    def _price(self, trial: Trial, source: StrategySource) -> None:
        """Adds the strategies of a source for all masks of a trial."""
        if source in trial.priced:
            return
        trial.priced[source] = 0.0
        for name, every in trial.groups.items():
            fastest = math.inf
            for groups in every:
                if self._is_possible(groups, source):
                    found = source(groups, self._limit(), self.budget.stagings)
                    trial.candidate.add(name, found)
                    fastest = min([fastest, *map(strategy_seconds, found)])
            trial.priced[source] += self.looks.masks[name][1] * fastest
            trial.fastest[name] = min(trial.fastest.get(name, math.inf), fastest)
        self.known = min(self.known, self._seconds(trial))

    def _settle(self) -> None:
        """Replaces estimates by prices for whatever looks fastest, until the fastest has none."""
        while True:
            self.known, leader = math.inf, None
            fastest: dict[tuple[str, PassName], PassOption] = {}
            for one in self.found.values():
                if not all(one.options.values()):
                    continue
                best = {key: min(options, key=_price_of) for key, options in one.options.items()}
                seconds = sum(
                    self.looks.masks[name][1] * option.seconds for (name, _), option in best.items()
                )
                if seconds < self.known:
                    self.known, leader, fastest = seconds, one, best
            estimates = {key: one for key, one in fastest.items() if one.is_estimate}
            if leader is None or not estimates:
                return
            for key, option in estimates.items():
                options = leader.options[key]
                assert option.refine is not None
                options[options.index(option)] = option.refine()

    def _seconds(self, trial: Trial) -> float:
        """Returns the least seconds of all masks of a trial so far, infinite before all have a price."""
        return sum(
            weight * trial.fastest.get(name, math.inf)
            for name, (_, weight) in self.looks.masks.items()
        )

    def _fastest_degrees(self) -> list[int]:
        """Returns the degrees that are searched, those that did best first."""
        fastest = dict.fromkeys(self.looks.searched, math.inf)
        for trial in self.trials.values():
            if trial.degree in fastest:
                fastest[trial.degree] = min(fastest[trial.degree], self._seconds(trial))
        return sorted(fastest, key=fastest.__getitem__)

    def _is_open(self, degree: int) -> bool:
        """Returns whether a plan of a degree may still be faster, by more than can be told, than the fastest."""
        reached = self.budget.perfect * (self.looks.bound + self.looks.exchange[degree])
        return not self.is_by_time or reached < self.known

    def _is_within(self, factor: float) -> bool:
        """Returns whether a plan was found that takes no more than `factor` times the load bound."""
        return self.known <= factor * self.looks.bound

    def _limit(self) -> float:
        """Returns the seconds beyond which a strategy is of no use; none where its time alone does not decide.

        So it is with masks of a family, which share a placement.
        """
        if len(self.looks.masks) > 1 or not self.is_by_time:
            return math.inf
        return self.budget.hopeless * self.known

    def _is_possible(self, groups: HeadGroups, source: StrategySource) -> bool:
        """Returns whether head groups, and parts into which they cut a mask, are few enough for a source."""
        is_moved = source in (move, *NEAR.values())
        if is_moved and not 1 < groups.placed.num_ranks <= self.most_moved:
            return False
        return groups.placed.has_parts(self._most_parts(groups, source))

    def _most_parts(self, groups: HeadGroups, source: StrategySource) -> int:
        """Returns into how many parts the mask may be cut for a source.

        Something must be found: what others publish, or with a chosen number of stages tokens in order.
        """
        if source in NEAR.values():
            return self.budget.most_near // groups.placed.num_ranks
        in_order = len(groups.placed.owners.ids) == groups.placed.num_ranks
        is_only = in_order and source is stay and self.config.num_stages is not None
        must = source is published or is_only
        most = self.budget.most_parts_published if must else self.budget.most_parts
        return max(most, 2 * groups.mask.num_slices, len(groups.placed.owners.ids) ** 2)

    def _too_many_parts(self) -> str:
        slices = max(mask.num_slices for mask, _ in self.looks.masks.values())
        way = "describe it in fewer, larger slices"
        if self.config.chunk_size is not None:
            way += (
                ", or leave out chunk_size: classes of tokens that never meet are put together then"
            )
        return (
            f"a mask of {slices} slices cannot be planned for {self.cp_size} ranks: cut where their tokens end it has "
            f"more than {self.budget.most_parts_published}, which fill memory; {way}"
        )

    def _trial(self, placement: Placement, degree: int) -> Trial:
        """Returns a placement at a degree; masks of a family may do better at the one that suits each, too."""
        ids = placement.ids.tobytes()
        if (ids, degree) not in self.trials:
            candidate = self.found.setdefault(ids, self.looks.candidate(placement))
            groups = {
                name: [
                    self._groups_of(placement, name, each)
                    for each in dict.fromkeys((degree, self._favourite(name, degree)))
                ]
                for name in self.looks.masks
            }
            self.trials[ids, degree] = Trial(candidate, degree, groups)
        return self.trials[ids, degree]

    def _groups_of(self, placement: Placement, name: str, degree: int) -> HeadGroups:
        """Returns a mask on the head groups of a placement; placed once for all trials."""
        key = placement.ids.tobytes(), name, degree
        if key not in self.groups:
            mask = self.looks.mask_on(name, placement)
            self.groups[key] = HeadGroups.of(mask, placement, self.config, degree)
        return self.groups[key]

    def _favourite(self, name: str, degree: int) -> int:
        """Returns the degree at which a mask of a family did best so far."""
        known = [trial for trial in self.trials.values() if name in trial.fastest]
        if len(self.looks.masks) == 1 or not known:
            return degree
        return min(known, key=lambda trial: trial.fastest[name]).degree


def _price_of(option: PassOption) -> float:
    return option.seconds
