"""Ranks of different speed: fair shares, prices, bounds, and what is refused."""

import functools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_cp import mask as masks
from megatron_cp.config import CPConfig, Topology
from megatron_cp.plan import PLANNERS, make_plan, plan_on_placement
from megatron_cp.plan.bounds.best_cases import BEST_CASES, best_case_seconds
from megatron_cp.plan.compute.blocks import Problem
from megatron_cp.plan.compute.local_search import improved
from megatron_cp.plan.hardware.makespan import makespan_seconds, transfer_shares
from megatron_cp.plan.hardware.rows import RowCost
from megatron_cp.plan.hardware.simulate import simulate_pass
from megatron_cp.plan.placement.by_documents import Ranks, whole_documents
from megatron_cp.plan.price.head_groups import HeadGroups
from megatron_cp.plan.price.pairs_move import move_compute, move_inside_nodes, stay_at_home
from megatron_cp.plan.schema import PASSES
from megatron_cp.plan.transfer.pass_builder import PlacedMask
from tests.plan.cases import config, packed
from tests.plan.golden import number_of
from tests.plan.machines import speeds_of

# Rows cost next to nothing here: what is left is how pairs are divided.
LINKS_ARE_FAST = Topology("fast links", 300.0, 250.0, 64, 1e6, 1e6, 0.0)
MASKS = {
    "causal": masks.causal(2400),
    "full": masks.full(1200),
    "window": masks.sliding_window(4800, 300),
    "log-normal": packed("log-normal", 4800, 24),
    "one long": packed("one long", 4800, 40),
    "equal": packed("equal", 4800, 48),
}


def pairs_of(plan, pass_name="forward"):
    """Returns the pairs of each rank, counted row by row."""
    degree = plan.get_pass(pass_name).head_degree
    totals = np.zeros(plan.cp_size)
    for stage in plan.get_pass(pass_name).stages:
        for rank, work in enumerate(stage.work):
            for q_start, q_end, k_start, k_end, lo, hi in work.array.tolist():
                q = np.arange(q_start, q_end)
                last, first = np.minimum(k_end, q + hi + 1), np.maximum(k_start, q + lo)
                totals[rank] += np.maximum(last - first, 0).sum()
    return totals / degree


@functools.cache
def num_pairs(name):
    """Returns the pairs of a mask, counted one by one, once for all tests."""
    return int(MASKS[name].to_dense().sum())


def fair_seconds(name, speeds, options):
    """Returns the time of both passes if pairs divide by speed and nothing moves."""
    row = options.topology
    flops = 4.0 * options.num_heads * options.head_dim * num_pairs(name) / sum(speeds)
    return flops / (row.forward_tflops * 1e12) + 2.5 * flops / (row.backward_tflops * 1e12)


@pytest.mark.parametrize("name", sorted(MASKS))
@pytest.mark.parametrize("cp_size", [2, 3, 4, 8])
def test_a_rank_at_half_speed_gets_half_of_the_others_pairs_and_nobody_waits(name, cp_size):
    mask = MASKS[name]
    for slow in (0, cp_size - 1):
        speeds = tuple(0.5 if rank == slow else 1.0 for rank in range(cp_size))
        options = config(topology=LINKS_ARE_FAST, num_kv_heads=4, rank_speeds=speeds)
        plan = make_plan(mask, cp_size, options)
        pairs = pairs_of(plan)
        # The search ends within 1 % of the bound; what others then have too much, the slow rank has too little.
        shares = pairs / speeds * sum(speeds) / pairs.sum()
        assert shares.max() <= 1.015
        assert shares[slow] >= 0.95
        assert len({len(ids) for ids in plan.global_from_local}) == 1  # tokens stay equal
        seconds = sum(makespan_seconds(plan, one) for one in PASSES)
        fair = fair_seconds(name, speeds, options)
        assert fair * (1 - 1e-9) <= seconds <= 1.03 * fair
        assert plan.stats()["imbalance"] == pytest.approx(
            max(pairs / speeds) * sum(speeds) / pairs.sum()
        )
        assert plan.stats()["load_bound_ms"] + plan.stats("backward")[
            "load_bound_ms"
        ] == pytest.approx(fair * 1e3)


