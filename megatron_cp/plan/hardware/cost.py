"""Seconds from area, rows, heads and a hardware row: the predicted time of a pass.

A stage costs every rank `compute` (pairs x FLOPs / rate) and its transfer costs the busiest of its links.
Moving rows takes a share of the compute meanwhile (`contention`), so of two plans that hide their transfers the
one that moves less is faster.
Stage i+1's transfer and stage i-1's results run under stage i's compute; the first transfer, the last
return and a head split are exposed. Nothing here is measured on the machine that asks: all figures are
predictions. `simulate.py` plays the same stages event by event, where ranks wait for each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_cp.config import CPConfig, KernelRates, Topology
from megatron_cp.mask import AttentionMask
from megatron_cp.mask.interval import IntArray
from megatron_cp.mask.slice import rows_area
from megatron_cp.plan.hardware.topology import get_topology
from megatron_cp.plan.schema import (
    DST,
    SIDES,
    SRC,
    START,
    STOP,
    AttentionPlan,
    HeadSplit,
    PassName,
    Side,
    Transfer,
)

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
BACKWARD_FLOPS = 2.5  # five matrix products against two
FP32_BYTES = 4
# Of the multiprocessors, to rows under way: at least 4 of an H100's 132, the margin that MagiAttention leaves.
MIN_TRANSFER_SHARE = 4 / 132


@dataclass(frozen=True)
class RowBytes:
    """Bytes of one row on its way to the rank that computes, and of its result on the way back."""

    there: int
    back: int


@dataclass(frozen=True)
class Movement:
    """What a transfer (and, by symmetry, its adjoint) costs every rank, before row sizes are known."""

    seconds_per_byte: FloatArray  # [P], for rows of one byte: the rank's busiest link
    latency: float

    def plus(self, other: "Movement | None") -> "Movement":
        """Returns this movement and another one after it."""
        if other is None:
            return self
        return Movement(
            self.seconds_per_byte + other.seconds_per_byte, self.latency + other.latency
        )


@dataclass(frozen=True)
class SideLoads:
    """What moves on one side, stage by stage.

    A stage that keeps the side goes on with the rows of the stage before; results for received rows go home
    after the last stage of such a chain.
    """

    seconds_per_byte: FloatArray  # [stages, P], see Movement
    latency: FloatArray  # [stages]
    keeps: BoolArray  # [stages]

    @classmethod
    def of(cls, moves: Sequence[Movement | None], keeps: Sequence[bool]) -> "SideLoads | None":
        """Returns the loads of stages that move so much each (None: nothing); None if none moves anything."""
        moving = {index: move for index, move in enumerate(moves) if move is not None}
        if not moving:
            return None
        num_ranks = len(next(iter(moving.values())).seconds_per_byte)
        per_byte, latency = np.zeros((len(moves), num_ranks)), np.zeros(len(moves))
        for index, move in moving.items():
            per_byte[index], latency[index] = move.seconds_per_byte, move.latency
        return cls(per_byte, latency, np.array(keeps, dtype=bool))

    def arrive(self, size: RowBytes) -> FloatArray:
        """Returns the seconds in which the rows of each stage travel: `[stages, P]`."""
        return _travel(self.seconds_per_byte, self.latency, size.there)

    def leave(self, size: RowBytes) -> FloatArray:
        """Returns the seconds in which results go home after each stage: `[stages, P]`."""
        if not self.keeps.any():
            return _travel(self.seconds_per_byte, self.latency, size.back)
        opens = np.flatnonzero(~self.keeps)
        seconds = np.zeros_like(self.seconds_per_byte)
        closes = np.concatenate([opens[1:], [len(self.keeps)]]) - 1
        seconds[closes] = _travel(
            np.add.reduceat(self.seconds_per_byte, opens),
            np.add.reduceat(self.latency, opens),
            size.back,
        )
        return seconds


def _travel(seconds_per_byte: FloatArray, latency: FloatArray, bytes_per_row: int) -> FloatArray:
    """Returns each rank's time for rows of this size, 0 for rows that do not move."""
    return (seconds_per_byte * bytes_per_row + latency[:, None]) * (bytes_per_row > 0)


