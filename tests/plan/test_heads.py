"""Head groups around any plan, against a replay that reads plain numbers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_cp import mask as masks
from megatron_cp.plan import AttentionPlan, make_plan
from megatron_cp.plan.transfer.head_split import config_of_groups, split_heads
from tests.plan.cases import config
from tests.plan.test_laws import any_square_mask, check_laws
from tests.runtime.handmade import random_plan


def lifted(inner, degree):
    """Returns the plan for `degree` times as many ranks, with head groups around `inner`."""
    passes = [split_heads(one, degree) for one in (inner.forward, inner.backward)]
    placement = inner.global_from_local.reshape(inner.cp_size * degree, -1)
    return AttentionPlan(inner.mask, config(), "lifted", placement, *passes)


@given(
    case=any_square_mask(),
    num_groups=st.sampled_from([1, 2, 3, 4]),
    degree=st.sampled_from([1, 2, 3]),
    seed=st.integers(0, 99),
)
@settings(max_examples=40)
def test_head_groups_around_any_plan_compute_every_pair_once_per_group(
    case, num_groups, degree, seed
):
    mask, allowed = case
    inner = random_plan(mask, num_groups, seed, config_of_groups(config(), degree))
    plan = lifted(inner, degree)
    assert plan.cp_size == num_groups * degree
    check_laws(plan, allowed)


@pytest.mark.parametrize("planner", ["contiguous", "zigzag", "auto"])
@pytest.mark.parametrize("degree", [2, 4])
def test_messages_stay_among_ranks_at_one_place_of_their_groups(planner, degree):
    mask = masks.documents([31, 0, 1, 40])
    inner = make_plan(mask, 2, config(planner, token_multiple=degree))
    plan = lifted(inner, degree)
    for before, after in zip(inner.forward.stages, plan.forward.stages, strict=True):
        assert (before.k_cast is None) == (after.k_cast is None)
        if before.k_cast is None:
            continue
        for one, many in zip(before.k_cast.hops, after.k_cast.hops, strict=True):
            src, dst = many.messages[:, 0], many.messages[:, 1]
            assert np.array_equal(src % degree, dst % degree)
            for place in range(degree):
                here = many.messages[src % degree == place]
                ends = np.stack([here[:, 0] // degree, here[:, 1] // degree], axis=1)
                assert np.array_equal(np.hstack([ends, here[:, 2:]]), one.messages)


def test_rows_of_groups_divide_over_their_members():
    assert config_of_groups(config(token_multiple=3), 4).token_multiple == 12
