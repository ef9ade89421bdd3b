"""Predicted seconds of the published ways to run a mask on a placement, without building a plan.

Queries stay and keys travel. Two figures of a mask on a placement decide: the pairs between the queries of one
rank and the keys of another, and the key rows that one needs of the other. `HeadGroups` prices any way on
super-ranks; `plan/price/pairs_move.py` does so for pairs that move.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_cp.config import CPConfig, Topology
from megatron_cp.mask import AttentionMask
from megatron_cp.mask.interval import IntArray
from megatron_cp.plan.compute.bisection import Weights
from megatron_cp.plan.hardware.cost import (
    FloatArray,
    Movement,
    PassLoads,
    SideLoads,
    compute_seconds,
    head_split_bytes,
    head_split_seconds,
    hop_movement,
    row_bytes,
    seconds_per_byte,
    stage_seconds,
    transfer_movement,
)
from megatron_cp.plan.hardware.topology import get_topology
from megatron_cp.plan.placement.placement import Placement
from megatron_cp.plan.schema import SIDES, HeadSplit, Pass, PassName, Side
from megatron_cp.plan.schemes.gather import allgather_pass, needed_keys_pass
from megatron_cp.plan.schemes.ring import ring_pass
from megatron_cp.plan.transfer.head_split import split_heads
from megatron_cp.plan.transfer.pass_builder import PlacedMask
from megatron_cp.plan.transfer.routing import DST, ID_START, ID_STOP, SRC

EVEN_STAGES = 2  # of MagiAttention's static overlap
FIRST_STAGE: IntArray = np.zeros(1, dtype=np.int64)
PASSES: tuple[PassName, PassName] = ("forward", "backward")


@dataclass(frozen=True)
class Figures:
    """A mask on a placement, as far as schemes that leave queries at home are concerned."""

    areas: FloatArray  # [P, P] pairs between the queries of rank i and the keys of rank j
    rows: FloatArray  # [P, P] key rows that rank j needs of rank i
    own_rows: int

    @property
    def loads(self) -> FloatArray:
        """Returns the pairs that each rank computes: `[P]`."""
        return self.areas.sum(axis=1)


@dataclass(frozen=True)
class Choice:
    """One way to run one pass of one mask on one placement."""

    seconds: float  # of one layer
    moved_bytes: float  # to all ranks that compute, and back; relays not counted
    imbalance: float
    build: Callable[[], Pass]
    refine: "Callable[[], Choice] | None" = (
        None  # the same at its exact price; None if that is the price
    )


Both = Mapping[PassName, Choice]
"""A way to run both passes; each may be taken without the other."""


@dataclass(frozen=True)
class HeadGroups:
    """Super-ranks of `degree` neighbours that exchange heads; what runs inside is planned on them."""

    mask: AttentionMask
    config: CPConfig
    degree: int
    placed: PlacedMask
    """The mask on the super-ranks."""

    @classmethod
    def of(
        cls, mask: AttentionMask, placement: Placement, config: CPConfig, degree: int
    ) -> "HeadGroups":
        """Returns the groups of `degree` consecutive ranks of a placement on ranks."""
        placed = PlacedMask(mask, placement.regrouped(placement.num_ranks // degree))
        return cls(mask, config, degree, placed)

    @functools.cached_property
    def topology(self) -> Topology:
        """Returns the machine as super-ranks see it."""
        topology = get_topology(self.config.topology)
        return replace(topology, node_size=max(1, topology.node_size // self.degree))

    def weights(self, names: Iterable[PassName] = PASSES) -> Weights:
        """Returns bytes per row there and back, over these passes."""
        query, key = (
            sum(
                size.there + size.back
                for size in (row_bytes(self.config, name, side, self.degree) for name in names)
            )
            for side in SIDES
        )
        return Weights(float(query), float(key))

    def seconds(self, loads: PassLoads, name: PassName) -> float:
        """Returns the predicted time of one pass; `loads`: of the super-ranks, for all heads."""
        return float(self.seconds_of_each(loads, FIRST_STAGE, name)[0])

    def seconds_of_each(self, loads: PassLoads, opens: IntArray, name: PassName) -> FloatArray:
        """Returns the times of passes that stand in `loads` one after another, from stages `opens` on: `[passes]`.

        Each but the last ends with a stage in which nothing is computed and nothing arrives.
        """
        per_head_group = replace(loads, areas=loads.areas / self.degree)
        stages = stage_seconds(per_head_group, self.config, name, self.degree)
        split = HeadSplit((tuple(range(self.degree)),))
        own_rows = self.placed.own_rows // self.degree
        exchange = head_split_seconds(split, own_rows, self.config, name)
        slowest: FloatArray = np.add.reduceat(stages, opens).max(axis=1)
        return slowest + exchange

    def compute_seconds(self, load: float, names: Iterable[PassName] = PASSES) -> float:
        """Returns the time of these passes to compute so many pairs of a super-rank."""
        pairs = np.array(load / self.degree)
        return sum(float(compute_seconds(pairs, self.config, name)) for name in names)

    def least_seconds(self) -> float:
        """Returns what both passes take at least where queries stay at home: the busiest super-rank's pairs."""
        return self.compute_seconds(self.placed.loads.max())

    def all_keys_seconds(self) -> float:
        """Returns what both passes take at least where every super-rank receives all keys."""
        num_ranks, node_size = self.placed.num_ranks, self.topology.node_size
        inside = min(node_size, num_ranks)
        rows = np.array([inside - 1, num_ranks - inside]) * self.placed.own_rows
        return float((rows * self.weights().key * seconds_per_byte(self.topology)).max())

    def moved_bytes(self, rows: dict[Side, float], name: PassName) -> float:
        """Returns what all ranks send in a pass; `rows`: moved per side by all super-ranks together."""
        own_rows = self.placed.own_rows // self.degree
        moved = self.placed.num_ranks * head_split_bytes(own_rows, self.degree, self.config, name)
        for side in SIDES:
            size = row_bytes(self.config, name, side, self.degree)
            moved += rows[side] * (size.there + size.back)
        return self.degree * moved

    def same_both_ways(self, loads: PassLoads, key_rows: float, build: Callable[[], Pass]) -> Both:
        """Returns the way whose backward pass moves and computes as its forward pass does; keys move."""
        rows: dict[Side, float] = {"q": 0.0, "k": key_rows}
        build_once = functools.cache(lambda: split_heads(build(), self.degree))
        uneven = imbalance(loads.areas.sum(axis=0))
        return {
            name: Choice(
                self.seconds(loads, name), self.moved_bytes(rows, name), uneven, build_once
            )
            for name in PASSES
        }

    def movement(self, hops: Sequence[IntArray]) -> Movement | None:
        """Returns what serving requests (owner, reader, ids) costs, hop after hop."""
        total: Movement | None = None
        for requests in hops:
            rows = requests[:, ID_STOP] - requests[:, ID_START]
            ends = requests[:, SRC], requests[:, DST]
            one = hop_movement(*ends, rows, self.placed.num_ranks, self.topology)
            total = one.plus(total)
        return total


