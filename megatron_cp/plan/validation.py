"""Checks that a plan can be executed and covers its mask: what `AttentionPlan.validate` does."""

from collections.abc import Iterable, Sequence
from operator import attrgetter, methodcaller

import numpy as np

from megatron_cp.mask.interval import IntArray
from megatron_cp.plan.schema import DST, SIDES, SRC, START, Hop, Pass, PlanData, Side

# Of a mask; quick, as large plans have millions of them.
GRID = attrgetter("num_queries", "num_keys")
AREA = methodcaller("area")


def validate(plan: PlanData) -> None:
    """Raises ValueError naming the first fault of a plan."""
    for side in SIDES:
        ids, least = plan.tokens_of(side).reshape(-1), plan.length_of(side)
        seen = np.zeros(ids.size, dtype=bool)
        if ids.size and ids.min() >= 0 and ids.max() < ids.size:
            seen[ids] = True
        if not seen.all() or ids.size < least or len(plan.tokens_of(side)) != plan.cp_size:
            raise ValueError(
                f"tokens of side {side!r} of planner {plan.planner!r} must hold every token id 0..P*T-1 exactly "
                f"once and at least {least} of them; fix the placement"
            )
    _validate_pass(plan, plan.forward, f"{plan.planner} forward")
    if plan.backward is not plan.forward:
        _validate_pass(plan, plan.backward, f"{plan.planner} backward")


def _validate_pass(plan: PlanData, pass_: Pass, where: str) -> None:
    degree = pass_.head_degree
    if pass_.head_split is not None:
        _check_groups(pass_.head_split.groups, degree, plan.cp_size, where)
    if pass_.stages and (pass_.stages[0].keeps_k or pass_.stages[0].keeps_q):
        raise ValueError(
            f"{where}: the first stage has no stage before it whose rows it could keep"
        )
    own_rows = plan.own_rows.times(degree)
    own = {side: np.full(plan.cp_size, own_rows.of(side)) for side in SIDES}
    held: dict[Side, IntArray] = {}
    for index, stage in enumerate(pass_.stages):
        for side in SIDES:
            before = held[side] if stage.keeps(side) else own[side]
            held[side] = _checked_rows_held(stage.hops(side), before, f"{where} stage {index}")
        rows = [held[side].tolist() for side in SIDES]
        grids = list(map(GRID, stage.work))
        if grids != list(zip(*rows, strict=True)):
            raise ValueError(
                f"{where} stage {index}: work grids {grids} do not match the rows held {rows}"
            )
    area = sum(sum(map(AREA, stage.work)) for stage in pass_.stages)
    if area != plan.mask.area() * degree:
        raise ValueError(
            f"{where}: stages compute {area} pairs, the mask has {plan.mask.area()} x head degree {degree}; "
            "every pair must be computed exactly once"
        )


def _check_groups(groups: Sequence[Sequence[int]], degree: int, cp_size: int, where: str) -> None:
    members = sorted(rank for group in groups for rank in group)
    ascending = all(list(group) == sorted(group) for group in groups)
    equal = {len(group) for group in groups} == {degree}
    if members != list(range(cp_size)) or not equal or not ascending:
        raise ValueError(
            f"{where}: head_split groups {groups} must cover all {cp_size} ranks once, in equal ascending groups"
        )


def _checked_rows_held(hops: Iterable[Hop], held: IntArray, where: str) -> IntArray:
    """Returns how many rows each rank holds after the hops, given those before: int64 `[P]`."""
    num_ranks = len(held)
    for hop in hops:
        src, dst, start, stop = hop.messages.T
        known = (src >= 0) & (src < num_ranks) & (dst >= 0) & (dst < num_ranks) & (src != dst)
        if not known.all() or (start < 0).any() or (stop > held[src]).any():
            raise ValueError(
                f"{where}: a message leaves the ranks or the rows held: {hop.messages.tolist()}"
            )
        repeated = _first_repeated_row(hop)
        if repeated is not None:
            raise ValueError(
                f"{where}: rank {repeated[0]} sends a row twice to {repeated[1]} in one hop"
            )
        held = held + hop.rows_received(num_ranks)
    return held


def _first_repeated_row(hop: Hop) -> tuple[int, int] | None:
    """Returns (src, dst) of two messages of one pair that share a row, or None."""
    src, dst, start, stop = hop.messages[np.lexsort(hop.messages[:, [START, DST, SRC]].T)].T
    shares = (src[1:] == src[:-1]) & (dst[1:] == dst[:-1]) & (start[1:] < stop[:-1])
    where = np.flatnonzero(shares)
    return (int(src[where[0]]), int(dst[where[0]])) if len(where) else None
