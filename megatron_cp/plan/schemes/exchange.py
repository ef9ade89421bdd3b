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
            uses = [[0] * num_parts for _ in range(len(owner))]
            for sides, chunk in zip(self._sides, chunk_of.tolist(), strict=True):
                sides.append((uses[chunk], int(owner[chunk]), there, back))
        for block, target in enumerate(self.part):
            self._use(block, target, 1)

    def _use(self, block: int, part: int, sign: int) -> None:
        """Counts a block at a part in (1) or out (-1); flows change with the first and the last use."""
        flow, num_parts = self.flow, self.num_parts
        for uses, home, there, back in self._sides[block]:
            before = uses[part]
            uses[part] = after = before + sign
            if home != part and not (before and after):
                flow[part] += sign * there
                flow[home] += sign * back
                flow[num_parts + part] += sign * back
                flow[num_parts + home] += sign * there

    def move(self, block: int, part: int) -> None:
        """Gives a block to a part."""
        old, area = self.part[block], self.areas[block]
        self._use(block, old, -1)
        self._use(block, part, 1)
        self.load[old] -= area
        self.load[part] += area
        self.part[block] = part

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