def imbalance(areas: FloatArray) -> float:
    """Returns the largest over the mean area, 1 for none."""
    return float(areas.max() / areas.mean()) if areas.any() else 1.0


def placement_figures(placed: PlacedMask) -> Figures:
    """Returns the exact figures of a mask on any placement of few runs."""
    return Figures(placed.areas_by_owner, placed.rows_by_owner, placed.own_rows)


def published_choices(groups: HeadGroups, limit: float = math.inf) -> list[Both]:
    """Returns the ways in which queries stay: needed keys at once, ring, all-gather; their prices are exact.

    Those that cannot take less than `limit` seconds, by their busiest rank or by moving all keys, are left out.
    """
    if groups.least_seconds() > limit:
        return []
    figures = placement_figures(groups.placed)
    choices = [_needed_keys(groups, figures)]
    if groups.all_keys_seconds() <= limit:
        choices += [_ring(groups, figures), _allgather(groups, figures)]
    return choices


def even_keys_choice(groups: HeadGroups) -> Both:
    """Returns the way in which needed keys come in stages of equal rows (MagiAttention's static overlap)."""
    figures, num_ranks = placement_figures(groups.placed), groups.placed.num_ranks
    count = groups.config.num_stages or EVEN_STAGES
    local = np.diagonal(figures.areas)
    src, dst = np.nonzero(figures.rows)
    rows = figures.rows[src, dst]
    moved = hop_movement(src, dst, rows / count, num_ranks, groups.topology)
    remote = (figures.loads - local) / count

    @functools.cache
    def build() -> Pass:
        return needed_keys_pass(groups.placed, count)

    @functools.cache
    def exact() -> Both:
        stages = build().stages
        areas = [[work.area() for work in stage.work] for stage in stages]
        moves = [transfer_movement(stage.k_cast, num_ranks, groups.topology) for stage in stages]
        loads = _key_loads(np.array(areas, dtype=np.float64), moves)
        return groups.same_both_ways(loads, float(rows.sum()), build)

    loads = _key_loads(np.array([local, *[remote] * count]), [None, *[moved] * count])
    estimate = groups.same_both_ways(loads, float(rows.sum()), build)

    def estimate_of(name: PassName) -> Choice:
        return replace(estimate[name], refine=lambda: exact()[name])

    return {name: estimate_of(name) for name in PASSES}


