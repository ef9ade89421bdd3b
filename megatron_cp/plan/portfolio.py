"""The search of planner "auto": many placements, each priced from small arrays; only the best is built.

The published schemes are in the portfolio with their exact prices, so our plan is never predicted slower
than the best of them.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from megatron_cp.config import CPConfig
from megatron_cp.mask import AttentionMask
from megatron_cp.mask.interval import IntArray
from megatron_cp.plan import balance, placement
from megatron_cp.plan.cost import load_bound_seconds, makespan_seconds
from megatron_cp.plan.pricing import Choice, Figures, choices, deal_figures, placement_figures
from megatron_cp.plan.schema import AttentionPlan
from megatron_cp.plan.schemes.gather import one_pass_plan
from megatron_cp.plan.stages import PlacedMask
from megatron_cp.plan.topology import get_topology

Family = Mapping[str, tuple[AttentionMask, float]]  # name -> (mask, number of layers)

TOLERANCES = (0.15, 0.04, 0.01)
NEAR = 1.10  # predictions are no better than this: a better balanced plan this near is preferred
GOOD_IMBALANCE = 1.02  # below, balance does not decide
CLOSE_TO_BOUND = 1.01  # a published scheme this near to the load bound ends the search
ROUNDING = 1 + 1e-9


@dataclass(frozen=True)
class Candidate:
    """A placement, and for every mask of the family its choices, the fastest first."""

    tokens: IntArray
    choices: dict[str, list[Choice]]
    seconds: float  # of the family: weighted sum of the fastest choices
    published_seconds: float  # the same over published schemes only, inf if a mask has none
    imbalance: float


def best_family(masks: Family, cp_size: int, config: CPConfig) -> dict[str, AttentionPlan]:
    """Returns one plan per mask, on one placement, with the smallest predicted time in the portfolio.

    Of plans within 10 % of the fastest the best balanced is taken, unless a published scheme is faster.
    """
    candidates = list(_candidates(masks, cp_size, config))
    surest = min(candidates, key=lambda c: c.published_seconds)
    limit = surest.published_seconds * ROUNDING
    fastest = min(candidates, key=lambda c: c.seconds)
    near = [c for c in candidates if c.seconds <= min(NEAR * fastest.seconds, limit)]
    balanced = min(near, key=lambda c: (max(c.imbalance, GOOD_IMBALANCE), c.seconds))
    for candidate in (balanced, fastest):
        plans, seconds = _build(masks, candidate, config)
        if seconds <= limit:
            return plans
    return _build(masks, surest, config)[0]


def _build(
    masks: Family, candidate: Candidate, config: CPConfig
) -> tuple[dict[str, AttentionPlan], float]:
    """Returns the plans of a candidate and their predicted seconds, weighted."""
    plans, total = {}, 0.0
    for name, (mask, weight) in masks.items():
        placed = PlacedMask(mask, candidate.tokens)
        found = candidate.choices[name]
        sure = next((choice for choice in found if choice.is_published), found[0])
        plan, seconds = _build_choice(placed, found[0], config)
        if sure is not found[0] and seconds > sure.seconds * ROUNDING:
            plan, seconds = _build_choice(placed, sure, config)
        plans[name] = plan
        total += weight * seconds
    return plans, total


def _build_choice(
    placed: PlacedMask, choice: Choice, config: CPConfig
) -> tuple[AttentionPlan, float]:
    both = choice.build(placed)
    plan = one_pass_plan(placed.mask, config, "auto", placed.placement, both)
    return plan, makespan_seconds(plan, "forward") + makespan_seconds(plan, "backward")


def _candidates(masks: Family, cp_size: int, config: CPConfig) -> Iterator[Candidate]:
    """Yields the published placements, then, unless one is as good as perfect, deals of chunks."""
    num_tokens = next(iter(masks.values()))[0].num_queries
    # One row count for all candidates: it must not depend on the data, pipeline shapes are fixed by it.
    pieces = 2 if cp_size > 1 else 1  # zigzag halves every rank's rows
    even = replace(config, token_multiple=math.lcm(config.token_multiple, pieces))
    chunk, per_rank = placement.chunk_layout(num_tokens, cp_size, even)
    padded = replace(config, token_multiple=chunk * per_rank)
    seconds = []
    for rule in (placement.contiguous, placement.zigzag)[:cp_size]:  # the same for one rank
        tokens = rule(num_tokens, cp_size, padded)
        figures = {name: placement_figures(mask, tokens) for name, (mask, _) in masks.items()}
        is_in_order = rule is placement.contiguous
        candidate = _price(masks, tokens, figures, config, is_in_order=is_in_order)
        seconds.append(candidate.seconds)
        yield candidate
    bound = sum(weight * _bound(mask, cp_size, config) for mask, weight in masks.values())
    if min(seconds) <= CLOSE_TO_BOUND * bound or cp_size == 1:
        return
    tables = {n: balance.chunk_table(m, chunk, cp_size * per_rank) for n, (m, _) in masks.items()}
    weights = [weight for _, weight in masks.values()]
    seen = set()
    for owned in _deals(balance.weighted_sum(list(tables.values()), weights), cp_size, config):
        if owned.tobytes() in seen:
            continue
        seen.add(owned.tobytes())
        figures = {name: deal_figures(table, owned) for name, table in tables.items()}
        yield _price(masks, placement.deal(owned, chunk), figures, config)


def _bound(mask: AttentionMask, cp_size: int, config: CPConfig) -> float:
    both = (load_bound_seconds(mask, cp_size, config, name) for name in ("forward", "backward"))
    return sum(both)


def _deals(table: balance.ChunkTable, cp_size: int, config: CPConfig) -> Iterator[IntArray]:
    """Yields deals of chunks to ranks, int64 `[P, n]`, those with better locality first."""
    num_chunks = len(table.areas)
    owned = balance.in_order(num_chunks, cp_size)
    for tolerance in TOLERANCES:
        owned = balance.exchange_chunks(owned, table, tolerance)
        yield owned
    yield balance.exchange_chunks(balance.zigzag(num_chunks, cp_size), table, TOLERANCES[-1])
    node_size = get_topology(config.topology).node_size
    if node_size < cp_size and cp_size % node_size == 0:
        for start in (balance.in_order, balance.zigzag):
            yield balance.nodes_first(table, cp_size, node_size, start, TOLERANCES[1])
    yield balance.largest_first(table.chunk_areas, cp_size)


def _price(
    masks: Family,
    tokens: IntArray,
    figures: Mapping[str, Figures],
    config: CPConfig,
    *,
    is_in_order: bool = False,
) -> Candidate:
    found: dict[str, list[Choice]] = {}
    seconds = published_seconds = 0.0
    loads = np.zeros(len(tokens))
    for name, (mask, weight) in masks.items():
        found[name] = choices(mask, figures[name], config, is_in_order=is_in_order)
        published = (choice.seconds for choice in found[name] if choice.is_published)
        seconds += weight * found[name][0].seconds
        published_seconds += weight * next(published, float("inf"))
        loads = loads + weight * figures[name].loads
    imbalance = float(loads.max() / loads.mean()) if loads.any() else 1.0
    return Candidate(tokens, found, seconds, published_seconds, imbalance)
