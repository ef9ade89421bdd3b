"""Planner "auto": the best of everything that `plan/search/search.py` looks at, built.

Published schemes are among the candidates with their exact prices; only those that cannot come near the best are
left out before.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from megatron_cp.config import CPConfig
from megatron_cp.plan.hardware.memory import received_bytes
from megatron_cp.plan.hardware.simulate import simulate_pass
from megatron_cp.plan.placement.candidates import Family
from megatron_cp.plan.price.head_groups import PassOption
from megatron_cp.plan.price.linear_layers import linear_seconds
from megatron_cp.plan.schema import PASSES, PassName, PlanData
from megatron_cp.plan.search.budget import BUDGET, SearchBudget
from megatron_cp.plan.search.candidate import Candidate
from megatron_cp.plan.search.portfolio import candidates

Key = tuple[str, PassName]
Chosen = dict[Key, PassOption]


@dataclass(frozen=True)
class _Total:
    """The figures of all passes of a family on one placement; imbalances count by time."""

    seconds: float
    moved_bytes: float
    imbalance: float
    published_seconds: float
    """Of the fastest published options, one for each pass."""


Priced = TypeVar("Priced", PassOption, _Total)


def best_family(
    masks: Family, cp_size: int, config: CPConfig, budget: SearchBudget = BUDGET
) -> dict[str, PlanData]:
    """Returns one plan per mask, on one placement, with the smallest predicted time in the portfolio."""
    return best_of(candidates(masks, cp_size, config, budget), masks, config, budget)


def best_of(
    found: list[Candidate], masks: Family, config: CPConfig, budget: SearchBudget = BUDGET
) -> dict[str, PlanData]:
    """Returns one plan per mask, on the candidate with the smallest predicted time.

    Of options that are equally fast, as far as predictions go, a balanced one that moves few bytes is taken, for each
    pass by itself. Some prices are estimates: the winner is priced exactly, and competes again until it wins at that.
    Prices of published options do not know that ranks wait for late senders, and none knows measured kernel rates: the
    winner is built and played, and competes again if that takes longer.
    """
    state_seconds = _state_seconds(found, masks, config)
    played: list[tuple[float, dict[str, PlanData]]] = []
    while True:
        place, chosen, total = _leader(found, masks, state_seconds, budget)
        candidate = found[place]
        estimates = {key: one.refine() for key, one in chosen.items() if one.refine is not None}
        if estimates:
            _replace(candidate, chosen, estimates)
            continue
        plans = _build(masks, candidate, chosen, config)
        too_large = _passes_over_limit(plans, config)
        if too_large:
            if math.isinf(total.seconds):
                raise ValueError(_no_plan_is_small_enough(masks, found, config))
            never = {key: replace(chosen[key], seconds=math.inf) for key in too_large}
            _replace(candidate, chosen, never)
            continue
        prices = {key: simulate_pass(plans[key[0]], key[1]).seconds for key in chosen}
        seconds = sum(masks[key[0]][1] * price for key, price in prices.items())
        played.append((state_seconds[place] + seconds, plans))
        slower = {
            key: replace(one, seconds=prices[key])
            for key, one in chosen.items()
            if prices[key] > budget.near * one.seconds
        }
        if not slower or len(played) == budget.most_played:
            return min(played, key=lambda one: one[0])[1]
        _replace(candidate, chosen, slower)


def _state_seconds(found: Sequence[Candidate], masks: Family, config: CPConfig) -> list[float]:
    """Returns the seconds that the states of linear layers travel, for each candidate; 0 without such layers."""
    if config.linear_state_bytes is None:
        return [0.0] * len(found)
    every_mask = [mask for mask, _ in masks.values()]
    return [linear_seconds(one.tokens, every_mask, config) for one in found]


def _leader(
    found: Sequence[Candidate], masks: Family, state_seconds: Sequence[float], budget: SearchBudget
) -> tuple[int, Chosen, _Total]:
    """Returns which candidate is best with the best option of each of its passes, these options, and their total."""
    every = [{key: _pick(options, budget) for key, options in one.options.items()} for one in found]
    totals = [
        _total(masks, one.options, chosen, seconds)
        for one, chosen, seconds in zip(found, every, state_seconds, strict=True)
    ]
    place = totals.index(_pick(totals, budget))
    return place, every[place], totals[place]


def _replace(candidate: Candidate, chosen: Chosen, others: Chosen) -> None:
    """Puts other options, or other prices of the same, where the chosen ones were."""
    for key, other in others.items():
        options = candidate.options[key]
        options[options.index(chosen[key])] = other


def _passes_over_limit(plans: Mapping[str, PlanData], config: CPConfig) -> list[Key]:
    """Returns the passes in which some rank would hold more rows of others than `max_received_mb` allows."""
    if config.max_received_mb is None:
        return []
    return [
        (name, which)
        for name, plan in plans.items()
        for which in PASSES
        if _received_megabytes(plan, which) > config.max_received_mb
    ]


def _received_megabytes(plan: PlanData, which: PassName) -> float:
    """Returns the most megabytes that a rank holds in a pass because others sent them."""
    return float(received_bytes(plan, which).max()) / 1e6


def _no_plan_is_small_enough(masks: Family, found: Sequence[Candidate], config: CPConfig) -> str:
    least = math.ceil(_least_megabytes(masks, found, config))
    return (
        f"max_received_mb={config.max_received_mb} cannot be kept by any plan that planner 'auto' knows; "
        f"the smallest holds {least} MB of received rows on a rank: raise it to that, or plan for more "
        "ranks"
    )


def _least_megabytes(masks: Family, found: Sequence[Candidate], config: CPConfig) -> float:
    """Returns the smallest limit that some plan of the candidates keeps; every option of theirs is built."""

    def held(candidate: Candidate, key: Key, option: PassOption) -> float:
        built = option.build()
        plan = candidate.plan(masks[key[0]][0], config, built, built)
        return _received_megabytes(plan, key[1])

    return min(
        max(
            min(held(candidate, key, option) for option in options)
            for key, options in candidate.options.items()
        )
        for candidate in found
    )


def _pick(options: Sequence[Priced], budget: SearchBudget) -> Priced:
    """Returns the fastest option, or one as good: balanced and with fewer bytes moved.

    Beside a published option "as good" means no slower than that.
    """
    limit = budget.near * min(one.seconds for one in options)
    limit = min(limit, min(one.published_seconds for one in options))
    near = [one for one in options if one.seconds <= limit]
    even = budget.good_imbalance
    return min(near, key=lambda one: (max(one.imbalance, even), one.moved_bytes, one.seconds))


def _total(
    masks: Family,
    options: Mapping[Key, Sequence[PassOption]],
    chosen: Chosen,
    state_seconds: float,
) -> _Total:
    """Returns the figures of the chosen options; `state_seconds` are added whatever is chosen on the placement."""
    weighted = [(masks[name][1], choice) for (name, _), choice in chosen.items()]
    seconds = sum(weight * choice.seconds for weight, choice in weighted)
    if not 0 < seconds < math.inf:
        return _Total(seconds, 0.0, 1.0, math.inf)
    loads = sum(weight * choice.seconds * choice.imbalance for weight, choice in weighted)
    moved = sum(weight * choice.moved_bytes for weight, choice in weighted)
    published = sum(
        masks[name][1] * min(one.published_seconds for one in found)
        for (name, _), found in options.items()
    )
    return _Total(seconds + state_seconds, moved, loads / seconds, published + state_seconds)


def _build(
    masks: Family, candidate: Candidate, chosen: Chosen, config: CPConfig
) -> dict[str, PlanData]:
    return {
        name: candidate.plan(mask, config, *(chosen[name, which].build() for which in PASSES))
        for name, (mask, _) in masks.items()
    }
