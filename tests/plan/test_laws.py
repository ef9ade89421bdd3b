"""What every plan of every planner must be, against a replay that reads plain numbers."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from megatron_cp import mask as masks
from megatron_cp.plan import AttentionPlan, make_plan, make_plans, plan_on_placement
from megatron_cp.plan.transfer.pass_builder import PlacedMask
from megatron_cp.plan.transfer.passes import needed_keys_pass
from tests.oracles.plans import needed_remote_ids, received_ids, times_computed
from tests.plan.cases import CP_SIZES, PLANNERS, config
from tests.strategies import attention_masks, document_lengths, render


def padded(allowed, size):
    whole = np.zeros((size, size), dtype=np.int64)
    whole[: len(allowed), : len(allowed)] = allowed
    return whole


def check_laws(plan, allowed):
    """Every pair once in each pass; equal tokens, each owned once; padding at the tail of the pack."""
    num_tokens, ids = len(allowed), plan.global_from_local
    assert sorted(ids.reshape(-1).tolist()) == list(range(ids.size))
    assert ids.shape == (plan.cp_size, plan.tokens_per_rank)
    assert plan.num_tokens == num_tokens <= ids.size
    for name in ("forward", "backward"):
        times = times_computed(plan, name)
        expected = padded(allowed, ids.size)
        assert all(np.array_equal(group, expected) for group in times)
    plan.validate()


@st.composite
def any_square_mask(draw):
    """Returns (mask, dense): arbitrary slices, or packed documents with empty and one-token ones."""
    if draw(st.booleans()):
        return draw(attention_masks(max_queries=29, square=True))
    lengths = draw(document_lengths(max_documents=5, max_length=17))
    within = draw(st.sampled_from(["causal", "full"]))
    mask = masks.documents(lengths, within=within)
    size, start, parts = sum(lengths), 0, []
    for length in lengths:
        hi = 0 if within == "causal" else None
        parts.append((start, start + length, start, start + length, None, hi))
        start += length
    return mask, render(size, size, parts)


@pytest.mark.parametrize("planner", PLANNERS)
@given(case=any_square_mask(), cp_size=st.sampled_from(CP_SIZES), data=st.data())
@settings(max_examples=40)
def test_every_pair_is_computed_exactly_once_in_each_pass(planner, case, cp_size, data):
    mask, allowed = case
    chunk_size = data.draw(st.sampled_from([None, 1, 2, 3]))
    stages = data.draw(st.sampled_from([None, 1, 3]))
    multiple = data.draw(st.sampled_from([1, 1, 4]))
    options = {"num_stages": stages, "token_multiple": multiple}
    if planner in ("auto", "dcp", "magi", "stripe"):
        step = math.lcm(chunk_size or 1, multiple)
        rows, least = (-(-len(allowed) // (cp_size * one)) * one for one in (step, multiple))
        assume(rows <= 2 * least)  # others are refused
        options["chunk_size"] = chunk_size
    plan = make_plan(mask, cp_size, config(planner, **options))
    assert plan.tokens_per_rank % multiple == 0
    check_laws(plan, allowed)


@given(case=any_square_mask(), cp_size=st.sampled_from(CP_SIZES), data=st.data())
def test_a_plan_on_any_placement_computes_every_pair_and_receives_each_needed_row_once(
    case, cp_size, data
):
    mask, allowed = case
    rows = -(-len(allowed) // cp_size) + data.draw(st.integers(0, 2))
    order = data.draw(st.permutations(range(cp_size * rows)))
    plan = plan_on_placement(mask, np.array(order).reshape(cp_size, rows), config())
    check_laws(plan, allowed)
    check_zero_redundant(plan, allowed)


def check_zero_redundant(plan, allowed):
    for name in ("forward", "backward"):
        needed = needed_remote_ids(plan, allowed)
        for ids, expected in zip(received_ids(plan, name), needed, strict=True):
            assert len(ids) == len(set(ids)), "a row arrives twice"
            assert set(ids) == expected


@given(
    case=any_square_mask(),
    cp_size=st.sampled_from(CP_SIZES),
    stages=st.sampled_from([1, 2, 4]),
)
@example(
    case=(masks.documents([9, 0, 1]), np.tril(np.ones((10, 10), dtype=bool)) & (
        (np.arange(10) < 9)[:, None] == (np.arange(10) < 9)[None, :]
    )),
    cp_size=8, stages=4,
)  # fmt: skip
def test_only_needed_rows_are_received_and_each_once(case, cp_size, stages):
    mask, allowed = case
    rows = -(-len(allowed) // cp_size)
    placed = PlacedMask(mask, np.arange(cp_size * rows).reshape(cp_size, rows))
    both = needed_keys_pass(placed, stages)
    plan = AttentionPlan(mask, config(), "by hand", placed.placement, both, both)
    check_laws(plan, allowed)
    check_zero_redundant(plan, allowed)


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("cp_size", [2, 3, 8])
def test_what_one_rank_sends_another_is_what_the_other_receives(planner, cp_size):
    plan = make_plan(masks.documents([31, 0, 1, 40]), cp_size, config(planner))
    for stage in plan.forward.stages:
        for cast in filter(None, (stage.k_cast, stage.q_cast)):
            for hop in cast.hops:
                received = hop.rows_received(cp_size).tolist()
                for rank in range(cp_size):
                    mine = hop.received_by(rank)
                    assert int((mine[:, 3] - mine[:, 2]).sum()) == received[rank]
                    for src in range(cp_size):
                        sent = hop.sent_by(src)
                        got = mine[mine[:, 0] == src]
                        assert np.array_equal(sent[sent[:, 1] == rank], got)


@given(
    lengths=document_lengths(max_documents=5, max_length=40, min_total=8),
    cp_size=st.sampled_from(CP_SIZES),
    weights=st.tuples(st.integers(1, 30), st.integers(1, 30)),
)
@settings(max_examples=25)
def test_a_family_of_plans_shares_one_placement_and_each_computes_its_mask(
    lengths, cp_size, weights
):
    full = masks.documents(lengths)
    window = full & masks.sliding_window(full.num_queries, 5)
    family = {"full": (full, weights[0]), "window": (window, weights[1])}
    plans = make_plans(family, cp_size, config())
    assert list(plans) == ["full", "window"]
    assert np.array_equal(plans["full"].global_from_local, plans["window"].global_from_local)
    for name, mask in (("full", full), ("window", window)):
        assert plans[name].mask == mask
        check_laws(plans[name], mask.to_dense())


def test_the_weights_of_a_family_decide_its_placement():
    num_tokens = 4096
    causal, window = masks.causal(num_tokens), masks.sliding_window(num_tokens, 64)
    options = config(num_heads=1, num_kv_heads=1, topology="h100")
    by_weight = {}
    for weights in ((1000.0, 0.001), (0.001, 1000.0)):
        family = {"full": (causal, weights[0]), "window": (window, weights[1])}
        by_weight[weights] = make_plans(family, 4, options)["full"].global_from_local
    only_causal = make_plan(causal, 4, options).global_from_local
    only_window = make_plan(window, 4, options).global_from_local
    assert not np.array_equal(only_causal, only_window)
    assert np.array_equal(by_weight[(1000.0, 0.001)], only_causal)
    assert np.array_equal(by_weight[(0.001, 1000.0)], only_window)


@pytest.mark.parametrize("planner", PLANNERS)
def test_more_ranks_than_tokens_leave_ranks_with_padding_only(planner):
    plan = make_plan(masks.causal(3), 8, config(planner))
    check_laws(plan, np.tril(np.ones((3, 3), dtype=bool)))


def test_plans_are_equal_by_what_they_execute_not_by_how_long_planning_took():
    plan = make_plan(masks.causal(32), 4, config())
    again = dataclasses.replace(plan, plan_ms=plan.plan_ms + 5)
    assert plan == again
    assert hash(plan) == hash(again)


@pytest.mark.parametrize(
    ("num_tokens", "cp_size"), [(8192, 6), (4096, 3), (5000, 4), (1002, 2), (37, 8)]
)
def test_the_row_count_does_not_depend_on_the_documents(num_tokens, cp_size):
    """Pipeline stages exchange tensors of one shape in every step, whatever the packs hold."""
    rng = np.random.default_rng(0)
    rows = set()
    for _ in range(12):
        cuts = np.sort(rng.integers(0, num_tokens, rng.integers(0, 12)))
        lengths = np.diff(np.r_[0, cuts, num_tokens]).tolist()
        plan = make_plan(masks.documents(lengths), cp_size, config("auto"))
        rows.add(plan.tokens_per_rank)
    assert len(rows) == 1
