"""Double ring: keys go round the nodes, and inside every node they go round its ranks.

P ranks in n nodes of w. Round 0 is a ring inside the node. In each later round the w blocks of another node
come in, every rank's block over its own link, to the rank at the same place, which passes it on inside:

    node 0   r0 r1            round 1:  r2 -> r0, r3 -> r1  over the network,
    node 1   r2 r3                      r0 <-> r1           inside, what just arrived

so a row crosses the network once per node, and all links work. The published scheme passes whole blocks
on and has a round of w steps for the network to bring the next w; here every step moves 1/w of each of
the w blocks: the same rows per step on every link, hidden under the same w steps, without holding a
node's keys. A round works through the keys in another order; the result is the same.

Volume per rank: 2 rho (n-1) over the network and 2 rho (P-n) inside. Backward moves keys there and their
gradients back (4 rho a block) or, where that is less, queries with their output gradient there and query
gradients back (3 a block, and two scalars per row and head): the same rounds with the two sides exchanged.
Sources: LoongTrain (arXiv 2406.18485), BurstAttention and BurstEngine (SC'25) for the query-passing backward.
"""

from dataclasses import replace

import numpy as np

from megatron_cp.config import CPConfig
from megatron_cp.mask import AttentionMask
from megatron_cp.mask.interval import IntArray
from megatron_cp.plan.hardware.rows import row_size
from megatron_cp.plan.placement.placement import zigzag
from megatron_cp.plan.schema import SIDES, Pass, PlanData, Stage
from megatron_cp.plan.schemes.layout import ranks_per_node
from megatron_cp.plan.transfer.pass_builder import PassBuilder, PlacedMask
from megatron_cp.plan.transfer.routing import ID_START, ID_STOP, ThroughNodes


def plan_double_ring(mask: AttentionMask, cp_size: int, config: CPConfig) -> PlanData:
    """Returns the double ring over zigzag tokens; inner rings are as large as fit nodes evenly."""
    inner = ranks_per_node(cp_size, config)
    placement = zigzag(mask.num_queries, cp_size, config)
    forward = backward = double_ring_pass(PlacedMask(mask, placement), inner)
    if passes_queries(config):
        exchanged = double_ring_pass(PlacedMask(mask.transpose(), placement), inner)
        backward = transposed(exchanged)
    return PlanData(mask, config, "double_ring", placement.tokens, forward, backward)


def passes_queries(config: CPConfig, head_degree: int = 1) -> bool:
    """Returns whether backward moves fewer elements with queries than with keys: rho > 3/4, or nearly."""
    query, key = (row_size(config, "backward", side, head_degree) for side in SIDES)
    return query.units < key.units


def double_ring_pass(placed: PlacedMask, inner: int) -> Pass:
    """Returns P stages: a ring inside each node, then a round of `inner` steps for every other node."""
    builder = PassBuilder(placed, ThroughNodes(inner))
    builder.add_own()
    for step in range(1, inner):
        _attend(builder, _inside(placed, inner, step))
    for distance in range(1, placed.num_ranks // inner):
        blocks = _of_other_node(placed, inner, distance)
        for step in range(inner):
            _attend(builder, _share(blocks, step, inner))
    return builder.build()


def transposed(pass_: Pass) -> Pass:
    """Returns the pass in which queries do what keys did and keys what queries did."""
    turned: dict[tuple[int, int, bytes], AttentionMask] = {}  # many ranks have the same work

    def turn(work: AttentionMask) -> AttentionMask:
        key = work.num_queries, work.num_keys, work.array.tobytes()
        if key not in turned:
            turned[key] = work.transpose()
        return turned[key]

    def exchange(stage: Stage) -> Stage:
        work = tuple(turn(one) for one in stage.work)
        return Stage(work, stage.q_cast, stage.k_cast, stage.keeps_q, stage.keeps_k)

    return replace(pass_, stages=tuple(exchange(stage) for stage in pass_.stages))


def _inside(placed: PlacedMask, inner: int, step: int) -> IntArray:
    """Returns requests (owner, reader, ids) for the block of the rank so many places before, in the node."""
    owner = placed.owners.rank
    reader = owner // inner * inner + (owner + step) % inner
    return np.column_stack([owner, reader, placed.owners.ids])


def _of_other_node(placed: PlacedMask, inner: int, distance: int) -> IntArray:
    """Returns requests by which every rank asks for all rows of the node so many places before its own."""
    owner = placed.owners.rank
    node = (owner // inner + distance) % (placed.num_ranks // inner)
    readers = (node * inner + place for place in range(inner))
    return np.concatenate([np.column_stack([owner, r, placed.owners.ids]) for r in readers])


def _share(requests: IntArray, part: int, num_parts: int) -> IntArray:
    """Returns one of `num_parts` equal pieces of every request, cut alike for all readers of a row."""
    size = requests[:, ID_STOP] - requests[:, ID_START]
    piece = requests.copy()
    piece[:, ID_START] += size * part // num_parts
    piece[:, ID_STOP] -= size - size * (part + 1) // num_parts
    return piece[piece[:, ID_START] < piece[:, ID_STOP]]


def _attend(builder: PassBuilder, requests: IntArray) -> None:
    """Appends the stage in which the requested rows arrive and their readers attend to them."""
    parts, ranks = builder.placed.parts_on_keys(requests)
    builder.add(parts, ranks, all_keys=requests)
