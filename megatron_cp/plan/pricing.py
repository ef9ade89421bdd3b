"""Predicted seconds of the published ways to run a mask on a placement, without building a plan.

Queries stay and keys travel. Two figures of a mask on a placement decide: the pairs between the queries of one
rank and the keys of another, and the key rows that one needs of the other. `HeadGroups` prices any way on
super-ranks; `plan/assigned.py` does so for pairs that move.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_cp.config import CPConfig, Topology
from megatron_cp.mask import AttentionMask
from megatron_cp.mask.interval import IntArray
from megatron_cp.plan.assignment import Weights
from megatron_cp.plan.cost import (
    FloatArray,
    Movement,
    StageLoad,
    head_split_bytes,
    head_split_seconds,
    hop_movement,
    pass_seconds,
    row_bytes,
    transfer_movement,
)
from megatron_cp.plan.heads import split_heads
from megatron_cp.plan.placement import Deal
from megatron_cp.plan.routing import DST, ID_START, ID_STOP, SRC
from megatron_cp.plan.schema import SIDES, HeadSplit, Pass, PassName, Side
from megatron_cp.plan.schemes.gather import allgather_pass, needed_keys_pass
from megatron_cp.plan.schemes.ring import ring_pass
from megatron_cp.plan.stages import PlacedMask
from megatron_cp.plan.topology import get_topology

EVEN_STAGES = 2  # of MagiAttention's static overlap
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
    """One way to run one mask on one placement."""

    seconds: float  # forward plus backward of one layer
    moved_bytes: float  # sent by all ranks in both passes
    imbalance: float
    is_published: bool  # nothing slower may be chosen
    build: Callable[[], tuple[Pass, Pass]]
    refine: "Callable[[], Choice] | None" = (
        None  # the same at its exact price; None if that is the price
    )


@dataclass(frozen=True)
class HeadGroups:
    """Super-ranks of `degree` neighbours that exchange heads; what runs inside is planned on them."""

    mask: AttentionMask
    config: CPConfig
    degree: int
    placed: PlacedMask
    """The mask on the super-ranks."""

    @classmethod
    def of(cls, mask: AttentionMask, deal: Deal, config: CPConfig, degree: int) -> "HeadGroups":
        """Returns the groups of `degree` consecutive ranks of a deal to ranks."""
        placed = PlacedMask(mask, deal.regrouped(len(deal.chunks) // degree))
        return cls(mask, config, degree, placed)

    @property
    def topology(self) -> Topology:
        """Returns the machine as super-ranks see it."""
        topology = get_topology(self.config.topology)
        return replace(topology, node_size=max(1, topology.node_size // self.degree))

    def weights(self) -> Weights:
        """Returns bytes per row there and back, over both passes."""
        both = {
            side: sum(
                size.there + size.back
                for size in (row_bytes(self.config, name, side, self.degree) for name in PASSES)
            )
            for side in SIDES
        }
        return Weights(float(both["q"]), float(both["k"]))

    def seconds(self, loads: Sequence[StageLoad], name: PassName) -> float:
        """Returns the predicted time of one pass; `loads`: of the super-ranks, for all heads."""
        loads = [replace(load, areas=load.areas / self.degree) for load in loads]
        seconds = pass_seconds(loads, self.config, name, self.degree)
        split = HeadSplit((tuple(range(self.degree)),))
        own_rows = self.placed.own_rows // self.degree
        return seconds + head_split_seconds(split, own_rows, self.config, name)

    def moved_bytes(self, rows: dict[Side, float]) -> float:
        """Returns what all ranks send in both passes; `rows`: moved per side by all super-ranks together."""
        weights = self.weights()
        own_rows = self.placed.own_rows // self.degree
        exchanged = sum(head_split_bytes(own_rows, self.degree, self.config, n) for n in PASSES)
        moved = rows["q"] * weights.query + rows["k"] * weights.key
        return self.degree * (moved + self.placed.num_ranks * exchanged)

    def same_both_ways(
        self, loads: Sequence[StageLoad], key_rows: float, build: Callable[[], Pass]
    ) -> Choice:
        """Returns the choice whose backward pass moves and computes as its forward pass does; keys move."""

        def build_both() -> tuple[Pass, Pass]:
            both = split_heads(build(), self.degree)
            return both, both

        areas = np.sum([load.areas for load in loads], axis=0)
        return Choice(
            sum(self.seconds(loads, name) for name in PASSES),
            self.moved_bytes({"q": 0.0, "k": key_rows}),
            imbalance(areas),
            is_published=True,
            build=build_both,
        )

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
    return Figures(placed.areas_by_owner(), placed.rows_by_owner(), placed.own_rows)


def published_choices(groups: HeadGroups) -> list[Choice]:
    """Returns the ways in which queries stay: needed keys at once, ring, all-gather; their prices are exact."""
    figures = placement_figures(groups.placed)
    return [_needed_keys(groups, figures), _ring(groups, figures), _allgather(groups, figures)]


def even_keys_choice(groups: HeadGroups) -> Choice:
    """Returns the way in which needed keys come in stages of equal rows (MagiAttention's static overlap)."""
    figures, num_ranks = placement_figures(groups.placed), groups.placed.num_ranks
    local = np.diagonal(figures.areas)
    src, dst = np.nonzero(figures.rows)
    rows = figures.rows[src, dst]
    movement = hop_movement(src, dst, rows / EVEN_STAGES, num_ranks, groups.topology)
    remote = StageLoad((figures.loads - local) / EVEN_STAGES, movement)

    def build() -> Pass:
        return needed_keys_pass(groups.placed, EVEN_STAGES)

    def refined() -> Choice:
        pass_ = build()
        loads = []
        for stage in pass_.stages:
            areas = np.array([work.area() for work in stage.work], dtype=np.float64)
            moved = transfer_movement(stage.k_cast, num_ranks, groups.topology)
            loads.append(StageLoad(areas, moved))
        exact = groups.same_both_ways(loads, float(rows.sum()), lambda: pass_)
        return replace(exact, is_published=False)

    choice = groups.same_both_ways(
        [StageLoad(local)] + [remote] * EVEN_STAGES, float(rows.sum()), build
    )
    return replace(choice, is_published=False, refine=refined)


def _needed_keys(groups: HeadGroups, figures: Figures) -> Choice:
    local = StageLoad(np.diagonal(figures.areas))
    src, dst = np.nonzero(figures.rows)
    build = functools.partial(needed_keys_pass, groups.placed)
    if not len(src):
        return groups.same_both_ways([local], 0.0, build)
    rows = figures.rows[src, dst]
    movement = hop_movement(src, dst, rows, len(figures.areas), groups.topology)
    loads = [local, StageLoad(figures.loads - local.areas, movement)]
    return groups.same_both_ways(loads, float(rows.sum()), build)


def _ring(groups: HeadGroups, figures: Figures) -> Choice:
    ranks = np.arange(len(figures.areas))
    loads = [StageLoad(np.diagonal(figures.areas))]
    rows = np.full(len(ranks), figures.own_rows)
    for step in range(1, len(ranks)):
        src = (ranks - step) % len(ranks)
        movement = hop_movement(src, ranks, rows, len(ranks), groups.topology)
        loads.append(StageLoad(figures.areas[ranks, src], movement))
    key_rows = float((len(ranks) - 1) * rows.sum())
    return groups.same_both_ways(loads, key_rows, functools.partial(ring_pass, groups.placed))


def _allgather(groups: HeadGroups, figures: Figures) -> Choice:
    src, dst = np.nonzero(~np.eye(len(figures.areas), dtype=bool))
    rows = np.full(len(src), figures.own_rows)
    movement = hop_movement(src, dst, rows, len(figures.areas), groups.topology)
    loads = [StageLoad(figures.loads, movement)]
    build = functools.partial(allgather_pass, groups.placed)
    return groups.same_both_ways(loads, float(rows.sum()), build)