@dataclass(frozen=True)
class PassLoads:
    """The stages of a pass as the cost model sees them."""

    areas: FloatArray  # [stages, P] pairs, in units of all heads of a rank
    keys: SideLoads | None = None
    queries: SideLoads | None = None

    def side(self, side: Side) -> SideLoads | None:
        """Returns what moves on one side."""
        return self.keys if side == "k" else self.queries


def row_bytes(config: CPConfig, pass_name: PassName, side: Side, head_degree: int = 1) -> RowBytes:
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


def row_elements(
    config: CPConfig, pass_name: PassName, side: Side, head_degree: int
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


def exchange_elements(config: CPConfig, pass_name: PassName, degree: int) -> float:
    """Returns what a token's rows hold in a head split of `degree`, over a whole pass, in the same unit.

    forward: q, k, v there and out back; backward: those and dout there, dq, dk, dv back.
    """
    value_dim = config.value_head_dim or config.head_dim
    unit = config.num_heads * config.head_dim
    keys = max(config.num_kv_heads, degree) * (config.head_dim + value_dim) / unit
    out = value_dim / config.head_dim
    return 1 + keys + out if pass_name == "forward" else 2 * (1 + keys) + out


def compute_seconds(area: FloatArray, config: CPConfig, pass_name: PassName) -> FloatArray:
    """Returns the time to compute `area` pairs for all heads of one rank, on the config's hardware."""
    topology = get_topology(config.topology)
    value_dim = config.value_head_dim or config.head_dim
    flops = 2.0 * area * config.num_heads * (config.head_dim + value_dim)
    if pass_name == "forward":
        return flops / (topology.forward_tflops * 1e12)
    return BACKWARD_FLOPS * flops / (topology.backward_tflops * 1e12)


def hop_movement(
    src: IntArray, dst: IntArray, rows: IntArray | FloatArray, num_ranks: int, topology: Topology
) -> Movement:
    """Returns the cost of one all-to-all of `rows[i]` rows from `src[i]` to `dst[i]`.

    A rank sends and receives on both levels at once; the slowest of these four decides.
    """
    is_remote = src // topology.node_size != dst // topology.node_size
    ends = np.concatenate([2 * src + is_remote, 2 * (num_ranks + dst) + is_remote])
    moved = np.bincount(ends, np.concatenate([rows, rows]), minlength=4 * num_ranks)
    seconds = moved.reshape(2, num_ranks, 2) * seconds_per_byte(topology)
    return Movement(seconds.max(axis=(0, 2)), topology.latency_us * 1e-6 if rows.any() else 0.0)


def seconds_per_byte(topology: Topology) -> FloatArray:
    """Returns the seconds in which a rank moves a byte inside a node and between nodes."""
    return 1e-9 / np.array([topology.inner_gbytes_per_s, topology.outer_gbytes_per_s])


def transfer_movement(
    transfer: Transfer | None, num_ranks: int, topology: Topology
) -> Movement | None:
    """Returns the cost of a transfer's hops, one after the other."""
    if transfer is None:
        return None
    total = Movement(np.zeros(num_ranks), 0.0)
    for hop in transfer.hops:
        messages = hop.messages
        rows = messages[:, STOP] - messages[:, START]
        one = hop_movement(messages[:, SRC], messages[:, DST], rows, num_ranks, topology)
        total = one.plus(total)
    return total


def stage_seconds(
    loads: PassLoads, config: CPConfig, pass_name: PassName, head_degree: int = 1
) -> FloatArray:
    """Returns the predicted time of every rank in every stage of a pass of one layer: `[stages, P]`.

    What nothing hides counts to the first and to the last stage.
    """
    compute = compute_seconds(loads.areas, config, pass_name)
    under, exposed = transfer_seconds(loads, config, pass_name, head_degree)
    slowed = compute + get_topology(config.topology).contention * under
    return np.maximum(slowed, under) + exposed


def transfer_seconds(
    loads: PassLoads, config: CPConfig, pass_name: PassName, head_degree: int
) -> tuple[FloatArray, FloatArray]:
    """Returns how long rows travel under each stage, and how long nothing hides them: both `[stages, P]`."""
    under, exposed = np.zeros_like(loads.areas), np.zeros_like(loads.areas)
    for side in SIDES:
        moved = loads.side(side)
        if moved is None:
            continue
        size = row_bytes(config, pass_name, side, head_degree)
        arrive, leave = moved.arrive(size), moved.leave(size)
        under[:-1] += arrive[1:]
        under[1:] += leave[:-1]
        exposed[0] += arrive[0]
        exposed[-1] += leave[-1]
    return under, exposed


def pass_seconds(
    loads: PassLoads, config: CPConfig, pass_name: PassName, head_degree: int = 1
) -> float:
    """Returns the predicted time of the slowest rank for the stages of one pass of one layer."""
    return float(stage_seconds(loads, config, pass_name, head_degree).sum(axis=0).max())


def head_split_bytes(
    tokens_per_rank: int, degree: int, config: CPConfig, pass_name: PassName
) -> float:
    """Returns what each rank sends to exchange tokens against heads and back, over a whole pass.

    `lse` returns forward; it and `delta` go there backward, in fp32. Gradients of copied key/value heads are added
    up in fp32.
    """
    query_bytes = config.num_heads * config.head_dim * config.element_bytes
    per_token = query_bytes * exchange_elements(config, pass_name, degree)
    per_token += FP32_BYTES * config.num_heads * (1 if pass_name == "forward" else 2)
    if pass_name == "backward" and config.num_kv_heads < degree:
        value_dim = config.value_head_dim or config.head_dim
        per_token += degree * (config.head_dim + value_dim) * (FP32_BYTES - config.element_bytes)
    return tokens_per_rank * per_token * (degree - 1) / degree


def head_split_seconds(
    split: HeadSplit | None, tokens_per_rank: int, config: CPConfig, pass_name: PassName
) -> float:
    """Returns the exposed time of exchanging tokens against heads and back."""
    if split is None or split.degree == 1:
        return 0.0
    topology = get_topology(config.topology)
    sent = head_split_bytes(tokens_per_rank, split.degree, config, pass_name)
    within = all(len({rank // topology.node_size for rank in group}) == 1 for group in split.groups)
    gbytes = topology.inner_gbytes_per_s if within else topology.outer_gbytes_per_s
    return sent / (gbytes * 1e9) + 2 * topology.latency_us * 1e-6


def stage_areas(plan: AttentionPlan, pass_name: PassName) -> FloatArray:
    """Returns pairs per stage and rank in units of all heads of a rank: float64 `[stages, P]`."""
    pass_ = plan.get_pass(pass_name)
    areas = [[work.area() for work in stage.work] for stage in pass_.stages]
    return np.array(areas, dtype=np.float64).reshape(-1, plan.cp_size) / pass_.head_degree


def weighted_areas(
    plan: AttentionPlan, pass_name: PassName, topology: Topology | None = None
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


def makespan_seconds(plan: AttentionPlan, pass_name: PassName) -> float:
    """Returns the predicted time of the slowest rank for one pass of one layer."""
    pass_ = plan.get_pass(pass_name)
    loads = _loads(plan, pass_name, weighted_areas(plan, pass_name))
    exposed = head_split_seconds(pass_.head_split, plan.tokens_per_rank, plan.config, pass_name)
    return pass_seconds(loads, plan.config, pass_name, pass_.head_degree) + exposed


def transfer_shares(plan: AttentionPlan, pass_name: PassName, rank: int) -> list[float]:
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
    whole = compute_seconds(areas[:, rank], plan.config, pass_name) + lost
    shares = np.divide(lost, whole, out=np.zeros_like(lost), where=lost > 0)
    least = MIN_TRANSFER_SHARE * (under[:, rank] > 0)
    within: list[float] = np.maximum(np.minimum(shares, contention), least).tolist()
    return within


def _loads(plan: AttentionPlan, pass_name: PassName, areas: FloatArray) -> PassLoads:
    pass_, topology = plan.get_pass(pass_name), get_topology(plan.config.topology)
    sides = {
        side: SideLoads.of(
            [transfer_movement(stage.cast(side), plan.cp_size, topology) for stage in pass_.stages],
            [stage.keeps(side) for stage in pass_.stages],
        )
        for side in SIDES
    }
    return PassLoads(areas, sides["k"], sides["q"])


def load_bound_seconds(
    mask: AttentionMask, cp_size: int, config: CPConfig, pass_name: PassName
) -> float:
    """Returns the load bound: the mask's area spread evenly, nothing moved. No plan can be faster."""
    even = np.array(mask.area() / cp_size)
    return float(compute_seconds(even, config, pass_name))
