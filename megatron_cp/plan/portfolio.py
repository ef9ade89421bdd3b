"""Planner "auto": the best of everything that `plan/search.py` looks at, built.

Published schemes are among the candidates with their exact prices, so our plan is never predicted slower than the
best of them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from megatron_cp.config import CPConfig
from megatron_cp.plan.deals import Family
from megatron_cp.plan.memory import received_bytes
from megatron_cp.plan.pricing import PASSES, Choice
from megatron_cp.plan.schema import AttentionPlan, PassName
from megatron_cp.plan.search import Candidate, candidates

NEAR = 1.0025  # predictions cannot tell such plans apart: balance, then bytes decide
GOOD_IMBALANCE = 1.02  # below, balance does not decide


def best_family(masks: Family, cp_size: int, config: CPConfig) -> dict[str, AttentionPlan]:
    """Returns one plan per mask, on one placement, with the smallest predicted time in the portfolio.

    Of ways that are equally fast, as far as predictions go, a balanced one that moves few bytes is taken, for each
    pass by itself. Some prices are estimates: the winner is priced exactly, and competes again until it wins at that.
    """
    found = candidates(masks, cp_size, config)
    while True:
        chosen = [{key: _pick(choices) for key, choices in one.choices.items()} for one in found]
        totals = [_total(masks, choices) for choices in chosen]
        best = totals.index(_pick(totals))
        estimates = [(key, choice) for key, choice in chosen[best].items() if choice.refine]
        if not estimates:
            plans = _build(masks, found[best], chosen[best], config)
            too_large = _too_large(plans, config, totals[best].seconds)
            if not too_large:
                return plans
            for key in too_large:
                choices, choice = found[best].choices[key], chosen[best][key]
                choices[choices.index(choice)] = replace(choice, seconds=math.inf)
            continue
        for key, choice in estimates:
            assert choice.refine is not None
            choices = found[best].choices[key]
            choices[choices.index(choice)] = choice.refine()


def _too_large(
    plans: Mapping[str, AttentionPlan], config: CPConfig, seconds: float
) -> dict[tuple[str, PassName], float]:
    """Returns the passes that hold more received rows than the config allows, with their megabytes.

    Raises ValueError when nothing is left to try: `seconds` of the best choice is infinite.
    """
    limit = config.max_received_mb
    if limit is None:
        return {}
    held = {
        (name, which): float(received_bytes(plan, which).max()) / 1e6
        for name, plan in plans.items()
        for which in PASSES
    }
    if math.isinf(seconds):
        raise ValueError(
            f"max_received_mb={limit} cannot be kept by any plan that planner 'auto' knows (the last holds "
            f"{math.ceil(max(held.values()))} MB of received rows on a rank); raise it, or use planner='zigzag', "
            "which holds two ranks' keys at a time"
        )
    return {key: size for key, size in held.items() if size > limit}


def _pick(choices: Sequence[Choice]) -> Choice:
    """Returns the fastest choice, or one as good: balanced and with fewer bytes moved."""
    limit = NEAR * min(choice.seconds for choice in choices)
    near = [choice for choice in choices if choice.seconds <= limit]
    return min(near, key=lambda c: (max(c.imbalance, GOOD_IMBALANCE), c.moved_bytes, c.seconds))


def _total(masks: Family, chosen: Mapping[tuple[str, PassName], Choice]) -> Choice:
    """Returns the figures of a family as if it were one choice; imbalances count by time."""
    weighted = [(masks[name][1], choice) for (name, _), choice in chosen.items()]
    seconds = sum(weight * choice.seconds for weight, choice in weighted)
    loads = sum(weight * choice.seconds * choice.imbalance for weight, choice in weighted)
    return Choice(
        seconds,
        sum(weight * choice.moved_bytes for weight, choice in weighted),
        loads / seconds if seconds else 1.0,
        build=weighted[0][1].build,
    )


def _build(
    masks: Family,
    candidate: Candidate,
    chosen: Mapping[tuple[str, PassName], Choice],
    config: CPConfig,
) -> dict[str, AttentionPlan]:
    tokens, plans = candidate.placement.tokens, {}
    for name, (mask, _) in masks.items():
        forward, backward = (chosen[name, which].build() for which in PASSES)
        plans[name] = AttentionPlan(mask, config, "auto", tokens, forward, backward)
    return plans
