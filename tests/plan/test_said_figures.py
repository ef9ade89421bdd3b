"""Figures that people read, of a plan whose ranks all differ: counted on the dense mask."""

import numpy as np
import pytest

from megatron_cp import mask as masks
from megatron_cp.plan import make_plan
from megatron_cp.plan.planner import forget_plans
from megatron_cp.plan.stats import traffic
from tests.plan.cases import config

RANKS, TOKENS = 4, 64


@pytest.fixture
def plan():
    """Contiguous and causal: rank r computes 2 r + 1 squares or so, and needs the keys of all ranks before it."""
    return make_plan(masks.causal(TOKENS), RANKS, config("contiguous", num_heads=8, num_kv_heads=2))


def pairs_of_ranks():
    return masks.causal(TOKENS).to_dense().sum(axis=1).reshape(RANKS, -1).sum(axis=1)


def moved(key_size, gradient_size):
    """Units from rank to rank: keys go to later ranks, their gradients come back."""
    later = np.triu(np.ones((RANKS, RANKS)), 1)
    return later * key_size + later.T * gradient_size


def test_imbalance_is_the_largest_over_the_mean():
    mask = masks.documents([40, 24])  # the mean is not the median
    plan = make_plan(mask, RANKS, config("contiguous"))
    pairs = mask.to_dense().sum(axis=1).reshape(RANKS, -1).sum(axis=1)
    assert np.median(pairs) != pairs.mean()
    for name in ("forward", "backward"):
        assert plan.stats(name)["imbalance"] == pytest.approx(pairs.max() / pairs.mean())


def test_traffic_goes_from_the_row_to_the_column_and_results_come_back(plan):
    keys = 2 * 2 / 8  # key and value rows of 2 heads against a query row of 8
    assert traffic(plan, "forward") == pytest.approx(moved(keys, 0))
    assert traffic(plan, "backward") == pytest.approx(moved(keys, keys))


def test_the_table_of_a_plan_says_what_each_rank_receives_and_sends(plan):
    lines = [line.split() for line in str(plan).splitlines() if line.startswith("     ")]
    forward = lines[:RANKS]
    pairs, expected = pairs_of_ranks(), moved(0.5, 0)
    for rank, (number, area, share, received, sent, *_) in enumerate(forward):
        assert (int(number), int(area)) == (rank, pairs[rank])
        assert float(share) == pytest.approx(pairs[rank] / pairs.mean(), abs=1e-3)
        assert float(received) == pytest.approx(expected[:, rank].sum())
        assert float(sent) == pytest.approx(expected[rank].sum())


def test_a_kept_plan_is_given_for_the_same_configuration_only():
    forget_plans()
    mask = masks.causal(TOKENS)
    first, second = (
        make_plan(mask, RANKS, config("zigzag", num_heads=n, num_kv_heads=2)) for n in (4, 8)
    )
    assert (first.config.num_heads, second.config.num_heads) == (4, 8)
    assert make_plan(mask, RANKS, config("zigzag", num_heads=4, num_kv_heads=2)) is first
