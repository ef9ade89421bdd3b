"""What an solver returns is the mask, exactly, and never slower than its start; counted pair by pair."""

import hashlib
import importlib.util
import itertools
import os
import subprocess
import sys

import numpy as np
import pytest

from megatron_cp import mask as masks
from megatron_cp.config import CPConfig
from megatron_cp.plan.compute.bisection import Assignment, Weights, assign
from megatron_cp.plan.compute.solvers.block_model import Units, cut_into_blocks
from megatron_cp.plan.compute.solvers.solve import SOLVERS, Problem, improve, measure
from megatron_cp.plan.placement.placement import contiguous, zigzag
from megatron_cp.plan.transfer.pass_builder import PlacedMask

PACKAGES = {"cp_sat": "ortools", "milp": "scipy", "hypergraph": "mtkahypar"}
EXACT = ("cp_sat", "milp")
WEIGHTS = Weights(7.0, 5.0)
COMPUTE, INSIDE, BETWEEN = 1e-3, 2e-4, 9e-4
ALL = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            importlib.util.find_spec(PACKAGES[name]) is None,
            reason=f"{PACKAGES[name]}, of the extra 'solvers', is not installed",
        ),
    )
    for name in SOLVERS
]
EXACT = [param for param in ALL if param.values[0] in EXACT]


def problem_of(mask, cp_size, node_size=8, place=contiguous, contention=0.1):
    config = CPConfig(num_heads=1, num_kv_heads=1, head_dim=8)
    placed = PlacedMask(mask, place(mask.num_queries, cp_size, config))
    return Problem(placed, WEIGHTS, COMPUTE, (INSIDE, BETWEEN), node_size, contention)


def recursive_cut(problem):
    placed = problem.placed
    even = np.ones(placed.num_ranks)
    return assign(placed.mask, placed.owners, (problem.node_size,), problem.weights, even)


def at_home(problem):
    """Every pair with its query's owner: unbalanced where the mask is."""
    return Assignment(problem.placed.parts, problem.placed.q_owner)


# ------------------------------------------------------------------ the oracle


def rendered(assignment, num_tokens):
    """Returns how often each pair is computed `[q, k]`, and by whom."""
    count = np.zeros((num_tokens, num_tokens), dtype=int)
    ranks = np.full(count.shape, -1)
    for (q0, q1, k0, k1, lo, hi), rank in zip(
        assignment.parts.tolist(), assignment.ranks.tolist(), strict=True
    ):
        for q, k in itertools.product(range(q0, q1), range(k0, k1)):
            if lo <= k - q <= hi:
                count[q, k] += 1
                ranks[q, k] = rank
    return count, ranks


