"""make_plan: the mask and the rank count in, the plan with the smallest predicted makespan out.

"auto" tries placements (in order, zigzag, exchanged and largest-first deals of chunks) with one to four
stages of remote keys, predicts every candidate and keeps the best. Ties go to the earlier candidate, so
equal inputs give equal bytes in every process.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from megatron_cp.config import CPConfig
from megatron_cp.mask import AttentionMask, interval
from megatron_cp.mask.interval import IntArray
from megatron_cp.plan import balance, placement
from megatron_cp.plan.cost import makespan_seconds
from megatron_cp.plan.routing import Owners, key_stage, local_stage, remote_keys, split_evenly
from megatron_cp.plan.schema import AttentionPlan, Pass
from megatron_cp.plan.schemes.gather import (
    one_pass_plan,
    plan_allgather,
    plan_contiguous,
    with_needed_keys,
)
from megatron_cp.plan.schemes.ring import plan_ring, plan_zigzag
from megatron_cp.plan.schemes.ulysses import plan_ulysses
from megatron_cp.plan.topology import get_topology

Planner = Callable[[AttentionMask, int, CPConfig], AttentionPlan]

STAGE_COUNTS = (1, 2, 4)
TOLERANCES = (0.02, 0.005)
MAX_CHUNKS_TO_EXCHANGE = 1024  # beyond, the square matrix of needs costs more than it earns


def make_plan(mask: AttentionMask, cp_size: int, config: CPConfig | None = None) -> AttentionPlan:
    """Returns a validated plan for `mask` on `cp_size` ranks; pure, deterministic, no collective.

    `mask` is square: queries and keys are the same tokens. Raises ValueError for an empty or non-square
    mask, an unknown planner or topology, and for a wish that the chosen planner cannot serve.
    """
    return make_plans({"mask": (mask, 1)}, cp_size, config)["mask"]


def make_plans(
    masks: Mapping[str, tuple[AttentionMask, float]], cp_size: int, config: CPConfig | None = None
) -> dict[str, AttentionPlan]:
    """Returns one plan per mask, all with the same token placement, so layers of any kind can alternate.

    `masks` maps a name to (mask, number of layers that use it). The placement is chosen for the weighted
    sum of the predicted times. Raises as `make_plan`, and when the masks differ in length.
    """
    config = config or CPConfig()
    started = time.perf_counter()
    _check_inputs(masks, cp_size, config)
    if config.planner == "auto":
        plans = _best_family(masks, cp_size, config)
    else:
        planner = PLANNERS[config.planner]
        plans = {name: planner(mask, cp_size, config) for name, (mask, _) in masks.items()}
    for plan in plans.values():
        plan.validate()
    plan_ms = (time.perf_counter() - started) * 1e3 / len(plans)
    return {name: replace(plan, plan_ms=plan_ms) for name, plan in plans.items()}


def plan_auto(mask: AttentionMask, cp_size: int, config: CPConfig) -> AttentionPlan:
    """Returns our plan: equal tokens, balanced area, needed keys only, overlapped as predicted best."""
    return _best_family({"mask": (mask, 1)}, cp_size, config)["mask"]


def plan_on_placement(
    mask: AttentionMask, tokens: IntArray, config: CPConfig, planner: str = "fixed_placement"
) -> AttentionPlan:
    """Returns the plan for a given token placement (int64 `[P, T]`), needed keys only.

    For frameworks that have split their batch already, for instance Megatron's own zigzag.
    """
    plan = with_needed_keys(mask, tokens, config, planner)
    plan.validate()
    return plan


def _best_family(
    masks: Mapping[str, tuple[AttentionMask, float]], cp_size: int, config: CPConfig
) -> dict[str, AttentionPlan]:
    best: tuple[float, dict[str, AttentionPlan]] | None = None
    for tokens in _candidate_placements(masks, cp_size, config):
        plans = {name: _best_stages(mask, tokens, config) for name, (mask, _) in masks.items()}
        seconds = sum(
            weight
            * (makespan_seconds(plans[name], "forward") + makespan_seconds(plans[name], "backward"))
            for name, (_, weight) in masks.items()
        )
        if best is None or seconds < best[0] * (1 - 1e-9):
            best = (seconds, plans)
    assert best is not None
    return best[1]


def _candidate_placements(
    masks: Mapping[str, tuple[AttentionMask, float]], cp_size: int, config: CPConfig
) -> Iterator[IntArray]:
    """Yields token placements worth predicting, those with better locality first."""
    first = next(iter(masks.values()))[0]
    num_tokens = first.num_queries
    chunk, per_rank = placement.chunk_layout(num_tokens, cp_size, config)
    num_chunks = cp_size * per_rank
    yield balance_in_order(num_chunks, cp_size, chunk)
    if cp_size == 1:
        return
    zigzag = placement.zigzag(num_tokens, cp_size, config)
    if zigzag.size == num_chunks * chunk:
        yield zigzag
    areas = sum(w * balance.chunk_areas(m, chunk, num_chunks) for m, w in masks.values())
    by_area = balance.largest_first(np.asarray(areas), cp_size)
    yield placement.deal(by_area, chunk)
    if num_chunks > MAX_CHUNKS_TO_EXCHANGE:
        return
    needs = sum(w * balance.chunk_needs(m, chunk, num_chunks) for m, w in masks.values())
    for start in (balance.in_order(num_chunks, cp_size), by_area):
        for tolerance in TOLERANCES:
            owned = balance.exchange_chunks(start, np.asarray(areas), np.asarray(needs), tolerance)
            yield placement.deal(owned, chunk)


def balance_in_order(num_chunks: int, cp_size: int, chunk: int) -> IntArray:
    """Returns the placement of the stream in order, in whole chunks."""
    return placement.deal(balance.in_order(num_chunks, cp_size), chunk)


def _best_stages(mask: AttentionMask, tokens: IntArray, config: CPConfig) -> AttentionPlan:
    """Returns the plan of a placement with the number of remote stages that is predicted fastest."""
    owners = Owners(tokens)
    wanted = remote_keys(mask, owners)
    local = local_stage(mask, owners)
    if not any(len(intervals) for intervals in wanted):
        return one_pass_plan(mask, config, "auto", tokens, Pass((local,)))
    counts = STAGE_COUNTS if config.num_stages is None else (config.num_stages,)
    best: tuple[float, AttentionPlan] | None = None
    for count in counts:
        parts = [split_evenly(interval.normalise(intervals), count) for intervals in wanted]
        remote = [key_stage(mask, owners, [part[i] for part in parts]) for i in range(count)]
        both = Pass((local, *remote))
        plan = one_pass_plan(mask, config, "auto", tokens, both)
        seconds = makespan_seconds(plan, "forward") + makespan_seconds(plan, "backward")
        if best is None or seconds < best[0] * (1 - 1e-9):
            best = (seconds, plan)
    assert best is not None
    return best[1]


def _check_inputs(
    masks: Mapping[str, tuple[AttentionMask, float]], cp_size: int, config: CPConfig
) -> None:
    if not isinstance(cp_size, int) or cp_size < 1:
        raise ValueError(f"cp_size={cp_size!r} must be a positive integer; use 1 for a single rank")
    if config.planner not in PLANNERS:
        raise ValueError(
            f"planner={config.planner!r} is unknown; choose one of {', '.join(sorted(PLANNERS))}"
        )
    get_topology(config.topology)
    if not masks:
        raise ValueError("masks is empty; give at least one mask by name")
    grids = {name: (mask.num_queries, mask.num_keys) for name, (mask, _) in masks.items()}
    lengths = {size for grid in grids.values() for size in grid}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(
            f"mask grids {grids} must be square, of one length, with at least one token; "
            "crop or concat the masks to the tokens of one pack"
        )


PLANNERS: dict[str, Planner] = {
    "auto": plan_auto,
    "contiguous": plan_contiguous,
    "ring": plan_ring,
    "zigzag": plan_zigzag,
    "allgather": plan_allgather,
    "ulysses": plan_ulysses,
}
