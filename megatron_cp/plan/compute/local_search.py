"""A faster assignment near another one: blocks of pairs change ranks, coarse ones first.

Recursive bisection (`bisection.py`) keeps areas equal and looks at one order of pairs at a time. Where links are slow
another trade is better: a few pairs too many here, far fewer rows there. So every rank's tokens are cut into 1, 2, 4
and 8 chunks in turn, and blocks (`blocks.py`) move while

    sum over ranks of (T of the rank / T of the slowest at the start) ^ 8

falls. Its slopes are prices: of a second of compute on each rank, of a second of each direction of its link. A step
moves the blocks that gain most at these prices to where each gains most; of a step that is too large, half is tried,
and the next step begins with twice what was moved. A block that has moved rests for the round, and others go on even
if the sum grows for a while, as in the method of Fiduccia and Mattheyses (1982); the best assignment seen is kept.

It is used where links limit, among at most 32 head groups. What it earns: `near_starts` of 0 in the results of
benchmarks/bench_search.py. In place of an earlier form, on the 16 cells where that ran, the hypergraph partitioner
Mt-KaHyPar, DCP's way (SOSP'25), won less, .938 of the predicted time for .926, in .6 s for 12 ms (2026-11-24, one core
of an EPYC).

Nothing here is clocked or drawn, and powers are products: every process finds the same.
"""

from typing import NamedTuple

import numpy as np

from megatron_cp.mask import sweep
from megatron_cp.mask.interval import IntArray
from megatron_cp.mask.slice import K_START, Q_START, shift_rows
from megatron_cp.plan.compute.bisection import Assignment
from megatron_cp.plan.compute.blocks import Blocks, Loads, Problem
from megatron_cp.plan.schema import BoolArray, FloatArray
from megatron_cp.plan.transfer.routing import Owners

# What half and double of each do: benchmarks/bench_search.py; results are linked in docs/plan.md.
CHUNKS_PER_RANK = (1, 2, 4, 8)
ROUNDS = 3  # of a size of blocks, while they gain
STEPS = 12  # of a round
IN_VAIN = 6  # steps without a new best that end a round
SHARE = 16  # one block of so many moves in a step, at most
LEAST_PRICE = 1e-2  # of the largest: what costs nothing now may do so after the step
LEAST_GAIN = 1e-4  # of a round


def improved(problem: Problem, start: Assignment) -> Assignment:
    """Returns an assignment of the same pairs, no slower by the blocks' T.

    Its slices have queries of one owner and keys of one, as the start's must have.
    """
    found = start
    for chunks in CHUNKS_PER_RANK:
        blocks = Blocks.of(problem, found, chunks)
        if blocks.num_blocks:
            found = blocks.assignment(_Search(blocks).best())
    return _merged(found, problem.placed.owners)


class _State(NamedTuple):
    """The rank of each block, and what follows from it."""

    ranks: IntArray
    loads: Loads
    total: float
    """The sum that is to fall."""


