"""Levels beyond nodes and shared network ports: prices against a scalar recount, and plans on any machine."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_cp import mask as masks
from megatron_cp.config import CPConfig, Level, Topology
from megatron_cp.plan import PLANNERS, forget_plans, make_plan
from megatron_cp.plan.bounds.bounds import time_bound
from megatron_cp.plan.compute.bisection import assign
from megatron_cp.plan.hardware.cost import hop_movement
from megatron_cp.plan.hardware.links import Links
from megatron_cp.plan.hardware.makespan import makespan_seconds
from megatron_cp.plan.hardware.rows import RowCost
from megatron_cp.plan.hardware.simulate import simulate_pass
from megatron_cp.plan.placement.by_documents import Ranks, group_sizes, whole_documents
from megatron_cp.plan.schema import PASSES
from megatron_cp.plan.transfer.pass_builder import PlacedMask
from tests.oracles.seconds import hop_seconds, predicted_seconds
from tests.plan.cases import config, packed
from tests.plan.machines import machines, speeds_of
from tests.plan.test_never_slower import CONTAINED
from tests.runtime.handmade import random_plan
from tests.strategies import attention_masks

# Nodes of two with one port, racks of four, two of them in a pod; moving rows takes compute.
PODS = Topology(
    "pods", 300.0, 250.0, 2, 200.0, 20.0, 5.0, 0.3,
    outer_levels=(Level(4, 8.0, 12.0), Level(8, 5.0)), nics_per_node=1,
)  # fmt: skip


# ------------------------------------------------------------------ links


@given(machine=machines(), data=st.data(), cp_size=st.sampled_from([2, 3, 5, 8, 12, 24]))
@settings(max_examples=80)
def test_a_hop_takes_as_long_as_its_busiest_link_on_any_machine(machine, data, cp_size):
    ends = st.tuples(st.integers(0, cp_size - 1), st.integers(0, cp_size - 1), st.integers(1, 9))
    messages = [(s, d, 0, n) for s, d, n in data.draw(st.lists(ends, max_size=30)) if s != d]
    sent, received, latency = hop_seconds(messages, 1.0, machine)
    src, dst, _, rows = np.array(messages, dtype=np.int64).reshape(-1, 4).T
    found = hop_movement(src, dst, rows, cp_size, Links.of(machine))
    busiest = [max(sent.get(rank, 0.0), received.get(rank, 0.0)) for rank in range(cp_size)]
    assert found.seconds_per_byte == pytest.approx(np.array(busiest), rel=1e-12)
    assert found.latency == pytest.approx(max(latency.values(), default=0.0))


def test_rows_out_of_a_rack_use_the_network_of_their_node_and_of_their_rack():
    """Rank 0 sends 6 bytes into its node, 4 into its rack and 2 beyond: 200, 20 and 8 GB/s."""
    src, dst, rows = np.array([0, 0, 0]), np.array([1, 2, 4]), np.array([6, 4, 2])
    racks = replace(PODS, nics_per_node=None)
    found = hop_movement(src, dst, rows, 8, Links.of(racks))
    assert found.seconds_per_byte[0] == pytest.approx(max(6 / 200, (4 + 2) / 20, 2 / 8) * 1e-9)
    assert found.seconds_per_byte[[1, 2, 4]] == pytest.approx(
        np.array([6 / 200, 4 / 20, 2 / 8]) * 1e-9
    )
    assert found.latency == pytest.approx(12e-6)
    near = hop_movement(src[:2], dst[:2], rows[:2], 8, Links.of(racks))
    assert near.latency == pytest.approx(5e-6)


def test_ranks_of_a_node_share_its_ports():
    """Four ranks send 3 bytes each out of their node: through two ports twice as long as through four."""
    row = Topology("t", 300.0, 250.0, 4, 200.0, 10.0, 5.0)
    src, dst = np.arange(4), np.arange(4, 8)

    def seconds(ranks, nics):
        links = Links.of(replace(row, nics_per_node=nics))
        return hop_movement(src[:ranks], dst[:ranks], np.full(ranks, 3), 8, links).seconds_per_byte

    for ranks, nics, times in ((4, None, 1), (4, 4, 1), (4, 2, 2), (4, 1, 4), (2, 1, 2), (1, 1, 1)):
        found = seconds(ranks, nics)
        assert found[:ranks] == pytest.approx(np.full(ranks, times * 3 / 10 * 1e-9))
        assert not found[ranks:4].any()  # who sends nothing does not wait
    # Head groups of two: those at both places of a group send at once.
    halves = Links.of(replace(row, nics_per_node=2), degree=2)
    groups = hop_movement(src[:2], src[2:], np.full(2, 3), 4, halves)
    assert groups.seconds_per_byte == pytest.approx(np.full(4, 2 * 3 / 10 * 1e-9))


# ------------------------------------------------------------------ prices of plans


@given(
    case=attention_masks(max_queries=24, square=True),
    machine=machines(node_sizes=(1, 2, 3)),
    seed=st.integers(0, 99),
    data=st.data(),
)
@settings(max_examples=60)
def test_random_plans_are_predicted_as_a_scalar_recount_says_and_not_below_the_bound(
    case, machine, seed, data
):
    mask, allowed = case
    if not len(allowed):
        return
    cp_size, degree = [(2, 1), (3, 1), (4, 2), (6, 1), (6, 2), (8, 4)][seed % 6]
    speeds = data.draw(speeds_of(cp_size))
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    options = CPConfig(topology=machine, rank_speeds=speeds, **shape)
    plan = random_plan(mask, cp_size, seed, options, head_degree=degree)
    for name in PASSES:
        seconds = makespan_seconds(plan, name)
        assert seconds == pytest.approx(predicted_seconds(plan, name, machine), rel=1e-9)
        bound = time_bound(mask, cp_size, options, name, plan.own_rows)
        assert bound <= seconds * (1 + 1e-9)
        assert bound <= simulate_pass(plan, name).seconds * (1 + 1e-9)


@pytest.mark.parametrize("planner", sorted(PLANNERS))
def test_every_strategy_pays_for_the_processors_that_hidden_transfers_take(planner):
    """On pods, with and without contention, and with one slow rank: as recounted; dearer where rows are hidden."""
    mask = packed("log-normal", 8192, 12)
    for contention in (0.0, 0.3):
        machine = replace(PODS, contention=contention)
        options = config(planner, topology=machine, num_kv_heads=8, rank_speeds=(1,) * 7 + (0.5,))
        plan = make_plan(mask, 8, options)
        for name in PASSES:
            assert makespan_seconds(plan, name) == pytest.approx(
                predicted_seconds(plan, name, machine), rel=1e-9
            )
    free = replace(plan.config, topology=replace(PODS, contention=0.0))
    for name in PASSES:
        without = makespan_seconds(replace(plan, config=free), name)
        hides = len(plan.get_pass(name).stages) > 1
        assert makespan_seconds(plan, name) >= without
        if hides:
            assert (
                simulate_pass(plan, name).computing.sum()
                > simulate_pass(replace(plan, config=free), name).computing.sum()
            )


# ------------------------------------------------------------------ planning


def rows_into_groups(assignment, owner, size):
    """Returns the foreign query and key rows that each group of `size` ranks needs from outside, in all."""
    needed = set()
    for (q_start, q_end, k_start, k_end, lo, hi), rank in zip(
        assignment.parts.tolist(), assignment.ranks.tolist(), strict=True
    ):
        for q in range(q_start, q_end):
            keys = range(max(k_start, q + lo), min(k_end, q + hi + 1))
            needed |= {(rank // size, "k", k) for k in keys}
            needed |= {(rank // size, "q", q)} if keys else set()
    return sum(owner[row] // size != group for group, _, row in needed)


@pytest.mark.parametrize("kind", ["full", "causal", "window"])
def test_compute_is_cut_between_racks_before_it_is_cut_between_nodes(kind):
    """Twelve ranks in racks of four: a cut at six, the middle, goes through the second rack."""
    mask = {
        "full": masks.full(96),
        "causal": masks.causal(96),
        "window": masks.sliding_window(96, 40),
    }[kind]
    owner = np.repeat(np.arange(12), 8)
    placed = PlacedMask(mask, np.arange(96).reshape(12, 8))
    nodes, racks = (
        assign(mask, placed.owners, sizes, RowCost(1.0, 1.0), np.ones(12))
        for sizes in ((2,), (2, 4))
    )
    assert rows_into_groups(racks, owner, 4) < rows_into_groups(nodes, owner, 4)
    areas = np.zeros(12)
    for (q_start, q_end, k_start, k_end, lo, hi), rank in zip(
        racks.parts.tolist(), racks.ranks.tolist(), strict=True
    ):
        for q in range(q_start, q_end):
            areas[rank] += max(0, min(k_end, q + hi + 1) - max(k_start, q + lo))
    assert areas.sum() == mask.to_dense().sum()
    assert areas.max() <= 1.15 * areas.mean()


def test_documents_fill_nodes_then_racks():
    assert group_sizes(24, 2, 6) == [1, 2, 6, 12, 24]
    assert group_sizes(24, 2, 8) == [1, 2, 4, 8, 24]
    # On 24 ranks of 16 tokens: three documents of three ranks each.
    lengths = np.array([48] * 3 + [16] * 15)
    bounds = np.r_[0, np.cumsum(lengths)]
    placed, _ = whole_documents(
        bounds, lengths[:, None] ** 2.0, Ranks(np.ones(24), (2, 6)), 16, 1.0
    )
    owner = np.empty(24 * 16, dtype=np.int64)
    owner[placed.tokens] = np.arange(24)[:, None]
    for start, stop in itertools.pairwise(bounds[:4]):
        assert len(set((owner[start:stop] // 6).tolist())) == 1  # each in one rack


@given(
    data=st.data(),
    machine=machines(),
    cp_size=st.sampled_from([3, 5, 8, 12, 24]),
    kind=st.sampled_from(["causal", "full", "window", "log-normal", "one long", "equal"]),
    heads=st.sampled_from([(24, 24), (8, 8), (8, 2)]),
)
@settings(max_examples=20, deadline=None)
def test_on_any_machine_auto_is_no_slower_than_a_scheme_and_the_same_on_every_run(
    data, machine, cp_size, kind, heads
):
    speeds, size = data.draw(speeds_of(cp_size)), cp_size * data.draw(st.sampled_from([48, 512]))
    mask = {
        "causal": lambda: masks.causal(size),
        "full": lambda: masks.full(size),
        "window": lambda: masks.sliding_window(size, size // 7),
    }.get(kind, lambda: packed(kind, size, data.draw(st.integers(2, 40))))()
    options = {"num_heads": heads[0], "num_kv_heads": heads[1], "topology": machine}

    def make(planner, **more):
        return make_plan(mask, cp_size, config(planner, rank_speeds=speeds, **options, **more))

    plan = make("auto")
    forget_plans()
    assert make("auto").digest() == plan.digest()
    plan.validate()
    ours = sum(makespan_seconds(plan, name) for name in PASSES)
    for name in PASSES:
        assert plan.stats(name)["bound_ms"] <= makespan_seconds(plan, name) * 1e3 * (1 + 1e-9)
    for planner in CONTAINED:
        try:
            other = make(planner, token_multiple=plan.tokens_per_rank)
        except ValueError:  # ulysses: heads that cp_size ranks cannot share
            continue
        theirs = sum(makespan_seconds(other, name) for name in PASSES)
        assert ours <= theirs * (1 + 1e-9), planner


# ------------------------------------------------------------------ what is refused


def test_levels_are_levels_and_may_stand_in_a_list():
    level = Level(4, 8.0)
    assert replace(PODS, outer_levels=[level]).outer_levels == (level,)
    for wrong in (level, [4], "racks", None):
        with pytest.raises(TypeError, match=r"outer_levels=.* of topology 'pods' must be levels"):
            replace(PODS, outer_levels=wrong)


@pytest.mark.parametrize(
    ("change", "fragments"),
    [
        ({"outer_levels": (Level(2, 8.0),)}, ["size=2 of outer_levels[0] of topology 'pods'", "larger multiple of 2"]),
        ({"outer_levels": (Level(5, 8.0),)}, ["size=5 of outer_levels[0]", "from the inside to the outside"]),
        ({"outer_levels": (Level(8, 8.0), Level(4, 8.0))}, ["size=4 of outer_levels[1]", "multiple of 8"]),
        ({"outer_levels": (Level(2.5, 8.0),)}, ["size=2.5 of outer_levels[0]"]),
        ({"outer_levels": (Level(4, 0.0),)}, ["gbytes_per_s=0.0 of outer_levels[0]", "positive and finite"]),
        ({"outer_levels": (Level(4, float("nan")),)}, ["gbytes_per_s=nan of outer_levels[0]"]),
        ({"outer_levels": (Level(4, "fast"),)}, ["gbytes_per_s='fast' of outer_levels[0]"]),
        ({"outer_levels": (Level(4, 8.0, 1.0),)}, ["latency_us=1.0 of outer_levels[0]", "at least 5.0"]),
        ({"nics_per_node": 0}, ["nics_per_node=0 of topology 'pods'", "from 1 to node_size=2"]),
        ({"nics_per_node": 3}, ["nics_per_node=3 ", "give outer_gbytes_per_s of all of them"]),
        ({"nics_per_node": 1.5}, ["nics_per_node=1.5 "]),
        ({"nics_per_node": True}, ["nics_per_node=True "]),
    ],
)  # fmt: skip
def test_levels_and_ports_that_cannot_be_are_refused_in_one_line(change, fragments):
    with pytest.raises(ValueError) as caught:
        replace(PODS, **change)
    assert "\n" not in str(caught.value)
    for fragment in fragments:
        assert fragment in str(caught.value)
