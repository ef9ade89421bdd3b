"""The event simulation against a scalar one, cases worked out by hand, and published measurements."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_cp import mask as masks
from megatron_cp.config import CPConfig, Level, Topology
from megatron_cp.plan import PLANNERS, AttentionPlan, Hop, Pass, Stage, Transfer, make_plan
from megatron_cp.plan.bounds.best_cases import BEST_CASES, best_case_seconds, is_built
from megatron_cp.plan.hardware.simulate import simulate_pass
from megatron_cp.plan.hardware.topology import TOPOLOGIES
from megatron_cp.plan.study.compare import best_other, compare, geometric_mean
from tests.oracles.seconds import compute_seconds, exchange_seconds, hop_seconds, row_sizes
from tests.plan.cases import config, packed
from tests.runtime.handmade import random_plan
from tests.strategies import attention_masks

# 1 pair of one head of 16 takes 64 FLOP; a byte takes 1 us inside, 4 us between nodes
TOY = Topology("toy", 64e-12, 64e-12 * 2.5, 2, 1e-3, 0.25e-3, 10.0)
SHARED = replace(TOY, name="shared processors", contention=0.25)
RACKS = replace(
    SHARED, name="racks of four", outer_levels=(Level(4, 0.1e-3, 17.0),), nics_per_node=1
)


# ------------------------------------------------------------------ a scalar simulation


class Scalar:
    """One rank after the other, one message after the other, with dictionaries."""

    def __init__(self, plan, pass_name, topology, overlap):
        self.plan, self.pass_, self.topology = plan, plan.get_pass(pass_name), topology
        self.overlap, self.ranks = overlap, range(plan.cp_size)
        split = self.pass_.head_split
        self.degree = split.degree if split else 1
        self.sizes = row_sizes(plan.config, pass_name, self.degree)
        self.pass_name = pass_name
        self.free = dict.fromkeys(self.ranks, 0.0)
        self.moving = dict.fromkeys(self.ranks, 0.0)

    def hop(self, messages, size, ready):
        spent, taken, latency = hop_seconds(messages, size, self.topology)
        partners = {}
        for src, dst, *_ in messages:
            partners.setdefault(dst, set()).add(src)
        busy = {src for src, *_ in messages} | set(partners)
        start = {r: max(ready[r], self.free[r]) for r in busy}
        for r in busy:
            self.moving[r] += max(spent.get(r, 0.0), taken.get(r, 0.0))
        sent = {r: start[r] + spent.get(r, 0.0) for r in busy}
        through = dict(ready)
        for rank in busy:
            end = sent[rank]
            if rank in partners:
                last = max(sent[s] for s in partners[rank])
                end = max(end, max(start[rank] + taken[rank], last) + latency[rank])
            through[rank] = self.free[rank] = end
        return through

    def cast(self, index, ready):
        for side in "qk":
            cast = getattr(self.pass_.stages[index], f"{side}_cast")
            for hop in cast.hops if cast else ():
                ready = self.hop(hop.messages.tolist(), self.sizes[side][0], ready)
        return ready

    def home(self, index, ready):
        stages = self.pass_.stages
        for side in "qk":
            keeps = f"keeps_{side}"
            size = self.sizes[side][1]
            if not size or (index + 1 < len(stages) and getattr(stages[index + 1], keeps)):
                continue
            chain, first = [], index
            while True:
                chain.append(getattr(stages[first], f"{side}_cast"))
                if not getattr(stages[first], keeps):
                    break
                first -= 1
            for cast in chain:
                for hop in reversed(cast.hops if cast else ()):
                    back = [(d, s, a, b) for s, d, a, b in hop.messages.tolist()]
                    ready = self.hop(back, size, ready)
        return ready

    def exchange(self, now):
        split = self.pass_.head_split
        if split is None:
            return now
        seconds = exchange_seconds(self.plan, self.pass_name, self.topology)
        then = {r: max(now[m] for m in g) + seconds / 2 for g in split.groups for r in g}
        self.free = {r: max(self.free[r], then[r]) for r in self.ranks}
        return then

    def seconds(self):
        compute = compute_seconds(self.plan, self.pass_name, self.topology)
        now = self.exchange(dict.fromkeys(self.ranks, 0.0))
        arrived, home = self.cast(0, now), now
        count = len(self.pass_.stages)
        self.moving = dict.fromkeys(self.ranks, 0.0)
        for index in range(count):
            now = {r: max(now[r], arrived[r]) for r in self.ranks}
            if self.overlap and index + 1 < count:
                arrived = self.cast(index + 1, now)
            lost = self.topology.contention if self.overlap else 0.0
            alone = compute[index]
            done = {r: now[r] + alone[r] + lost * self.moving[r] for r in self.ranks}
            self.moving = dict.fromkeys(self.ranks, 0.0)
            now = {r: max(done[r], home[r]) for r in self.ranks}
            home = self.home(index, done)
            if not self.overlap:
                now = {r: max(now[r], home[r]) for r in self.ranks}
                if index + 1 < count:
                    arrived = self.cast(index + 1, home)
        now = self.exchange({r: max(now[r], home[r]) for r in self.ranks})
        return [now[r] for r in self.ranks]


@given(
    case=attention_masks(max_queries=24, square=True),
    seed=st.integers(0, 99),
    overlap=st.booleans(),
    pass_name=st.sampled_from(["forward", "backward"]),
)
@settings(max_examples=60)
def test_random_plans_take_as_long_as_in_a_scalar_simulation(case, seed, overlap, pass_name):
    mask, allowed = case
    if not len(allowed):
        return
    cp_size, degree = [(2, 1), (3, 1), (4, 1), (4, 2), (6, 1)][seed % 5]
    topology = (TOY, SHARED, RACKS)[seed % 3]
    speeds = tuple(1.0 / (1 + (rank + seed) % 3) for rank in range(cp_size)) if seed % 2 else None
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    options = CPConfig(topology=topology, rank_speeds=speeds, **shape)
    plan = random_plan(mask, cp_size, seed, options, head_degree=degree)
    found = simulate_pass(plan, pass_name, overlap=overlap)
    expected = Scalar(plan, pass_name, topology, overlap).seconds()
    assert np.allclose(found.finished, expected, rtol=1e-9)
    assert found.seconds == found.finished.max()


@pytest.mark.parametrize("planner", sorted(PLANNERS))
def test_plans_of_all_planners_take_as_long_as_in_a_scalar_simulation(planner):
    for cp_size, mask in (
        (2, masks.causal(96)),
        (4, packed("log-normal", 500, 6)),
        (6, masks.full(48)),
    ):
        topology = RACKS if cp_size == 6 else TOY
        try:
            plan = make_plan(mask, cp_size, config(planner, topology=topology, num_kv_heads=12))
        except (ValueError, NotImplementedError):  # what a scheme does not serve
            continue
        for name in ("forward", "backward"):
            expected = Scalar(plan, name, topology, True).seconds()
            assert np.allclose(simulate_pass(plan, name).finished, expected, rtol=1e-9)


# ------------------------------------------------------------------ by hand


def two_rank_plan(late_rows=0):
    """Rank 0 needs 4 key rows of rank 1; rank 1 computes `late_rows` x 10 pairs first."""
    empty = masks.from_slices(10, 10, [])
    first = (masks.full(10), masks.full(10).crop(q=(0, late_rows)).shift(num_queries=10))
    second = (masks.from_slices(10, 14, [(0, 10, 10, 14, None, None)]), empty)
    stages = (Stage(first), Stage(second, k_cast=Transfer((Hop([(1, 0, 0, 4)]),))))
    both = Pass(stages)
    options = CPConfig(head_dim=16, topology=TOY)
    tokens = np.arange(20).reshape(2, 10)
    return AttentionPlan(masks.full(20), options, "by hand", tokens, both, both)


def test_a_transfer_travels_while_its_reader_computes():
    """100 pairs in 100 s; 4 rows of 64 bytes in 256 us and 10 us; 40 pairs in 40 s. Nothing is exposed."""
    plan = two_rank_plan()
    found = simulate_pass(plan, "forward", num_traced=2)
    assert found.seconds == pytest.approx(140) and found.computing.tolist() == [140, 0]
    waits = simulate_pass(plan, "forward", overlap=False)
    assert waits.seconds == pytest.approx(100 + 266e-6 + 40)
    assert found.busy["node link in"].tolist() == pytest.approx([256e-6, 0])
    assert found.busy["node link out"].tolist() == pytest.approx([0, 256e-6])
    assert found.busy["network in"].tolist() == [0, 0]
    events = [(e.resource, e.what, round(e.start, 7), round(e.end, 7)) for e in found.timeline[0]]
    assert events == [
        ("node link in", "key rows of stage 1", 0.0, 266e-6),
        ("compute", "stage 0", 0.0, 100.0),
        ("compute", "stage 1", 100.0, 140.0),
    ]


def test_rows_that_travel_take_their_share_of_the_processors():
    """A quarter of the 256 us in which rank 0 receives, and of those in which rank 1 sends."""
    found = simulate_pass(two_rank_plan(10), "forward", topology=SHARED)
    assert found.computing.tolist() == pytest.approx([140 + 64e-6, 100 + 64e-6])
    waits = simulate_pass(two_rank_plan(10), "forward", topology=SHARED, overlap=False)
    assert waits.computing.tolist() == pytest.approx([140, 100])


def test_gradients_go_home_after_their_stage_and_are_exposed_at_the_end():
    """Backward: the same rates by choice of the topology; 4 rows of 128 bytes return."""
    found = simulate_pass(two_rank_plan(), "backward")
    assert found.seconds == pytest.approx(140 + 4 * 128e-6 + 10e-6)
    assert found.finished[0] < found.finished[1]


def test_without_overlap_a_reader_waits_for_a_sender_that_still_computes():
    assert simulate_pass(two_rank_plan(10), "forward").seconds == pytest.approx(140)
    found = simulate_pass(two_rank_plan(10), "forward", overlap=False)
    assert found.seconds == pytest.approx(140 + 266e-6)
    assert found.finished.tolist() == pytest.approx([140 + 266e-6, 100 + 256e-6])


def test_rows_between_nodes_and_inside_a_node_travel_at_the_same_time():
    """Rank 0 of a node of two takes 8 rows from its neighbour and 3 from the other node."""
    own = tuple(masks.from_slices(8, 8, []) for _ in range(4))
    work = (masks.from_slices(8, 19, []), *own[1:])
    hop = Hop([(1, 0, 0, 8), (2, 0, 0, 3)])
    both = Pass((Stage(own), Stage(work, k_cast=Transfer((hop,)))))
    options = CPConfig(head_dim=16, topology=TOY)
    plan = AttentionPlan(
        masks.from_slices(32, 32, []), options, "by hand", np.arange(32).reshape(4, 8), both, both
    )
    found = simulate_pass(plan, "forward")
    assert found.seconds == pytest.approx(max(8 * 64e-6, 3 * 64 * 4e-6) + 10e-6)
    assert found.busy["network in"][0] == pytest.approx(3 * 64 * 4e-6)


def test_nothing_of_one_resource_overlaps_in_a_timeline():
    plan = make_plan(packed("log-normal", 4000, 12), 4, config("ring", topology=TOY))
    found = simulate_pass(plan, "backward", num_traced=3)
    assert len(found.timeline) == 3
    for events in found.timeline:
        for resource in found.busy:
            spans = sorted((e.start, e.end) for e in events if e.resource == resource)
            assert all(a[1] <= b[0] + 1e-12 for a, b in itertools.pairwise(spans))
    compute = [sum(e.end - e.start for e in t if e.resource == "compute") for t in found.timeline]
    assert np.allclose(compute, found.computing[:3])


# ------------------------------------------------------------------ published measurements

# UltraAttn (SC'25), raw files of its repository: forward, 32 heads of 128, A800, milliseconds; 512K tokens
PUBLISHED = [
    ("causal", "ring", 16, 1535.0), ("causal", "ring", 32, 931.8), ("causal", "ring", 64, 633.9),
    ("causal", "zigzag", 32, 637.5), ("causal", "zigzag", 64, 511.1),
    ("causal", "stripe", 16, 1029.0), ("causal", "stripe", 32, 660.2),
    ("causal", "stripe", 64, 531.5),
    ("full", "ring", 16, 1682.0), ("full", "ring", 32, 992.7), ("full", "ring", 64, 684.2),
]  # fmt: skip


def test_rings_without_overlap_take_the_published_time():
    """Within 4 % on average over the points on several nodes, with one set of constants for all.

    Left out is zigzag on 16 ranks (657.7 ms), which overlapped; constants are the means of the two fits
    of the study of these files (229 and 238 TFLOP/s, 23.6 and 22.7 GB/s).
    """
    row = replace(TOPOLOGIES["a800"], forward_tflops=233.5, outer_gbytes_per_s=23.15, contention=0)
    options = CPConfig(num_heads=32, num_kv_heads=32, topology=row)
    errors = []
    for kind, planner, cp_size, published in PUBLISHED:
        mask = getattr(masks, kind)(512 << 10)
        if planner == "stripe":  # tokens one by one: 512K of them is not needed for its time
            seconds = striped_seconds(mask.area(), cp_size, row)
        else:
            plan = make_plan(mask, cp_size, replace(options, planner=planner))
            seconds = simulate_pass(plan, "forward", overlap=False).seconds
        errors.append(seconds * 1e3 / published - 1)
    assert np.mean(np.abs(errors)) <= 0.04
    assert np.max(np.abs(errors)) <= 0.09


def striped_seconds(area, cp_size, row):
    """Balanced pairs and P - 1 blocks of keys, one after the other."""
    compute = area / cp_size * 4 * 32 * 128 / (row.forward_tflops * 1e12)
    block = (512 << 10) / cp_size * 2 * 32 * 128 * 2
    return compute + (cp_size - 1) * (block / (row.outer_gbytes_per_s * 1e9) + 20e-6)


def test_the_overlapped_ring_of_the_same_constants_is_faster():
    """The study's own figure for an overlapped zigzag ring: 371 ms against 511 measured."""
    options = CPConfig(planner="zigzag", num_heads=32, num_kv_heads=32, topology="a800")
    plan = make_plan(masks.causal(512 << 10), 64, options)
    assert simulate_pass(plan, "forward").seconds == pytest.approx(0.371, rel=0.01)


