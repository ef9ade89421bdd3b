"""Figures of a plan, counted from the plan itself: balance, rows moved, predicted time."""

import numpy as np
from numpy.typing import NDArray

from megatron_cp.config import CPConfig
from megatron_cp.plan.cost import load_bound_seconds, makespan_seconds, stage_areas
from megatron_cp.plan.schema import DST, SRC, START, STOP, AttentionPlan, PassName

FloatArray = NDArray[np.float64]


def row_elements(
    config: CPConfig, pass_name: PassName, side: str, head_degree: int
) -> tuple[float, float]:
    """Returns elements per row (there, back), in units of one query row of all heads."""
    value_dim = config.value_head_dim or config.head_dim
    heads = max(1, config.num_heads // head_degree)
    unit = config.num_heads * config.head_dim
    keys = max(1, config.num_kv_heads // head_degree) * (config.head_dim + value_dim)
    if side == "k":
        return keys / unit, keys / unit if pass_name == "backward" else 0.0
    if pass_name == "forward":
        return heads * config.head_dim / unit, heads * (value_dim + 1) / unit
    there = heads * (config.head_dim + value_dim + 2) / unit
    return there, heads * config.head_dim / unit


def traffic(plan: AttentionPlan, pass_name: PassName) -> FloatArray:
    """Returns what each rank sends to each other in one pass: float64 `[src, dst]`.

    Unit: one rank's query rows (tokens x query heads x head dim elements), results on their way back
    included.
    """
    pass_ = plan.get_pass(pass_name)
    degree = pass_.head_split.degree if pass_.head_split else 1
    moved = np.zeros((plan.cp_size, plan.cp_size))
    for side, transfer in pass_.transfers():
        there, back = row_elements(plan.config, pass_name, side, degree)
        for hop in transfer.hops:
            src, dst = hop.messages[:, SRC], hop.messages[:, DST]
            rows = (hop.messages[:, STOP] - hop.messages[:, START]) / plan.tokens_per_rank
            np.add.at(moved, (src, dst), rows * there)
            np.add.at(moved, (dst, src), rows * back)
    if pass_.head_split is not None:
        moved += _head_split_traffic(plan, pass_name)
    return moved


def _head_split_traffic(plan: AttentionPlan, pass_name: PassName) -> FloatArray:
    split = plan.get_pass(pass_name).head_split
    assert split is not None
    config, degree = plan.config, split.degree
    value_dim = config.value_head_dim or config.head_dim
    unit = config.num_heads * config.head_dim
    keys = max(config.num_kv_heads, degree) * (config.head_dim + value_dim) / unit
    out = value_dim / config.head_dim
    # forward: q, k, v there and out back; backward: those and dout there, dq, dk, dv back
    elements = 1 + keys + out if pass_name == "forward" else 2 * (1 + keys) + out
    moved = np.zeros((plan.cp_size, plan.cp_size))
    for group in split.groups:
        moved[np.ix_(group, group)] = elements / degree
    np.fill_diagonal(moved, 0.0)
    return moved


def pass_stats(plan: AttentionPlan, pass_name: PassName) -> dict[str, float]:
    """Returns the figures of one pass.

    imbalance      max over mean of the pairs that ranks compute (1 for an empty mask)
    volume_mean, volume_max   inbound per rank, in units of one rank's query rows
    link_max       the largest in or out over ranks, same unit
    slices_max, messages_max  most slices in one stage, most messages sent by one rank in the pass
    makespan_ms, bound_ms     predicted time of the slowest rank; the load bound (no plan is faster)
    plan_ms        wall time that making the plan took (both passes)
    """
    moved = traffic(plan, pass_name)
    loads = stage_areas(plan, pass_name).sum(axis=0)
    stages = plan.get_pass(pass_name).stages
    sent = np.zeros(plan.cp_size, dtype=np.int64)
    for _, transfer in plan.get_pass(pass_name).transfers():
        for hop in transfer.hops:
            sent += np.bincount(hop.messages[:, SRC], minlength=plan.cp_size)
    return {
        "imbalance": float(loads.max() / loads.mean()) if loads.any() else 1.0,
        "volume_mean": float(moved.sum(axis=0).mean()),
        "volume_max": float(moved.sum(axis=0).max()),
        "link_max": float(max(moved.sum(axis=0).max(), moved.sum(axis=1).max())),
        "num_stages": float(len(stages)),
        "slices_max": float(max(work.num_slices for stage in stages for work in stage.work)),
        "messages_max": float(sent.max()),
        "makespan_ms": makespan_seconds(plan, pass_name) * 1e3,
        "bound_ms": load_bound_seconds(plan.mask, plan.cp_size, plan.config, pass_name) * 1e3,
        "plan_ms": plan.plan_ms,
    }