class _Search:
    """The blocks of one size."""

    def __init__(self, blocks: Blocks):
        self.blocks = blocks
        self.scale = blocks.loads(blocks.start).seconds.max()
        self.all = np.arange(blocks.num_blocks)
        pins = blocks.pins
        self.opens = np.flatnonzero(np.diff(pins[:, 1], prepend=-1))

    def best(self) -> IntArray:
        """Returns the rank of each block."""
        best = self._state(self.blocks.start)
        for _ in range(ROUNDS):
            before = best.total
            best = self._round(best)
            if best.total >= before * (1 - LEAST_GAIN):
                break
        return best.ranks

    def _round(self, best: _State) -> _State:
        now, rests, in_vain = best, np.zeros(len(best.ranks), dtype=bool), 0
        most = largest = max(1, len(rests) // SHARE)
        for _ in range(STEPS):
            before, now = now, self._step(now, rests, best.total, most)
            most = min(largest, 2 * int((now.ranks != before.ranks).sum()))
            if now.total < best.total:
                best, in_vain = now, 0
            else:
                in_vain += 1
            if in_vain > IN_VAIN or rests.all():
                break
        return best

    def _step(self, now: _State, rests: BoolArray, least: float, most: int) -> _State:
        """Moves the blocks that gain most and do not rest, at most so many, and lets them rest."""
        gains = self._gains(now)
        target = gains.argmax(axis=1)
        gain = np.where(rests, -np.inf, gains[self.all, target])
        chosen = np.argsort(-gain, kind="stable")[: min(most, int((~rests).sum()))]
        found = now._replace(total=np.inf)
        while len(chosen):
            moved = now.ranks.copy()
            moved[chosen] = target[chosen]
            tried = self._state(moved)
            if tried.total < found.total:
                found = tried
            if tried.total < least:
                break
            chosen = chosen[: len(chosen) // 2]
        rests |= found.ranks != now.ranks
        return found

    def _state(self, ranks: IntArray) -> _State:
        loads = self.blocks.loads(ranks)
        return _State(ranks, loads, float(_eighth_power(loads.seconds / self.scale).sum()))

    def _gains(self, now: _State) -> FloatArray:
        """Returns what the sum falls by, about, if a block moves to a rank: `[blocks, P]`; nothing for its own."""
        blocks, loads = self.blocks, now.loads
        compute, came, went, entered, left = _prices(loads, self.scale)
        inside = blocks.near * (came + went[blocks.source])
        between = blocks.far * (entered[blocks.relay] + left[blocks.owner][:, None])
        # A rank's first block that needs a net brings it there, its last one frees it; and so it is with nodes.
        brings = np.where(loads.readers == 0, inside, 0.0)
        brings += np.where(loads.in_node == 0, between, 0.0)[:, blocks.node]
        frees = inside + np.where(loads.in_node == 1, between, 0.0)[:, blocks.node]
        net, block = blocks.pins.T
        rank = now.ranks[block]
        is_last = loads.readers[net, rank] == 1
        freed = np.add.reduceat(is_last * frees[net, rank], self.opens)
        brought = np.add.reduceat(brings.take(net, axis=0), self.opens, axis=0)
        price = compute / blocks.problem.speeds
        more = blocks.compute[:, None] * (price - price[now.ranks][:, None])
        gains = freed[:, None] - brought - more
        gains[self.all, now.ranks] = -np.inf
        return gains


def _prices(loads: Loads, scale: float) -> FloatArray:
    """Returns the slopes of the sum by each rank's compute and by the four directions of its link: `[5, P]`."""
    relative, link = loads.seconds / scale, loads.link
    cube = relative * relative * relative
    slope = cube * cube * relative
    is_slowed = loads.with_transfers >= link
    of_direction = _eighth_power(loads.links / np.where(link > 0, link, 1.0))
    of_direction /= np.maximum(of_direction.sum(axis=0), 1.0)
    prices = np.concatenate(
        [
            (slope * is_slowed)[None],
            slope * np.where(is_slowed, loads.contention, 1.0) * of_direction,
        ]
    )
    return prices + LEAST_PRICE * prices.max()


def _eighth_power(x: FloatArray) -> FloatArray:
    for _ in range(3):
        x = x * x
    return x


def _merged(assignment: Assignment, owners: Owners) -> Assignment:
    """Returns the same pairs on the same ranks in few slices, each with queries of one owner and keys of one."""
    parts = assignment.parts
    of = [assignment.ranks, *(owners.rank_of(parts[:, start]) for start in (Q_START, K_START))]
    groups, group = np.unique(np.stack(of), axis=1, return_inverse=True)
    group = group.reshape(-1)  # NumPy 2.0 gives it another shape
    q_step = owners.num_ids + 1  # so far apart that slices of two groups are never neighbours,
    k_step = 3 * q_step  # not even in k - q
    rows = sweep.merge(shift_rows(parts, q=group * q_step, k=group * k_step))
    group = rows[:, Q_START] // q_step
    return Assignment(shift_rows(rows, q=-group * q_step, k=-group * k_step), groups[0, group])
