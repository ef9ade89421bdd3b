"""Assigns blocks window by window, each a mixed-integer program for HiGHS, through `scipy.optimize.milp`.

The budget is a number of nodes, so the values are the same in every process. HiGHS takes no start through
SciPy; T of the start is a bound, so what it finds is no worse.
"""

from typing import Any

import numpy as np

from megatron_cp.mask.interval import IntArray
from megatron_cp.plan.compute.solvers.block_model import BlockModel
from megatron_cp.plan.compute.solvers.windows import Program, assign_by_windows
from megatron_cp.plan.schema import BoolArray

ENTRIES_SQUARED_PER_SECOND = 1.5e8
"""A node of a window of n matrix entries takes about n^2 over this (measured, one core of 2.4 GHz)."""
ROOT_NODES = 10  # what the root costs, with its cuts and heuristics


def assign_blocks(model: BlockModel, effort: float) -> IntArray:
    """Returns the unit of each block `[blocks]`, never slower than `model.start`."""
    return assign_by_windows(model, solve, effort)


def solve(program: Program, effort: float) -> tuple[BoolArray | None, float]:
    """See `windows.Solver`; effort is about seconds, counted in nodes."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    num_x, T = program.num_groups * program.num_choices, program.num_variables
    matrix, low, high = _constraints(program)
    per_node = matrix.nnz**2 / ENTRIES_SQUARED_PER_SECOND
    upper = np.ones(T + 1)
    upper[T] = program.most
    result: Any = milp(
        np.arange(T + 1) == T,
        constraints=LinearConstraint(matrix, low, high),
        bounds=Bounds(0, upper),
        integrality=np.arange(T + 1) < num_x,
        options={"node_limit": 1 + int(effort / per_node), "mip_rel_gap": 1e-5},
    )
    spent = per_node * (ROOT_NODES + (result.mip_node_count or 0))
    return (None if result.x is None else result.x[:num_x] > 0.5), spent


def _constraints(program: Program) -> tuple[Any, Any, Any]:
    """Returns matrix, low and high: groups, implications, loads."""
    from scipy.sparse import coo_array

    num_x, T = program.num_groups * program.num_choices, program.num_variables
    num_loads, num_implied = len(program.base), len(program.implications)
    load, variable, amount = program.terms
    each = program.num_groups + np.arange(num_implied)
    first_load = program.num_groups + num_implied
    under = np.flatnonzero(program.is_in_objective)
    entries = (
        (np.arange(num_x) // program.num_choices, np.arange(num_x), np.ones(num_x)),
        (each, program.implications[:, 0], np.ones(num_implied)),
        (each, program.implications[:, 1], -np.ones(num_implied)),
        (first_load + load, variable, amount),
        (first_load + under, np.full(len(under), T), -np.ones(len(under))),
    )
    row, column, value = (np.concatenate(parts) for parts in zip(*entries, strict=True))
    matrix = coo_array((value, (row, column)), shape=(first_load + num_loads, T + 1)).tocsr()
    low = np.full(first_load + num_loads, -np.inf)
    low[: program.num_groups] = 1
    high = np.zeros(first_load + num_loads)
    high[: program.num_groups] = 1
    high[first_load:] = np.where(program.is_in_objective, 0, 1) - program.base
    # a load that the window cannot change may stand at its limit, rounded up
    is_fixed = ~program.is_in_objective & (np.bincount(load, minlength=num_loads) == 0)
    high[first_load:][is_fixed] = np.inf
    return matrix, low, high
