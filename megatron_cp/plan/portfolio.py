"""Planner "auto": the best of everything that `plan/search.py` looks at, built.

Published schemes are among the candidates with their exact prices, so our plan is never predicted slower than the
best of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megatron_cp.config import CPConfig
from megatron_cp.mask.interval import IntArray
from megatron_cp.plan.cost import makespan_seconds
from megatron_cp.plan.pricing import Choice
from megatron_cp.plan.schema import AttentionPlan
from megatron_cp.plan.search import Candidate, Family, candidates

NEAR = 1.005  # predictions cannot tell such plans apart: balance, then bytes decide
GOOD_IMBALANCE = 1.02  # below, balance does not decide
SURE = 1.01  # a built plan so near to the others' estimates is taken: estimates are low rather than high
ROUNDING = 1 + 1e-12

Chosen = Mapping[str, Choice]


def best_family(masks: Family, cp_size: int, config: CPConfig) -> dict[str, AttentionPlan]:
    """Returns one plan per mask, on one placement, with the smallest predicted time in the portfolio.

    Of plans that are equally fast, as far as predictions go, a balanced one that moves few bytes is taken.
    Some prices are estimates: what turns out slower once built competes again at its true price.
    """
    options: list[tuple[Candidate, Chosen]] = []
    for candidate in candidates(masks, cp_size, config):
        options.append((candidate, {name: _pick(candidate.choices[name]) for name in masks}))
        sure = {name: _published(candidate.choices[name]) for name in masks}
        if all(sure.values()):
            options.append((candidate, {name: _pick(found) for name, found in sure.items()}))
    totals = [_total(masks, chosen) for _, chosen in options]
    while True:
        best = totals.index(_pick(totals))
        candidate, chosen = options[best]
        plans, seconds = _build(masks, candidate.deal.tokens, chosen, config)
        is_fast = all(seconds <= _slack(other) * other.seconds for other in totals)
        totals[best] = replace(totals[best], seconds=seconds * ROUNDING)
        if is_fast or _pick(totals) is totals[best]:
            return plans


def _pick(choices: Sequence[Choice]) -> Choice:
    """Returns the fastest choice, or one as good: balanced and with fewer bytes moved."""
    limit = NEAR * min(choice.seconds for choice in choices)
    near = [choice for choice in choices if choice.seconds <= limit]
    return min(near, key=lambda c: (max(c.imbalance, GOOD_IMBALANCE), c.moved_bytes, c.seconds))


def _published(choices: Sequence[Choice]) -> list[Choice]:
    return [choice for choice in choices if choice.is_published]


def _slack(other: Choice) -> float:
    """Returns how much slower a built plan may be than another's price."""
    return NEAR if other.is_published else SURE


def _total(masks: Family, chosen: Chosen) -> Choice:
    """Returns the figures of a family as if it were one choice; imbalances count by time."""
    weighted = [(weight, chosen[name]) for name, (_, weight) in masks.items()]
    seconds = sum(weight * choice.seconds for weight, choice in weighted)
    loads = sum(weight * choice.seconds * choice.imbalance for weight, choice in weighted)
    return Choice(
        seconds,
        sum(weight * choice.moved_bytes for weight, choice in weighted),
        loads / seconds if seconds else 1.0,
        is_published=all(choice.is_published for _, choice in weighted),
        build=weighted[0][1].build,
    )


def _build(
    masks: Family, tokens: IntArray, chosen: Chosen, config: CPConfig
) -> tuple[dict[str, AttentionPlan], float]:
    """Returns the plans and their predicted seconds, weighted."""
    plans, total = {}, 0.0
    for name, (mask, weight) in masks.items():
        passes = chosen[name].build()
        plans[name] = AttentionPlan(mask, config, "auto", tokens, *passes)
        both = (makespan_seconds(plans[name], which) for which in ("forward", "backward"))
        total += weight * sum(both)
    return plans, total