# ------------------------------------------------------------------ prices from below


@pytest.mark.parametrize("planner", sorted(set(BEST_CASES) & set(PLANNERS)))
@pytest.mark.parametrize("cp_size", [4, 8, 24])
def test_a_best_case_is_no_slower_than_the_plan_that_it_stands_for(planner, cp_size):
    cases = (
        (masks.causal(4800), 12),
        (packed("log-normal", 6000, 15), 12),
        (masks.sliding_window(3000, 70), 12),
        # Queries pass in backward, and its busiest rank of queries is not that of keys.
        (masks.causal_blockwise([600] * 8), 24),
    )
    for place, (mask, kv_heads) in enumerate(cases):
        slow_links = Topology("slow links", 300.0, 250.0, 8, 3.0, 0.2, 50.0)
        slow_pairs = Topology("slow pairs", 1.0, 1.0, 8, 300.0, 30.0, 0.1)
        topologies = ("h100", TOY, slow_links, slow_pairs)
        # On many ranks plans are dear: each mask there with one machine that is not that of another.
        for topology in topologies if cp_size < 24 else topologies[place : place + 1]:
            options = config(planner, topology=topology, num_kv_heads=kv_heads)
            try:
                plan = make_plan(mask, cp_size, options)
            except (ValueError, NotImplementedError):  # what a scheme does not serve
                continue
            for name in ("forward", "backward"):
                best = best_case_seconds(planner, mask, cp_size, options, name)
                assert best <= plan.stats(name)["makespan_ms"] / 1e3 * (1 + 1e-9)
                assert best <= simulate_pass(plan, name).seconds * (1 + 1e-9)