def slowest_rank(problem, ranks_of_pairs):
    """Returns T from the rank of every pair `[q, k]` (-1: none): rows one by one, once into each node."""
    num_ranks, size = problem.placed.num_ranks, problem.node_size
    owner = {int(t): r for r, row in enumerate(problem.placed.placement) for t in row}
    came, went = np.zeros((2, num_ranks)), np.zeros((2, num_ranks))  # inside, between

    def send(source, target, weight):
        level = int(source // size != target // size)
        went[level, source] += weight
        came[level, target] += weight

    for axis, weight in ((0, WEIGHTS.query), (1, WEIGHTS.key)):
        for token in range(len(ranks_of_pairs)):
            readers = set(np.take(ranks_of_pairs, token, axis).tolist()) - {-1}
            home = owner[token]
            for node in range(-(-num_ranks // size)):
                here = {reader for reader in readers if reader // size == node} - {home}
                source = home
                if here and node != home // size:
                    source = min(node * size + home % size, num_ranks - 1)
                    send(home, source, weight)
                for reader in here - {source}:
                    send(source, reader, weight)
    seconds = np.array(problem.seconds_per_byte)[:, None]
    link = (np.maximum(came, went) * seconds).max(axis=0)
    pairs = np.bincount(ranks_of_pairs[ranks_of_pairs >= 0], minlength=num_ranks)
    return np.maximum(pairs * COMPUTE + problem.contention * link, link).max()


def check(problem, start, found):
    """The found assignment is the mask, and faster than its start by the oracle; returns both times."""
    tokens = problem.placed.mask.num_queries
    before = slowest_rank(problem, rendered(start, tokens)[1])
    assert measure(problem, start) == pytest.approx(before, rel=1e-9)
    if found is None:
        return before, before
    count, ranks = rendered(found, tokens)
    assert (count == problem.placed.mask.to_dense()).all()
    assert ((ranks >= -1) & (ranks < problem.placed.num_ranks)).all()
    after = slowest_rank(problem, ranks)
    assert after < before
    assert measure(problem, found) == pytest.approx(after, rel=1e-9)
    return before, after


# ------------------------------------------------------------------ a result is the mask, and faster

CASES = {  # without contention a search ends as soon as areas are equal
    "causal": (masks.causal(24), 4, 8, contiguous, 0.0),
    "zigzag": (masks.causal(24), 3, 8, zigzag, 0.0),
    "padded": (masks.causal(11), 3, 2, contiguous, 0.1),
    "window": (masks.sliding_window(24, 5), 8, 4, contiguous, 0.1),
    "documents": (masks.documents([7, 1, 3, 5]), 4, 2, contiguous, 0.1),
    "star": (masks.star(24, 4), 3, 1, contiguous, 0.0),
    "rows without keys": (masks.from_slices(12, 12, [(3, 9, 0, 6)]), 4, 8, contiguous, 0.0),
    "ranks without pairs": (masks.from_slices(24, 24, [(0, 3, 0, 3)]), 8, 4, zigzag, 0.1),
}
STARTS = (recursive_cut, at_home)


@pytest.mark.slow
@pytest.mark.parametrize("solver", ALL)
@pytest.mark.parametrize("name", CASES)
def test_every_pair_is_computed_once_and_no_rank_is_slower_than_the_slowest_was(name, solver):
    problem = problem_of(*CASES[name])
    start = STARTS[list(CASES).index(name) % 2](problem)
    check(problem, start, improve(problem, start, solver, 1))


@pytest.mark.parametrize("solver", ALL)
def test_a_causal_mask_at_home_is_made_faster(solver):
    problem = problem_of(masks.causal(24), 4, contention=0.0)
    before, after = check(problem, at_home(problem), improve(problem, at_home(problem), solver, 1))
    assert after < 0.8 * before  # the last rank has 7/4 of the mean


@pytest.mark.parametrize("solver", EXACT)
def test_solvers_find_the_best_of_all_ways_to_deal_four_tokens_to_two_ranks(solver):
    for mask in (masks.causal(4), masks.sliding_window(4, 1, 1)):
        problem = problem_of(mask, 2)
        pairs = np.argwhere(mask.to_dense())
        best = np.inf
        for assigned in itertools.product((0, 1), repeat=len(pairs)):
            ranks = np.full((4, 4), -1)
            ranks[tuple(pairs.T)] = assigned
            best = min(best, slowest_rank(problem, ranks))
        start = Assignment(
            problem.placed.parts, np.zeros(len(problem.placed.parts), dtype=np.int64)
        )
        _, after = check(problem, start, improve(problem, start, solver, 2))
        assert after == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("solver", SOLVERS)
def test_one_rank_and_no_pairs_have_nothing_to_improve(solver):
    pytest.importorskip(PACKAGES[solver], reason="of the extra 'solvers'")
    alone, empty = problem_of(masks.causal(8), 1), problem_of(masks.from_slices(8, 8, []), 2)
    for problem in (alone, empty):
        assert improve(problem, at_home(problem), solver, 1) is None


@pytest.mark.parametrize("solver", EXACT)
def test_what_is_too_large_for_a_solver_is_left_alone(solver):
    problem = problem_of(masks.causal(128), 64, node_size=64)
    assert improve(problem, at_home(problem), solver, 1) is None


@pytest.mark.parametrize("name", CASES)
def test_the_model_of_blocks_prices_any_deal_as_the_oracle_does(name):
    mask, cp_size, _, place, _ = CASES[name]
    problem = problem_of(mask, cp_size, place=place)
    ranks = np.arange(cp_size)
    units = Units(
        np.ones_like(ranks), np.ones(cp_size), 1, ranks, 0 * ranks, INSIDE, np.zeros(cp_size)
    )
    start = recursive_cut(problem)
    model = cut_into_blocks(problem, start.parts, start.ranks, units, max_size=10_000)
    rng = np.random.default_rng(7)
    for assigned in (model.start, *rng.integers(0, cp_size, (5, model.num_blocks))):
        pairs = rendered(Assignment(model.slices, assigned[model.block]), mask.num_queries)[1]
        assert model.seconds(assigned) == pytest.approx(slowest_rank(problem, pairs), rel=1e-9)


# ------------------------------------------------------------------ the same everywhere


def digest(solver):
    problem = problem_of(masks.documents([5, 2, 4, 1]), 4, node_size=2)
    found = improve(problem, at_home(problem), solver, 1)
    return hashlib.sha256(found.parts.tobytes() + found.ranks.tobytes()).hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize("solver", ALL)
def test_another_process_with_another_hash_seed_finds_the_same(solver):
    code = f"from tests.plan.test_solvers import digest; print(digest({solver!r}))"
    other = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "4711"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.split()[-1] == digest(solver)


# ------------------------------------------------------------------ what is refused


def test_an_unknown_improver_is_refused_with_the_nearest():
    problem = problem_of(masks.causal(8), 2)
    with pytest.raises(ValueError, match=r"improver='cpsat' is unknown.*nearest: cp_sat"):
        improve(problem, at_home(problem), "cpsat", 1)


def test_no_effort_is_refused():
    pytest.importorskip("scipy", reason="of the extra 'solvers'")
    problem = problem_of(masks.causal(8), 2)
    with pytest.raises(ValueError, match="effort=0 must be at least 1"):
        improve(problem, at_home(problem), "milp", 0)


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_missing_package_is_named_with_the_extra_that_brings_it(solver, monkeypatch):
    problem = problem_of(masks.causal(8), 2)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    expected = (
        rf"improver='{solver}' needs {PACKAGES[solver]}; pip install 'megatron_cp\[solvers\]'"
    )
    with pytest.raises(ModuleNotFoundError, match=expected):
        improve(problem, at_home(problem), solver, 1)
