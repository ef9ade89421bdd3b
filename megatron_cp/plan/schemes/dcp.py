"""DCP: data blocks and compute blocks placed together, so that few bytes move; nodes first, then ranks.

A data block is a chunk of tokens (queries, keys, values and results), a compute block the pairs between two of
them. The published hypergraph joins each data block with the compute blocks that use it, and its partition
minimises the bytes moved: the *sum*, not the fullest link. Loads may be 40 % over the mean between nodes, 10 % inside.

    data in order, or grown by pairs -> assign compute blocks -> exchange data blocks to their users -> assign again

The published partitioners are KaHyPar and PaToH; here it is the greedy descent of `blocks.py` with pairwise exchanges
of data blocks, which keep tokens per rank equal. All heads at once (theirs cut by key/value head as well: a head
split does that here). Compute blocks run in T = 4 divisions, rows of the next travel under the last, and enter a node
once. Backward computes where forward does. Source: DCP (SOSP'25).
"""

import math

import numpy as np

from megatron_cp.config import CPConfig
from megatron_cp.mask import AttentionMask
from megatron_cp.mask.blocks import cell_areas
from megatron_cp.mask.interval import IntArray
from megatron_cp.plan.placement.placement import Placement, chunk_layout
from megatron_cp.plan.schema import PlanData
from megatron_cp.plan.schemes.blocks import OwnedBlocks, RowWeights, least_sum
from megatron_cp.plan.schemes.divisions import cut_to_chunks, pass_in_divisions
from megatron_cp.plan.schemes.gather import one_pass_plan
from megatron_cp.plan.schemes.layout import ranks_per_node
from megatron_cp.plan.transfer.pass_builder import PlacedMask
from megatron_cp.plan.transfer.routing import ThroughNodes

NODE_TOLERANCE = 0.4
RANK_TOLERANCE = 0.1
DIVISIONS = 4
MOST_CHUNKS = 256  # over all ranks, at least one each
CHUNKS_PER_RANK = 8
MOST_WORK = 1 << 24  # blocks times nodes