def test_a_comparison_prices_rings_from_below_on_many_ranks_and_keeps_refusals():
    mask = packed("log-normal", 16_384, 40)
    options = CPConfig(num_heads=6, num_kv_heads=6)
    found = {
        one.planner: one for one in compare(mask, 256, options, ["contiguous", "ring", "ulysses"])
    }
    assert not is_built("ring", 256) and is_built("ring", 128) and is_built("contiguous", 4096)
    assert found["ring"].is_best_case and found["ring"].plan is None
    assert not found["contiguous"].is_best_case and found["contiguous"].plan.cp_size == 256
    assert "num_heads=6" in found["ulysses"].refusal
    others = [one for one in found.values() if not one.refusal]
    fastest = min(others, key=lambda one: one.predicted_ms)
    assert best_other(found.values(), ours="auto") is fastest
    assert found["contiguous"].gap >= 1 and found["ring"].gap >= 1


def test_more_ranks_than_tokens_are_refused_in_one_line():
    with pytest.raises(
        ValueError, match=r"cp_size=8 is more than the 5 tokens.*use 5 ranks or fewer"
    ):
        compare(masks.causal(5), 8, CPConfig(), ["contiguous"])


def test_the_geometric_mean_of_ratios_and_their_inverses_is_one():
    assert geometric_mean([2.0, 0.5, 4.0, 0.25]) == pytest.approx(1)
    assert np.isnan(geometric_mean([]))