@given(
    data=st.data(), cp_size=st.sampled_from([2, 3, 5, 8, 12]), name=st.sampled_from(sorted(MASKS))
)
@settings(max_examples=40, deadline=None)
def test_pairs_follow_any_speeds(data, cp_size, name):
    speeds = data.draw(speeds_of(cp_size)) or (1.0,) * cp_size
    mask = MASKS[name]
    options = config(topology=LINKS_ARE_FAST, num_kv_heads=4, rank_speeds=speeds)
    plan = make_plan(mask, cp_size, options)
    assert max(pairs_of(plan) / speeds) <= 1.05 * pairs_of(plan).sum() / sum(speeds)
    seconds = sum(makespan_seconds(plan, one) for one in PASSES)
    assert seconds <= 1.05 * fair_seconds(name, speeds, options)


@pytest.mark.parametrize("planner", sorted(set(PLANNERS) - {"auto"}))
def test_published_schemes_know_no_speeds_and_are_priced_with_them(planner):
    mask, speeds = packed("equal", 960, 8), (1.0, 0.5, 2.0, 1.0)
    plain = config(planner, topology=LINKS_ARE_FAST)
    slow = replace(plain, rank_speeds=speeds)
    plan, same = make_plan(mask, 4, plain), make_plan(mask, 4, slow)
    assert number_of(plan) == number_of(same)
    assert plan.digest() != same.digest()  # ranks that disagree about speeds are noticed
    for name in PASSES:
        stages = np.array([[work.area() for work in s.work] for s in same.get_pass(name).stages])
        flops = 4.0 * 24 * 64 * stages / same.get_pass(name).head_degree / np.array(speeds)
        rate, times = (300e12, 1.0) if name == "forward" else (250e12, 2.5)
        least = (times * flops / rate).sum(axis=0).max()
        assert makespan_seconds(same, name) == pytest.approx(least, rel=0.05)
        assert simulate_pass(same, name).seconds >= least * (1 - 1e-9)
        if planner in BEST_CASES:
            below = best_case_seconds(planner, mask, 4, slow, name)
            assert below <= makespan_seconds(same, name) * (1 + 1e-9)


def test_a_head_group_is_as_fast_as_its_slowest_rank():
    """Members of a group compute the same pairs, each for its heads."""
    mask, speeds = masks.full(960), (1.0, 0.25, 1.0, 1.0)
    options = config("ulysses", topology=LINKS_ARE_FAST, rank_speeds=speeds)
    plan = make_plan(mask, 4, options)
    alone = 4.0 * 24 * 64 * 960 * 960 / 4 / 0.25 / 300e12
    assert makespan_seconds(plan, "forward") == pytest.approx(alone, rel=0.02)
    assert plan.stats()["imbalance"] == pytest.approx(3.25 / 4 / 0.25)
    groups = HeadGroups.of(mask, PlacedMask(mask, plan.global_from_local).tokens, options, 2)
    assert groups.speeds.tolist() == [0.25, 1.0]
    dealt = np.bincount(move_compute(groups).ranks, minlength=2)
    assert dealt.min() > 0
    areas = [
        sum(_area(row) for row in move_compute(groups).parts[move_compute(groups).ranks == g])
        for g in (0, 1)
    ]
    assert areas[0] / areas[1] == pytest.approx(0.25, rel=0.01)


def _area(row):
    q_start, q_end, k_start, k_end, lo, hi = row.tolist()
    q = np.arange(q_start, q_end)
    return int(np.maximum(np.minimum(k_end, q + hi + 1) - np.maximum(k_start, q + lo), 0).sum())


def test_inside_nodes_pairs_move_by_speed_and_no_pair_leaves_its_node():
    mask, speeds = masks.documents([240, 240], "full"), (1.0, 0.5, 1.0, 1.0)
    options = config(topology=replace(LINKS_ARE_FAST, node_size=2), rank_speeds=speeds)
    tokens = np.arange(480).reshape(4, 120)
    groups = HeadGroups.of(mask, PlacedMask(mask, tokens).tokens, options, 1)
    found = move_inside_nodes(groups)
    areas, home = np.zeros(4), found.parts[:, 0] // 240
    for row, rank, node in zip(found.parts, found.ranks, home, strict=True):
        areas[rank] += _area(row)
        assert rank // 2 == node
    assert areas == pytest.approx(np.array([2 / 3, 1 / 3, 1 / 2, 1 / 2]) * 240 * 240, rel=0.01)
    even = replace(options, rank_speeds=None)
    alike = HeadGroups.of(mask, PlacedMask(mask, tokens).tokens, even, 1)
    assert move_inside_nodes(alike) is None


