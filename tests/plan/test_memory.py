"""Received rows are counted as they are held, and a limit on them is kept or refused."""

import re
from dataclasses import replace

import numpy as np
import pytest

from megatron_cp import mask as masks
from megatron_cp.config import CPConfig, KernelRates
from megatron_cp.plan import AttentionPlan, Hop, Pass, Stage, Transfer, make_plan
from megatron_cp.plan.hardware.memory import peak_bytes, received_bytes
from megatron_cp.plan.hardware.topology import get_topology

OPTIONS = CPConfig(num_heads=2, num_kv_heads=1, head_dim=16)


def test_a_chain_holds_its_rows_and_results_and_a_prefetch_beside_them():
    """Rank 0 computes nothing; rank 1 receives 3 rows, keeps them, receives 2 more, then starts anew with 4."""

    def brings(rows):
        return Transfer((Hop(np.array([[0, 1, 0, rows]])),))

    def work(held):
        return (masks.from_slices(10, 10, []), masks.from_slices(10, 10 + held, []))

    stages = (
        Stage(work(3), k_cast=brings(3)),
        Stage(work(5), k_cast=brings(2), keeps_k=True),
        Stage(work(4), k_cast=brings(4)),
    )
    mask = masks.from_slices(20, 20, [])
    both = Pass(stages)
    plan = AttentionPlan(mask, OPTIONS, "by hand", np.arange(20).reshape(2, 10), both, both)
    plan.validate()
    there = (16 + 16) * 2  # one key and one value row in bf16
    assert received_bytes(plan, "forward").tolist() == [0, (5 + 4) * there]
    back = (16 + 16) * 4  # their gradients in fp32, for rows that are held
    first = 5 * (there + back) + 4 * there
    second = 4 * (there + back) + 5 * back  # the first gradients travel home under the last stage
    expected = max(first, second)
    # Rank 0 gets the gradients of 5 rows home, and those of the last 4 while the first are being added.
    assert received_bytes(plan, "backward").tolist() == [(5 + 4) * back, expected]


@pytest.mark.parametrize("share", [0.9, 0.75, 0.6])
def test_auto_keeps_a_limit_on_received_rows(share):
    def held(limit):
        config = CPConfig(num_heads=32, num_kv_heads=32, max_received_mb=limit)
        plan = make_plan(masks.causal(1 << 17), 8, config)
        return max(plan.stats(name)["received_mb_max"] for name in ("forward", "backward"))

    limit = int(held(None) * share)
    assert held(limit) <= limit


def test_rows_that_are_exchanged_for_heads_count_like_others():
    """By hand: 4 ranks of 1024 tokens, 8 query and 4 key/value heads of 64, bf16, all heads exchanged."""
    config = CPConfig(planner="ulysses", num_heads=8, num_kv_heads=4, head_dim=64)
    plan = make_plan(masks.causal(4096), 4, config)
    rows, heads, kv_heads = 4096, 2, 1  # of the group, on one rank
    enter = rows * (heads * 64 + kv_heads * 128) * 2
    leave = rows * heads * (64 * 2 + 4)
    assert received_bytes(plan, "forward").tolist() == [enter + leave] * 4
    enter += rows * heads * (64 * 2 + 2 * 4)  # dout, lse and delta
    leave = rows * (heads * 64 + kv_heads * 128) * 2
    assert received_bytes(plan, "backward").tolist() == [enter + leave] * 4


@pytest.mark.parametrize("planner", ["zigzag", "ulysses", "usp", "allgather"])
def test_a_scheme_that_cannot_keep_a_limit_is_refused_with_one_that_it_keeps(planner: str):
    config = CPConfig(planner=planner, num_heads=8, num_kv_heads=4, head_dim=64, max_received_mb=1)
    with pytest.raises(ValueError, match="max_received_mb=1 cannot be kept by planner=") as refused:
        make_plan(masks.causal(16_384), 4, config)
    held = int(re.search(r"holds (\d+) MB", str(refused.value)).group(1))
    assert make_plan(masks.causal(16_384), 4, replace(config, max_received_mb=held))
    with pytest.raises(ValueError, match="cannot be kept"):
        make_plan(masks.causal(16_384), 4, replace(config, max_received_mb=held - 1))


def test_peaks_hold_more_than_what_is_received():
    for planner in ("auto", "zigzag", "usp"):
        plan = make_plan(
            masks.causal(8192), 4, replace(OPTIONS, planner=planner, num_heads=8, num_kv_heads=4)
        )
        for name in ("forward", "backward"):
            assert (peak_bytes(plan, name).allocated > received_bytes(plan, name)).all()


def test_a_limit_is_kept_with_measured_kernel_rates_too():
    sizes = (128, 32_768)
    table = ((500.0, 590.0), (590.0, 600.0))
    rates = KernelRates(sizes, sizes, (table, table), (table, table))
    machine = replace(get_topology("h100"), kernels=rates)

    def held(limit):
        config = CPConfig(num_heads=32, num_kv_heads=32, topology=machine, max_received_mb=limit)
        plan = make_plan(masks.causal(1 << 17), 8, config)
        return max(plan.stats(name)["received_mb_max"] for name in ("forward", "backward"))

    limit = int(held(None) * 0.9)
    assert held(limit) <= limit


def test_a_limit_that_no_plan_keeps_is_refused_with_one_that_a_plan_keeps():
    config = CPConfig(head_dim=128, max_received_mb=1)  # one head: nothing to exchange
    with pytest.raises(ValueError, match="max_received_mb=1 cannot be kept") as refused:
        make_plan(masks.full(65_536), 4, config)
    held = int(re.search(r"smallest holds (\d+) MB", str(refused.value)).group(1))
    assert make_plan(masks.full(65_536), 4, replace(config, max_received_mb=held))
    with pytest.raises(ValueError, match="cannot be kept"):
        make_plan(masks.full(65_536), 4, replace(config, max_received_mb=held - 1))
