"""Seconds from area, rows, heads and a hardware row: the predicted time of a pass.

A stage costs every rank `compute` (pairs x FLOPs / rate) and its transfer costs the busiest of its links.
Stage i+1's transfer runs under stage i's compute; the first transfer, the last return and a head split
are exposed. Nothing here is measured on the machine that asks: figures are predictions.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_cp.config import CPConfig, Topology
from megatron_cp.plan.schema import DST, SRC, START, STOP, AttentionPlan, PassName, Transfer
from megatron_cp.plan.topology import get_topology

FloatArray = NDArray[np.float64]
BACKWARD_FLOPS = 2.5  # five matrix products against two
FP32_BYTES = 4


@dataclass(frozen=True)
class RowBytes:
    """Bytes of one row on its way to the rank that computes, and of its result on the way back."""

    there: int
    back: int


def row_bytes(config: CPConfig, pass_name: PassName, side: str, head_degree: int = 1) -> RowBytes:
    """Returns the bytes per key-side or query-side row under a head split of `head_degree`.

    Partial results and gradients travel in fp32; `lse` and `delta` are fp32 scalars per head.
    """
    value_dim = config.value_head_dim or config.head_dim
    heads = max(1, config.num_heads // head_degree)
    kv_elements = max(1, config.num_kv_heads // head_degree) * (config.head_dim + value_dim)
    if side == "k":
        back = kv_elements * FP32_BYTES if pass_name == "backward" else 0
        return RowBytes(kv_elements * config.element_bytes, back)
    if pass_name == "forward":
        there = heads * config.head_dim * config.element_bytes
        return RowBytes(there, heads * (value_dim + 1) * FP32_BYTES)
    there = heads * (config.head_dim + value_dim) * config.element_bytes + 2 * heads * FP32_BYTES
    return RowBytes(there, heads * config.head_dim * FP32_BYTES)


def compute_seconds(area: FloatArray, config: CPConfig, pass_name: PassName) -> FloatArray:
    """Returns the time to compute `area` pairs for all heads of one rank, on the config's hardware."""
    topology = get_topology(config.topology)
    value_dim = config.value_head_dim or config.head_dim
    flops = 2.0 * area * config.num_heads * (config.head_dim + value_dim)
    if pass_name == "forward":
        return flops / (topology.forward_tflops * 1e12)
    return BACKWARD_FLOPS * flops / (topology.backward_tflops * 1e12)


def transfer_seconds(
    transfer: Transfer | None, bytes_per_row: int, num_ranks: int, topology: Topology
) -> FloatArray:
    """Returns each rank's time for a transfer (or, by symmetry, its adjoint): float64 `[num_ranks]`."""
    seconds = np.zeros(num_ranks)
    for hop in transfer.hops if transfer and bytes_per_row else ():
        messages = hop.messages
        rows = (messages[:, STOP] - messages[:, START]).astype(np.float64)
        same_node = messages[:, SRC] // topology.node_size == messages[:, DST] // topology.node_size
        links = (
            (same_node, topology.inner_gbytes_per_s),
            (~same_node, topology.outer_gbytes_per_s),
        )
        busiest = np.zeros(num_ranks)
        for chosen, gbytes in links:
            for end in (SRC, DST):
                moved = np.bincount(messages[chosen, end], rows[chosen], minlength=num_ranks)
                busiest = np.maximum(busiest, moved * bytes_per_row / (gbytes * 1e9))
        seconds += busiest + topology.latency_us * 1e-6
    return seconds


def head_split_seconds(plan: AttentionPlan, pass_name: PassName) -> float:
    """Returns the exposed time of exchanging tokens against heads and back."""
    split = plan.get_pass(pass_name).head_split
    if split is None or split.degree == 1:
        return 0.0
    config, topology, degree = plan.config, get_topology(plan.config.topology), split.degree
    value_dim = config.value_head_dim or config.head_dim
    query = config.num_heads * config.head_dim
    out = config.num_heads * value_dim
    keys = max(config.num_kv_heads, degree) * (config.head_dim + value_dim)
    elements = query + keys + out if pass_name == "forward" else 2 * (query + keys) + out
    sent = plan.tokens_per_rank * elements * config.element_bytes * (degree - 1) / degree
    within = all(len({rank // topology.node_size for rank in group}) == 1 for group in split.groups)
    gbytes = topology.inner_gbytes_per_s if within else topology.outer_gbytes_per_s
    return sent / (gbytes * 1e9) + 2 * topology.latency_us * 1e-6


def stage_areas(plan: AttentionPlan, pass_name: PassName) -> FloatArray:
    """Returns pairs per stage and rank in units of all heads of a rank: float64 `[stages, P]`."""
    pass_ = plan.get_pass(pass_name)
    degree = pass_.head_split.degree if pass_.head_split else 1
    areas = [[work.area() for work in stage.work] for stage in pass_.stages]
    return np.array(areas, dtype=np.float64).reshape(-1, plan.cp_size) / degree


def makespan_seconds(plan: AttentionPlan, pass_name: PassName) -> float:
    """Returns the predicted time of the slowest rank for one pass of one layer."""
    pass_, topology = plan.get_pass(pass_name), get_topology(plan.config.topology)
    degree = pass_.head_split.degree if pass_.head_split else 1
    compute = compute_seconds(stage_areas(plan, pass_name), plan.config, pass_name)
    arrive, leave = np.zeros_like(compute), np.zeros_like(compute)
    for index, stage in enumerate(pass_.stages):
        for side, cast in (("k", stage.k_cast), ("q", stage.q_cast)):
            size = row_bytes(plan.config, pass_name, side, degree)
            arrive[index] += transfer_seconds(cast, size.there, plan.cp_size, topology)
            leave[index] += transfer_seconds(cast, size.back, plan.cp_size, topology)
    under = np.zeros_like(compute)  # what travels while stage i computes
    under[:-1] += arrive[1:]
    under[1:] += leave[:-1]
    per_rank = arrive[0] + np.maximum(compute, under).sum(axis=0) + leave[-1]
    return float(per_rank.max()) + head_split_seconds(plan, pass_name)


def bound_seconds(plan: AttentionPlan, pass_name: PassName) -> float:
    """Returns the load bound: the mask's area spread evenly, nothing moved. No plan can be faster."""
    even = np.array(plan.mask.area() / plan.cp_size)
    return float(compute_seconds(even, plan.config, pass_name))
