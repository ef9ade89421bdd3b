"""Planner "auto": the best of everything that `plan/search.py` looks at, built.

Published schemes are among the candidates with their exact prices, so our plan is never predicted slower than the
best of them.
"""

from collections.abc import Mapping, Sequence

from megatron_cp.config import CPConfig
from megatron_cp.plan.pricing import Choice
from megatron_cp.plan.schema import AttentionPlan
from megatron_cp.plan.search import Candidate, Family, candidates

NEAR = 1.005  # predictions cannot tell such plans apart: balance, then bytes decide
GOOD_IMBALANCE = 1.02  # below, balance does not decide


def best_family(masks: Family, cp_size: int, config: CPConfig) -> dict[str, AttentionPlan]:
    """Returns one plan per mask, on one placement, with the smallest predicted time in the portfolio.

    Of plans that are equally fast, as far as predictions go, a balanced one that moves few bytes is taken.
    Some prices are estimates: the winner is priced exactly, and competes again until it wins at that.
    """
    found = candidates(masks, cp_size, config)
    while True:
        chosen = [{name: _pick(one.choices[name]) for name in masks} for one in found]
        totals = [_total(masks, choices) for choices in chosen]
        best = totals.index(_pick(totals))
        estimates = [(name, choice) for name, choice in chosen[best].items() if choice.refine]
        if not estimates:
            return _build(masks, found[best], chosen[best], config)
        for name, choice in estimates:
            assert choice.refine is not None
            choices = found[best].choices[name]
            choices[choices.index(choice)] = choice.refine()


def _pick(choices: Sequence[Choice]) -> Choice:
    """Returns the fastest choice, or one as good: balanced and with fewer bytes moved."""
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
        is_published=all(choice.is_published for _, choice in weighted),
        build=weighted[0][1].build,
    )


def _build(
    masks: Family, candidate: Candidate, chosen: Mapping[str, Choice], config: CPConfig
) -> dict[str, AttentionPlan]:
    tokens = candidate.deal.tokens
    return {
        name: AttentionPlan(mask, config, "auto", tokens, *chosen[name].build())
        for name, (mask, _) in masks.items()
    }
