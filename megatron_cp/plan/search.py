"""What planner "auto" looks at: placements of tokens, degrees of head exchange, and who computes what.

    published     tokens in order and zigzag, every head degree: needed keys, ring, all-gather, Ulysses, USP
    balanced      one deal of tokens by area for every head degree
    then, for the degrees that did best, until effort is spent or a plan is as good as perfect:
      stages      the same placements with keys in as many stages as hide them best
      compute     moved away from the queries' owners, by recursive bisection (`plan/assignment.py`)
      tokens      dealt by area among super-ranks, groups of ranks that exchange heads (`plan/balance.py`)

Everything is priced from small arrays; nothing is built here. Effort is counted, not clocked, so every rank finds
the same plan.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from megatron_cp.config import CPConfig
from megatron_cp.mask import AttentionMask
from megatron_cp.mask.interval import IntArray
from megatron_cp.plan import balance
from megatron_cp.plan.assigned import assigned_choice, move_compute, stay_at_home
from megatron_cp.plan.cost import load_bound_seconds
from megatron_cp.plan.placement import Deal, chunk_layout
from megatron_cp.plan.pricing import (
    PASSES,
    Choice,
    HeadGroups,
    even_keys_choice,
    published_choices,
)
from megatron_cp.plan.schemes.ulysses import fits_heads
from megatron_cp.plan.topology import get_topology

Family = Mapping[str, tuple[AttentionMask, float]]  # name -> (mask, number of layers)
Ways = Callable[[HeadGroups], list[Choice]]

ROUGH, FINE = 0.04, 0.01  # balance of deals
SMALL = 8  # super-ranks; a first deal for more takes too long
CHUNKS_DEALT = 256  # over all super-ranks
MIN_CHUNKS_DEALT = 4  # per super-rank
EFFORT = 20.0  # of what follows the published schemes, in about milliseconds of one core
EFFORT_PER_RANK = 0.1
MAX_SUPER_RANKS = 256  # more are looked at only where heads cannot be exchanged
PERFECT = 1.005  # times the load bound: nothing found later could be told from it


@dataclass(frozen=True)
class Candidate:
    """A placement, and for every mask of the family the ways to run it found so far."""

    deal: Deal
    choices: dict[str, list[Choice]]
    groups: dict[tuple[str, int], HeadGroups] = field(default_factory=dict)


def candidates(masks: Family, cp_size: int, config: CPConfig) -> list[Candidate]:
    """Returns all placements looked at, with their priced choices; each mask has at least one on each."""
    search = _Search(masks, cp_size, config)
    search.look_around()
    for degree in search.degrees_by_promise():
        if search.is_over():
            break
        search.improve(degree)
    return [one for one in search.found.values() if all(one.choices.values())]


class _Search:
    def __init__(self, masks: Family, cp_size: int, config: CPConfig):
        self.masks, self.cp_size, self.config = masks, cp_size, config
        # One row count for all candidates: it must not depend on the data, pipeline shapes are fixed by it.
        num_tokens = next(iter(masks.values()))[0].num_queries
        pieces = 2 if cp_size > 1 else 1  # zigzag halves every rank's rows
        even = replace(config, token_multiple=math.lcm(config.token_multiple, pieces))
        self.chunk, per_rank = chunk_layout(num_tokens, cp_size, even)
        self.rows = self.chunk * per_rank
        self.degrees = _head_degrees(cp_size, config)
        self.bound = sum(
            weight * load_bound_seconds(mask, cp_size, config, name)
            for mask, weight in masks.values()
            for name in PASSES
        )
        self.found: dict[tuple[bytes, int], Candidate] = {}
        self.fastest = dict.fromkeys(self.degrees, math.inf)
        self.by_mask = {name: dict.fromkeys(self.degrees, math.inf) for name in masks}
        self._dealers = {degree: self._area_deals(degree) for degree in self.degrees}
        self.effort = 0.0

    def look_around(self) -> None:
        """Prices the published schemes exactly, and one balanced deal per degree."""
        for degree in self.degrees:
            if self.config.num_stages is None:
                for deal in self._fixed_deals(degree):
                    self._price(deal, degree, published_choices)
            if 1 < self.cp_size // degree <= SMALL:
                self._price(next(self._dealers[degree]), degree, _stay_dealt)

    def degrees_by_promise(self) -> list[int]:
        """Returns the degrees of head exchange, the one that did best so far first."""
        return sorted(self.degrees, key=self.fastest.__getitem__)

    def improve(self, degree: int) -> None:
        """Searches stages, compute and tokens for one degree of head exchange."""
        groups = self.cp_size // degree
        for deal in self._fixed_deals(degree):
            self._price(deal, degree, _stay)
            self.effort += 2 + groups / 8
            if groups > 1 and not self.is_over():
                self._price(deal, degree, _move)
                self.effort += 4 + groups / 3
            if self.is_over():
                return
        for deal in self._dealers[degree] if groups > 1 else ():
            self._price(deal, degree, _stay_dealt)
            self.effort += 2 + groups / 4
            if self.is_over():
                return

    def is_over(self) -> bool:
        """Returns whether nothing better can be expected, or enough has been tried."""
        is_perfect = min(self.fastest.values()) <= PERFECT * self.bound
        return is_perfect or self.effort > EFFORT + EFFORT_PER_RANK * self.cp_size

    def _price(self, deal: Deal, degree: int, ways: Ways) -> None:
        """Prices all masks on a deal, with this degree of head exchange or the one that suits a mask best."""
        key = deal.chunks.tobytes(), deal.chunk_size
        candidate = self.found.setdefault(key, Candidate(deal, {name: [] for name in self.masks}))
        total = 0.0
        for name, (_, weight) in self.masks.items():
            seconds = []
            for each in {degree: None, self._favourite(name, degree): None}:
                choices = ways(self._groups_of(candidate, name, each))
                candidate.choices[name].extend(choices)
                seconds.append(min(choice.seconds for choice in choices))
                self.by_mask[name][each] = min(self.by_mask[name][each], seconds[-1])
            total += weight * min(seconds)
        self.fastest[degree] = min(self.fastest[degree], total)

    def _groups_of(self, candidate: Candidate, name: str, degree: int) -> HeadGroups:
        """Returns a mask on the head groups of a candidate; placed once for all ways."""
        if (name, degree) not in candidate.groups:
            mask, _ = self.masks[name]
            groups = HeadGroups.of(mask, candidate.deal, self.config, degree)
            candidate.groups[name, degree] = groups
        return candidate.groups[name, degree]

    def _favourite(self, name: str, degree: int) -> int:
        """Returns the degree at which a mask did best so far; masks of one plan need not share it."""
        by_degree = self.by_mask[name]
        return min(by_degree, key=by_degree.__getitem__) if len(self.masks) > 1 else degree

    def _fixed_deals(self, degree: int) -> Iterator[Deal]:
        """Yields tokens in order and zigzag over super-ranks of `degree` ranks."""
        groups = self.cp_size // degree
        yield Deal(np.arange(self.cp_size)[:, None], self.rows)
        if groups > 1:
            first = np.arange(groups)
            halves = np.stack([first, 2 * groups - 1 - first], axis=1)
            yield Deal(halves, degree * self.rows // 2).regrouped(self.cp_size)

    def _area_deals(self, degree: int) -> Iterator[Deal]:
        """Yields deals of chunks to super-ranks; the first is balanced, the others are on the way to balance."""
        groups = self.cp_size // degree
        per_group = self._chunks_per_group(degree * self.rows // self.chunk, groups)
        size, count = degree * self.rows // per_group, groups * per_group
        tables = [balance.chunk_table(mask, size, count) for mask, _ in self.masks.values()]
        table = balance.weighted_sum(tables, [weight for _, weight in self.masks.values()])
        for start in (balance.zigzag, balance.in_order):
            owned = balance.exchange_chunks(start(count, groups), table, ROUGH)
            fine = balance.exchange_chunks(owned, table, FINE)
            yield self._deal(fine, size)
            if not np.array_equal(fine, owned):
                yield self._deal(owned, size)
        yield self._deal(balance.largest_first(table.chunk_areas, groups), size)

    def _deal(self, owned: IntArray, size: int) -> Deal:
        return Deal(np.sort(owned, axis=1), size).regrouped(self.cp_size)

    def _chunks_per_group(self, finest: int, groups: int) -> int:
        """Returns how many chunks a super-rank owns in a deal: a divisor of the finest number."""
        if self.config.chunk_size is not None:
            return finest
        most = max(MIN_CHUNKS_DEALT, CHUNKS_DEALT // groups)
        return max(n for n in range(1, finest + 1) if finest % n == 0 and (n <= most or n == 1))


def _stay(groups: HeadGroups) -> list[Choice]:
    return [assigned_choice(groups, stay_at_home(groups))]


def _stay_dealt(groups: HeadGroups) -> list[Choice]:
    return [*_stay(groups), even_keys_choice(groups)]


def _move(groups: HeadGroups) -> list[Choice]:
    return [assigned_choice(groups, move_compute(groups))]


def _head_degrees(cp_size: int, config: CPConfig) -> list[int]:
    """Returns the head degrees worth a look: those inside a node, and all ranks (Ulysses)."""
    node_size = get_topology(config.topology).node_size
    inside = [d for d in range(1, min(node_size, cp_size) + 1) if cp_size % d == 0]
    aligned = [d for d in inside if cp_size <= node_size or node_size % d == 0]
    legal = [d for d in sorted({*aligned, cp_size}) if fits_heads(d, config)]
    few = [d for d in legal if cp_size // d <= MAX_SUPER_RANKS]
    return few or legal[-1:]
