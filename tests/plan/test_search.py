"""The search: who computes what, in which stages, and that it is never predicted worse than what it knows."""

import itertools
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_cp import mask as masks
from megatron_cp.config import CPConfig, Topology
from megatron_cp.plan import AttentionPlan, forget_plans, make_plan, make_plans
from megatron_cp.plan.compute.bisection import Assignment, assign
from megatron_cp.plan.compute.staging import ORDERS, AssignedMask, Staging
from megatron_cp.plan.hardware.makespan import makespan_seconds
from megatron_cp.plan.hardware.rows import RowCost
from megatron_cp.plan.hardware.simulate import simulate_pass
from megatron_cp.plan.hardware.topology import get_topology
from megatron_cp.plan.schema import PASSES
from megatron_cp.plan.transfer.pass_builder import PlacedMask
from megatron_cp.plan.transfer.routing import ThroughNodes, direct, tree
from tests.plan.cases import config, packed
from tests.plan.test_laws import any_square_mask, check_laws

SAME = RowCost(query=2.0, key=2.0)  # one query head per key/value head


def placed_in_order(mask, cp_size):
    rows = -(-mask.num_queries // cp_size)
    return PlacedMask(mask, np.arange(cp_size * rows).reshape(cp_size, rows))


def pairs_of(assignment, size):
    """Returns which rank computes each pair, -1 for none, by painting the slices one by one."""
    rank_of = np.full((size, size), -1)
    for (q0, q1, k0, k1, lo, hi), rank in zip(
        assignment.parts.tolist(), assignment.ranks.tolist(), strict=True
    ):
        for q in range(q0, q1):
            for k in range(max(k0, q + lo), min(k1, q + hi + 1)):
                assert rank_of[q, k] == -1, "a pair is assigned twice"
                rank_of[q, k] = rank
    return rank_of


def remote_rows(rank_of, owner_of, cp_size):
    """Returns the foreign query rows plus foreign key rows that each rank needs, counted pair by pair."""
    found = []
    for rank in range(cp_size):
        mine = rank_of == rank
        queries = mine.any(axis=1) & (owner_of != rank)
        keys = mine.any(axis=0) & (owner_of != rank)
        found.append(int(queries.sum() + keys.sum()))
    return found


@given(
    case=any_square_mask(),
    cp_size=st.sampled_from([1, 2, 3, 5, 8]),
    node_size=st.sampled_from([1, 2, 8]),
)
@settings(max_examples=60)
def test_every_pair_is_assigned_once_and_areas_differ_by_a_row_or_so(case, cp_size, node_size):
    mask, allowed = case
    placed = placed_in_order(mask, cp_size)
    found = assign(mask, placed.owners, (node_size,), SAME, np.ones(cp_size))
    rank_of = pairs_of(found, len(allowed))
    assert np.array_equal(rank_of >= 0, allowed)
    areas = np.bincount(rank_of[rank_of >= 0], minlength=cp_size)
    longest_row = allowed.sum(axis=1).max(initial=0)
    levels = int(np.ceil(np.log2(cp_size))) if cp_size > 1 else 0
    assert np.abs(areas - areas.mean()).max() <= 1 + longest_row * levels


@pytest.mark.parametrize("shares", [[1, 1], [3, 1], [0, 1], [1, 2, 3]])
def test_areas_follow_the_loads_asked_for(shares):
    mask = masks.causal(240)
    placed = placed_in_order(mask, len(shares))
    found = assign(mask, placed.owners, (8,), SAME, np.array(shares, dtype=float))
    areas = np.bincount(found.ranks, masks_area(found.parts), minlength=len(shares))
    assert np.allclose(areas / areas.sum(), np.array(shares) / sum(shares), atol=0.01)


def masks_area(parts):
    return [masks.from_slices(10**4, 10**4, [part]).area() for part in parts.tolist()]


@pytest.mark.parametrize("cp_size", [4, 16])
def test_a_full_mask_is_cut_into_the_grid_that_moves_least(cp_size):
    """X x Y ranks on N chunks: 2 (X - 1) + 2 (Y - 1) rows of a chunk each, X = Y = sqrt(N) the least."""
    rows = 8
    mask = masks.full(cp_size * rows)
    placed = placed_in_order(mask, cp_size)
    found = assign(mask, placed.owners, (cp_size,), SAME, np.ones(cp_size))
    rank_of = pairs_of(found, cp_size * rows)
    owner_of = np.arange(cp_size * rows) // rows
    side = int(np.sqrt(cp_size))
    assert sum(remote_rows(rank_of, owner_of, cp_size)) <= cp_size * rows * 2 * (side - 1) + cp_size


def best_of_all(allowed, owner_of):
    """Returns the fewest remote rows of any assignment of four blocks to two ranks with areas as equal."""
    half = len(allowed) // 2
    blocks = list(itertools.product((slice(0, half), slice(half, None)), repeat=2))
    best = None
    for ranks in itertools.product((0, 1), repeat=4):
        rank_of = np.full(allowed.shape, -1)
        for block, rank in zip(blocks, ranks, strict=True):
            rank_of[block] = np.where(allowed[block], rank, -1)
        areas = np.bincount(rank_of[rank_of >= 0], minlength=2)
        key = (areas.max(), sum(remote_rows(rank_of, owner_of, 2)))
        best = key if best is None else min(best, key)
    return best


@pytest.mark.parametrize("name", ["full", "two documents", "star", "anti-diagonal"])
def test_two_ranks_do_as_well_as_the_best_assignment_of_blocks(name):
    size = 16
    mask = {
        "full": masks.full(size),
        "two documents": masks.documents([8, 8], within="full"),
        "star": masks.from_slices(
            size, size, [(0, 8, 0, 8, None, None), (8, 16, 0, 8, None, None)]
        ),
        "anti-diagonal": masks.from_slices(
            size, size, [(0, 8, 8, 16, None, None), (8, 16, 0, 8, None, None)]
        ),
    }[name]
    placed = placed_in_order(mask, 2)
    found = assign(mask, placed.owners, (8,), SAME, np.ones(2))
    rank_of, owner_of = pairs_of(found, size), np.arange(size) // 8
    areas = np.bincount(rank_of[rank_of >= 0], minlength=2)
    ours = (areas.max(), sum(remote_rows(rank_of, owner_of, 2)))
    assert ours <= best_of_all(mask.to_dense(), owner_of)


@given(
    case=any_square_mask(),
    cp_size=st.sampled_from([2, 3, 4, 8]),
    count=st.sampled_from([1, 2, 4]),
    kept=st.sampled_from(["k", "q"]),
    rest=st.booleans(),
    order=st.sampled_from(ORDERS),
    most_apart=st.sampled_from([1.0, 0.5, 0.25, 0.0]),
    route=st.sampled_from([direct, tree, ThroughNodes(2), ThroughNodes(2, tree=True)]),
)
@settings(max_examples=100)
def test_an_assignment_in_any_stages_and_by_any_route_is_a_plan_of_the_mask(
    case, cp_size, count, kept, rest, order, most_apart, route
):
    mask, allowed = case
    placed = placed_in_order(mask, cp_size)
    assigned = AssignedMask(placed, assign(mask, placed.owners, (2,), SAME, np.ones(cp_size)))
    staging = Staging(count, rest, kept, order, most_apart)
    both = assigned.in_pieces(kept).build(staging, route)
    plan = AttentionPlan(mask, config(), "by hand", placed.placement, both, both)
    check_laws(plan, allowed)


def test_local_pairs_fill_the_stages_of_ranks_that_have_more_of_them():
    """Rank 0 has a short document of its own beside a share of the long one; its stages become as long as others'."""
    mask = masks.documents([96, 416])
    placed = placed_in_order(mask, 4)
    assigned = AssignedMask(placed, assign(mask, placed.owners, (4,), SAME, np.ones(4)))
    apart, filled = (
        assigned.in_pieces("k").areas(Staging(4, True, "k", "tokens", most)) for most in (1.0, 0.25)
    )
    assert np.allclose(apart.sum(axis=0), filled.sum(axis=0))
    uneven = [(np.cumsum(one, axis=0)[:-1].std(axis=1)).mean() for one in (apart, filled)]
    assert uneven[1] < 0.7 * uneven[0]


@pytest.mark.parametrize("kept", ["k", "q"])
@pytest.mark.parametrize("order", ORDERS)
def test_a_row_of_the_kept_side_travels_once_to_each_rank_that_needs_it(order, kept):
    mask = masks.causal(512)
    placed = placed_in_order(mask, 8)
    assigned = AssignedMask(placed, assign(mask, placed.owners, (8,), SAME, np.ones(8)))
    owner_of = np.arange(512) // 64
    rank_of = pairs_of(assigned, 512)
    axis = 0 if kept == "k" else 1
    needed = sum(
        int(((rank_of == rank).any(axis=axis) & (owner_of != rank)).sum()) for rank in range(8)
    )
    for count in (1, 4):
        stages = assigned.in_pieces(kept).build(Staging(count, True, kept, order)).stages
        casts = [stage.cast(kept) for stage in stages]
        moved = sum(int(c.hops[0].rows_received(8).sum()) for c in casts if c is not None)
        assert moved == needed


def test_shares_load_every_link_alike_in_every_stage_and_tokens_do_not():
    """Eight ranks read one document: in stream order all begin with its first owner."""
    placed = placed_in_order(masks.full(512), 8)
    assigned = AssignedMask(placed, Assignment(placed.parts, placed.q_owner))
    busiest = {}
    for order in ORDERS:
        stages = assigned.in_pieces("k").build(Staging(4, False, "k", order)).stages[1:]
        hops = [stage.k_cast.hops[0].messages for stage in stages]
        sent = [np.bincount(m[:, 0], m[:, 3] - m[:, 2], minlength=8).max() for m in hops]
        busiest[order] = max(sent)
    assert busiest["shares"] == 7 * 64 // 4
    assert busiest["ring"] <= 2 * 64
    assert busiest["tokens"] >= 7 * 32


KNOWN = ("contiguous", "ring", "zigzag", "allgather", "ulysses", "usp", "magi")
PAIRS = Topology("nodes of two", 300.0, 250.0, 2, 200.0, 10.0, 5.0)


@pytest.mark.parametrize("topology", ["h100", PAIRS], ids=["one node", "nodes of two"])
@pytest.mark.parametrize("kind", ["log-normal", "one long", "causal"])
def test_auto_is_simulated_no_slower_than_the_schemes_it_knows(kind, topology):
    """The simulator lets ranks wait for each other, prices do not: a few per cent between them."""
    mask = masks.causal(8192) if kind == "causal" else packed(kind, 16_384, 24)
    options = {"num_heads": 16, "num_kv_heads": 4, "head_dim": 128, "topology": topology}
    seconds = {}
    for planner in ("auto", *KNOWN):
        plan = make_plan(mask, 8, config(planner, **options))
        seconds[planner] = sum(
            simulate_pass(plan, name).seconds for name in ("forward", "backward")
        )
    assert seconds["auto"] <= 1.03 * min(seconds.values()), seconds


@pytest.mark.parametrize(
    ("cp_size", "node_size", "kv_heads"), [(41, 8, 32), (34, 1, 32), (77, 8, 8)]
)
def test_compute_moves_also_where_groups_cannot_be_few(cp_size, node_size, kv_heads):
    """Ranks that do not divide into nodes, and nodes of one rank: no heads are exchanged, and keys alone take long."""
    topology = replace(get_topology("h100"), name="machine", node_size=node_size)
    options = CPConfig(num_heads=32, num_kv_heads=kv_heads, topology=topology)
    mask = masks.causal(512 * cp_size)
    names = ("auto", "contiguous", "zigzag", "double_ring")
    ours, *others = (
        sum(plan.stats(name)["makespan_ms"] for name in PASSES)
        for plan in (make_plan(mask, cp_size, replace(options, planner=one)) for one in names)
    )
    assert ours < 0.7 * min(others)


@pytest.mark.parametrize(
    ("num_documents", "cp_size", "window", "layers"),
    [(24, 8, 1023, 5), (60, 16, 1023, 5), (60, 16, 4095, 3), (100, 16, 1023, 5), (1, 8, 1023, 3)],
)
def test_one_placement_serves_window_and_full_layers_nearly_as_well_as_their_own(
    num_documents, cp_size, window, layers
):
    length = 8192 * cp_size
    full = packed("log-normal", length, num_documents)
    family = {"full": (full, 1.0), "window": (full & masks.sliding_window(length, window), layers)}
    options = config(num_heads=64, num_kv_heads=8, head_dim=128)

    def seconds(plan):
        return sum(makespan_seconds(plan, name) for name in ("forward", "backward"))

    together = make_plans(family, cp_size, options)
    ours = sum(weight * seconds(together[name]) for name, (_, weight) in family.items())
    alone = sum(
        weight * seconds(make_plan(mask, cp_size, options)) for mask, weight in family.values()
    )
    assert ours <= 1.05 * alone


def test_a_mask_that_comes_again_gets_the_same_plan_object():
    forget_plans()
    first = make_plan(masks.documents([40, 24]), 4, config())
    assert make_plan(masks.documents([40, 24]), 4, config()) is first
    assert make_plan(masks.documents([24, 40]), 4, config()) is not first
    assert make_plan(masks.documents([40, 24]), 4, config(num_stages=2)) is not first
    forget_plans()
    again = make_plan(masks.documents([40, 24]), 4, config())
    assert again is not first
    assert again.digest() == first.digest()


DIGESTS = """
from megatron_cp import mask as masks
from megatron_cp.config import CPConfig
from megatron_cp.plan import make_plan
for mask in (masks.causal(3000), masks.documents([700, 9, 1800, 64, 427]), masks.sliding_window(3000, 99)):
    for size in (3, 8, 16):
        config = CPConfig(num_heads=16, num_kv_heads=4, topology="h100")
        print(make_plan(mask, size, config).digest())
"""


def test_plans_are_the_same_in_another_process_with_another_hash_seed_and_thread_count():
    found = []
    for seed, threads in (("0", "1"), ("4711", "2")):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": threads}
        done = subprocess.run(
            [sys.executable, "-c", DIGESTS],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        found.append(done.stdout.split())
    assert len(found[0]) == 9
    assert found[0] == found[1]
