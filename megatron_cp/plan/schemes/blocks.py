"""Assigns blocks of a mask to parts of a machine: the search that the planners of blocks share.

A block is the pairs between one chunk of queries and one chunk of keys. Chunks live on parts (nodes, or ranks of
a node); a part that computes a block of foreign chunks receives them, and sends results back:

                 k chunks   0 1 2 3         block (2, 0) on part 1, which owns chunk 2: key chunk 0 travels
    q chunks 0              0 . . .         block (3, 1) on part 1: query chunk 3 travels there and back,
             1              0 0 . .                                 key chunk 1 travels
             2              1 1 1 .
             3              0 1 . 1

Published planners hand this to solvers (Gurobi for UltraAttn, KaHyPar or PaToH for DCP). Here it is a greedy
descent: blocks start where their queries live, or their keys, or on a grid between; loaded parts hand over the
blocks that cost least per pair, and single blocks then move while that lowers the cost, first under a loose load
cap, then the real one. Small tables then go through exchanges (`exchange.py`). No optimum is promised: what it
reaches stands beside the known optima in tests/plan/test_blocks.py.
All figures are whole numbers and ties go to the earlier block and part: the same result everywhere.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from megatron_cp.config import CPConfig
from megatron_cp.mask.interval import IntArray
from megatron_cp.plan.hardware.rows import row_size
from megatron_cp.plan.schema import SIDES, BoolArray, FloatArray, PassName
from megatron_cp.plan.schemes.exchange import FlowAssignment, exchange_blocks

Objective = Literal["sum", "max"]
"""What an assignment costs: all rows moved, or (by fourth powers) the fullest way in or out of a part."""

UNIT = 16  # per query row; row weights are rounded to 1/16 of it
POWER = 4
LOOSE = 0.25  # more load than the cap, while blocks look for a place
ROUNDS = 3
SWEEPS = 8
AT_ONCE = 32  # one in so many blocks of a full part moves before prices are looked at again
MOST_TRIES = 10_000
TRIES_PER_BLOCK = 1_000


@dataclass(frozen=True)
class RowWeights:
    """What a chunk of one side costs on its way to a part, and its results on the way back."""

    q_there: int
    q_back: int
    k_there: int
    k_back: int

    @classmethod
    def of(cls, config: CPConfig, pass_name: PassName) -> "RowWeights":
        """Returns the weights of a pass, in sixteenths of a query row."""
        query, key = (row_size(config, pass_name, side) for side in SIDES)
        units = (query.units_there, query.units_back, key.units_there, key.units_back)
        return cls(*(max(round(UNIT * x), int(x > 0)) for x in units))


@dataclass(frozen=True)
class OwnedBlocks:
    """Blocks with pairs in them, and where their chunks live."""

    rows: IntArray
    """Query chunk of each block: `[n]`."""
    columns: IntArray
    areas: IntArray
    q_owner: IntArray
    """The part that owns each query chunk."""
    k_owner: IntArray
    num_parts: int

    @classmethod
    def of_table(cls, areas: IntArray, owner: IntArray, num_parts: int) -> "OwnedBlocks":
        """Returns the blocks of a table of pairs `[chunks, chunks]` whose chunks live at `owner`."""
        rows, columns = np.nonzero(areas)
        return cls(rows, columns, areas[rows, columns], owner, owner, num_parts)

    @property
    def mean_load(self) -> float:
        """Returns the pairs of a part if all have the same."""
        return int(self.areas.sum()) / self.num_parts

    @property
    def is_pinned(self) -> BoolArray:
        """Returns whether a block is on the diagonal: those stay with their owner, as published."""
        return self.rows == self.columns


def least_sum(blocks: OwnedBlocks, weights: RowWeights, tolerance: float) -> IntArray:
    """Returns the part of each block: few rows moved, loads within `1 + tolerance` of the mean if possible."""
    return _best_descent(blocks, weights, "sum", tolerance)


def least_max(
    blocks: OwnedBlocks, weights: RowWeights, tolerance: float, num_tries: int = MOST_TRIES
) -> IntArray:
    """Returns the part of each block: no way in or out much fuller than others, loads as in `least_sum`."""
    part = _best_descent(blocks, weights, "max", tolerance)
    chunks, owners = (blocks.rows, blocks.columns), (blocks.q_owner, blocks.k_owner)
    costs = (weights.q_there, weights.q_back), (weights.k_there, weights.k_back)
    state = FlowAssignment(chunks, owners, costs, blocks.areas, part, blocks.num_parts)
    free = np.flatnonzero(~blocks.is_pinned)
    cap = max(blocks.mean_load * (1 + tolerance), max(state.load))
    return exchange_blocks(state, free, cap, min(num_tries, TRIES_PER_BLOCK * len(free)))


def _best_descent(
    blocks: OwnedBlocks, weights: RowWeights, objective: Objective, tolerance: float
) -> IntArray:
    # X x Y grids, from X = 1 (blocks where their queries live) to X = parts (where their keys do).
    q_home, k_home = blocks.q_owner[blocks.rows], blocks.k_owner[blocks.columns]
    widths = [x for x in range(1, blocks.num_parts + 1) if blocks.num_parts % x == 0]
    found = [
        _descend(
            _BlockAssignment(blocks, weights, objective, q_home // x * x + k_home % x), tolerance
        )
        for x in widths
    ]
    return min(found, key=lambda one: one[0])[1]


def _descend(state: "_BlockAssignment", tolerance: float) -> tuple[tuple[int, int], IntArray]:
    """Returns the best assignment found from a start, and what it costs: (load over the cap, cost)."""
    mean = state.blocks.mean_load
    cap, loose = mean * (1 + tolerance), mean * (1 + tolerance + LOOSE)
    best: tuple[tuple[int, int], IntArray] | None = None
    for _ in range(ROUNDS):
        state.even_out(cap)
        state.improve(cap)
        over = max(0, int(state.load.max()) - int(cap))
        now = (over, state.cost()), state.part.copy()
        if best is not None and now[0] >= best[0]:
            break
        best = now
        state.improve(loose)
    assert best is not None
    return best


class _BlockAssignment:
    """An assignment under change: blocks of parts, how many of them use each chunk, and what flows where."""

    def __init__(
        self, blocks: OwnedBlocks, weights: RowWeights, objective: Objective, part: IntArray
    ):
        self.blocks, self.weights, self.objective = blocks, weights, objective
        self.part = part.copy()
        parts, areas = blocks.num_parts, blocks.areas
        self.q_uses = np.zeros((parts, len(blocks.q_owner)), dtype=np.int64)
        self.k_uses = np.zeros((parts, len(blocks.k_owner)), dtype=np.int64)
        np.add.at(self.q_uses, (part, blocks.rows), 1)
        np.add.at(self.k_uses, (part, blocks.columns), 1)
        self.load = np.bincount(part, areas, parts).astype(np.int64)
        self.is_free = ~blocks.is_pinned

    def flows(self) -> tuple[IntArray, IntArray]:
        """Returns what comes into each part and what goes out: two int64 `[parts]`."""
        coming, going = (np.zeros(self.blocks.num_parts, dtype=np.int64) for _ in range(2))
        w = self.weights
        for uses, owner, there, back in (
            (self.q_uses, self.blocks.q_owner, w.q_there, w.q_back),
            (self.k_uses, self.blocks.k_owner, w.k_there, w.k_back),
        ):
            part, chunk = np.nonzero(uses)
            foreign = owner[chunk] != part
            readers = np.bincount(part[foreign], minlength=len(coming))
            owners = np.bincount(owner[chunk[foreign]], minlength=len(coming))
            coming += readers * there + owners * back
            going += readers * back + owners * there
        return coming, going

    def cost(self) -> int:
        """Returns what the assignment costs under its objective."""
        coming, going = self.flows()
        if self.objective == "sum":
            return int(coming.sum())
        return int((coming**POWER + going**POWER).sum())

    def changes(self, which: IntArray) -> IntArray:
        """Returns by how much the cost changes if a block goes to a part: int64 `[blocks, parts]`."""
        here = self.part[which]
        leaves, enters = zip(
            self._side_changes(self.q_uses, self.blocks.q_owner, self.blocks.rows[which], here),
            self._side_changes(self.k_uses, self.blocks.k_owner, self.blocks.columns[which], here),
            strict=True,
        )
        w = self.weights
        if self.objective == "sum":
            q_cost, k_cost = w.q_there + w.q_back, w.k_there + w.k_back
            change = q_cost * (enters[0] - leaves[0]) + k_cost * (enters[1] - leaves[1])
        else:
            change = self._changes_of_powers(which, leaves, enters)
        change[np.arange(len(which)), here] = 0
        return change

    def _side_changes(
        self, uses: IntArray, owner: IntArray, chunk: IntArray, here: IntArray
    ) -> tuple[IntArray, IntArray]:
        """Returns whether a chunk is no more needed here `[n, 1]`, and newly needed at a part `[n, parts]`."""
        parts = np.arange(self.blocks.num_parts)
        leaves = (uses[here, chunk] == 1) & (owner[chunk] != here)
        enters = (uses[:, chunk].T == 0) & (owner[chunk][:, None] != parts)
        return leaves[:, None].astype(np.int64), enters.astype(np.int64)

    def _changes_of_powers(
        self, which: IntArray, leaves: tuple[IntArray, ...], enters: tuple[IntArray, ...]
    ) -> IntArray:
        n, parts = len(which), np.arange(self.blocks.num_parts)
        here, w = self.part[which][:, None], self.weights
        block, target = np.arange(n)[:, None], parts[None]
        total = np.zeros((n, len(parts)), dtype=np.int64)
        owners = (
            self.blocks.q_owner[self.blocks.rows[which]][:, None],
            self.blocks.k_owner[self.blocks.columns[which]][:, None],
        )
        ways = (
            (w.q_there, w.q_back, w.k_there, w.k_back),
            (w.q_back, w.q_there, w.k_back, w.k_there),
        )
        for flow, (q_reader, q_home, k_reader, k_home) in zip(self.flows(), ways, strict=True):
            after = np.tile(flow, (n, len(parts), 1))
            after[block, target, here] -= leaves[0] * q_reader + leaves[1] * k_reader
            after[block, target, target] += enters[0] * q_reader + enters[1] * k_reader
            after[block, target, owners[0]] += (enters[0] - leaves[0]) * q_home
            after[block, target, owners[1]] += (enters[1] - leaves[1]) * k_home
            total += (after**POWER).sum(axis=2) - int((flow**POWER).sum())
        return total

    def move(self, block: int, part: int) -> None:
        """Gives a block to a part."""
        row, column, old = self.blocks.rows[block], self.blocks.columns[block], self.part[block]
        for target, sign in ((old, -1), (part, 1)):
            self.q_uses[target, row] += sign
            self.k_uses[target, column] += sign
            self.load[target] += sign * self.blocks.areas[block]
        self.part[block] = part

    def even_out(self, cap: float) -> None:
        """Moves blocks off the most loaded part, cheapest per pair first, until loads are below `cap`."""
        for _ in range(2 * len(self.part)):
            fullest = int(self.load.argmax())
            mine = np.flatnonzero((self.part == fullest) & self.is_free)
            if self.load[fullest] <= cap or not len(mine):
                return
            areas = self.blocks.areas[mine][:, None]
            helps = self.load[None] + areas < self.load[fullest]
            if not helps.any():
                return
            change = self.changes(mine)
            price = np.where(helps, (change + (change >= 0)) / areas, np.inf)
            cheapest = np.argsort(price.min(axis=1), kind="stable")[: 1 + len(mine) // AT_ONCE]
            for place in cheapest.tolist():
                self._shed(int(mine[place]), int(price[place].argmin()), cap)

    def _shed(self, block: int, part: int, cap: float) -> None:
        """Moves a block off a part that is too full, unless that has changed, or the other would be fuller."""
        old, area = self.part[block], self.blocks.areas[block]
        if self.load[old] > cap and self.load[part] + area < self.load[old]:
            self.move(block, part)

    def improve(self, cap: float) -> None:
        """Moves single blocks to where they cost less, as long as the load there stays below `cap`."""
        free = np.flatnonzero(self.is_free)
        for _ in range(SWEEPS):
            gains = self._allowed(free, cap).min(axis=1) if len(free) else np.zeros(0)
            order = np.argsort(gains, kind="stable")[: int((gains < 0).sum())]
            moved = False
            for block in free[order].tolist():
                change = self._allowed(np.array([block]), cap)[0]
                part = int(change.argmin())
                if change[part] < 0:
                    self.move(block, part)
                    moved = True
            if not moved:
                return

    def _allowed(self, which: IntArray, cap: float) -> FloatArray:
        """Returns `changes`, infinite where the load would exceed `cap`."""
        fits = self.load[None] + self.blocks.areas[which][:, None] <= cap
        return np.where(fits, self.changes(which).astype(np.float64), np.inf)
