"""Predicted seconds of the ways to run a mask on a placement, without building a plan.

Two figures of a mask on a placement decide: the pairs between the queries of one rank and the keys of
another, and the key rows that one needs of the other. Choices priced from them are exact for the published
schemes. Two things are estimated: the rows needed by a deal of chunks (from above, see `chunk_table`), and
how areas split over several stages of needed keys (evenly). Rows split evenly over stages by construction.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megatron_cp.config import CPConfig
from megatron_cp.mask import AttentionMask
from megatron_cp.mask.interval import IntArray
from megatron_cp.plan.balance import ChunkTable
from megatron_cp.plan.cost import (
    FloatArray,
    Movement,
    StageLoad,
    head_split_seconds,
    hop_movement,
    pass_seconds,
)
from megatron_cp.plan.schema import Pass
from megatron_cp.plan.schemes.gather import allgather_pass, needed_keys_pass
from megatron_cp.plan.schemes.ring import ring_pass
from megatron_cp.plan.schemes.ulysses import fits_heads, full_split, ulysses_pass
from megatron_cp.plan.stages import PlacedMask
from megatron_cp.plan.topology import get_topology

STAGE_COUNTS = (1, 2, 4)


@dataclass(frozen=True)
class Figures:
    """A mask on a placement, as far as the cost model is concerned."""

    areas: FloatArray  # [P, P] pairs between the queries of rank i and the keys of rank j
    rows: FloatArray  # [P, P] key rows that rank j needs of rank i
    own_rows: int
    is_exact: bool

    @property
    def loads(self) -> FloatArray:
        """Returns the pairs that each rank computes: `[P]`."""
        return self.areas.sum(axis=1)


@dataclass(frozen=True)
class Choice:
    """One way to run one mask on one placement: forward and backward alike."""

    seconds: float  # forward plus backward of one layer
    is_published: bool  # priced exactly, and nothing slower may be chosen
    build: Callable[[PlacedMask], Pass]


def placement_figures(mask: AttentionMask, tokens: IntArray) -> Figures:
    """Returns the exact figures of a mask on any placement of few runs."""
    placed = PlacedMask(mask, tokens)
    return Figures(placed.areas_by_owner(), placed.rows_by_owner(), tokens.shape[1], is_exact=True)


def deal_figures(table: ChunkTable, owned: IntArray) -> Figures:
    """Returns the figures of a deal of chunks `[P, n]`."""
    areas = table.areas[owned].sum(axis=1)[:, owned].sum(axis=2)
    needed = table.needs[owned].max(axis=1)
    np.put_along_axis(needed, owned, 0.0, axis=1)  # own rows do not travel
    rows = needed[:, owned].sum(axis=2).T
    return Figures(areas, rows, owned.shape[1] * table.chunk_size, is_exact=False)


def choices(
    mask: AttentionMask, figures: Figures, config: CPConfig, *, is_in_order: bool
) -> list[Choice]:
    """Returns the ways to run `mask` on the placement of `figures`, the fastest first.

    The published schemes need exact figures, and Ulysses tokens in order; a config that asks for a number
    of stages gets just that.
    """
    found = _needed_keys(figures, config, is_in_order)
    if figures.is_exact and config.num_stages is None:
        found += [_ring(figures, config), _allgather(figures, config)]
        if is_in_order and fits_heads(len(figures.areas), config):
            found.append(_ulysses(mask, figures, config))
    return sorted(found, key=lambda choice: choice.seconds)


def _needed_keys(figures: Figures, config: CPConfig, is_in_order: bool) -> list[Choice]:
    counts = STAGE_COUNTS if config.num_stages is None else (config.num_stages,)
    local = StageLoad(np.diagonal(figures.areas))
    src, dst = np.nonzero(figures.rows)
    if not len(src):
        return [Choice(_seconds([local], config), is_in_order, needed_keys_pass)]
    movement = _movement(src, dst, figures.rows[src, dst], figures, config)
    remote = figures.loads - local.areas
    found = []
    for count in counts:
        loads = [local] + [StageLoad(remote / count, movement.part(count))] * count
        build = functools.partial(needed_keys_pass, num_stages=count)
        found.append(Choice(_seconds(loads, config), is_in_order and count == 1, build))
    return found


def _ring(figures: Figures, config: CPConfig) -> Choice:
    ranks = np.arange(len(figures.areas))
    loads = [StageLoad(np.diagonal(figures.areas))]
    for step in range(1, len(ranks)):
        src = (ranks - step) % len(ranks)
        movement = _movement(src, ranks, np.full(len(ranks), figures.own_rows), figures, config)
        loads.append(StageLoad(figures.areas[ranks, src], movement))
    return Choice(_seconds(loads, config), True, ring_pass)


def _allgather(figures: Figures, config: CPConfig) -> Choice:
    src, dst = np.nonzero(~np.eye(len(figures.areas), dtype=bool))
    movement = _movement(src, dst, np.full(len(src), figures.own_rows), figures, config)
    return Choice(_seconds([StageLoad(figures.loads, movement)], config), True, allgather_pass)


def _ulysses(mask: AttentionMask, figures: Figures, config: CPConfig) -> Choice:
    num_ranks, split = len(figures.areas), full_split(len(figures.areas))
    load = StageLoad(np.full(num_ranks, mask.area() / num_ranks))
    seconds = _seconds([load], config, num_ranks) + sum(
        head_split_seconds(split, figures.own_rows, config, name)
        for name in ("forward", "backward")
    )
    num_rows = num_ranks * figures.own_rows
    return Choice(seconds, True, lambda _: ulysses_pass(mask, num_ranks, num_rows))


def _movement(
    src: IntArray,
    dst: IntArray,
    rows: IntArray | FloatArray,
    figures: Figures,
    config: CPConfig,
) -> Movement:
    return hop_movement(src, dst, rows, len(figures.areas), get_topology(config.topology))


def _seconds(loads: list[StageLoad], config: CPConfig, head_degree: int = 1) -> float:
    return sum(pass_seconds(loads, config, name, head_degree) for name in ("forward", "backward"))
