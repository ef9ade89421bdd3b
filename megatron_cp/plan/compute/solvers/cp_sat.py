"""Assigns blocks window by window with OR-tools' CP-SAT, from a hint.

One worker that takes turns between its searches, a fixed seed and a deterministic budget: the same values in
every process. Loads are whole numbers inside, T to begin with is RESOLUTION.
"""

from typing import Any

import numpy as np

from megatron_cp.mask.interval import IntArray
from megatron_cp.plan.compute.solvers.block_model import BlockModel
from megatron_cp.plan.compute.solvers.windows import Program, assign_by_windows
from megatron_cp.plan.schema import BoolArray

RESOLUTION = 1e8


def assign_blocks(model: BlockModel, effort: float) -> IntArray:
    """Returns the unit of each block `[blocks]`, never slower than `model.start`."""
    return assign_by_windows(model, solve, effort)


def solve(program: Program, effort: float) -> tuple[BoolArray | None, float]:
    """See `windows.Solver`; effort is CP-SAT's deterministic time, about seconds."""
    from ortools.sat.python import cp_model

    model: Any = cp_model.CpModel()
    variables = [model.new_bool_var("") for _ in range(program.num_variables)]
    size = program.num_choices
    for group in range(program.num_groups):
        model.add_exactly_one(variables[group * size : (group + 1) * size])
    for cause, effect in program.implications.tolist():
        model.add_implication(variables[cause], variables[effect])
    most = int(program.most * RESOLUTION)
    slowest = model.new_int_var(0, most, "")
    load, variable, amount = program.terms
    whole = np.floor(amount * RESOLUTION).astype(np.int64).tolist()
    sums: list[list[Any]] = [[] for _ in program.base]
    for one, index, weight in zip(load.tolist(), variable.tolist(), whole, strict=True):
        sums[one].append(weight * variables[index])
    base = np.floor(program.base * RESOLUTION).astype(np.int64).tolist()
    for terms, fixed, is_in_objective in zip(
        sums, base, program.is_in_objective.tolist(), strict=True
    ):
        if terms or is_in_objective:
            model.add(sum(terms) + fixed <= (slowest if is_in_objective else int(RESOLUTION)))
    for one, value in zip(variables, program.start.tolist(), strict=True):
        model.add_hint(one, value)
    model.add_hint(slowest, most)
    model.minimize(slowest)
    solver: Any = cp_model.CpSolver()
    options = solver.parameters
    options.num_workers, options.random_seed, options.interleave_search = 1, 0, True
    options.max_deterministic_time = effort
    status = solver.solve(model)
    spent = float(solver.response_proto.deterministic_time)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None, spent
    values = [bool(solver.value(one)) for one in variables[: program.num_groups * size]]
    return np.array(values), spent
