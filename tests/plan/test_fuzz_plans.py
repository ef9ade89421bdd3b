"""Planner "auto" on machines, heads and families drawn at random: the laws of plans, and prices that are kept."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_cp import mask as masks
from megatron_cp.config import CPConfig
from megatron_cp.plan import AttentionPlan, make_plans
from megatron_cp.plan.hardware.makespan import makespan_seconds
from megatron_cp.plan.hardware.simulate import simulate_pass
from megatron_cp.plan.search.budget import BUDGET
from megatron_cp.plan.search.portfolio import candidates
from tests.plan.machines import machines, speeds_of
from tests.plan.test_laws import check_laws
from tests.strategies import attention_masks, document_lengths

RANKS = (1, 2, 3, 5, 6, 7, 8, 12, 16)
HEADS = ((1, 1), (3, 1), (6, 2), (8, 8), (5, 5), (24, 8))


@st.composite
def settings_of_auto(draw, cp_size):
    """Returns a config of planner "auto" on a machine of any levels, with ranks of any speed."""
    num_heads, num_kv_heads = draw(st.sampled_from(HEADS))
    return CPConfig(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=draw(st.sampled_from([8, 128])),
        value_head_dim=draw(st.sampled_from([None, None, 4, 192])),
        token_multiple=draw(st.sampled_from([1, 1, 3, 8])),
        num_stages=draw(st.sampled_from([None, None, 1, 3, 5])),
        topology=draw(machines(node_sizes=(1, 2, 3, 8))),
        rank_speeds=draw(speeds_of(cp_size)),
    )


@st.composite
def families(draw, most=4):
    """Returns masks of one length with weights: any slices, documents with bounds of their own, windows of them."""
    first = draw(document_lengths(max_documents=6, max_length=12, min_total=1))
    size = sum(first)
    family = {}
    for index in range(draw(st.integers(1, most))):
        kind = draw(st.sampled_from(["any", "same documents", "other documents", "window", "none"]))
        if kind == "any":
            mask, _ = draw(attention_masks(max_queries=size, square=True))
            rows = [tuple(row) for row in mask.array.tolist()]
            mask = masks.from_slices(size, size, rows)
        elif kind == "none":
            mask = masks.from_slices(size, size, [])
        else:
            cuts = np.sort(draw(st.lists(st.integers(0, size), max_size=6)))
            other = np.diff(np.r_[0, cuts, size]).astype(int).tolist()
            mask = masks.documents(other if kind == "other documents" else first)
            if kind == "window":
                mask = mask & masks.sliding_window(size, draw(st.integers(1, size)))
        family[f"{kind} {index}"] = (mask, draw(st.sampled_from([0.1, 1, 30.0])))
    return family


@given(family=families(), cp_size=st.sampled_from(RANKS), data=st.data())
@settings(max_examples=60, deadline=None)
def test_families_on_any_machine_share_a_placement_and_compute_every_pair_once(
    family, cp_size, data
):
    config = data.draw(settings_of_auto(cp_size))
    plans = make_plans(family, cp_size, config)
    tokens = next(iter(plans.values())).global_from_local
    assert tokens.shape[1] % config.token_multiple == 0
    for name, (mask, _) in family.items():
        assert np.array_equal(plans[name].global_from_local, tokens)
        check_laws(plans[name], mask.to_dense())


@given(
    family=families(most=2),
    cp_size=st.sampled_from(RANKS[:-1]),
    data=st.data(),
)
@settings(max_examples=40, deadline=None)
def test_every_option_that_was_looked_at_takes_as_long_built_as_its_price_says(
    family, cp_size, data
):
    config = data.draw(settings_of_auto(cp_size))
    for candidate in candidates(family, cp_size, config, BUDGET):
        for (name, which), options in candidate.options.items():
            for option in options:
                exact = option.refine() if option.refine else option
                built = exact.build()
                mask = family[name][0]
                plan = AttentionPlan(mask, config, "auto", candidate.placement.tokens, built, built)
                seconds = (
                    makespan_seconds(plan, which)
                    if option.is_published
                    else simulate_pass(plan, which).seconds
                )
                assert exact.seconds == pytest.approx(seconds, rel=1e-9)
