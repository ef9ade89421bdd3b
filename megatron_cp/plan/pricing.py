"""Predicted seconds of the ways to run a mask on a placement, without building a plan.

Two kinds of ways: queries stay and keys travel (the published schemes, from two figures: the pairs between
the queries of one rank and the keys of another, and the key rows that one needs of the other); or pairs are
assigned to ranks by search and rows of both sides travel. Areas and rows are exact. One thing is estimated:
how they divide over several stages (evenly); the winner is priced again once it is built.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_cp.config import CPConfig, Topology
from megatron_cp.mask import AttentionMask
from megatron_cp.mask.interval import IntArray
from megatron_cp.plan.assignment import Weights, assign
from megatron_cp.plan.cost import (
    FloatArray,
    Movement,
    StageLoad,
    head_split_bytes,
    head_split_seconds,
    hop_movement,
    pass_seconds,
    row_bytes,
)
from megatron_cp.plan.heads import split_heads
from megatron_cp.plan.overlap import AssignedMask, Staging
from megatron_cp.plan.placement import Deal
from megatron_cp.plan.routing import DST, ID_START, ID_STOP, SRC
from megatron_cp.plan.schema import SIDES, HeadSplit, Pass, PassName, Side
from megatron_cp.plan.schemes.gather import allgather_pass, needed_keys_pass
from megatron_cp.plan.schemes.ring import ring_pass
from megatron_cp.plan.stages import PlacedMask
from megatron_cp.plan.topology import get_topology

STAGE_COUNTS = (1, 2, 4)
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
    """One way to run one mask on one placement: forward and backward alike."""

    seconds: float  # forward plus backward of one layer
    moved_bytes: float  # sent by all ranks in both passes
    imbalance: float
    is_published: bool  # priced exactly, and nothing slower may be chosen
    build: Callable[[], Pass]


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

    def choice(
        self,
        loads: Sequence[StageLoad],
        rows: dict[Side, float],
        build: Callable[[], Pass],
        *,
        is_published: bool = False,
    ) -> Choice:
        """Returns the priced choice.

        `loads`: of the super-ranks, for all heads. `rows`: moved per side by all super-ranks together.
        """
        num_ranks = self.placed.num_ranks * self.degree
        loads = [replace(load, areas=load.areas / self.degree) for load in loads]
        seconds = sum(pass_seconds(loads, self.config, name, self.degree) for name in PASSES)
        weights = self.weights()
        moved = (rows["q"] * weights.query + rows["k"] * weights.key) * self.degree
        if self.degree > 1:
            own_rows = self.placed.own_rows // self.degree
            split = HeadSplit((tuple(range(self.degree)),))
            for name in PASSES:
                seconds += head_split_seconds(split, own_rows, self.config, name)
                moved += num_ranks * head_split_bytes(own_rows, self.degree, self.config, name)
        areas = np.sum([load.areas for load in loads], axis=0)
        imbalance = float(areas.max() / areas.mean()) if areas.any() else 1.0
        return Choice(
            seconds, moved, imbalance, is_published, lambda: split_heads(build(), self.degree)
        )

    def movement(self, requests: IntArray) -> Movement | None:
        """Returns what serving requests (owner, reader, ids) costs, straight from the owners."""
        if not len(requests):
            return None
        rows = requests[:, ID_STOP] - requests[:, ID_START]
        return hop_movement(
            requests[:, SRC], requests[:, DST], rows, self.placed.num_ranks, self.topology
        )


def placement_figures(placed: PlacedMask) -> Figures:
    """Returns the exact figures of a mask on any placement of few runs."""
    return Figures(placed.areas_by_owner(), placed.rows_by_owner(), placed.own_rows)


def moved_key_choices(groups: HeadGroups, figures: Figures) -> list[Choice]:
    """Returns the ways in which queries stay: needed keys in some stages, ring, all-gather.

    A config that asks for a number of stages gets just that.
    """
    found = _needed_keys(groups, figures)
    if groups.config.num_stages is None:
        found += [_ring(groups, figures), _allgather(groups, figures)]
    return found


def assigned_choices(groups: HeadGroups) -> list[Choice]:
    """Returns the ways in which pairs are assigned by search: balanced, with few rows moved on both sides."""
    placed, config = groups.placed, groups.config
    node_size, even = groups.topology.node_size, np.ones(placed.num_ranks)
    found = assign(groups.mask, placed.owners, node_size, groups.weights(), even)
    assigned = AssignedMask(placed, found)
    requests: dict[Side, IntArray] = {side: assigned.requests(side) for side in SIDES}
    rows = {side: float((r[:, ID_STOP] - r[:, ID_START]).sum()) for side, r in requests.items()}
    moves = {side: groups.movement(request) for side, request in requests.items()}
    counts = STAGE_COUNTS if config.num_stages is None else (config.num_stages,)
    if not any(rows.values()):
        counts = (0,)
    choices = []
    for staging in [
        Staging(count, rest) for count in counts for rest in (False, True)[: count + 1]
    ]:
        loads = _assigned_loads(assigned, staging, moves)
        build = functools.partial(assigned.build, staging)
        choices.append(groups.choice(loads, rows, build))
    return choices


def _assigned_loads(
    assigned: AssignedMask, staging: Staging, moves: dict[Side, Movement | None]
) -> list[StageLoad]:
    local, count = assigned.local_areas, staging.num_remote
    remote = assigned.areas - local
    parts = {side: None if move is None else move.part(count) for side, move in moves.items()}
    loads = [StageLoad(local / 2 if staging.keeps_rest else local)]
    for index in range(count):
        loads.append(StageLoad(remote / count, parts["k"], parts["q"], keeps_keys=index > 0))
    return loads + [StageLoad(local / 2)] * staging.keeps_rest


def _needed_keys(groups: HeadGroups, figures: Figures) -> list[Choice]:
    config, placed = groups.config, groups.placed
    counts = STAGE_COUNTS if config.num_stages is None else (config.num_stages,)
    local = StageLoad(np.diagonal(figures.areas))
    src, dst = np.nonzero(figures.rows)
    build = functools.partial(needed_keys_pass, placed)
    if not len(src):
        return [groups.choice([local], _keys_only(0.0), build, is_published=True)]
    rows = figures.rows[src, dst]
    movement = hop_movement(src, dst, rows, len(figures.areas), groups.topology)
    remote = figures.loads - local.areas
    found = []
    for count in counts:
        loads = [local] + [StageLoad(remote / count, movement.part(count))] * count
        build = functools.partial(needed_keys_pass, placed, num_stages=count)
        moved = _keys_only(float(rows.sum()))
        found.append(groups.choice(loads, moved, build, is_published=count == 1))
    return found


def _ring(groups: HeadGroups, figures: Figures) -> Choice:
    ranks = np.arange(len(figures.areas))
    loads = [StageLoad(np.diagonal(figures.areas))]
    rows = np.full(len(ranks), figures.own_rows)
    for step in range(1, len(ranks)):
        src = (ranks - step) % len(ranks)
        movement = hop_movement(src, ranks, rows, len(ranks), groups.topology)
        loads.append(StageLoad(figures.areas[ranks, src], movement))
    moved = _keys_only(float((len(ranks) - 1) * rows.sum()))
    build = functools.partial(ring_pass, groups.placed)
    return groups.choice(loads, moved, build, is_published=True)


def _allgather(groups: HeadGroups, figures: Figures) -> Choice:
    src, dst = np.nonzero(~np.eye(len(figures.areas), dtype=bool))
    rows = np.full(len(src), figures.own_rows)
    movement = hop_movement(src, dst, rows, len(figures.areas), groups.topology)
    loads = [StageLoad(figures.loads, movement)]
    build = functools.partial(allgather_pass, groups.placed)
    return groups.choice(loads, _keys_only(float(rows.sum())), build, is_published=True)


def _keys_only(rows: float) -> dict[Side, float]:
    return {"q": 0.0, "k": rows}