def plan_dcp(mask: AttentionMask, cp_size: int, config: CPConfig) -> PlanData:
    """Returns chunks and blocks where few bytes move, in `num_stages` divisions (4 if left out)."""
    inner = ranks_per_node(cp_size, config)
    wanted = min(CHUNKS_PER_RANK, max(1, MOST_CHUNKS // cp_size))
    chunk, per_rank = chunk_layout(mask.num_queries, cp_size, config, wanted)
    work = math.ceil(mask.density() * (cp_size * per_rank) ** 2) * (cp_size // inner)
    if work > MOST_WORK:
        raise NotImplementedError(
            f"planner='dcp' would weigh {work} ways to deal this mask to cp_size={cp_size} ranks; at most "
            f"{MOST_WORK} are served: use fewer ranks, a larger chunk_size, or planner='auto'"
        )
    edges = np.minimum(np.arange(cp_size * per_rank + 1) * chunk, mask.num_queries)
    areas = cell_areas(mask, edges, edges)
    weights = RowWeights.of(config, "forward")
    owner, ranks = _assign_ranks(areas, cp_size, inner, weights)
    placed = PlacedMask(mask, Placement.of_chunks(_members(owner, cp_size), chunk))
    parts, where = cut_to_chunks(mask, ranks, chunk)
    divisions = config.num_stages or DIVISIONS
    both = pass_in_divisions(placed, parts, where, divisions, ThroughNodes(inner))
    return one_pass_plan(placed, config, "dcp", both)


def _assign_ranks(
    areas: IntArray, cp_size: int, inner: int, weights: RowWeights
) -> tuple[IntArray, IntArray]:
    """Returns the rank that owns each chunk `[C]`, and the one that computes each block `[C, C]`."""
    num_chunks, num_nodes = len(areas), cp_size // inner
    joined = _chunks_to_join(num_chunks, num_nodes)
    coarse = areas.reshape(num_chunks // joined, joined, -1, joined).sum(axis=(1, 3))
    node = np.arange(len(coarse)) * num_nodes // len(coarse)
    node, of_block = _assign_level(coarse, node, num_nodes, weights, NODE_TOLERANCE)
    node = node.repeat(joined)
    of_block = of_block.repeat(joined, axis=0).repeat(joined, axis=1)
    place = np.empty(num_chunks, dtype=np.int64)  # of a chunk's owner in its node
    for chunks in _members(node, num_nodes):
        place[chunks] = np.arange(len(chunks)) * inner // len(chunks)
    ranks = np.zeros_like(areas)
    for one in range(num_nodes):
        mine = areas * (of_block == one)
        # A foreign row comes in at the place of its owner, so it counts as living there.
        moved, inside = _assign_level(mine, place, inner, weights, RANK_TOLERANCE, node == one)
        place = np.where(node == one, moved, place)
        ranks += np.where(mine > 0, one * inner + inside, 0)
    return node * inner + place, ranks


def _chunks_to_join(num_chunks: int, num_nodes: int) -> int:
    """Returns how many neighbouring chunks the first level takes as one: more where there are very many."""
    joined = 1
    while num_chunks // joined > MOST_CHUNKS and num_chunks % (2 * joined * num_nodes) == 0:
        joined *= 2
    return joined


def _assign_level(
    areas: IntArray,
    owner: IntArray,
    num_parts: int,
    weights: RowWeights,
    tolerance: float,
    may_move: IntArray | None = None,
) -> tuple[IntArray, IntArray]:
    """Returns owners of chunks and the part of each block, assigned twice, data exchanged in between.

    `may_move`: which chunks may change places; all if None.
    """
    free = np.arange(len(owner)) if may_move is None else np.flatnonzero(may_move)
    found, grown = [], _grown(areas, owner, free)
    for start in [owner] if np.array_equal(owner, grown) else [owner, grown]:
        part = _assign_blocks(areas, start, num_parts, weights, tolerance)
        moved = _exchange_data(_bytes_used(areas, part, num_parts, weights), start, free)
        if not np.array_equal(moved, start):
            part = _assign_blocks(areas, moved, num_parts, weights, tolerance)
        used = _bytes_used(areas, part, num_parts, weights)
        stay = used[np.arange(len(moved)), moved]
        found.append((int(used.sum() - stay.sum()), moved, part))
    return min(found, key=lambda one: one[0])[1:]


def _grown(areas: IntArray, owner: IntArray, free: IntArray) -> IntArray:
    """Returns the owners if the `free` chunks are shared anew, to each part those with most pairs among them."""
    grown = owner.copy()
    pairs = (areas + areas.T)[np.ix_(free, free)]
    is_left = np.ones(len(free), dtype=bool)
    for part, room in zip(*np.unique(owner[free], return_counts=True), strict=True):
        shared = np.zeros(len(free), dtype=np.int64)
        for _ in range(int(room)):
            chunk = int(np.where(is_left, shared, -1).argmax())
            is_left[chunk] = False
            grown[free[chunk]] = part
            shared += pairs[chunk]
    return grown


def _assign_blocks(
    areas: IntArray, owner: IntArray, num_parts: int, weights: RowWeights, tolerance: float
) -> IntArray:
    """Returns the part of each block `[C, C]`, 0 where there is none."""
    blocks = OwnedBlocks.of_table(areas, owner, num_parts)
    part = np.zeros_like(areas)
    part[blocks.rows, blocks.columns] = least_sum(blocks, weights, tolerance)
    return part


def _bytes_used(areas: IntArray, part: IntArray, num_parts: int, weights: RowWeights) -> IntArray:
    """Returns what each part needs of each chunk, results included: int64 `[C, parts]`."""
    rows, columns = np.nonzero(areas)
    used = np.zeros((2, len(areas), num_parts), dtype=np.int64)
    used[0, rows, part[rows, columns]] = weights.q_there + weights.q_back
    used[1, columns, part[rows, columns]] = weights.k_there + weights.k_back
    return used.sum(axis=0)


def _exchange_data(used: IntArray, owner: IntArray, free: IntArray) -> IntArray:
    """Returns the owners after exchanges of two `free` chunks each, while those save bytes; counts stay."""
    owner, saved = owner.copy(), used[free]  # by a chunk that lives on a part
    for _ in range(len(free)):
        there = saved[:, owner[free]]
        here = np.diagonal(there)
        gain = there + there.T - here[:, None] - here
        a, b = divmod(int(gain.argmax()), len(free))
        if gain[a, b] <= 0:
            break
        owner[free[[a, b]]] = owner[free[[b, a]]]
    return owner


def _members(owner: IntArray, num_parts: int) -> IntArray:
    """Returns the chunks of each part, in order; all have as many: int64 `[parts, n]`."""
    return np.argsort(owner, kind="stable").reshape(num_parts, -1)
