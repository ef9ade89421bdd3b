"""Predicted seconds of the published strategies for a mask on a placement, without building a plan.

Queries stay and keys travel. Two figures of a mask on a placement decide: the pairs between the queries of one
rank and the keys of another, and the key rows that one needs of the other.
"""

import functools
import math
from collections.abc import Sequence

import numpy as np

from megatron_cp.plan.hardware.cost import Movement, PassLoads, SideLoads, hop_movement
from megatron_cp.plan.price.double_ring import double_ring
from megatron_cp.plan.price.head_groups import HeadGroups, Strategy
from megatron_cp.plan.schema import FloatArray
from megatron_cp.plan.transfer.passes import allgather_pass, needed_keys_pass, ring_pass


def published_strategies(groups: HeadGroups, limit: float = math.inf) -> list[Strategy]:
    """Returns the strategies in which queries stay: needed keys at once, ring, all-gather, double ring.

    Those that cannot take less than `limit` seconds, by their busiest rank or by moving all keys, are left out. The
    others' prices are exact, but for the double ring's among nodes.
    """
    if groups.least_seconds() > limit:
        return []
    strategies = [_needed_keys(groups)]
    if groups.all_keys_seconds() <= limit:
        strategies += [_ring(groups), _allgather(groups)]
    return strategies + double_ring(groups, limit)


def _key_loads(areas: FloatArray, moves: Sequence[Movement | None]) -> PassLoads:
    """Returns the loads of stages that receive keys and keep none."""
    return PassLoads(areas, SideLoads.of(moves, [False] * len(moves)))


def _needed_keys(groups: HeadGroups) -> Strategy:
    areas, needed = groups.placed.areas_by_owner, groups.placed.rows_by_owner
    local = np.diagonal(areas)
    src, dst = np.nonzero(needed)
    build = functools.partial(needed_keys_pass, groups.placed)
    if not len(src):
        return groups.same_both_ways(PassLoads(local[None]), 0.0, build)
    rows = needed[src, dst]
    moved = hop_movement(src, dst, rows, len(areas), groups.links)
    loads = _key_loads(np.stack([local, areas.sum(axis=1) - local]), [None, moved])
    return groups.same_both_ways(loads, float(rows.sum()), build)


def _ring(groups: HeadGroups) -> Strategy:
    links, num_ranks, own_rows = groups.links, groups.placed.num_ranks, groups.placed.own_rows
    ranks, steps = np.arange(num_ranks), np.arange(num_ranks)[:, None]
    src, dst = (ranks - steps) % num_ranks, (ranks + steps) % num_ranks
    # In a step every rank has one partner to receive from and one to send to: the slower link decides.
    level = np.stack([links.level(ranks, partner) for partner in (src, dst)])
    slower = links.seconds(links.passed(level)).max(axis=(0, 3))
    per_byte: FloatArray = slower * (own_rows * (steps > 0))
    latency = np.where(steps[:, 0] > 0, np.array(links.latency)[level.max(axis=(0, 2))], 0.0)
    moved = SideLoads(per_byte, latency, np.zeros(num_ranks, dtype=bool))
    loads = PassLoads(groups.placed.areas_by_owner[ranks, src], moved if num_ranks > 1 else None)
    key_rows = float((num_ranks - 1) * num_ranks * own_rows)
    return groups.same_both_ways(loads, key_rows, functools.partial(ring_pass, groups.placed))


def _allgather(groups: HeadGroups) -> Strategy:
    areas = groups.placed.areas_by_owner
    src, dst = np.nonzero(~np.eye(len(areas), dtype=bool))
    rows = np.full(len(src), groups.placed.own_rows)
    moved = hop_movement(src, dst, rows, len(areas), groups.links)
    loads = _key_loads(areas.sum(axis=1)[None], [moved])
    build = functools.partial(allgather_pass, groups.placed)
    return groups.same_both_ways(loads, float(rows.sum()), build)