def test_documents_go_to_ranks_by_speed():
    """Twelve documents on three ranks, all ranks full: the slow one gets those of few pairs."""
    lengths = np.array([40] * 6 + [8] * 30)
    bounds, speeds = np.r_[0, np.cumsum(lengths)], np.array([1.0, 1.0, 0.25])
    placed, _ = whole_documents(bounds, lengths[:, None] ** 2.0, Ranks(speeds, (3,)), 160, 1.0)
    document = np.searchsorted(bounds, placed.tokens, side="right") - 1
    times = (lengths[document].sum(axis=1)) / speeds  # each token of a document has as many pairs
    equal, _ = whole_documents(bounds, lengths[:, None] ** 2.0, Ranks(np.ones(3), (3,)), 160, 1.0)
    document = np.searchsorted(bounds, equal.tokens, side="right") - 1
    assert times.max() < 0.7 * (lengths[document].sum(axis=1) / speeds).max()
    assert np.array_equal(np.sort(placed.tokens, axis=None), np.arange(480))


def test_a_slow_rank_leaves_a_smaller_share_to_rows_under_way():
    """The rows are the same and its stage takes twice as long: the transfer's part of it is half."""
    row = Topology("t", 300.0, 250.0, 8, 40.0, 20.0, 5.0, 0.3)
    options, mask = config("contiguous", topology=row, num_kv_heads=4), masks.full(1 << 15)
    plain = make_plan(mask, 4, options)
    slow = make_plan(mask, 4, replace(options, rank_speeds=(0.5, 1.0, 1.0, 1.0)))
    fast, half = (transfer_shares(plan, "forward", 0)[0] for plan in (plain, slow))
    assert 4 / 132 < half < fast < 0.3
    assert (1 / half - 1) == pytest.approx(2 * (1 / fast - 1))
    assert transfer_shares(plain, "forward", 1) == transfer_shares(slow, "forward", 1)


@pytest.mark.parametrize("node_size", [2, 4])
def test_a_local_search_divides_by_speed(node_size):
    mask, speeds = masks.causal(256), np.array([1.0, 1.0, 0.5, 1.0])
    placed = PlacedMask(mask, np.arange(256).reshape(4, 64))
    problem = Problem(placed, RowCost(2.0, 1.0), 1.0, (1e-6, 1e-5), node_size, 0.1, speeds)
    start = stay_at_home(HeadGroups(mask, CPConfig(), 1, placed))
    home = np.zeros(4)
    np.add.at(home, start.ranks, [_area(row) for row in start.parts])
    found = improved(problem, start)
    dealt = np.zeros(4)
    np.add.at(dealt, found.ranks, [_area(row) for row in found.parts])
    assert dealt.sum() == home.sum() == 256 * 257 // 2
    assert (dealt / speeds).max() <= 1.25 * dealt.sum() / speeds.sum() < (home / speeds).max()


def test_a_plan_shows_speeds_and_shares_of_what_is_fair():
    speeds = (1.0, 0.5, 1.0)
    plan = make_plan(MASKS["causal"], 3, config(topology=LINKS_ARE_FAST, rank_speeds=speeds))
    head = next(line for line in str(plan).splitlines() if line.split()[:1] == ["rank"])
    assert head.split()[:4] == ["rank", "speed", "pairs", "share"]
    rows = [
        line.split() for line in str(plan).split("backward:")[0].splitlines() if line[:5] == "     "
    ]
    pairs = pairs_of(plan)
    for rank, row in enumerate(rows):
        assert float(row[1]) == speeds[rank] and float(row[2]) == pytest.approx(pairs[rank], abs=1)
        share = pairs[rank] / speeds[rank] * sum(speeds) / pairs.sum()
        assert float(row[3]) == pytest.approx(share, abs=6e-4)