def _key_loads(areas: FloatArray, moves: Sequence[Movement | None]) -> PassLoads:
    """Returns the loads of stages that receive keys and keep none."""
    return PassLoads(areas, SideLoads.of(moves, [False] * len(moves)))


def _needed_keys(groups: HeadGroups, figures: Figures) -> Both:
    local = np.diagonal(figures.areas)
    src, dst = np.nonzero(figures.rows)
    build = functools.partial(needed_keys_pass, groups.placed)
    if not len(src):
        return groups.same_both_ways(PassLoads(local[None]), 0.0, build)
    rows = figures.rows[src, dst]
    moved = hop_movement(src, dst, rows, len(figures.areas), groups.topology)
    loads = _key_loads(np.stack([local, figures.loads - local]), [None, moved])
    return groups.same_both_ways(loads, float(rows.sum()), build)


def _ring(groups: HeadGroups, figures: Figures) -> Both:
    topology, num_ranks = groups.topology, len(figures.areas)
    ranks, steps = np.arange(num_ranks), np.arange(num_ranks)[:, None]
    src, dst = (ranks - steps) % num_ranks, (ranks + steps) % num_ranks
    # In a step every rank has one partner to receive from and one to send to: the slower link decides.
    node, levels = ranks // topology.node_size, seconds_per_byte(topology)
    slower = np.maximum(*(levels[(node != node[end]).astype(np.int64)] for end in (src, dst)))
    per_byte: FloatArray = slower * (figures.own_rows * (steps > 0))
    latency = np.where(steps[:, 0] > 0, topology.latency_us * 1e-6, 0.0)
    moved = SideLoads(per_byte, latency, np.zeros(num_ranks, dtype=bool))
    loads = PassLoads(figures.areas[ranks, src], moved if num_ranks > 1 else None)
    key_rows = float((num_ranks - 1) * num_ranks * figures.own_rows)
    return groups.same_both_ways(loads, key_rows, functools.partial(ring_pass, groups.placed))


def _allgather(groups: HeadGroups, figures: Figures) -> Both:
    src, dst = np.nonzero(~np.eye(len(figures.areas), dtype=bool))
    rows = np.full(len(src), figures.own_rows)
    moved = hop_movement(src, dst, rows, len(figures.areas), groups.topology)
    loads = _key_loads(figures.loads[None], [moved])
    build = functools.partial(allgather_pass, groups.placed)
    return groups.same_both_ways(loads, float(rows.sum()), build)
