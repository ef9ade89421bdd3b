"""Published schemes against the closed forms of their papers, computed here by hand."""

import numpy as np
import pytest

from megatron_cp import mask as masks
from megatron_cp.plan import make_plan
from tests.plan.cases import config, packed

HEAD_COUNTS = [(8, 8), (8, 2), (8, 1)]


def scheme(planner, mask, cp_size, heads=(8, 8), **options):
    """Returns the plan of a scheme for these query and key/value heads, and rho."""
    options = config(planner, num_heads=heads[0], num_kv_heads=heads[1], **options)
    return make_plan(mask, cp_size, options), heads[1] / heads[0]


# ------------------------------------------------------------------ stripe


@pytest.mark.parametrize("cp_size", [2, 3, 8])
@pytest.mark.parametrize("heads", HEAD_COUNTS)
def test_stripes_move_2_rho_times_p_minus_1_and_differ_by_a_diagonal(cp_size, heads):
    rows = 40
    plan, rho = scheme("stripe", masks.causal(rows * cp_size), cp_size, heads)
    assert np.array_equal(plan.global_from_local, np.arange(rows * cp_size).reshape(rows, -1).T)
    stats = plan.stats("forward")
    assert stats["volume_mean"] == pytest.approx(2 * rho * (cp_size - 1))
    assert stats["link_max"] == pytest.approx(2 * rho * (cp_size - 1))
    # query a P + r sees a P + r + 1 keys; the last rank has the most
    loads = [sum(a * cp_size + r + 1 for a in range(rows)) for r in range(cp_size)]
    assert stats["imbalance"] == pytest.approx(loads[-1] * cp_size / sum(loads))
    assert stats["slices_max"] == 1
    for step, stage in enumerate(plan.forward.stages):
        triangle = rows * (rows + 1) // 2
        areas = [triangle if rank >= step else triangle - rows for rank in range(cp_size)]
        assert [work.area() for work in stage.work] == areas


def test_token_stripes_of_a_million_tokens_are_one_slice_per_step():
    plan, _ = scheme("stripe", masks.causal(1 << 20), 8)
    assert plan.stats("forward")["slices_max"] == 1


def test_stripes_of_blocks_place_blocks_in_turn():
    plan, _ = scheme("stripe", packed("uniform", 48, 3), 4, chunk_size=3)
    expected = np.arange(48).reshape(4, 4, 3).transpose(1, 0, 2).reshape(4, 12)
    assert np.array_equal(plan.global_from_local, expected)
