"""What a local search returns is the mask, exactly, and never slower than its start; counted pair by pair."""

import hashlib
import itertools
import os
import subprocess
import sys

import numpy as np
import pytest

from megatron_cp import mask as masks
from megatron_cp.config import CPConfig, Topology
from megatron_cp.plan import forget_plans, make_plan
from megatron_cp.plan.compute.bisection import Assignment, assign
from megatron_cp.plan.compute.blocks import Blocks, Problem
from megatron_cp.plan.compute.local_search import improved
from megatron_cp.plan.hardware.rows import RowCost
from megatron_cp.plan.hardware.simulate import simulate_pass
from megatron_cp.plan.placement.placement import contiguous, zigzag
from megatron_cp.plan.schema import PASSES
from megatron_cp.plan.search.search import Search
from megatron_cp.plan.transfer.pass_builder import PlacedMask

WEIGHTS = RowCost(7.0, 5.0)
COMPUTE, INSIDE, BETWEEN = 1e-3, 2e-4, 9e-4


def problem_of(mask, cp_size, node_size=8, place=contiguous, contention=0.1):
    config = CPConfig(num_heads=1, num_kv_heads=1, head_dim=8)
    placed = PlacedMask(mask, place(mask.num_queries, cp_size, config))
    speeds = np.ones(cp_size)
    return Problem(placed, WEIGHTS, COMPUTE, (INSIDE, BETWEEN), node_size, contention, speeds)


def bisected(problem):
    placed = problem.placed
    even = np.ones(placed.num_ranks)
    return assign(placed.mask, placed.owners, (problem.node_size,), problem.row_cost, even)


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


def owner_of_tokens(problem):
    return {int(t): r for r, row in enumerate(problem.placed.placement) for t in row}


def times(problem, ranks_of_pairs):
    """Returns T of each rank from the rank of every pair `[q, k]` (-1: none): rows one by one, once into each node."""
    num_ranks, size = problem.placed.num_ranks, problem.node_size
    owner = owner_of_tokens(problem)
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
    return np.maximum(pairs * COMPUTE + problem.contention * link, link)


def slowest(problem, ranks_of_pairs):
    return times(problem, ranks_of_pairs).max()


def check(problem, start):
    """What is found is the mask, no slower than its start by the oracle; returns both times."""
    tokens = problem.placed.mask.num_queries
    found = improved(problem, start)
    count, ranks = rendered(found, tokens)
    assert (count == problem.placed.mask.to_dense()).all()
    assert ((ranks >= -1) & (ranks < problem.placed.num_ranks)).all()
    owner = owner_of_tokens(problem)
    for q0, q1, k0, k1, *_ in found.parts.tolist():
        assert len({owner[q] for q in range(q0, q1)}) == 1
        assert len({owner[k] for k in range(k0, k1)}) == 1
    before, after = slowest(problem, rendered(start, tokens)[1]), slowest(problem, ranks)
    assert after <= before * (1 + 1e-9)
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
    "nodes of three": (masks.prefix_lm(30, 9), 8, 3, zigzag, 0.1),
}


@pytest.mark.parametrize("start", [bisected, at_home])
@pytest.mark.parametrize("name", CASES)
def test_every_pair_is_computed_once_and_no_rank_is_slower_than_the_slowest_was(name, start):
    problem = problem_of(*CASES[name])
    check(problem, start(problem))


def test_a_causal_mask_at_home_is_made_faster():
    problem = problem_of(masks.causal(24), 4, contention=0.0)
    before, after = check(problem, at_home(problem))
    assert after < 0.8 * before  # the last rank has 7/4 of the mean


@pytest.mark.parametrize("mask", [masks.causal(4), masks.sliding_window(4, 1, 1)])
def test_four_tokens_on_two_ranks_are_dealt_at_most_a_tenth_slower_than_in_the_best_way(mask):
    problem = problem_of(mask, 2)
    pairs, best = np.argwhere(mask.to_dense()), np.inf
    for dealt in itertools.product((0, 1), repeat=len(pairs)):
        ranks = np.full((4, 4), -1)
        ranks[tuple(pairs.T)] = dealt
        best = min(best, slowest(problem, ranks))
    parts = problem.placed.parts
    _, after = check(problem, Assignment(parts, np.zeros(len(parts), dtype=np.int64)))
    assert best <= after <= 1.1 * best


def test_one_rank_and_no_pairs_stay_as_they_are():
    for problem in (problem_of(masks.causal(8), 1), problem_of(masks.from_slices(8, 8, []), 2)):
        before, after = check(problem, at_home(problem))
        assert before == after


@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_blocks_price_any_deal_as_the_oracle_does(name, chunks):
    mask, cp_size, *_ = CASES[name]
    problem = problem_of(*CASES[name])
    start = bisected(problem)
    blocks = Blocks.of(problem, start, chunks)
    rng = np.random.default_rng(7)
    for dealt in (blocks.start, *rng.integers(0, cp_size, (5, blocks.num_blocks))):
        pairs = rendered(blocks.assignment(dealt), mask.num_queries)[1]
        assert blocks.loads(dealt).seconds == pytest.approx(times(problem, pairs), rel=1e-9)


# ------------------------------------------------------------------ in plans


@pytest.mark.parametrize("cp_size", [6, 10])
def test_auto_is_faster_by_it_where_links_limit(cp_size, monkeypatch):
    mask = masks.causal_blockwise([3000, 1000, 2500, 700, 4000, 800])
    pairs = Topology("nodes of two", 300.0, 250.0, 2, 300.0, 40.0, 5.0, 0.1)
    config = CPConfig(num_heads=12, num_kv_heads=12, head_dim=128, topology=pairs)

    def planned():
        forget_plans()
        plan = make_plan(mask, cp_size, config)
        plan.validate()
        return sum(simulate_pass(plan, name).seconds for name in PASSES)

    with_it = planned()
    monkeypatch.setattr(Search, "_move_near", lambda search: None)
    assert with_it < 0.95 * planned()  # .941 and .933


def digest():
    problem = problem_of(masks.documents([5, 2, 4, 1]), 4, node_size=2)
    found = improved(problem, at_home(problem))
    return hashlib.sha256(found.parts.tobytes() + found.ranks.tobytes()).hexdigest()


def test_another_process_with_another_hash_seed_finds_the_same():
    code = "from tests.plan.test_local_search import digest; print(digest())"
    other = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "4711"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.split()[-1] == digest()
