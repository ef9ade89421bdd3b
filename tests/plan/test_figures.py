"""Volumes against the closed forms of the literature, balance, and the promise of planner "auto"."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_cp import mask as masks
from megatron_cp.config import CPConfig, Topology
from megatron_cp.plan import AttentionPlan, Hop, Pass, Stage, Transfer, make_plan, make_plans
from megatron_cp.plan.hardware.makespan import makespan_seconds
from megatron_cp.plan.placement import by_area
from megatron_cp.plan.placement.placement import Placement
from megatron_cp.plan.price.double_ring import double_ring
from megatron_cp.plan.price.head_groups import HeadGroups
from megatron_cp.plan.price.keys_move import published_strategies
from megatron_cp.plan.transfer.head_split import fits_heads
from megatron_cp.plan.transfer.pass_builder import PassBuilder, PlacedMask
from megatron_cp.plan.transfer.passes import needed_keys_pass
from tests.plan.cases import PRICED, config, nodes_of, packed
from tests.strategies import attention_masks

TIE = 1.005  # "auto" prefers fewer bytes among plans whose predictions are so near
RATIOS = [(8, 8), (8, 2), (8, 1)]


@pytest.mark.parametrize("cp_size", [2, 4, 8])
@pytest.mark.parametrize("heads", RATIOS)
@pytest.mark.parametrize("planner", ["ring", "zigzag", "allgather"])
def test_ring_and_allgather_move_2_rho_times_p_minus_1(planner, heads, cp_size):
    options = config(planner, num_heads=heads[0], num_kv_heads=heads[1])
    plan = make_plan(masks.causal(64 * cp_size), cp_size, options)
    rho = heads[1] / heads[0]
    volume = 2 * rho * (cp_size - 1)
    for name, factor in (("forward", 1), ("backward", 2)):  # backward sends dk, dv back
        stats = plan.stats(name)
        assert stats["volume_mean"] == pytest.approx(factor * volume)
        assert stats["volume_max"] == pytest.approx(factor * volume)
        assert stats["link_max"] == pytest.approx(factor * volume)


@pytest.mark.parametrize("cp_size", [2, 4, 8])
@pytest.mark.parametrize("heads", RATIOS)
def test_ulysses_moves_two_query_and_two_key_rows_of_every_token(heads, cp_size):
    num_heads, num_kv_heads = heads
    options = config("ulysses", num_heads=num_heads, num_kv_heads=num_kv_heads)
    plan = make_plan(masks.causal(64 * cp_size), cp_size, options)
    keys = (
        max(num_kv_heads, cp_size) / num_heads
    )  # replicated where there are fewer heads than ranks
    volume = 2 * (1 + keys) * (cp_size - 1) / cp_size
    assert plan.stats("forward")["volume_mean"] == pytest.approx(volume)
    # backward: q, k, v, dout there and dq, dk, dv back
    backward = (3 + 4 * keys) * (cp_size - 1) / cp_size
    assert plan.stats("backward")["volume_mean"] == pytest.approx(backward)
    assert plan.stats("forward")["imbalance"] == pytest.approx(1.0)


@pytest.mark.parametrize("cp_size", [2, 4, 8])
def test_contiguous_causal_moves_rho_times_p_minus_1_on_average(cp_size):
    plan = make_plan(masks.causal(64 * cp_size), cp_size, config("contiguous"))
    stats = plan.stats("forward")
    assert stats["volume_mean"] == pytest.approx(cp_size - 1)
    assert stats["volume_max"] == pytest.approx(2 * (cp_size - 1))
    rows = 64
    ideal = (2 * cp_size - 1) / cp_size  # for long documents; diagonal blocks add a little
    exact = (rows * (cp_size - 1) + (rows + 1) / 2) / ((rows * cp_size + 1) / 2)
    assert stats["imbalance"] == pytest.approx(exact)
    assert stats["imbalance"] == pytest.approx(ideal, rel=0.02)


def test_contiguous_documents_move_what_lies_left_of_each_edge():
    lengths = [100, 300, 50, 190]
    plan = make_plan(masks.documents(lengths), 4, config("contiguous"))
    starts = np.cumsum([0, *lengths])
    edges = [r * 160 for r in range(4)]
    left = [edge - starts[np.searchsorted(starts, edge, side="right") - 1] for edge in edges]
    expected = np.array(left) * 2 / 160  # a key and a value row each, rho = 1
    moved = np.array([float(line.split()[3]) for line in _rank_lines(plan)])
    assert np.allclose(moved, expected, atol=0.006)
    assert plan.stats("forward")["volume_max"] == pytest.approx(expected.max())


def _rank_lines(plan):
    block = str(plan).split("backward:")[0]
    return [line for line in block.splitlines() if line.startswith("     ")]


def test_a_sliding_window_costs_its_halo_and_no_more():
    plan = make_plan(masks.sliding_window(8 * 512, 63), 8, config())
    stats = plan.stats("forward")
    assert stats["volume_max"] == pytest.approx(2 * 63 / 512)
    assert stats["imbalance"] <= 1.01


# ------------------------------------------------------------------ auto

KINDS = ["log-normal", "uniform", "one long", "equal"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", [(32, 32), (32, 8), (64, 8)])
@pytest.mark.parametrize("seed", [0, 1])
def test_packed_causal_documents_are_balanced_within_5_percent(kind, heads, seed):
    mask = packed(kind, 262_144, 100, seed)
    options = CPConfig(num_heads=heads[0], num_kv_heads=heads[1], head_dim=128)
    plan = make_plan(mask, 8, options)
    for name in ("forward", "backward"):
        assert plan.stats(name)["imbalance"] <= 1.05


def predicted(plan):
    return makespan_seconds(plan, "forward") + makespan_seconds(plan, "backward")


CASES = {
    "causal": masks.causal(6000),
    "full": masks.full(4096),
    "window": masks.sliding_window(9000, 500),
    "one token": masks.causal(1),
    "nothing to compute": masks.from_slices(100, 100, []),
    "prime": masks.causal(4099),
    **{kind: packed(kind, 20_000, 30) for kind in KINDS},
    "tiny documents": packed("log-normal", 3000, 200),
}
PAIRS = Topology("nodes of two", 300.0, 250.0, 2, 200.0, 10.0, 5.0)
GROUPS = [
    (1, "h100"),
    (2, "cpu"),
    (2, "h100"),
    (3, "a800"),
    (4, PAIRS),
    (8, "h100"),
    (8, PAIRS),
    (16, "h100"),
]
HEADS = [(1, 1), (16, 16), (16, 2)]


@pytest.mark.parametrize("place", range(len(GROUPS)))
def test_auto_is_never_predicted_slower_than_a_published_scheme(place):
    """Every mask on every machine, each with the next head counts: every two of the three meet."""
    cp_size, topology = GROUPS[place]
    for number, (name, mask) in enumerate(CASES.items(), place):
        heads = HEADS[number % len(HEADS)]
        options = {
            "num_heads": heads[0],
            "num_kv_heads": heads[1],
            "head_dim": 128,
            "topology": topology,
        }
        plan = make_plan(mask, cp_size, config("auto", **options))
        ours = predicted(plan)
        options["token_multiple"] = plan.tokens_per_rank  # the same padding for every scheme
        for planner in PRICED:
            scheme = config(planner, **options)
            if planner == "ulysses" and not fits_heads(cp_size, scheme):
                continue
            other = predicted(make_plan(mask, cp_size, scheme))
            assert ours <= other * TIE, f"{planner} on {name}, {cp_size} ranks, {heads}"


def test_a_family_is_never_predicted_slower_than_a_published_scheme_for_all_its_masks():
    full = packed("log-normal", 20_000, 30)
    window = full & masks.sliding_window(20_000, 256)
    weights = {"full": (full, 6), "window": (window, 26)}
    for cp_size in (2, 8):
        plans = make_plans(weights, cp_size, config())
        ours = sum(weights[name][1] * predicted(plan) for name, plan in plans.items())
        rows = plans["full"].tokens_per_rank  # the same padding for every scheme
        for planner in PRICED:
            others = make_plans(weights, cp_size, config(planner, token_multiple=rows))
            theirs = sum(weights[name][1] * predicted(plan) for name, plan in others.items())
            assert ours <= theirs * TIE, planner


@pytest.mark.parametrize("planner", ["contiguous", "ring", "zigzag", "allgather", "ulysses"])
@pytest.mark.parametrize("cp_size", [2, 3, 8])
def test_the_price_of_a_published_scheme_is_the_prediction_of_its_plan(planner, cp_size):
    for mask in (packed("log-normal", 5003, 12), masks.causal(1000), masks.sliding_window(777, 9)):
        options = config(planner, topology="a800")
        plan = make_plan(mask, cp_size, options)
        degree = cp_size if planner == "ulysses" else 1
        groups = HeadGroups.of(
            mask, Placement.of_chunks(plan.global_from_local, 1), options, degree
        )
        prices = [sum(c.seconds for c in both.values()) for both in published_strategies(groups)]
        assert min(abs(price / predicted(plan) - 1) for price in prices) < 1e-9


@pytest.mark.parametrize("node_size", [2, 4, 8])
@pytest.mark.parametrize("kv_heads", [24, 4])
def test_the_price_of_the_double_ring_is_from_below_and_exact_once_it_is_refined(
    node_size, kv_heads
):
    for mask in (packed("log-normal", 5008, 12), masks.causal(1024), masks.full(512)):
        options = config(topology=nodes_of(node_size), num_kv_heads=kv_heads)
        plan = make_plan(mask, 8, replace(options, planner="double_ring"))
        groups = HeadGroups.of(mask, Placement.of_chunks(plan.global_from_local, 1), options, 1)
        priced = double_ring(groups, math.inf)
        if not priced:  # one node, and keys go round in both passes: the ring
            assert node_size == 8
            assert kv_heads == 4
            continue
        for name, option in priced[0].items():
            exact = makespan_seconds(plan, name)
            assert option.seconds <= exact * (1 + 1e-9)
            refined = option if option.refine is None else option.refine()
            assert refined.seconds == pytest.approx(exact, rel=1e-9)
            assert (option.refine is None) == (node_size == 8)


# ------------------------------------------------------------------ what prices are made of


@given(case=attention_masks(max_queries=30, square=True), cp_size=st.sampled_from([1, 2, 3, 4]))
@settings(max_examples=60)
def test_figures_of_a_placement_count_pairs_and_needed_rows_between_ranks(case, cp_size):
    mask, allowed = case
    rows = -(-len(allowed) // cp_size)
    placement = np.random.default_rng(len(allowed)).permutation(cp_size * rows).reshape(cp_size, -1)
    placed = PlacedMask(mask, placement)
    whole = np.zeros((placement.size, placement.size), dtype=bool)
    whole[: len(allowed), : len(allowed)] = allowed
    for reader, queries in enumerate(placement):
        for owner, keys in enumerate(placement):
            block = whole[np.ix_(queries, keys)]
            assert placed.areas_by_owner[reader, owner] == block.sum()
            expected = 0 if reader == owner else block.any(axis=0).sum()
            assert placed.rows_by_owner[owner, reader] == expected


@given(case=attention_masks(max_queries=30, square=True), chunk=st.integers(1, 9))
@settings(max_examples=60)
def test_a_chunk_table_holds_the_area_of_every_two_chunks_and_no_fewer_rows_than_needed(
    case, chunk
):
    mask, allowed = case
    num_chunks = -(-len(allowed) // chunk)
    table = by_area.chunk_table(mask, chunk, num_chunks)
    for i in range(num_chunks):
        for j in range(num_chunks):
            block = allowed[i * chunk : (i + 1) * chunk, j * chunk : (j + 1) * chunk]
            assert table.areas[i, j] == block.sum()
            assert block.any(axis=0).sum() <= table.needs[i, j] <= chunk


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cp_size", [2, 3, 8])
def test_deals_give_every_rank_equally_many_chunks_and_exchanges_balance_them(kind, cp_size):
    table = by_area.chunk_table(packed(kind, 24_000, 40), 24_000 // (cp_size * 20), cp_size * 20)
    count = cp_size * 20
    for start in (np.arange(count).reshape(cp_size, -1), by_area.zigzag_chunks(count, cp_size)):
        owned = by_area.exchange_chunks(start, table, 0.02, np.ones(cp_size))
        assert sorted(owned.reshape(-1).tolist()) == list(range(count))
        loads = table.chunk_areas[owned].sum(axis=1)
        assert loads.max() <= 1.03 * loads.mean()


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_every_stage_of_needed_keys_loads_every_link_alike(num_stages):
    mask = packed("log-normal", 9000, 12)
    placed = PlacedMask(mask, np.arange(9000).reshape(4, -1))
    counts = []
    for stage in needed_keys_pass(placed, num_stages).stages[1:]:
        rows = np.zeros((4, 4), dtype=int)
        for src, dst, start, stop in stage.k_cast.hops[0].messages.tolist():
            rows[src, dst] += stop - start
        counts.append(rows)
    assert len(counts) == num_stages
    assert np.ptp(np.stack(counts), axis=0).max() <= 1


def test_a_stage_costs_what_its_slowest_link_and_its_pairs_cost():
    """Two ranks, one node: 4 rows come while 100 pairs are computed; then 60 pairs on them."""
    topology = Topology(
        "made up", 1e-6, 1e-6, 8, 1e-3, 1.0, 1e6
    )  # 1e6 FLOP/s, 1e6 B/s, 1 s latency
    options = CPConfig(head_dim=16, topology=topology)
    local = masks.full(10)
    own = (local, masks.from_slices(10, 10, []))
    remote = (masks.from_slices(10, 14, [(0, 10, 10, 14), (0, 10, 0, 2)]), own[1])
    stages = (Stage(own), Stage(remote, k_cast=Transfer((Hop([(1, 0, 0, 4)]),))))
    both = Pass(stages)
    plan = AttentionPlan(
        masks.full(20), options, "by hand", np.arange(20).reshape(2, 10), both, both
    )
    pair = 4 * 16 / 1e6  # two matrix products of 16 multiply-adds
    arrive = 1 + 4 * (16 + 16) * 2 / 1e6
    assert makespan_seconds(plan, "forward") == pytest.approx(max(100 * pair, arrive) + 60 * pair)
    leave = 1 + 4 * (16 + 16) * 4 / 1e6  # gradients return in fp32
    expected = max(250 * pair, arrive) + 150 * pair + leave
    assert makespan_seconds(plan, "backward") == pytest.approx(expected)


def test_silent_hops_cost_no_latency():
    placed = PlacedMask(masks.documents([8, 8]), np.arange(16).reshape(2, 8))
    builder = PassBuilder(placed)
    builder.add_own()
    silent = Stage(builder.build().stages[0].work, k_cast=Transfer((Hop(np.zeros((0, 4))),)))
    both = Pass((silent,))
    plan = AttentionPlan(placed.mask, config(), "by hand", placed.placement, both, both)
    without = make_plan(placed.mask, 2, config("contiguous"))
    assert makespan_seconds(plan, "forward") == makespan_seconds(without, "forward")
