"""Figures of a plan, counted from the plan itself: balance, rows moved, predicted time."""

from collections.abc import Callable

import numpy as np

from megatron_cp.plan.bounds.bounds import time_bound, volume_bound
from megatron_cp.plan.hardware.cost import load_bound_seconds
from megatron_cp.plan.hardware.makespan import makespan_seconds, stage_areas
from megatron_cp.plan.hardware.memory import peak_bytes
from megatron_cp.plan.hardware.rows import exchange_elements, head_split_bytes, row_size
from megatron_cp.plan.hardware.speeds import imbalance, rank_speeds
from megatron_cp.plan.schema import DST, SRC, START, STOP, FloatArray, PassName, PlanData, Side


def traffic(plan: PlanData, pass_name: PassName) -> FloatArray:
    """Returns what each rank sends to each other in one pass: float64 `[src, dst]`.

    Unit: one rank's query rows (tokens x query heads x head dim elements), results on their way back included.
    """
    degree = plan.get_pass(pass_name).head_degree
    exchanged = exchange_elements(plan.config, pass_name, degree, plan.own_rows) / degree

    def units(side: Side) -> tuple[float, float]:
        size = row_size(plan.config, pass_name, side, degree)
        return size.units_there / plan.tokens_per_rank, size.units_back / plan.tokens_per_rank

    return _sent(plan, pass_name, units, exchanged)


def sent_bytes(plan: PlanData, pass_name: PassName) -> FloatArray:
    """Returns the same in bytes of one layer, gradients and partial results in fp32 as they travel."""
    degree = plan.get_pass(pass_name).head_degree
    exchanged = head_split_bytes(plan.own_rows, degree, plan.config, pass_name)

    def width(side: Side) -> tuple[float, float]:
        size = row_size(plan.config, pass_name, side, degree)
        return size.there, size.back

    return _sent(plan, pass_name, width, exchanged / max(1, degree - 1))


def _sent(
    plan: PlanData,
    pass_name: PassName,
    size_of_row: Callable[[Side], tuple[float, float]],
    exchanged: float,
) -> FloatArray:
    """Counts rows by their size there and back, and what members of a head group give each other."""
    pass_ = plan.get_pass(pass_name)
    moved = np.zeros((plan.cp_size, plan.cp_size))
    for side, transfer in pass_.transfers():
        there, back = size_of_row(side)
        for hop in transfer.hops:
            src, dst = hop.messages[:, SRC], hop.messages[:, DST]
            rows = hop.messages[:, STOP] - hop.messages[:, START]
            np.add.at(moved, (src, dst), rows * there)
            np.add.at(moved, (dst, src), rows * back)
    for group in () if pass_.head_split is None else pass_.head_split.groups:
        moved[np.ix_(group, group)] += exchanged
    np.fill_diagonal(moved, 0.0)
    return moved


def pass_stats(plan: PlanData, pass_name: PassName) -> dict[str, float]:
    """Returns the figures of one pass.

    imbalance      largest time of a rank's pairs over the fair one: with equal speeds max over mean of pairs (1 for
                   an empty mask)
    volume_mean, volume_max   inbound per rank, in units of one rank's query rows
    link_max       the largest in or out over ranks, same unit
    received_mb_max   the most megabytes that a rank holds at once because others sent them (see max_received_mb)
    peak_mb_max    the most megabytes that the runtime allocates at once on a rank
    slices_max, messages_max  most slices in one stage, most messages sent by one rank in the pass
    volume_bound   the least mean volume of any plan with these areas per rank and this head degree
    makespan_ms, bound_ms     predicted time of the slowest rank; no plan is predicted faster
    load_bound_ms             the part of the bound that is the mask's area spread evenly, by speed
    plan_ms        wall time that making the plan took (both passes)
    """
    moved = traffic(plan, pass_name)
    loads = stage_areas(plan, pass_name).sum(axis=0)
    stages, split = plan.get_pass(pass_name).stages, plan.get_pass(pass_name).head_split
    own, config = plan.own_rows, plan.config
    peaks = peak_bytes(plan, pass_name)
    sent = np.zeros(plan.cp_size, dtype=np.int64)
    for _, transfer in plan.get_pass(pass_name).transfers():
        for hop in transfer.hops:
            sent += np.bincount(hop.messages[:, SRC], minlength=plan.cp_size)
    return {
        "imbalance": imbalance(loads, rank_speeds(config, plan.cp_size)),
        "volume_mean": float(moved.sum(axis=0).mean()),
        "volume_max": float(moved.sum(axis=0).max()),
        "volume_bound": volume_bound(
            loads, own, config, pass_name, plan.mask, split.degree if split else 1
        ),
        "received_mb_max": float(peaks.received.max()) / 1e6,
        "peak_mb_max": float(peaks.allocated.max()) / 1e6,
        "link_max": float(max(moved.sum(axis=0).max(), moved.sum(axis=1).max())),
        "num_stages": float(len(stages)),
        "slices_max": float(max(work.num_slices for stage in stages for work in stage.work)),
        "messages_max": float(sent.max()),
        "makespan_ms": makespan_seconds(plan, pass_name) * 1e3,
        "bound_ms": time_bound(plan.mask, plan.cp_size, config, pass_name, own) * 1e3,
        "load_bound_ms": load_bound_seconds(plan.mask, plan.cp_size, config, pass_name) * 1e3,
        "plan_ms": plan.plan_ms,
    }