def test_speeds_of_the_topology_hold_where_the_config_has_none():
    speeds = (1, 0.5)
    row = replace(LINKS_ARE_FAST, rank_speeds=speeds)
    by_row = make_plan(MASKS["causal"], 2, config(topology=row))
    by_config = make_plan(MASKS["causal"], 2, config(topology=LINKS_ARE_FAST, rank_speeds=speeds))
    assert number_of(by_row) == number_of(by_config)
    assert makespan_seconds(by_row, "forward") == makespan_seconds(by_config, "forward")
    with pytest.raises(
        ValueError, match=r"rank_speeds=\(1.0, 1.0\) differ from .*leave them out here or there"
    ):
        config(topology=row, rank_speeds=(1, 1))


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("speeds", "error", "fragments"),
    [
        ((1, 0), ValueError, ["rank_speeds[1]=0 ", "from 0.01 to 100", "leave out of the group"]),
        ((1, -1.5), ValueError, ["rank_speeds[1]=-1.5 "]),
        ((float("nan"), 1), ValueError, ["rank_speeds[0]=nan "]),
        ((float("inf"), 1), ValueError, ["rank_speeds[0]=inf "]),
        ((1, 1000), ValueError, ["rank_speeds[1]=1000 "]),
        ((), ValueError, ["rank_speeds=() must be one number per context rank"]),
        (
            "1,1",
            TypeError,
            ["rank_speeds='1,1' must be one number per context rank", "(1, 1, 0.5, 1)"],
        ),
        ((1, "x"), TypeError, ["rank_speeds=(1, 'x')"]),
        ((1, True), TypeError, ["rank_speeds=(1, True)"]),
        (0.5, TypeError, ["rank_speeds=0.5 "]),
        ({1: 1}, TypeError, ["rank_speeds={1: 1} "]),
    ],
)
def test_wrong_speeds_are_refused_in_one_line(speeds, error, fragments):
    for make in (
        lambda: CPConfig(rank_speeds=speeds),
        lambda: replace(LINKS_ARE_FAST, rank_speeds=speeds),
    ):
        with pytest.raises(error) as caught:
            make()
        assert "\n" not in str(caught.value)
        for fragment in fragments:
            assert fragment in str(caught.value)


def test_one_speed_for_each_rank_is_asked_for():
    options = config(rank_speeds=(1, 0.5, 1))
    tokens = np.arange(64).reshape(2, 32)
    for call in (
        lambda: make_plan(masks.causal(64), 2, options),
        lambda: plan_on_placement(masks.causal(64), tokens, options),
        lambda: simulate_pass(
            make_plan(masks.causal(64), 2, config()), "forward",
            topology=replace(LINKS_ARE_FAST, rank_speeds=(1, 0.5, 1)),
        ),
    ):  # fmt: skip
        with pytest.raises(
            ValueError,
            match=r"rank_speeds=\(1.0, 0.5, 1.0\) are 3 for cp_size=2; .* give 2 numbers",
        ):
            call()


def test_under_a_window_a_slow_rank_of_many_gives_up_half_of_its_pairs():
    """Heads exchanged in pairs would make its neighbour as slow: with 64 ranks no group may be larger than a rank."""
    speeds = (*[1.0] * 63, 0.5)
    options = CPConfig(num_heads=32, num_kv_heads=8, rank_speeds=speeds)
    plan = make_plan(masks.sliding_window(64 << 13, 4095), 64, options)
    fair = sum(pairs_of(plan)) / sum(speeds)
    assert max(np.divide(pairs_of(plan), speeds)) < 1.1 * fair
    assert pairs_of(plan)[63] < 0.6 * np.median(pairs_of(plan))
    assert plan.forward.head_degree == 1


def test_speeds_may_be_a_list_and_are_numbers_then():
    assert CPConfig(rank_speeds=[1, 2]).rank_speeds == (1.0, 2.0)
    assert hash(CPConfig(rank_speeds=[1, 2])) == hash(CPConfig(rank_speeds=(1.0, 2.0)))


def test_a_config_without_wishes_has_the_digest_that_it_had_before_there_were_any():
    """Digests of both plans: ranks have no speeds, topologies no more levels; a scheme's plan is always the same."""
    row = Topology("three to a node", 300.0, 250.0, 3, 200.0, 20.0, 5.0)
    options = {"planner": "zigzag", "num_heads": 6, "num_kv_heads": 6}
    digests = [
        make_plan(masks.causal(4096), 6, CPConfig(**options, **more)).digest()
        for more in ({}, {"topology": row})
    ]
    assert digests == [
        "28d2fdad400d04e7ca0d752f670a9d61e6fc3fd4d0e293b9bbce6b659080e50e",
        "8b20b6c6d8b9d6a5ca14ae277c261ecc5e4f8dceeca299ed1a18a7115db116bc",
    ]
