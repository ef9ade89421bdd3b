"""Improves an assignment window by window: a few units, the slowest among them, share their blocks anew.

    units  0  1  2  3  4  5  6  7        solve for {2, 5}; better: again from the slowest unit;
           .  .  #  .  .  #  .  .        not better: {2, 6}, ...; no partner helps: windows of three, four

A window is a small 0/1 program that a solver takes as plain arrays (`Program`); whole assignments to eight ranks are
beyond exact solvers, and their own searches spend most of their time on units that do not matter.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from megatron_cp.mask.interval import IntArray
from megatron_cp.plan.compute.solvers.block_model import BlockModel
from megatron_cp.plan.schema import BoolArray, FloatArray

WINDOW_SIZES = (2, 3, 4)
EFFORT_SHARE = 1 / 50  # of all effort, for each unit of a window: proofs take longer than finding
GAIN = 1e-6  # relative: less is rounding
DONE = 1e-4  # so close to equal loads and nothing moved there is nothing to win


@dataclass(frozen=True)
class Program:
    """Minimise T over 0/1 variables: exactly one of each group, implications, and loads.

    Variables `group * choices + choice` come first; the others are implied (may be continuous in [0, 1]).
    """

    num_groups: int
    num_choices: int
    num_variables: int
    implications: IntArray
    """`[n, 2]`: the first variable implies the second."""
    terms: tuple[IntArray, IntArray, FloatArray]
    """Load, variable, amount, of loads in units of T to begin with."""
    base: FloatArray
    """What each load is without any variable: `[loads]`."""
    is_in_objective: BoolArray
    """Whether a load counts in T; the others must stay at most 1: `[loads]`."""
    start: BoolArray
    """Values to begin with: `[variables]`."""
    most: float
    """T of the start."""


Solver = Callable[[Program, float], tuple[BoolArray | None, float]]
"""(program, effort) -> the values of the grouped variables or None, and the effort spent."""


def assign_by_windows(model: BlockModel, solver: Solver, effort: float) -> IntArray:
    """Returns the unit of each block `[blocks]`, never slower than `model.start`."""
    unit_of_block, size, per_unit = model.start, 0, effort * EFFORT_SHARE
    sizes = [size for size in WINDOW_SIZES if size <= model.units.count]
    while effort > 0 and size < len(sizes):
        seconds = model.unit_seconds(unit_of_block)
        if seconds.max() <= model.least_seconds() * (1 + DONE):
            break
        better = None
        for window in _windows(seconds, sizes[size]):
            budget = min(effort, per_unit * sizes[size])
            better, spent = _solve_window(model, unit_of_block, window, solver, budget)
            effort -= spent
            if better is not None or effort <= 0:
                break
        unit_of_block, size = (unit_of_block, size + 1) if better is None else (better, 0)
    return unit_of_block


def _windows(seconds: FloatArray, size: int) -> Iterator[IntArray]:
    """Yields the slowest unit with every set of others, the fastest first."""
    slowest = int(seconds.argmax())
    others = [unit for unit in np.argsort(seconds, kind="stable").tolist() if unit != slowest]
    for partners in itertools.combinations(others, size - 1):
        yield np.sort(np.array([slowest, *partners], dtype=np.int64))


def _solve_window(
    model: BlockModel, unit_of_block: IntArray, window: IntArray, solver: Solver, effort: float
) -> tuple[IntArray | None, float]:
    program, blocks = _program(model, unit_of_block, window)
    values, spent = solver(program, effort)
    if values is None:
        return None, spent
    assigned = unit_of_block.copy()
    assigned[blocks] = window[values.reshape(len(blocks), len(window)).argmax(axis=1)]
    before, after = model.unit_seconds(unit_of_block), model.unit_seconds(assigned)
    is_better = after[window].max() < before[window].max() * (1 - GAIN)
    return (assigned if is_better and after.max() <= before.max() else None), spent


def _program(
    model: BlockModel, unit_of_block: IntArray, window: IntArray
) -> tuple[Program, IntArray]:
    """Returns the program of a window, and its blocks."""
    size = len(window)
    place = np.full(model.units.count, -1)
    place[window] = np.arange(size)
    blocks = np.flatnonzero(place[unit_of_block] >= 0)
    number = np.full(model.num_blocks, -1)
    number[blocks] = np.arange(len(blocks))
    is_inside = number[model.pins[:, 1]] >= 0
    pins, rest = model.pins[is_inside], model.pins[~is_inside]
    # y: whether a unit of the window needs a net that it does not own
    nets, net_of_pin = np.unique(pins[:, 0], return_inverse=True)
    is_foreign = model.owner[nets][:, None] != window
    num_x = len(blocks) * size
    y = np.full(is_foreign.shape, -1)
    y[is_foreign] = num_x + np.arange(int(is_foreign.sum()))
    x_of_pin = (number[pins[:, 1]] * size)[:, None] + np.arange(size)
    implications = np.stack([x_of_pin, y[net_of_pin]], axis=2)[is_foreign[net_of_pin]]
    net, at = np.nonzero(is_foreign)
    start = np.zeros(num_x + len(net), dtype=bool)
    start[np.arange(len(blocks)) * size + place[unit_of_block[blocks]]] = True
    start[implications[start[implications[:, 0]], 1]] = True
    loads = _Loads(model, place >= 0)
    unit, block = np.tile(window, len(blocks)), np.repeat(blocks, size)
    own = unit, model.compute[block] / model.units.speed[unit]
    outside = np.bincount(unit_of_block[number < 0], model.compute[number < 0], model.units.count)
    ends = model.ends(nets[net], window[at])
    for fixed, end in zip(model.links(rest, unit_of_block), ends, strict=True):
        loads.add(own, outside / model.units.speed, (end, model.travel[nets[net]]), fixed)
    seconds = model.unit_seconds(unit_of_block)
    program = Program(
        num_groups=len(blocks),
        num_choices=size,
        num_variables=len(start),
        implications=implications,
        terms=loads.terms(1 / float(seconds.max())),
        base=np.concatenate(loads.base) / seconds.max(),
        is_in_objective=np.concatenate(loads.is_in_objective),
        start=start,
        most=float(seconds[window].max() / seconds.max()),
    )
    return program, blocks


class _Loads:
    """Collects (compute + contention x link, link) of all ports: sums of variables, and what is there without."""

    def __init__(self, model: BlockModel, is_in_window: BoolArray):
        self.model, self.is_in_window = model, is_in_window
        self.base: list[FloatArray] = []
        self.is_in_objective: list[BoolArray] = []
        self._terms: list[tuple[IntArray, IntArray, FloatArray]] = []

    def add(
        self,
        own: tuple[IntArray, FloatArray],
        compute: FloatArray,
        moved: tuple[IntArray, FloatArray],
        link: FloatArray,
    ) -> None:
        """Adds the loads of all ports in one direction.

        `own`: unit and compute of the first variables; `moved`: port and travel of the rest; `compute` `[units]` and
        `link` `[ports]`: what the window does not change.
        """
        ports, other, share = (
            self.model.units.num_ports,
            self.model.units.other_link,
            self.model.contention,
        )
        x = np.arange(len(own[0]))
        y = len(x) + np.arange(len(moved[0]))
        self._put([(moved[0], y, moved[1])], link, ports)
        slowed = [(own[0] * ports + port, x, own[1]) for port in range(ports)]
        self._put(
            [*slowed, (moved[0], y, moved[1] * share)],
            np.repeat(compute, ports) + share * link,
            ports,
        )
        self._put([], other, 1)
        self._put([(own[0], x, own[1])], compute + share * other, 1)

    def _put(
        self, terms: list[tuple[IntArray, IntArray, FloatArray]], base: FloatArray, ports: int
    ) -> None:
        first = sum(len(one) for one in self.base)
        self._terms += [(first + load, variable, amount) for load, variable, amount in terms]
        self.base.append(base)
        self.is_in_objective.append(np.repeat(self.is_in_window, ports))

    def terms(self, scale: float) -> tuple[IntArray, IntArray, FloatArray]:
        """Returns load, variable and scaled amount of all terms."""
        load, variable, amount = (
            np.concatenate(column) for column in zip(*self._terms, strict=True)
        )
        return load, variable, amount * scale
