"""What a pack is dealt by: counted against dense masks, and beside the times of plans."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_cp.config import CPConfig
from megatron_cp.data.balance import assign_packs
from megatron_cp.data.batch import PlanRequest, make_batch_plans
from megatron_cp.data.pack_cost import extent_of_lengths, least_seconds
from megatron_cp.mask import documents
from megatron_cp.plan.schema import PASSES
from megatron_cp.plan.study.workloads import document_lengths


def dense(lengths, window):
    """Who sees whom, a pair at a time: causal documents whose leading tokens see each other, through a window."""
    size = sum(tokens for tokens, _ in lengths)
    sees = np.zeros((size, size), dtype=bool)
    start = 0
    for tokens, prefix in lengths:
        for i, j in itertools.product(range(tokens), repeat=2):
            sees[start + i, start + j] = j <= i or (i < prefix and j < prefix)
        start += tokens
    left, right = window or (-1, -1)
    for i, j in itertools.product(range(size), repeat=2):
        sees[i, j] &= (left < 0 or i - j <= left) and (right < 0 or j - i <= right)
    return sees


@st.composite
def packs(draw):
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    return [(tokens, draw(st.integers(0, tokens))) for tokens in lengths]


windows = st.none() | st.tuples(st.integers(-1, 14), st.sampled_from([-1, 0]))


@given(lengths=packs(), window=windows)
def test_the_extent_of_lengths_is_that_of_the_dense_mask(lengths, window):
    sees = dense(lengths, window)
    extent = extent_of_lengths(lengths, window)
    both_ways = sees & sees.T
    np.fill_diagonal(both_ways, False)
    assert extent.area == sees.sum()
    # a degree may be given too large, never too small: the bound stays one
    assert sees.sum(axis=1).max() <= extent.row_degree <= max(n for n, _ in lengths)
    assert sees.sum(axis=0).max() <= extent.key_degree <= max(n for n, _ in lengths)
    if not any(prefix for _, prefix in lengths):
        assert extent.row_degree == sees.sum(axis=1).max()
    assert extent.is_one_sided == (not both_ways.any()) or not extent.is_one_sided


def planned_seconds(lengths, request):
    """What the pack's own plans are predicted to take in all layers."""
    layers = {"full": request.num_full_layers, "window": request.num_window_layers}
    return sum(
        layers[kind] * plan.stats(name)["makespan_ms"] * 1e-3
        for kind, plan in make_batch_plans(documents(lengths), request).items()
        for name in PASSES
    )


HEADS = CPConfig(num_heads=64, num_kv_heads=8, head_dim=128, topology="h100")
REQUESTS = {
    "full": PlanRequest(cp_size=8, config=HEADS),
    "windows": PlanRequest(cp_size=8, config=HEADS, num_window_layers=11, window=(127, 0)),
}


@pytest.fixture(scope="module", params=sorted(REQUESTS))
def costs(request):
    """Lengths, predicted seconds and planned seconds of packs from many short documents to one long one."""
    wanted = REQUESTS[request.param]
    found = [
        document_lengths(name, 32 << 10, seed).tolist()
        for name in ("W1", "W2", "W4", "W6", "W7")
        for seed in range(4)
    ]
    least = [least_seconds([(n, 0) for n in one], 32 << 10, wanted) for one in found]
    return found, least, [planned_seconds(one, wanted) for one in found]


def test_no_plan_is_predicted_below_the_cost_of_its_pack(costs):
    _, least, planned = costs
    assert all(low <= seconds * (1 + 1e-9) for low, seconds in zip(least, planned, strict=True))


def test_packs_are_ordered_as_by_their_plans_where_those_differ_by_a_fifth(costs):
    _, least, planned = costs
    for (low, mine), (other_low, others) in itertools.combinations(
        zip(least, planned, strict=True), 2
    ):
        if mine > 1.2 * others or others > 1.2 * mine:
            assert (low > other_low) == (mine > others)


def test_where_most_layers_slide_a_window_packs_are_dealt_more_evenly_than_by_area():
    request = PlanRequest(cp_size=1, config=HEADS, num_window_layers=47, window=(127, 0))
    # the long document has most pairs, which one layer of 48 sees
    lengths = [[4096], *([64] * 64 for _ in range(2)), [2048, 2048]]
    least = [least_seconds([(n, 0) for n in one], 4096, request) for one in lengths]
    area = [float(documents(one).area()) for one in lengths]
    planned = [planned_seconds(one, request) for one in lengths]

    def slowest(cost):
        dealt = assign_packs(cost, dp_size=2, micro_batch_size=1)
        return max(sum(planned[pack] for packs in mine for pack in packs) for mine in dealt)

    best = min(
        max(planned[i] + planned[j], sum(planned) - planned[i] - planned[j])
        for i, j in itertools.combinations(range(4), 2)
    )
    assert slowest(least) == pytest.approx(best)
    assert slowest(least) <= slowest(area)
