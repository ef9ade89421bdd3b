"""Plans of cross attention: every pair computed once, bounds kept, equal rows, placements of other plans kept."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_cp import mask as masks
from megatron_cp.config import CPConfig
from megatron_cp.plan import make_plan, make_plans
from megatron_cp.plan.bounds.bounds import time_bound
from megatron_cp.plan.hardware.simulate import simulate_pass
from megatron_cp.plan.planner import forget_plans
from megatron_cp.plan.schema import PASSES
from tests.oracles.plans import times_computed
from tests.plan.machines import machines, speeds_of
from tests.strategies import attention_masks

RANKS = (1, 2, 3, 4, 5, 8)


def rectangle(num_queries, num_keys):
    """Returns the mask in which every query sees every key."""
    return masks.from_slices(num_queries, num_keys, [(0, num_queries, 0, num_keys, None, None)])


def captioned(clips, captions):
    """Returns the mask in which the queries of each clip see the keys of its caption."""
    q, k = np.r_[0, np.cumsum(clips)], np.r_[0, np.cumsum(captions)]
    blocks = [(q[i], q[i + 1], k[i], k[i + 1], None, None) for i in range(len(clips))]
    rows = [tuple(int(x) if x is not None else None for x in row) for row in blocks]
    return masks.from_slices(int(q[-1]), int(k[-1]), [row for row in rows if row[1] > row[0]])


def aligned(num_queries, per_query):
    """Returns the mask in which query i sees the first (i + 1) * per_query keys."""
    rows = [(i, i + 1, 0, (i + 1) * per_query, None, None) for i in range(num_queries)]
    return masks.from_slices(num_queries, num_queries * per_query, rows)


def aligned_runs(count, queries, keys):
    """Returns the mask in which the i-th run of queries sees the first i + 1 runs of keys."""
    rows = [(i * queries, (i + 1) * queries, 0, (i + 1) * keys, None, None) for i in range(count)]
    return masks.from_slices(count * queries, count * keys, rows)


def _lengths(num_queries, num_keys, count):
    """Returns log-normal lengths of clips, and of captions."""
    rng = np.random.default_rng(0)
    found = []
    for total in (num_queries, num_keys):
        weights = rng.lognormal(0, 1.5, count)
        lengths = np.maximum(1, (weights / weights.sum() * total).astype(int))
        lengths[lengths.argmax()] += total - lengths.sum()
        found.append(lengths.tolist())
    return found


CASES = {
    "long queries, short keys": rectangle(301, 17),
    "few queries, many keys": rectangle(5, 203),
    "one key": rectangle(40, 1),
    "one query": rectangle(1, 40),
    "captions": captioned([50, 3, 90, 20, 1], [7, 1, 5, 0, 30]),
    "aligned": aligned(24, 5),
    "as many keys as queries, but for one": rectangle(32, 31),
    "rows without keys": masks.from_slices(30, 12, [(3, 9, 2, 5, None, None)]),
}


def check(plan):
    """Holds a plan against its mask, pair by pair."""
    plan.validate()
    mask = plan.mask
    for side, count in (("q", mask.num_queries), ("k", mask.num_keys)):
        ids = np.sort(plan.tokens_of(side).reshape(-1))
        assert (ids == np.arange(len(ids))).all()
        assert count <= len(ids)
    wanted = mask.to_dense().astype(np.int64)
    for name in PASSES:
        times = times_computed(plan, name)
        inside = times[:, : mask.num_queries, : mask.num_keys]
        assert (inside == wanted).all()
        assert times.sum() == len(times) * wanted.sum()


@pytest.mark.parametrize("cp_size", RANKS)
@pytest.mark.parametrize("planner", ["auto", "contiguous"])
@pytest.mark.parametrize("name", CASES)
def test_every_pair_is_computed_once(name, planner, cp_size):
    check(make_plan(CASES[name], cp_size, CPConfig(planner=planner, num_heads=8, num_kv_heads=4)))


@given(st.data(), st.sampled_from(RANKS))
@settings(max_examples=60)
def test_laws_hold_on_any_machine(data, cp_size):
    mask, _ = data.draw(attention_masks(max_queries=24))
    heads = data.draw(st.sampled_from([(1, 1), (6, 2), (8, 8)]))
    config = CPConfig(
        num_heads=heads[0],
        num_kv_heads=heads[1],
        token_multiple=data.draw(st.sampled_from([1, 3])),
        num_stages=data.draw(st.sampled_from([None, 1, 3])),
        topology=data.draw(machines(node_sizes=(1, 2, 3, 8))),
        rank_speeds=data.draw(speeds_of(cp_size)),
    )
    if not mask.num_queries or not mask.num_keys or mask.num_queries == mask.num_keys:
        return
    plan = make_plan(mask, cp_size, config)
    check(plan)
    for name in PASSES:
        stats = plan.stats(name)
        bound = time_bound(mask, cp_size, config, name, plan.own_rows) * 1e3
        assert bound == pytest.approx(stats["bound_ms"])
        assert stats["makespan_ms"] >= bound * (1 - 1e-9)
        assert stats["volume_mean"] >= stats["volume_bound"] * (1 - 1e-9)


def test_few_queries_travel_to_many_keys():
    """2 K queries and 4 M keys: keys would be 2,048 times the bytes, so queries go where keys are."""
    plan = make_plan(rectangle(2048, 1 << 22), 8, CPConfig(num_heads=8, num_kv_heads=8))
    moved = {side for stage in plan.forward.stages for side in "qk" if stage.cast(side)}
    assert moved == {"q"}
    # A rank receives the queries of 7 others, and 7 results for its own: out in units of a query, lse a 128th.
    assert plan.stats()["volume_mean"] == pytest.approx(7 * (1 + 1 + 1 / 128))


def test_few_queries_travel_also_on_ranks_that_do_not_divide_into_nodes():
    mask = rectangle(2050, 41 << 13)
    ours, in_order = (
        make_plan(mask, 41, CPConfig(planner=planner, num_heads=8, num_kv_heads=8))
        for planner in ("auto", "contiguous")
    )
    assert any(stage.q_cast for stage in ours.forward.stages)
    assert ours.stats()["makespan_ms"] < 0.2 * in_order.stats()["makespan_ms"]


def test_queries_travel_to_the_documents_of_keys_that_they_see():
    """64 documents on 23 ranks, 23 queries and 5,888 keys each: keys stay, wherever documents end."""
    mask = captioned([23] * 64, [23 << 8] * 64)
    ours, in_order = (
        make_plan(mask, 23, CPConfig(planner=planner, num_heads=64, num_kv_heads=8))
        for planner in ("auto", "contiguous")
    )
    moved = {side for stage in ours.forward.stages for side in "qk" if stage.cast(side)}
    assert moved == {"q"}
    assert ours.stats()["makespan_ms"] < 0.15 * in_order.stats()["makespan_ms"]


def test_rows_go_straight_into_a_node_twice_where_a_second_hop_would_take_longer():
    """Captions of few tokens on 23 ranks in nodes of 8: latencies are most of the time."""
    mask = captioned(*_lengths(23 << 10, 23 << 8, 64))
    ours, in_order = (
        make_plan(mask, 23, CPConfig(planner=planner, num_heads=32, num_kv_heads=4))
        for planner in ("auto", "contiguous")
    )
    casts = [stage.cast(side) for stage in ours.forward.stages for side in "qk"]
    assert [len(cast.hops) for cast in casts if cast is not None] == [1]
    assert ours.stats()["makespan_ms"] < 0.9 * in_order.stats()["makespan_ms"]


SAID = {  # docs/plan.md: predicted time over that of both sides in order
    "video and text": (rectangle(1 << 20, 512), 64, 0.93),
    "clips and captions": (captioned(*_lengths(1 << 17, 1 << 13, 40)), 8, 0.37),
    "growing": (aligned_runs(128, 64, 1024), 16, 0.14),
    "few queries": (rectangle(4096, 1 << 20), 32, 0.06),
}


@pytest.mark.parametrize("name", SAID)
def test_the_documented_times_hold(name):
    mask, cp_size, said = SAID[name]
    plans = [
        make_plan(
            mask, cp_size, CPConfig(planner=planner, num_heads=32, num_kv_heads=8, topology="h100")
        )
        for planner in ("auto", "contiguous")
    ]
    ours, in_order = (sum(plan.stats(name)["makespan_ms"] for name in PASSES) for plan in plans)
    assert ours / in_order == pytest.approx(said, abs=0.005)


def test_captions_lie_beside_their_clips():
    """Sixteen equal clips on eight ranks: no row has to travel."""
    plan = make_plan(captioned([512] * 16, [32] * 16), 8, CPConfig())
    assert plan.stats()["volume_mean"] == 0
    assert plan.stats()["imbalance"] == 1


def test_aligned_keys_are_balanced_by_pairs():
    """Late queries see more: in order the last rank would have 1.87 times the mean, as under a causal mask."""
    mask = aligned(1024, 4)
    in_order = make_plan(mask, 8, CPConfig(planner="contiguous"))
    assert in_order.stats()["imbalance"] > 1.8
    heavy = CPConfig(num_heads=64, num_kv_heads=1, topology="cpu")
    assert make_plan(mask, 8, heavy).stats()["imbalance"] < 1.05


def test_tokens_stay_where_other_plans_have_them():
    decoder = make_plan(masks.causal(300), 4, CPConfig())
    encoder = make_plan(masks.documents([70, 30, 41], within="full"), 4, CPConfig())
    mask = rectangle(300, 141)
    plan = make_plan(mask, 4, CPConfig(), queries=decoder, keys=encoder)
    assert (plan.global_from_local == decoder.global_from_local).all()
    assert (plan.key_tokens == encoder.global_from_local).all()
    check(plan)
    one = make_plan(mask, 4, CPConfig(planner="contiguous"), queries=decoder)
    assert (one.global_from_local == decoder.global_from_local).all()
    assert (one.key_tokens.reshape(-1) == np.arange(one.key_tokens.size)).all()
    other = make_plan(mask, 4, CPConfig(), keys=plan)
    assert (other.key_tokens == plan.key_tokens).all()


def test_a_square_mask_with_keys_of_its_own_is_cross_attention():
    encoder = make_plan(masks.documents([20, 12], within="full"), 2, CPConfig())
    plan = make_plan(masks.full(32), 2, CPConfig(), keys=encoder)
    assert plan.key_tokens is not None
    assert plan.digest() != make_plan(masks.full(32), 2, CPConfig()).digest()
    check(plan)


def test_plans_are_the_same_every_time_and_remembered():
    mask = captioned([300, 17, 40], [20, 3, 9])
    first = make_plan(mask, 4, CPConfig())
    assert make_plan(mask, 4, CPConfig()) is first
    forget_plans()
    assert make_plan(mask, 4, CPConfig()).digest() == first.digest()


@pytest.mark.parametrize("cp_size", [2, 8])
def test_the_simulator_plays_them(cp_size):
    plan = make_plan(rectangle(512, 4096), cp_size, CPConfig(num_heads=8, num_kv_heads=2))
    for name in PASSES:
        played = simulate_pass(plan, name).seconds * 1e3
        assert played >= plan.stats(name)["bound_ms"] * (1 - 1e-9)


def test_memory_is_limited_and_refused_with_the_least():
    mask = rectangle(1 << 12, 1 << 16)
    with pytest.raises(ValueError, match=r"max_received_mb=1 cannot be kept.*raise it to that"):
        make_plan(mask, 8, CPConfig(max_received_mb=1))
    wide = make_plan(mask, 8, CPConfig(max_received_mb=2000))
    assert wide.stats()["received_mb_max"] <= 2000


SQUARE = masks.full(12)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: make_plan(rectangle(8, 4), 2, CPConfig(planner="ring")), ValueError, "is for self attention"),
        (lambda: make_plan(masks.from_slices(8, 0, []), 2), ValueError, "one of each at least"),
        (lambda: make_plan(rectangle(8, 4), 2, queries=make_plan(SQUARE, 2)), ValueError, "the mask has 8 queries"),
        (lambda: make_plan(rectangle(12, 4), 2, queries=make_plan(SQUARE, 4)), ValueError, "on 4 ranks"),
        (lambda: make_plan(rectangle(8, 4), 2, keys="encoder"), TypeError, "keys='encoder' must be the plan"),
        (lambda: make_plan(rectangle(8, 4), 0), ValueError, "cp_size=0"),
        (lambda: make_plan("mask", 2, keys=make_plan(SQUARE, 2)), TypeError, "mask"),
        (lambda: make_plans({"a": (rectangle(8, 4), 1)}, 2), ValueError, "queries=plan"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_said(call, error, words):
    with pytest.raises(error, match=words):
        call()
