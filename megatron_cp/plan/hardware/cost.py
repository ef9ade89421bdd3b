"""Seconds from area, rows, heads and a hardware row: the predicted time of a pass.

A stage costs every rank `compute` (pairs x FLOPs / (rate x the rank's speed)) and its transfer costs the busiest of
its links (`links.py`).
Moving rows takes a share of the compute meanwhile (`contention`), so of two plans that hide their transfers the
one that moves less is faster.
Stage i+1's transfer and stage i-1's results run under stage i's compute; the first transfer, the last
return and a head split are exposed. Nothing here is measured on the machine that asks: all figures are
predictions. `simulate.py` plays the same stages event by event, where ranks wait for each other.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from megatron_cp.config import CPConfig
from megatron_cp.mask import AttentionMask
from megatron_cp.mask.interval import IntArray
from megatron_cp.plan.hardware.links import Links
from megatron_cp.plan.hardware.rows import FP32_BYTES, RowSize, head_split_bytes, row_size
from megatron_cp.plan.hardware.speeds import rank_speeds, total_speed
from megatron_cp.plan.hardware.topology import get_topology
from megatron_cp.plan.schema import (
    SIDES,
    BoolArray,
    FloatArray,
    HeadSplit,
    OwnRows,
    PassName,
    Side,
)

Area = TypeVar("Area", float, FloatArray)
BACKWARD_FLOPS = 2.5  # five matrix products against two


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

    def arrive(self, size: RowSize) -> FloatArray:
        """Returns the seconds in which the rows of each stage travel: `[stages, P]`."""
        return _travel(self.seconds_per_byte, self.latency, size.there)

    def leave(self, size: RowSize) -> FloatArray:
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
    gradient_bytes: int = FP32_BYTES

    def side(self, side: Side) -> SideLoads | None:
        """Returns what moves on one side."""
        return self.keys if side == "k" else self.queries


def compute_seconds(area: Area, config: CPConfig, pass_name: PassName) -> Area:
    """Returns the time to compute `area` pairs for all heads of one rank of speed 1, on the config's hardware."""
    topology = get_topology(config.topology)
    flops = 2.0 * area * config.num_heads * (config.head_dim + config.value_dim)
    if pass_name == "forward":
        return flops / (topology.forward_tflops * 1e12)
    return BACKWARD_FLOPS * flops / (topology.backward_tflops * 1e12)


def hop_movement(
    src: IntArray, dst: IntArray, rows: IntArray | FloatArray, num_ranks: int, links: Links
) -> Movement:
    """Returns the cost of one all-to-all of `rows[i]` rows from `src[i]` to `dst[i]`.

    A rank sends and receives on all levels at once; the slowest of these decides.
    """
    seconds = links.seconds(links.moved(src, dst, rows, num_ranks))
    return Movement(seconds.max(axis=(0, 2)), links.hop_latency(src, dst, rows))


def movement_of(hops: Iterable[IntArray], num_ranks: int, links: Links) -> Movement | None:
    """Returns what messages (source, destination, start, stop) of rows cost, hop after hop; None without a hop."""
    total: Movement | None = None
    for messages in hops:
        src, dst, start, stop = messages.T
        total = hop_movement(src, dst, stop - start, num_ranks, links).plus(total)
    return total


def stage_seconds(
    loads: PassLoads, config: CPConfig, pass_name: PassName, head_degree: int = 1
) -> FloatArray:
    """Returns the predicted time of every rank in every stage of a pass of one layer: `[stages, P]`.

    What nothing hides counts to the first and to the last stage.
    """
    compute = compute_seconds(loads.areas, config, pass_name)
    compute = compute / rank_speeds(config, loads.areas.shape[1])
    under, exposed = transfer_seconds(loads, config, pass_name, head_degree)
    return hidden_seconds(config, compute, under) + exposed


def hidden_seconds(
    config: CPConfig, compute: FloatArray | float, under: FloatArray | float
) -> FloatArray:
    """Returns what stages take that compute so long while rows travel so long."""
    slowed = compute + get_topology(config.topology).contention * under
    seconds: FloatArray = np.maximum(slowed, under)
    return seconds


def transfer_seconds(
    loads: PassLoads, config: CPConfig, pass_name: PassName, head_degree: int
) -> tuple[FloatArray, FloatArray]:
    """Returns how long rows travel under each stage, and how long nothing hides them: both `[stages, P]`."""
    under, exposed = np.zeros_like(loads.areas), np.zeros_like(loads.areas)
    for side in SIDES:
        moved = loads.side(side)
        if moved is None:
            continue
        size = row_size(config, pass_name, side, head_degree, loads.gradient_bytes)
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


def head_split_seconds(
    split: HeadSplit | None, own: OwnRows, config: CPConfig, pass_name: PassName
) -> float:
    """Returns the exposed time of exchanging tokens against heads and back."""
    if split is None or split.degree == 1:
        return 0.0
    sent = head_split_bytes(own, split.degree, config, pass_name)
    gbytes, latency = Links.of(get_topology(config.topology)).exchange(split.groups)
    return sent / (gbytes * 1e9) + 2 * latency


def load_bound_seconds(
    mask: AttentionMask, cp_size: int, config: CPConfig, pass_name: PassName
) -> float:
    """Returns the load bound: the mask's area spread by speed, nothing moved. No plan can be faster."""
    return compute_seconds(mask.area() / total_speed(config, cp_size), config, pass_name)
