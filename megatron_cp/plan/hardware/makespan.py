"""What a built plan takes: pairs per stage and rank, seconds of the slowest rank, rows under way."""

from dataclasses import replace

import numpy as np

from megatron_cp.config import KernelRates, Topology
from megatron_cp.mask.interval import IntArray
from megatron_cp.mask.slice import rows_area
from megatron_cp.plan.hardware.cost import (
    PassLoads,
    SideLoads,
    compute_seconds,
    head_split_seconds,
    movement_of,
    pass_seconds,
    transfer_seconds,
)
from megatron_cp.plan.hardware.links import Links
from megatron_cp.plan.hardware.rows import FP32_BYTES
from megatron_cp.plan.hardware.speeds import rank_speeds
from megatron_cp.plan.hardware.topology import get_topology
from megatron_cp.plan.schema import PASSES, FloatArray, PassName, PlanData, Side

# Of the multiprocessors, to rows under way: at least 4 of an H100's 132, the margin that MagiAttention leaves.
MIN_TRANSFER_SHARE = 4 / 132


def stage_areas(plan: PlanData, pass_name: PassName) -> FloatArray:
    """Returns pairs per stage and rank in units of all heads of a rank: float64 `[stages, P]`."""
    pass_ = plan.get_pass(pass_name)
    areas = [[work.area() for work in stage.work] for stage in pass_.stages]
    return np.array(areas, dtype=np.float64).reshape(-1, plan.cp_size) / pass_.head_degree


def weighted_areas(
    plan: PlanData, pass_name: PassName, topology: Topology | None = None
) -> FloatArray:
    """Returns `stage_areas` with every slice weighted by how much slower than the peak it runs.

    The same as `stage_areas` unless the topology (by default that of the config) has measured kernel rates.
    """
    kernels = (topology or get_topology(plan.config.topology)).kernels
    if kernels is None:
        return stage_areas(plan, pass_name)
    pass_ = plan.get_pass(pass_name)
    works = [work.array for stage in pass_.stages for work in stage.work]
    owner = np.repeat(np.arange(len(works)), [len(work) for work in works])
    slices = np.concatenate([np.zeros((0, 6), np.int64), *works])
    weights = rows_area(slices) * slowdown(kernels, slices, pass_name)
    totals = np.bincount(owner, weights, minlength=len(works)).reshape(-1, plan.cp_size)
    return totals / pass_.head_degree


def slowdown(kernels: KernelRates, slices: IntArray, pass_name: PassName) -> FloatArray:
    """Returns the peak rate over the rate of each slice: float64 `[n]`, at least 1.

    Rates between measured shapes are interpolated over log2 of rows and of mean keys per row; a slice
    beyond the table runs like its nearest shape.
    """
    table = np.array(kernels.forward_tflops if pass_name == "forward" else kernels.backward_tflops)
    q_start, q_end, k_start, k_end, lo, hi = slices.T
    kind = ((lo > k_start - q_end + 1) | (hi < k_end - 1 - q_start)).astype(np.int64)
    rows = (q_end - q_start).astype(np.float64)
    keys = rows_area(slices) / rows
    i, along_rows = _grid_place(np.log2(kernels.rows), np.log2(rows))
    j, along_keys = _grid_place(np.log2(kernels.keys), np.log2(keys))
    i_next, j_next = (
        np.minimum(line + 1, size - 1) for line, size in zip((i, j), table.shape[1:], strict=True)
    )
    low = table[kind, i, j] * (1 - along_keys) + table[kind, i, j_next] * along_keys
    high = table[kind, i_next, j] * (1 - along_keys) + table[kind, i_next, j_next] * along_keys
    return table.max() / (low * (1 - along_rows) + high * along_rows)


def _grid_place(grid: FloatArray, values: FloatArray) -> tuple[IntArray, FloatArray]:
    """Returns the grid line at or before each value (clamped to the grid) and the way to the next."""
    values = np.clip(values, grid[0], grid[-1])
    line = np.clip(np.searchsorted(grid, values, side="right") - 1, 0, max(0, len(grid) - 2))
    gap = np.diff(grid, append=grid[-1] + 1.0)[line]
    return line, (values - grid[line]) / gap


def makespan_seconds(
    plan: PlanData, pass_name: PassName, gradient_bytes: int = FP32_BYTES
) -> float:
    """Returns the predicted time of the slowest rank for one pass of one layer; `gradient_bytes`: see `row_size`."""
    pass_ = plan.get_pass(pass_name)
    loads = _loads(plan, pass_name, weighted_areas(plan, pass_name))
    loads = replace(loads, gradient_bytes=gradient_bytes)
    exposed = head_split_seconds(pass_.head_split, plan.own_rows, plan.config, pass_name)
    return pass_seconds(loads, plan.config, pass_name, pass_.head_degree) + exposed


def layer_seconds(plan: PlanData, gradient_bytes: int = FP32_BYTES) -> float:
    """Returns the predicted time of one layer, forward and backward; `gradient_bytes`: see `row_size`."""
    return sum(makespan_seconds(plan, name, gradient_bytes) for name in PASSES)


def transfer_shares(plan: PlanData, pass_name: PassName, rank: int) -> list[float]:
    """Returns, per stage, the share of its multiprocessors that a rank leaves to the rows that travel under it.

    While rows move, `contention` of them is lost; the loss is spread over the whole stage, and no more than
    `contention`. At least MIN_TRANSFER_SHARE, as a transfer that finds no free multiprocessor runs after the stage; 0
    where nothing moves.
    """
    pass_ = plan.get_pass(pass_name)
    own = [stage.work[rank].area() / pass_.head_degree for stage in pass_.stages]
    areas = np.zeros((len(own), plan.cp_size))
    areas[:, rank] = own
    loads = _loads(plan, pass_name, areas)
    under, _ = transfer_seconds(loads, plan.config, pass_name, pass_.head_degree)
    contention = get_topology(plan.config.topology).contention
    lost = contention * under[:, rank]
    alone = compute_seconds(areas[:, rank], plan.config, pass_name)
    whole = alone / rank_speeds(plan.config, plan.cp_size)[rank] + lost
    shares = np.divide(lost, whole, out=np.zeros_like(lost), where=lost > 0)
    least = MIN_TRANSFER_SHARE * (under[:, rank] > 0)
    within: list[float] = np.maximum(np.minimum(shares, contention), least).tolist()
    return within


def _loads(plan: PlanData, pass_name: PassName, areas: FloatArray) -> PassLoads:
    pass_, links = plan.get_pass(pass_name), Links.of(get_topology(plan.config.topology))

    def of_side(side: Side) -> SideLoads | None:
        messages = ([hop.messages for hop in stage.hops(side)] for stage in pass_.stages)
        moves = [movement_of(hops, plan.cp_size, links) for hops in messages]
        return SideLoads.of(moves, [stage.keeps(side) for stage in pass_.stages])

    return PassLoads(areas, of_side("k"), of_side("q"))
