"""Solvers that are given a compute assignment and return a better one, or nothing.

    improve(problem, start, "cp_sat", effort=10) -> Assignment | None

The mask is cut into blocks (`block_model.py`), nodes first, then ranks inside each node, and a solver assigns
blocks anew: OR-tools' CP-SAT (`cp_sat`) or HiGHS (`milp`), a few units at a time (`windows.py`), or the hypergraph
partitioner Mt-KaHyPar (`hypergraph`). What comes back is judged by `measure`, exact to a row.

All count their work instead of looking at the clock: the same assignment in every process, for one version
of the solver. Equal plans on all ranks therefore need equal solver versions.
"""

import difflib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from megatron_cp.mask import sweep
from megatron_cp.mask.interval import IntArray
from megatron_cp.mask.slice import Q_START, shift_rows
from megatron_cp.plan.compute.bisection import Assignment
from megatron_cp.plan.compute.solvers import cp_sat, hypergraph, milp
from megatron_cp.plan.compute.solvers.block_model import (
    BlockModel,
    Problem,
    Units,
    cut_into_blocks,
    link_seconds,
    measure,
)
from megatron_cp.plan.compute.solvers.windows import GAIN

__all__ = ["SOLVERS", "Problem", "check_solver", "improve", "measure"]


@dataclass(frozen=True)
class _Solver:
    package: str
    assign: Callable[[BlockModel, float], IntArray]
    """(model, effort) -> the unit of each block, never slower than the start."""
    max_size: int
    """(blocks + pins) x units of a model."""


_SOLVERS = {
    "cp_sat": _Solver("ortools", cp_sat.assign_blocks, 20_000),
    "milp": _Solver("scipy", milp.assign_blocks, 8_000),
    "hypergraph": _Solver("mtkahypar", hypergraph.assign_blocks, 200_000),
}
SOLVERS = tuple(_SOLVERS)


def improve(problem: Problem, start: Assignment, solver: str, effort: int) -> Assignment | None:
    """Returns an assignment that is faster by `measure`, or None: nothing found, nothing to win, or too large.

    `effort`: about seconds on one core, counted and not clocked. Raises ValueError for an unknown solver or an
    effort below 1, ModuleNotFoundError where its package is not installed.
    """
    by = _named(solver)
    if effort < 1:
        raise ValueError(
            f"effort={effort} must be at least 1, about a second of one core; give 10 or more"
        )
    found = min(_attempts(problem, start, by, effort), key=partial(measure, problem), default=start)
    is_better = measure(problem, found) < measure(problem, start) * (1 - GAIN)
    return _merged(found, problem.placed.owners.num_ids) if is_better else None


def _merged(assignment: Assignment, num_ids: int) -> Assignment:
    """Returns the same pairs on the same ranks in few slices: blocks that a rank has side by side become one."""
    q_step = (
        num_ids + 1
    )  # ranks so far apart that slices of two are never neighbours, not even in k - q
    k_step = 3 * q_step
    ranks = assignment.ranks
    rows = sweep.merge(shift_rows(assignment.parts, q=ranks * q_step, k=ranks * k_step))
    ranks = rows[:, Q_START] // q_step
    return Assignment(shift_rows(rows, q=-ranks * q_step, k=-ranks * k_step), ranks)


def check_solver(solver: str) -> None:
    """Raises ValueError for an unknown solver, ModuleNotFoundError where its package is not installed."""
    _named(solver)


def _named(solver: str) -> _Solver:
    if solver not in _SOLVERS:
        near = difflib.get_close_matches(str(solver), SOLVERS, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"improver={solver!r} is unknown; choose one of {', '.join(SOLVERS)} (nearest: {near})"
        )
    package = _SOLVERS[solver].package
    if importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(
            f"improver={solver!r} needs {package}; pip install 'megatron_cp[solvers]'"
        )
    return _SOLVERS[solver]


def _attempts(
    problem: Problem, start: Assignment, by: _Solver, effort: int
) -> Iterator[Assignment]:
    """Yields assignments that may be better than the start."""
    if not len(start.parts) or problem.placed.num_ranks == 1:
        return
    if problem.placed.num_ranks <= problem.node_size:
        yield _assign_inside(problem, start, by, effort)
        return
    if problem.node_size > 1:
        yield _assign_inside(problem, start, by, effort / 2)
    nodes = _assign_nodes(problem, start, by, effort / (4 if problem.node_size > 1 else 1))
    if nodes is not None:
        yield nodes
        yield _assign_inside(problem, nodes, by, effort / 4)


def _assign_inside(problem: Problem, start: Assignment, by: _Solver, effort: float) -> Assignment:
    """Returns the assignment with the pairs of every node assigned anew inside it; foreign rows are at their relays."""
    num_ranks, size = problem.placed.num_ranks, problem.node_size
    firsts, between = range(0, num_ranks, size), link_seconds(problem, start)[1]
    parts, ranks = [], []
    for first in firsts:
        width = min(size, num_ranks - first)
        inside = start.ranks // size == first // size
        if not inside.any():
            continue
        node = Assignment(start.parts[inside], start.ranks[inside] - first)
        place = np.minimum(np.arange(num_ranks) % size, width - 1)
        units = Units(
            width=np.ones(width, dtype=np.int64),
            speed=problem.speed_of(first + np.arange(width)),
            num_ports=1,
            of_owner=place,
            port_of_owner=np.zeros_like(place),
            seconds_per_byte=problem.seconds_per_byte[0],
            other_link=between[first : first + width],
        )
        model = cut_into_blocks(problem, node.parts, node.ranks, units, by.max_size)
        if model is not None:
            node = Assignment(model.slices, by.assign(model, effort / len(firsts))[model.block])
        parts.append(node.parts)
        ranks.append(node.ranks + first)
    return Assignment(np.concatenate(parts), np.concatenate(ranks))


def _assign_nodes(
    problem: Problem, start: Assignment, by: _Solver, effort: float
) -> Assignment | None:
    """Returns the assignment with pairs assigned anew to nodes, or None when all stay.

    In a new node pairs are with the rank at their queries' owner's place, until they are assigned inside.
    """
    num_ranks, size = problem.placed.num_ranks, problem.node_size
    node_of_rank = np.arange(num_ranks) // size
    width = np.bincount(node_of_rank)
    units = Units(
        width=width,
        speed=np.bincount(node_of_rank, problem.speed_of(np.arange(num_ranks))).astype(float),
        num_ports=size,
        of_owner=node_of_rank,
        port_of_owner=np.arange(num_ranks) % size,
        seconds_per_byte=problem.seconds_per_byte[1],
        other_link=np.zeros(len(width)),
    )
    model = cut_into_blocks(problem, start.parts, node_of_rank[start.ranks], units, by.max_size)
    if model is None:
        return None
    assigned = by.assign(model, effort)
    if (assigned == model.start).all():
        return None
    node, place = (
        assigned[model.block],
        problem.placed.owners.rank_of(model.slices[:, Q_START]) % size,
    )
    ranks = start.ranks[model.source]
    moved = np.minimum(node * size + place, num_ranks - 1)
    return Assignment(model.slices, np.where(node_of_rank[ranks] == node, ranks, moved))
