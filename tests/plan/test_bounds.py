"""No plan is below its bound; the bounds are the closed forms of the literature, and tight where they can be."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_cp import mask as masks
from megatron_cp.config import CPConfig, Topology
from megatron_cp.plan import PLANNERS, make_plan
from megatron_cp.plan.bounds.bounds import mask_extent, time_bound, volume_bound
from megatron_cp.plan.hardware.cost import load_bound_seconds
from megatron_cp.plan.hardware.simulate import simulate_pass
from megatron_cp.plan.placement.placement import tokens_per_rank
from megatron_cp.plan.schema import OwnRows
from tests.plan.cases import HEADS, config, packed
from tests.runtime.handmade import random_plan
from tests.strategies import attention_masks

SLACK = 1 - 1e-9  # rounding of sums in another order
PAIRS = Topology("nodes of two", 300.0, 250.0, 2, 200.0, 10.0, 5.0)
SLOW = Topology("slow links", 300.0, 250.0, 2, 2.0, 0.1, 50.0, contention=0.2)

MASKS = {
    "causal": masks.causal(1536),
    "full": masks.full(960),
    "window": masks.sliding_window(2048, 100),
    "both ways": masks.sliding_window(1111, 60, 60),
    "documents": packed("log-normal", 3000, 20),
    "full documents": packed("uniform", 2000, 9, within="full"),
    "one long": packed("one long", 2500, 30),
    "strided": masks.strided(1024),
    "hubs": masks.global_local(1024),
    "one token": masks.causal(1),
    "nothing": masks.from_slices(100, 100, []),
}


def check_plan(plan):
    for name in ("forward", "backward"):
        stats = plan.stats(name)
        assert stats["volume_bound"] * SLACK <= stats["volume_mean"]
        assert stats["bound_ms"] * SLACK <= stats["makespan_ms"]
        assert stats["load_bound_ms"] <= stats["bound_ms"] / SLACK
        assert stats["bound_ms"] * SLACK <= simulate_pass(plan, name).seconds * 1e3


@pytest.mark.parametrize("planner", sorted(PLANNERS))
@pytest.mark.parametrize("cp_size", [1, 2, 3, 8])
def test_no_plan_of_any_planner_is_below_its_bound(planner, cp_size):
    checked = 0
    for index, mask in enumerate(MASKS.values(), start=cp_size):
        kv_heads, topology = (HEADS, HEADS // 8)[index // 2 % 2], (PAIRS, SLOW)[index % 2]
        options = config(planner, num_kv_heads=kv_heads, topology=topology)
        try:
            plan = make_plan(mask, cp_size, options)
        except (ValueError, NotImplementedError):  # what a scheme does not serve
            continue
        check_plan(plan)
        checked += 1
    assert checked


@given(case=attention_masks(max_queries=24, square=True), seed=st.integers(0, 99))
@settings(max_examples=25)
def test_no_random_plan_is_below_its_bound(case, seed):
    """Random placements, relays, kept rows, head splits: anything that the schema allows."""
    mask, allowed = case
    if not len(allowed):
        return
    cp_size, degree = [(2, 1), (3, 1), (4, 1), (4, 2)][seed % 4]
    options = CPConfig(num_heads=4, num_kv_heads=2, head_dim=8, topology=SLOW)
    check_plan(random_plan(mask, cp_size, seed, options, head_degree=degree))


# ------------------------------------------------------------------ closed forms


def row_costs(head_dim, rho):
    """Query and key row of a forward pass there and back; partial results bring their lse."""
    return 1 + (head_dim + 1) / head_dim, 2 * rho


def balanced_volume(mask, cp_size, options):
    """Returns the least mean volume of ranks that have equal pairs, without a head split."""
    own = OwnRows.of_tokens(tokens_per_rank(mask.num_queries, cp_size, options))
    return volume_bound(np.full(1, mask.area() / cp_size), own, options, "forward", mask)


@pytest.mark.parametrize("cp_size", [4, 16, 64])
@pytest.mark.parametrize("heads", [(32, 32), (32, 8), (64, 8)])
@pytest.mark.parametrize("kind", ["full", "causal"])
def test_dense_masks_have_the_isoperimetric_bound(kind, heads, cp_size):
    rows = 256
    mask = getattr(masks, kind)(rows * cp_size)
    options = CPConfig(num_heads=heads[0], num_kv_heads=heads[1], head_dim=64)
    query, key = row_costs(64, heads[1] / heads[0])
    area = cp_size if kind == "full" else cp_size / 2 + (1 - 1 / rows) / 2 + 1 / (2 * rows)
    # causal: half of the rank's own square counts as well, because no pair of it can be used both ways
    is_wide = key * area >= query  # a rectangle of more rows than the rank's own
    rectangle = 2 * np.sqrt(query * key * area) - query - key
    expected = rectangle if is_wide else key * (area - 1)
    assert balanced_volume(mask, cp_size, options) == pytest.approx(max(0, expected), rel=1e-6)


def test_the_causal_bound_at_64_ranks_is_that_of_the_literature():
    """18.6 units at rho = 1, 5.75 at 1/8, within the lse and the half square that it leaves out."""
    for heads, published in (((32, 32), 18.6), ((64, 8), 5.75)):
        options = CPConfig(num_heads=heads[0], num_kv_heads=heads[1])
        found = balanced_volume(masks.causal(64 * 1024), 64, options)
        assert published <= found <= 1.02 * published


def test_documents_that_fit_their_ranks_need_not_move():
    options = CPConfig(num_heads=8, num_kv_heads=8)
    for within in ("causal", "full"):
        mask = masks.documents([128] * 32, within)
        assert balanced_volume(mask, 8, options) == 0
        load = load_bound_seconds(mask, 8, options, "forward")
        assert time_bound(mask, 8, options, "forward") == load


def test_a_window_has_to_move_half_its_halo():
    """Rows of a rank see `width` keys; what its own cannot give is a triangle of width^2 / 2 pairs."""
    width, rows, cp_size = 64, 512, 8
    mask = masks.sliding_window(rows * cp_size, width - 1)
    missing = mask.area() / cp_size - (rows * width - width * (width - 1) / 2)
    options = CPConfig(num_heads=8, num_kv_heads=8, head_dim=64)
    found = balanced_volume(mask, cp_size, options)
    # rows there cost 2 (key and value) or more than 2 (query and result): keys are cheaper
    assert found == pytest.approx(2 * missing / width / rows)


def test_a_head_split_over_all_ranks_moves_exactly_its_bound():
    for kv_heads in (24, 4):
        plan = make_plan(masks.causal(4800), 8, config("ulysses", num_kv_heads=kv_heads))
        for name in ("forward", "backward"):
            stats = plan.stats(name)
            assert stats["volume_bound"] == pytest.approx(stats["volume_mean"])


def test_a_bound_is_above_the_load_and_no_higher_for_heads_that_may_be_split():
    mask, options = masks.causal(4096), CPConfig(num_heads=8, num_kv_heads=8, topology=SLOW)
    bound = time_bound(mask, 8, options, "forward")
    assert bound > load_bound_seconds(mask, 8, options, "forward")
    unsplit = CPConfig(num_heads=1, num_kv_heads=1, head_dim=1024, topology=SLOW)
    assert bound <= time_bound(mask, 8, unsplit, "forward") / SLACK


# ------------------------------------------------------------------ brute force


def cheapest_by_area(allowed, query, key):
    """Returns the least total cost of any way to compute a 4 x 4 mask on two ranks, by rank 0's pairs."""
    pairs = np.argwhere(allowed)
    choice = np.arange(1 << len(pairs))[:, None] >> np.arange(len(pairs)) & 1  # 1: on rank 1
    best = {}
    for mine in itertools.combinations(range(4), 2):
        total = np.zeros(len(choice))
        for rank in (0, 1):
            foreign = [t for t in range(4) if (t in mine) == (rank == 1)]
            for token in foreign:
                for axis, weight in ((0, query), (1, key)):
                    touched = (choice[:, pairs[:, axis] == token] == rank).any(axis=1)
                    total += weight * touched
        sizes = len(pairs) - choice.sum(axis=1)
        for size in range(len(pairs) + 1):
            least = total[sizes == size].min()
            best[size] = min(best.get(size, np.inf), least)
    return best


