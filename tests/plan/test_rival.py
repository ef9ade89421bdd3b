"""The rival's forms: rows once per node, gradients in 16 bits, received rows in the order of tokens."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_cp import mask as masks
from megatron_cp.config import Topology
from megatron_cp.plan import make_plan
from megatron_cp.plan.hardware.makespan import makespan_seconds
from megatron_cp.plan.schema import PASSES
from megatron_cp.plan.study.compare import measured
from megatron_cp.plan.study.rival import (
    FORMS,
    in_16_bits,
    most_slices,
    rival_figures,
    work_in_global_order,
)
from tests.plan.cases import config, nodes_of, packed
from tests.plan.test_laws import check_laws

PAIRS = nodes_of(2)
MASK = packed("log-normal", 512, 12, 3, within="full")


def magi(planner="magi"):
    return make_plan(MASK, 8, config(planner, topology=PAIRS, chunk_size=16))


def test_a_row_enters_a_node_once_and_every_pair_is_computed_once():
    plan = magi("magi_hierarchical")
    check_laws(plan, MASK.to_dense())
    owner = np.argsort(plan.global_from_local.reshape(-1)) // plan.tokens_per_rank
    for stage in plan.forward.stages:
        arrived = [set() for _ in range(4)]
        held = list(plan.global_from_local)
        for hop in stage.k_cast.hops if stage.k_cast else ():
            for src, dst, start, stop in hop.messages.tolist():
                if src // 2 != dst // 2:
                    ids = held[src][start:stop].tolist()
                    assert not arrived[dst // 2].intersection(ids)
                    assert (owner[ids] // 2 != dst // 2).all()
                    arrived[dst // 2].update(ids)


def test_work_in_global_order_has_the_same_pairs_with_received_keys_ascending():
    plan = magi()
    allowed = MASK.to_dense()
    held = plan.forward.held_ids("k", plan.global_from_local)
    done = np.zeros_like(allowed, dtype=int)
    for now, works in zip(held, work_in_global_order(plan), strict=True):
        for rank, work in enumerate(works):
            own = plan.global_from_local[rank]
            keys = np.concatenate([own, np.sort(now[rank][len(own) :])])
            np.add.at(done, np.ix_(own, keys), work.to_dense().astype(int))
    assert np.array_equal(done, allowed.astype(int))
    assert most_slices(plan, is_in_global_order=True) < most_slices(plan)


def test_gradients_of_half_the_bytes_take_half_as_long_home():
    """One rank per node, no compute to speak of: rows there in 2 bytes, gradients back in 4 or 2."""
    machine = Topology("links only", 1e9, 1e9, 1, 1.0, 1.0, 0.0)
    plan = make_plan(
        masks.full(64), 2, config("magi", topology=machine, num_heads=4, num_kv_heads=4)
    )
    full, half = (makespan_seconds(plan, "backward", size) for size in (4, 2))
    elements = 32 * 4 * (64 + 64)  # rows, heads, key and value; nothing hides them
    assert full == pytest.approx(elements * (2 + 4) / 1e9, rel=1e-6)
    assert half == pytest.approx(elements * (2 + 2) / 1e9, rel=1e-6)
    assert makespan_seconds(plan, "forward", 2) == makespan_seconds(plan, "forward", 4)
    in_fp32 = measured(plan.mask, 2, replace(plan.config, planner="magi"))
    narrow = in_16_bits(in_fp32)
    saved = elements * 2 / 1e9 * 1e3
    assert in_fp32.predicted_ms - narrow.predicted_ms == pytest.approx(saved, rel=1e-6)
    assert in_fp32.simulated_ms - narrow.simulated_ms == pytest.approx(saved, rel=1e-6)


def test_other_planners_and_refusals_have_no_other_gradients():
    ours = measured(MASK, 8, config(topology=PAIRS))
    refused = measured(masks.causal(64), 4096, config("magi"))
    assert in_16_bits(ours) is ours and in_16_bits(refused) is refused and refused.refusal


def test_a_form_with_smaller_gradients_is_faster_and_one_in_order_has_no_more_slices():
    figures = rival_figures(MASK, 8, config(topology=PAIRS, chunk_size=16))
    assert [one.form for one in figures] == list(FORMS)
    straight, straight_16, per_node, per_node_16 = figures
    assert straight_16.predicted_ms < straight.predicted_ms
    assert per_node_16.predicted_ms < per_node.predicted_ms
    assert straight_16.slices_max <= straight.slices_max
    plan = magi("magi_hierarchical")
    seconds = sum(makespan_seconds(plan, name) for name in PASSES)
    assert per_node.predicted_ms == pytest.approx(seconds * 1e3)
