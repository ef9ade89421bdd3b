"""The search of planner "auto": placements, head groups and ways to run, each priced; only the best is built.

Published schemes are in the portfolio with their exact prices, so our plan is never predicted slower than the
best of them. Tokens stay in order or zigzag; compute moves (`plan/assignment.py`). Only where keys are so
cheap to move that dealing tokens pays (`plan/balance.py`) are tokens dealt by area.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from megatron_cp.config import CPConfig
from megatron_cp.mask import AttentionMask
from megatron_cp.mask.interval import IntArray
from megatron_cp.plan import balance
from megatron_cp.plan.cost import load_bound_seconds, makespan_seconds
from megatron_cp.plan.placement import Deal, chunk_layout
from megatron_cp.plan.pricing import (
    Choice,
    HeadGroups,
    assigned_choice,
    move_compute,
    published_choices,
    stay_at_home,
)
from megatron_cp.plan.schema import AttentionPlan
from megatron_cp.plan.schemes.ulysses import fits_heads
from megatron_cp.plan.topology import get_topology

Family = Mapping[str, tuple[AttentionMask, float]]  # name -> (mask, number of layers)

TOLERANCES = (0.15, 0.04, 0.01)
CHUNKS_DEALT = 256  # over all super-ranks
MIN_CHUNKS_DEALT = 4  # per super-rank
DEGREES_SEARCHED = 2  # head degrees for which compute is searched, the most promising ones
EFFORT = 40.0  # bounds the search, in about milliseconds of one core; counted, not clocked: equal on all ranks
EFFORT_PER_RANK = 0.2
NEAR = 1.005  # predictions cannot tell such plans apart: the better balanced, then the one that moves less, is taken
ROUNDING = 1 + 1e-12
GOOD_IMBALANCE = 1.02  # below, balance does not decide


@dataclass(frozen=True)
class Trial:
    """A deal of tokens to ranks, a degree of head exchange, and whether compute is searched too."""

    deal: Deal
    degree: int
    searches: bool


@dataclass(frozen=True)
class Candidate:
    """A placement, and for every mask of the family the ways to run it."""

    deal: Deal
    choices: dict[str, list[Choice]]

    def pick(self, masks: Family) -> dict[str, Choice]:
        """Returns the choice to take for every mask."""
        return {name: _pick(self.choices[name]) for name in masks}

    def published(self, masks: Family) -> dict[str, Choice]:
        """Returns the fastest choices whose prices are exact; empty if a mask has none."""
        found = {}
        for name in masks:
            sure = [choice for choice in self.choices[name] if choice.is_published]
            if not sure:
                return {}
            found[name] = min(sure, key=lambda choice: choice.seconds)
        return found


def best_family(masks: Family, cp_size: int, config: CPConfig) -> dict[str, AttentionPlan]:
    """Returns one plan per mask, on one placement, with the smallest predicted time in the portfolio.

    Of plans that are equally fast, as far as predictions go, a balanced one that moves few bytes is taken.
    Some prices are estimates: what turns out slower once built competes again at its true price.
    """
    options = [
        (candidate, chosen)
        for candidate in _candidates(masks, cp_size, config)
        for chosen in (candidate.pick(masks), candidate.published(masks))
        if chosen
    ]
    totals = [_total(masks, chosen) for _, chosen in options]
    while True:
        best = totals.index(_pick(totals))
        candidate, chosen = options[best]
        plans, seconds = _build(masks, candidate.deal.tokens, chosen, config)
        if seconds <= NEAR * min(totals[best].seconds, *(total.seconds for total in totals)):
            return plans
        totals[best] = replace(totals[best], seconds=seconds * ROUNDING)
        if _pick(totals) is totals[best]:
            return plans


def _pick(choices: Iterable[Choice]) -> Choice:
    """Returns the fastest choice, or one as good: balanced and with fewer bytes moved."""
    choices = list(choices)
    limit = NEAR * min(choice.seconds for choice in choices)
    near = [choice for choice in choices if choice.seconds <= limit]
    return min(near, key=lambda c: (max(c.imbalance, GOOD_IMBALANCE), c.moved_bytes, c.seconds))


def _total(masks: Family, chosen: Mapping[str, Choice]) -> Choice:
    """Returns the figures of a family as if it were one choice; imbalances count by time."""
    weighted = [(weight, chosen[name]) for name, (_, weight) in masks.items()]
    seconds = sum(weight * choice.seconds for weight, choice in weighted)
    loads = sum(weight * choice.seconds * choice.imbalance for weight, choice in weighted)
    return Choice(
        seconds,
        sum(weight * choice.moved_bytes for weight, choice in weighted),
        loads / seconds if seconds else 1.0,
        is_published=False,
        build=weighted[0][1].build,
    )


def _build(
    masks: Family, tokens: IntArray, chosen: Mapping[str, Choice], config: CPConfig
) -> tuple[dict[str, AttentionPlan], float]:
    """Returns the plans and their predicted seconds, weighted."""
    plans, total = {}, 0.0
    for name, (mask, weight) in masks.items():
        passes = chosen[name].build()
        plans[name] = AttentionPlan(mask, config, "auto", tokens, *passes)
        both = (makespan_seconds(plans[name], which) for which in ("forward", "backward"))
        total += weight * sum(both)
    return plans, total


def _candidates(masks: Family, cp_size: int, config: CPConfig) -> list[Candidate]:
    """Returns placements with their priced choices; stops at one as good as perfect, or when effort is spent."""
    bound = sum(weight * _bound(mask, cp_size, config) for mask, weight in masks.values())
    found: dict[tuple[bytes, int], Candidate] = {}
    effort = 0.0
    for trial in _trials(masks, cp_size, config):
        key = trial.deal.chunks.tobytes(), trial.deal.chunk_size
        candidate = found.setdefault(key, Candidate(trial.deal, {name: [] for name in masks}))
        for name, (mask, _) in masks.items():
            candidate.choices[name] += _choices(mask, trial, config)
        fastest = _total(masks, candidate.pick(masks)).seconds
        groups = cp_size // trial.degree
        effort += len(masks) * (1 + groups / 16 + trial.searches * (3 + groups / 5))
        if fastest <= NEAR * bound or effort > EFFORT + EFFORT_PER_RANK * cp_size:
            break
    return list(found.values())


def _trials(masks: Family, cp_size: int, config: CPConfig) -> Iterator[Trial]:
    """Yields what to try, the most promising first: tokens in order, zigzag, then deals by area.

    Zigzag and deals are made for super-ranks, groups of ranks that exchange heads.
    """
    num_tokens = next(iter(masks.values()))[0].num_queries
    # One row count for all candidates: it must not depend on the data, pipeline shapes are fixed by it.
    pieces = 2 if cp_size > 1 else 1  # zigzag halves every rank's rows
    even = replace(config, token_multiple=math.lcm(config.token_multiple, pieces))
    chunk, per_rank = chunk_layout(num_tokens, cp_size, even)
    rows = chunk * per_rank * -(-num_tokens // (chunk * per_rank * cp_size))
    degrees = _head_degrees(cp_size, config)
    in_order = Deal(np.arange(cp_size)[:, None], rows)
    for place, degree in enumerate(degrees):
        yield Trial(in_order, degree, place < DEGREES_SEARCHED)
    split = [(place, d, cp_size // d) for place, d in enumerate(degrees) if d < cp_size]
    for place, degree, groups in split:
        half = np.arange(groups)
        zigzag = Deal(np.stack([half, 2 * groups - 1 - half], axis=1), degree * rows // 2)
        yield Trial(zigzag.regrouped(cp_size), degree, place < DEGREES_SEARCHED)
    for _, degree, groups in split:
        per_group = _chunks_per_group(degree * rows // chunk, groups, config)
        size = degree * rows // per_group
        for owned in _deals(masks, groups, size, per_group):
            deal = Deal(np.sort(owned, axis=1), size)
            yield Trial(deal.regrouped(cp_size), degree, searches=False)


def _chunks_per_group(finest: int, groups: int, config: CPConfig) -> int:
    """Returns how many chunks a super-rank owns in a deal: a divisor of the finest number."""
    if config.chunk_size is not None:
        return finest
    most = max(MIN_CHUNKS_DEALT, CHUNKS_DEALT // groups)
    return max(n for n in range(1, finest + 1) if finest % n == 0 and (n <= most or n == 1))


def _deals(masks: Family, groups: int, size: int, per_group: int) -> Iterator[IntArray]:
    """Yields deals of chunks to super-ranks, int64 `[groups, n]`, more and more balanced."""
    num_chunks = groups * per_group
    tables = [balance.chunk_table(mask, size, num_chunks) for mask, _ in masks.values()]
    table = balance.weighted_sum(tables, [weight for _, weight in masks.values()])
    for start in (balance.zigzag, balance.in_order):
        owned = start(num_chunks, groups)
        for tolerance in TOLERANCES:
            before, owned = owned, balance.exchange_chunks(owned, table, tolerance)
            if not np.array_equal(before, owned):
                yield owned


def _choices(mask: AttentionMask, trial: Trial, config: CPConfig) -> Iterator[Choice]:
    """Yields the ways to run a mask on the placement of a trial."""
    groups = HeadGroups.of(mask, trial.deal, config, trial.degree)
    if config.num_stages is None:
        yield from published_choices(groups)
    yield assigned_choice(groups, stay_at_home(groups))
    if trial.searches and groups.placed.num_ranks > 1:
        yield assigned_choice(groups, move_compute(groups))


def _head_degrees(cp_size: int, config: CPConfig) -> list[int]:
    """Returns the head degrees worth a look: those inside a node, and all ranks (Ulysses).

    With several nodes the largest come first, because exchanging heads inside a node is cheap there.
    """
    node_size = get_topology(config.topology).node_size
    inside = [d for d in range(1, min(node_size, cp_size) + 1) if cp_size % d == 0]
    aligned = [d for d in inside if cp_size <= node_size or node_size % d == 0]
    legal = [d for d in sorted({*aligned, cp_size}) if fits_heads(d, config)]
    return legal if cp_size <= node_size else legal[::-1]


def _bound(mask: AttentionMask, cp_size: int, config: CPConfig) -> float:
    both = (load_bound_seconds(mask, cp_size, config, name) for name in ("forward", "backward"))
    return sum(both)