FOUR = {
    "full": np.ones((4, 4), dtype=bool),
    "causal": np.tril(np.ones((4, 4), dtype=bool)),
    "window": np.tril(np.ones((4, 4), dtype=bool)) & ~np.tril(np.ones((4, 4), dtype=bool), -2),
    "two documents": np.kron(np.eye(2, dtype=bool), np.ones((2, 2), dtype=bool)),
    "hub": np.eye(4, dtype=bool) | (np.arange(4) == 0),
}


@pytest.mark.parametrize("name", sorted(FOUR))
@pytest.mark.parametrize("heads", [(4, 4), (4, 1)])
def test_the_volume_bound_is_below_every_way_to_compute_four_tokens_on_two_ranks(name, heads):
    options = CPConfig(num_heads=heads[0], num_kv_heads=heads[1], head_dim=64)
    mask = masks.from_dense(FOUR[name])
    query, key = row_costs(64, heads[1] / heads[0])
    for size, least in cheapest_by_area(FOUR[name], query, key).items():
        areas = np.array([size, FOUR[name].sum() - size])
        found = volume_bound(areas, OwnRows.of_tokens(2), options, "forward", mask)
        # two ranks of two rows each: mean over ranks, in units of two rows
        assert found <= least / 2 / 2 + 1e-12
    if name == "full" and heads == (4, 1):  # reached: each rank takes all keys for its two queries
        least = cheapest_by_area(FOUR[name], query, key)[8]
        found = volume_bound(np.array([8, 8]), OwnRows.of_tokens(2), options, "forward", mask)
        assert found == pytest.approx(least / 2 / 2) == pytest.approx(key)


# ------------------------------------------------------------------ what bounds know of a mask


@given(case=attention_masks(max_queries=30, square=True))
@settings(max_examples=80)
def test_extent_counts_the_busiest_row_and_column(case):
    mask, allowed = case
    extent = mask_extent(mask)
    assert extent.area == allowed.sum()
    assert extent.row_degree == allowed.sum(axis=1).max(initial=0)
    assert extent.key_degree == allowed.sum(axis=0).max(initial=0)
    is_one_sided = not np.triu(allowed, 1).any() or not np.tril(allowed, -1).any()
    assert extent.is_one_sided == is_one_sided


@given(case=attention_masks(max_queries=10, square=True), data=st.data())
@settings(max_examples=60)
def test_local_pairs_are_at_least_those_of_any_set_of_tokens(case, data):
    mask, allowed = case
    own = data.draw(st.integers(0, len(allowed)))
    most = max(
        (
            allowed[np.ix_(list(chosen), list(chosen))].sum()
            for chosen in itertools.combinations(range(len(allowed)), own)
        ),
        default=0,
    )
    assert mask_extent(mask).local_pairs(OwnRows.of_tokens(own)) >= most
