"""Predicted seconds of the double ring for a mask on a placement.

Keys go round in forward, the cheaper side in backward. In one node it is a ring, exact to the row. Among nodes each
step of a round moves an equal part of every block; how the pairs of a round divide over its steps is first taken to be
even, and the winner is priced again as it is built.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from megatron_cp.mask.interval import IntArray
from megatron_cp.plan.hardware.cost import Movement, PassLoads, SideLoads, hop_movement
from megatron_cp.plan.hardware.makespan import makespan_seconds
from megatron_cp.plan.hardware.rows import row_size
from megatron_cp.plan.price.head_groups import HeadGroups, PassOption, Strategy
from megatron_cp.plan.schema import PASSES, FloatArray, Pass, PassName, PlanData, Side
from megatron_cp.plan.schemes.double_ring import double_ring_pass, passes_queries, transposed
from megatron_cp.plan.transfer.head_split import split_heads
from megatron_cp.plan.transfer.pass_builder import PlacedMask


def double_ring(groups: HeadGroups, limit: float) -> list[Strategy]:
    """Returns the double ring, if it is not the ring itself and may take less than `limit` seconds."""
    if double_ring_seconds(groups) > limit:
        return []
    inner = _ranks_inside(groups)
    moved = SideLoads.of(_movements(groups, inner), [False] * groups.placed.num_ranks)
    build = functools.cache(functools.partial(_build, groups, inner))
    sides = _sides(groups)
    return [{name: _option(groups, inner, name, sides[name], moved, build) for name in PASSES}]


def double_ring_seconds(groups: HeadGroups) -> float:
    """Returns what both passes take at least to move all blocks; infinite where the double ring is the ring."""
    num_ranks, inner, sides = groups.placed.num_ranks, _ranks_inside(groups), _sides(groups)
    if num_ranks == 1 or (inner == num_ranks and sides["backward"] == "k"):
        return math.inf
    sizes = [row_size(groups.config, name, side, groups.degree) for name, side in sides.items()]
    size = sum(max(one.there, one.back) for one in sizes)
    blocks = np.array([num_ranks - num_ranks // inner, num_ranks // inner - 1])
    seconds = blocks * groups.links.seconds_per_byte[:2]
    return float(seconds.max()) * groups.placed.own_rows * size


def _ranks_inside(groups: HeadGroups) -> int:
    """Returns the head groups of an inner ring."""
    num_ranks = groups.placed.num_ranks
    return math.gcd(num_ranks, min(num_ranks, groups.links.node_size))


def _sides(groups: HeadGroups) -> dict[PassName, Side]:
    """Returns which side goes round."""
    return {
        "forward": "k",
        "backward": "q" if passes_queries(groups.config, groups.degree) else "k",
    }


def _option(
    groups: HeadGroups,
    inner: int,
    name: PassName,
    side: Side,
    moved: SideLoads | None,
    build: Callable[[Side], Pass],
) -> PassOption:
    """`moved`: in each step; `build`: the pass in which a side goes round, built once for both passes."""
    areas = groups.placed.areas_by_owner
    stay = areas if side == "k" else areas.T  # [who stays, who moves]
    loads = _stage_areas(stay, inner)
    passing = PassLoads(loads, keys=moved) if side == "k" else PassLoads(loads, queries=moved)
    num_moved = float(len(areas) * (len(areas) - 1) * groups.placed.own_rows)
    rows: dict[Side, float] = {"q": 0.0, "k": 0.0, side: num_moved}
    option = PassOption(
        groups.seconds(passing, name),
        groups.moved_bytes(rows, name),
        groups.imbalance(stay.sum(axis=1)),
        functools.partial(build, side),
        is_published=True,
    )
    if inner == len(areas):
        return option
    return replace(option, refine=functools.partial(_as_built, groups, option, name))


def _stage_areas(stay: FloatArray, inner: int) -> FloatArray:
    """Returns the pairs of each rank in each step: `[P, P]`; those of a round divided evenly over its steps."""
    num_ranks = len(stay)
    rank = np.arange(num_ranks)
    node = rank // inner
    steps = [stay[rank, node * inner + (rank - step) % inner] for step in range(inner)]
    of_node = stay.reshape(num_ranks, -1, inner).sum(axis=2)  # [who stays, node]
    for distance in range(1, num_ranks // inner):
        comes_from = (node - distance) % (num_ranks // inner)
        steps += [of_node[rank, comes_from] / inner] * inner
    return np.stack(steps)


def _movements(groups: HeadGroups, inner: int) -> list[Movement | None]:
    """Returns what every step moves: nothing, blocks inside, then a part of each block of another node, in two hops."""
    num_ranks, own_rows = groups.placed.num_ranks, groups.placed.own_rows
    rank = np.arange(num_ranks)

    def hop(src: IntArray, dst: IntArray, rows: float) -> Movement:
        every = np.full(len(src), rows)
        return hop_movement(src, dst, every, num_ranks, groups.links)

    inside = rank // inner * inner
    steps: list[Movement | None] = [None]
    steps += [hop(rank, inside + (rank + step) % inner, own_rows) for step in range(1, inner)]
    others = np.repeat(rank, inner - 1), np.tile(np.arange(1, inner), num_ranks)
    readers = others[0] // inner * inner + (others[0] + others[1]) % inner
    share = own_rows / inner
    passed_on = hop(others[0], readers, share) if inner > 1 else None
    for distance in range(1, num_ranks // inner):
        arrives = hop(rank, (rank + distance * inner) % num_ranks, share)
        steps += [arrives.plus(passed_on)] * inner
    return steps


def _build(groups: HeadGroups, inner: int, side: Side) -> Pass:
    if side == "k":
        return split_heads(double_ring_pass(groups.placed, inner), groups.degree)
    placed = PlacedMask(groups.mask.transpose(), groups.placed.tokens)
    return split_heads(transposed(double_ring_pass(placed, inner)), groups.degree)


def _as_built(groups: HeadGroups, option: PassOption, name: PassName) -> PassOption:
    pass_: Pass = option.build()
    tokens = groups.placed.tokens.regrouped(groups.placed.num_ranks * groups.degree).tokens
    plan = PlanData(groups.mask, groups.config, "auto", tokens, pass_, pass_)
    return replace(option, seconds=makespan_seconds(plan, name), refine=None)
