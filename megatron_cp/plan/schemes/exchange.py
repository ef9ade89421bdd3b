"""Threshold-accepting exchanges for small block tables: what greedy descent leaves on the table.

In turn a block moves to another part, or two blocks change places; a change stays when the cost rises
by no more than a threshold that sinks to nothing. Which change is tried comes from a fixed sequence, costs are
whole numbers and thresholds fractions of them: the same result everywhere.
Source of the rule: Dueck and Scheuer, Threshold Accepting, J. Comput. Phys. 90 (1990).
"""

import numpy as np

from megatron_cp.mask.interval import IntArray

FIRST_THRESHOLD = 0.2
SLACK = 0.25
SEED = 0


class FlowAssignment:
    """An assignment of blocks under the fourth-power cost of the flows, in plain lists: a move takes microseconds."""

    def __init__(
        self,
        chunks: tuple[IntArray, IntArray],
        owners: tuple[IntArray, IntArray],
        row_costs: tuple[tuple[int, int], tuple[int, int]],
        areas: IntArray,
        part: IntArray,
        num_parts: int,
    ):
        """`chunks`, `owners`, `row_costs` (there, back): of queries and of keys."""
        self.areas = areas.tolist()
        self.part: list[int] = part.tolist()
        self.num_parts = num_parts
        self.load = np.bincount(part, areas, num_parts).astype(np.int64).tolist()
        self.flow = [0] * (2 * num_parts)  # into each part, then out of each
        # Of each block and side: how often each part uses its chunk, who owns that, what a row costs there and back.
        self._sides: list[list[tuple[list[int], int, int, int]]] = [[] for _ in self.part]
        for chunk_of, owner, (there, back) in zip(chunks, owners, row_costs, strict=True):
            counts = [[0] * num_parts for _ in range(len(owner))]
            for sides, chunk in zip(self._sides, chunk_of.tolist(), strict=True):
                sides.append((counts[chunk], int(owner[chunk]), there, back))
        for sides, target in zip(self._sides, self.part, strict=True):
            for uses, home, there, back in sides:
                if not uses[target] and target != home:
                    self._send(home, target, there, back)
                uses[target] += 1

    def move(self, block: int, part: int) -> None:
        """Gives a block to a part; flows change with the last use by the old one and the first by the new one."""
        old, area = self.part[block], self.areas[block]
        for uses, home, there, back in self._sides[block]:
            uses[old] -= 1
            if not uses[old] and old != home:
                self._send(home, old, -there, -back)
            if not uses[part] and part != home:
                self._send(home, part, there, back)
            uses[part] += 1
        self.load[old] -= area
        self.load[part] += area
        self.part[block] = part

    def _send(self, home: int, reader: int, there: int, back: int) -> None:
        """Adds a row that its owner's part sends to a reader's, and what comes back."""
        flow, num_parts = self.flow, self.num_parts
        flow[reader] += there
        flow[home] += back
        flow[num_parts + reader] += back
        flow[num_parts + home] += there

    def cost(self) -> int:
        """Returns the sum of the fourth powers of all flows."""
        squares = [x * x for x in self.flow]
        return sum([x * x for x in squares])


def exchange_blocks(state: FlowAssignment, free: IntArray, cap: float, num_steps: int) -> IntArray:
    """Returns the cheapest assignment seen in `num_steps` tries with the `free` blocks and loads below `cap`."""
    if not len(free):
        return np.array(state.part, dtype=np.int64)
    draw = np.random.default_rng(SEED).integers
    blocks = free[draw(0, len(free), num_steps)].tolist()
    others = free[draw(0, len(free), num_steps)].tolist()
    parts = draw(0, state.num_parts, num_steps).tolist()
    loose = cap * (1 + SLACK)  # on the way from one assignment to another
    cost = best = state.cost()
    found = list(state.part)
    for step, (block, other, part) in enumerate(zip(blocks, others, parts, strict=True)):
        change = _move(state, block, part, loose) if step % 2 else _swap(state, block, other, loose)
        if not change:
            continue
        undo = [(moved, state.part[moved]) for moved, _ in change]
        for moved, target in change:
            state.move(moved, target)
        now = state.cost()
        left = num_steps - step
        if now <= cost + int(cost * FIRST_THRESHOLD * left / num_steps):
            cost = now
            if cost < best and max(state.load) <= cap:
                best, found = cost, list(state.part)
        else:
            for moved, target in undo:
                state.move(moved, target)
    return np.array(found, dtype=np.int64)


def _move(state: FlowAssignment, block: int, part: int, cap: float) -> list[tuple[int, int]]:
    """Returns the move of a block to a part, none if it would be too full."""
    fits = part != state.part[block] and state.load[part] + state.areas[block] <= cap
    return [(block, part)] if fits else []


def _swap(state: FlowAssignment, block: int, other: int, cap: float) -> list[tuple[int, int]]:
    """Returns the moves by which two blocks change places, none if a part would be too full."""
    here, there = state.part[block], state.part[other]
    change = state.areas[block] - state.areas[other]
    if there == here or state.load[there] + change > cap or state.load[here] - change > cap:
        return []
    return [(block, there), (other, here)]
