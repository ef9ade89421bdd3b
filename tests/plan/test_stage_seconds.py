"""Under which stage rows travel, and what nothing hides: three stages by hand."""

import numpy as np
import pytest

from megatron_cp import mask as masks
from megatron_cp.plan import make_plan
from megatron_cp.plan.hardware.cost import (
    PassLoads,
    SideLoads,
    compute_seconds,
    pass_seconds,
    transfer_seconds,
)
from megatron_cp.plan.hardware.makespan import transfer_shares
from megatron_cp.plan.hardware.rows import row_size
from megatron_cp.plan.hardware.topology import get_topology
from tests.plan.cases import config

CONFIG = config("auto", num_heads=8, num_kv_heads=2)
PER_BYTE = np.array([[1.0], [10.0], [100.0]]) * 1e-9  # of one rank in three stages


def loads(keeps=(False, False, False), area=0.0):
    keys = SideLoads(PER_BYTE, np.zeros(3), np.array(keeps))
    return PassLoads(np.full((3, 1), area), keys=keys)


def test_rows_come_under_the_stage_before_and_gradients_leave_under_the_stage_after():
    size = row_size(CONFIG, "backward", "k")
    there, back = PER_BYTE[:, 0] * size.there, PER_BYTE[:, 0] * size.back
    under, exposed = transfer_seconds(loads(), CONFIG, "backward", 1)
    assert under[:, 0] == pytest.approx([there[1], there[2] + back[0], back[1]])
    assert exposed[:, 0] == pytest.approx([there[0], 0, back[2]])
    assert there[0] > 0 and back[0] > 0


def test_results_of_a_chain_leave_together_after_its_last_stage():
    size = row_size(CONFIG, "backward", "k")
    there, back = PER_BYTE[:, 0] * size.there, PER_BYTE[:, 0] * size.back
    under, exposed = transfer_seconds(loads((False, True, False)), CONFIG, "backward", 1)
    assert under[:, 0] == pytest.approx([there[1], there[2], back[0] + back[1]])
    assert exposed[:, 0] == pytest.approx([there[0], 0, back[2]])


def test_forward_keys_bring_no_results_home():
    under, exposed = transfer_seconds(loads(), CONFIG, "forward", 1)
    there = PER_BYTE[:, 0] * row_size(CONFIG, "forward", "k").there
    assert under[:, 0] == pytest.approx([there[1], there[2], 0])
    assert exposed[:, 0] == pytest.approx([there[0], 0, 0])


def test_the_backward_pass_computes_five_products_where_the_forward_computes_two():
    topology = get_topology(CONFIG.topology)
    peak = topology.forward_tflops, topology.backward_tflops
    forward, backward = (
        float(compute_seconds(np.array(1e9), CONFIG, name)) for name in ("forward", "backward")
    )
    flops = 2 * 2 * 1e9 * CONFIG.num_heads * CONFIG.head_dim
    assert forward == pytest.approx(flops / (peak[0] * 1e12))
    assert backward == pytest.approx(5 / 2 * flops / (peak[1] * 1e12))
    nothing_moves = PassLoads(np.full((3, 1), 1e9))
    assert pass_seconds(nothing_moves, CONFIG, "forward") == pytest.approx(3 * forward)


def test_a_stage_leaves_at_least_the_least_share_to_rows_under_way_and_nothing_to_none():
    """Attention is long here and the keys are few: their share of the time is below what a transfer needs to begin."""
    plan = make_plan(masks.causal(1 << 17), 4, config("contiguous", num_kv_heads=1))
    shares = [transfer_shares(plan, "forward", rank) for rank in range(4)]
    assert len(plan.forward.stages) == 2
    for rank, (under_first, under_last) in enumerate(shares):
        moves = rank > 0 or len(plan.forward.stages[1].k_cast.hops[0].sent_by(rank)) > 0
        assert under_first == (pytest.approx(4 / 132) if moves else 0.0)
        assert under_last == 0.0
