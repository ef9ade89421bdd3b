"""MagiAttention: chunks assigned by area, each rank then receives just the keys that it needs, in two stages.

Chunks of the stream, sorted by the area of their query rows, go one by one to the least loaded rank that has
room (a min-heap): balanced under any mask, blind to where keys are. Group-cast sends every key row once to each
rank that needs it. Own keys come first, then as many stages of remote keys as the overlap degree says.

Eight chunks per rank unless `chunk_size` says otherwise, and overlap degree 2 unless `num_stages` does, as in
the published benchmarks. Their stages take chunks of remote keys in turn; ours take an equal share
of what each pair of ranks exchanges: the same rows, and no fuller links.
`magi_hierarchical` sends a row once to each node, and the rank at the owner's place passes it on: the published
system's hierarchical group-cast, which a variable of its environment turns on. `study/rival.py` has the rest of how
it is run.

Volume: what the chunks of a rank need; at most 2 rho (P-1). Source: MagiAttention 1.1, static solver.
"""

import heapq

import numpy as np

from megatron_cp.config import CPConfig
from megatron_cp.mask import AttentionMask
from megatron_cp.mask.interval import IntArray
from megatron_cp.plan.hardware.topology import get_topology
from megatron_cp.plan.placement.placement import Placement, chunk_layout
from megatron_cp.plan.schema import FloatArray, PlanData
from megatron_cp.plan.schemes.gather import one_pass_plan
from megatron_cp.plan.transfer.pass_builder import PlacedMask
from megatron_cp.plan.transfer.passes import needed_keys_pass
from megatron_cp.plan.transfer.routing import Route, ThroughNodes, direct

CHUNKS_PER_RANK = 8
OVERLAP_DEGREE = 2


def plan_magi(mask: AttentionMask, cp_size: int, config: CPConfig) -> PlanData:
    """Returns chunks assigned largest area first, and needed keys in `num_stages` stages after own keys."""
    return _plan(mask, cp_size, config, "magi", direct)


def plan_magi_hierarchical(mask: AttentionMask, cp_size: int, config: CPConfig) -> PlanData:
    """Returns the plan of `plan_magi` in which a row enters each node once."""
    node_size = get_topology(config.topology).node_size
    route = ThroughNodes(node_size) if 1 < node_size < cp_size else direct
    return _plan(mask, cp_size, config, "magi_hierarchical", route)


def _plan(
    mask: AttentionMask, cp_size: int, config: CPConfig, planner: str, route: Route
) -> PlanData:
    chunk, per_rank = chunk_layout(mask.num_queries, cp_size, config, CHUNKS_PER_RANK)
    areas = mask.area_of_rows(np.arange(cp_size * per_rank + 1) * chunk)
    chunks = np.sort(largest_first(areas.astype(np.float64), cp_size), axis=1)
    placed = PlacedMask(mask, Placement.of_chunks(chunks, chunk))
    both = needed_keys_pass(placed, config.num_stages or OVERLAP_DEGREE, route)
    return one_pass_plan(placed, config, planner, both)


def largest_first(areas: FloatArray, cp_size: int) -> IntArray:
    """Returns the chunk assignment that gives the largest chunk to the least loaded rank with room, again and again.

    Source: longest-processing-time rule with equal counts; MagiAttention's min-heap dispatch.
    """
    room = len(areas) // cp_size
    owned: list[list[int]] = [[] for _ in range(cp_size)]
    heap = [(0.0, rank) for rank in range(cp_size)]
    for chunk in np.argsort(-areas, kind="stable").tolist():
        load, rank = heapq.heappop(heap)
        owned[rank].append(chunk)
        if len(owned[rank]) < room:
            heapq.heappush(heap, (load + areas[chunk], rank))
    return np.array(owned, dtype=np.int64)
