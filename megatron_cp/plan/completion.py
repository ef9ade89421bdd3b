"""Where a rank's results are all there: the last pairs with results for its own rows, if none come home after them.

The pairs of a stage lie in four quadrants, computed in this order:

    0  own queries, own keys         1  own queries, received keys
    2  received queries, own keys    3  received queries, received keys
"""

from collections.abc import Iterable

from megatron_cp.mask.interval import IntArray
from megatron_cp.mask.slice import K_END, K_START, Q_END, Q_START
from megatron_cp.plan.schema import OwnRows, Pass, Side

OF_OWN_ROWS: dict[Side, tuple[int, int]] = {"q": (0, 1), "k": (0, 2)}
"""The quadrants with results for own rows."""


def quadrants_with_pairs(work: IntArray, own: OwnRows) -> list[bool]:
    """Returns which quadrants of a stage's slices have any, over row spaces `[own | received]`."""
    of_q = (work[:, Q_START] < own.q, work[:, Q_END] > own.q)
    of_k = (work[:, K_START] < own.k, work[:, K_END] > own.k)
    return [bool((query & key).any()) for query in of_q for key in of_k]


def completing_quadrants(
    pass_: Pass, own: OwnRows, side: Side, ranks: Iterable[int]
) -> list[tuple[int, int] | None]:
    """Returns `(stage, quadrant)` of each of the ranks, None where results come home last or there are none.

    `own`: rows inside the pass. What comes home after a stage joins own rows under the stage behind it.
    """
    num_stages = len(pass_.stages)
    last_home = max((i for i in range(num_stages) if comes_home(pass_, i, side)), default=-2)
    candidates = range(num_stages - 1, last_home + 1, -1)
    return [_last_with_pairs(pass_, own, side, rank, candidates) for rank in ranks]


def _last_with_pairs(
    pass_: Pass, own: OwnRows, side: Side, rank: int, candidates: range
) -> tuple[int, int] | None:
    first, second = OF_OWN_ROWS[side]
    for index in candidates:
        there = quadrants_with_pairs(pass_.stages[index].work[rank].array, own)
        if there[first] or there[second]:
            return index, second if there[second] else first
    return None


def comes_home(pass_: Pass, index: int, side: Side) -> bool:
    """Returns whether anything is sent home after a stage: results for the rows of the chain that ends there."""
    hops = pass_.hops_of_chain(index, side)
    return pass_.ends_chain(index, side) and any(len(hop.messages) for hop in hops)
