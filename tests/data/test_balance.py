"""Dealing packs to ranks: everything once, equal counts, nearly equal cost."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_cp.data.balance import assign_in_order, assign_packs, deal_by_cost


@st.composite
def problems(draw):
    dp_size, num_microbatches, size = (draw(st.integers(1, 4)) for _ in range(3))
    count = dp_size * num_microbatches * size
    costs = draw(st.lists(st.integers(0, 10**12), min_size=count, max_size=count))
    return costs, dp_size, num_microbatches, size


@given(problems())
def test_every_pack_goes_to_exactly_one_micro_batch(problem):
    costs, dp_size, num_microbatches, size = problem
    plan = assign_packs(costs, dp_size=dp_size, micro_batch_size=size)
    assert [[len(m) for m in rank] for rank in plan] == [[size] * num_microbatches] * dp_size
    flat = [i for rank in plan for micro_batch in rank for i in micro_batch]
    assert sorted(flat) == list(range(len(costs)))
    for rank in plan:  # so that micro-batches computed at the same time cost about the same
        weights = [sum(costs[i] for i in micro_batch) for micro_batch in rank]
        assert weights == sorted(weights, reverse=True)


@given(st.lists(st.integers(1, 100), min_size=6, max_size=6), st.sampled_from([2, 3]))
def test_the_largest_load_is_near_the_best_of_all_ways_to_deal(costs, num_groups):
    groups = deal_by_cost(costs, num_groups)
    largest = max(sum(costs[i] for i in group) for group in groups)
    quota = len(costs) // num_groups
    best = min(
        max(sum(costs[i] for i in way[g : g + quota]) for g in range(0, len(costs), quota))
        for way in itertools.permutations(range(len(costs)))
    )
    assert largest <= 4 / 3 * best


def test_attention_cost_is_balanced_where_token_count_cannot_tell():
    costs = [100, 100, 1, 1, 1, 1, 1, 1]  # in order, one rank would get both long documents
    plan = assign_packs(costs, dp_size=2, micro_batch_size=2)
    assert [sum(costs[i] for m in rank for i in m) for rank in plan] == [103, 103]


@given(problems(), st.integers(0, 10**6))
def test_which_packs_share_a_micro_batch_does_not_depend_on_the_ranks(problem, seed):
    """Without per-token loss a batch's loss is a mean of micro-batches: other groups, another loss."""
    areas, dp_size, _, size = problem
    shuffled = random.Random(seed).sample(areas, len(areas))  # what one layout's ranks cost
    one = assign_packs(areas, dp_size=1, micro_batch_size=size)
    many = assign_packs(shuffled, dp_size=dp_size, micro_batch_size=size, areas=areas)
    assert sorted(one[0]) == sorted(itertools.chain(*many))


@given(problems(), st.integers(0, 10**6))
def test_the_order_of_one_replica_s_micro_batches_does_not_depend_on_what_they_cost(problem, seed):
    """A running mean, as the balance of experts over a global batch, is another in another order."""
    areas, _, _, size = problem
    shuffled = random.Random(seed).sample(areas, len(areas))
    one = assign_packs(areas, dp_size=1, micro_batch_size=size)
    assert assign_packs(shuffled, dp_size=1, micro_batch_size=size, areas=areas) == one


def test_batches_that_cannot_be_dealt_evenly_are_refused():
    with pytest.raises(ValueError, match="global_batch_size=6 must be a multiple of"):
        assign_packs([1] * 6, dp_size=4, micro_batch_size=1)
    with pytest.raises(ValueError, match="num_groups=4 must divide the 6 packs"):
        deal_by_cost([1] * 6, 4)


@given(problems())
def test_in_order_every_micro_batch_of_all_ranks_takes_the_next_packs(problem):
    costs, dp_size, num_microbatches, size = problem
    plan = assign_in_order(len(costs), dp_size=dp_size, micro_batch_size=size)
    assert [[len(m) for m in rank] for rank in plan] == [[size] * num_microbatches] * dp_size
    by_step = [pack for step in zip(*plan, strict=True) for rank in step for pack in rank]
    assert by_step == list(range(len(costs)))
