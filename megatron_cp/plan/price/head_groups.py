"""Head groups of a placed mask, and the options that a pass has on them.

A strategy says how both passes of a mask run on a placement; of each pass it has one option, with its price.
`HeadGroups` prices any of them: `keys_move.py` those in which queries stay, `pairs_move.py` those in which pairs move.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from megatron_cp.config import CPConfig
from megatron_cp.mask import AttentionMask
from megatron_cp.plan.hardware.cost import (
    PassLoads,
    compute_seconds,
    head_split_seconds,
    pass_seconds,
)
from megatron_cp.plan.hardware.links import Links
from megatron_cp.plan.hardware.rows import RowCost, head_split_bytes, row_size
from megatron_cp.plan.hardware.speeds import imbalance, rank_speeds
from megatron_cp.plan.hardware.topology import get_topology
from megatron_cp.plan.placement.placement import Placement
from megatron_cp.plan.schema import (
    PASSES,
    SIDES,
    FloatArray,
    HeadSplit,
    OwnRows,
    Pass,
    PassName,
    Side,
)
from megatron_cp.plan.transfer.head_split import split_heads
from megatron_cp.plan.transfer.pass_builder import PlacedMask


@dataclass(frozen=True)
class PassOption:
    """One way to run one pass of one mask on one placement."""

    seconds: float  # of one layer
    moved_bytes: float  # to all ranks that compute, and back; relays not counted
    imbalance: float
    build: Callable[[], Pass]
    refine: "Callable[[], PassOption] | None" = None
    """The same at its exact price; None if it is that."""
    is_estimate: bool = False
    """Whether the price may be too low by more than a few per mille."""
    is_published: bool = False
    """Whether a named planner would run the pass so: the plan is never slower than that, not even by a little."""

    @property
    def published_seconds(self) -> float:
        """Returns the time of a published option, infinite for others."""
        return self.seconds if self.is_published else math.inf


Strategy = Mapping[PassName, PassOption]
"""How both passes of a mask run: an option for each, which may be taken without the other."""


def strategy_seconds(strategy: Strategy) -> float:
    """Returns the time of both passes."""
    return sum(option.seconds for option in strategy.values())


@dataclass(frozen=True)
class HeadGroups:
    """Head groups of `degree` neighbours that exchange heads; what runs inside is planned on them."""

    mask: AttentionMask
    config: CPConfig
    degree: int
    placed: PlacedMask
    """The mask on the head groups."""

    @classmethod
    def of(
        cls, mask: AttentionMask, placement: Placement, config: CPConfig, degree: int
    ) -> "HeadGroups":
        """Returns the groups of `degree` consecutive ranks of a placement on ranks."""
        placed = PlacedMask(mask, placement.regrouped(placement.num_ranks // degree))
        return cls(mask, config, degree, placed)

    @functools.cached_property
    def links(self) -> Links:
        """The links as head groups use them."""
        return Links.of(get_topology(self.config.topology), self.degree)

    @functools.cached_property
    def speeds(self) -> FloatArray:
        """The speed of each head group: of its slowest rank. float64 `[P]`."""
        return rank_speeds(self.config, self.placed.num_ranks)

    @functools.cached_property
    def _own(self) -> OwnRows:
        """The rows of one rank."""
        own = self.placed.tokens.own
        return own._replace(q=own.q // self.degree, k=own.k // self.degree)

    def row_cost(self) -> RowCost:
        """Returns the bytes of a row there and back, over both passes."""
        query, key = (
            sum(row_size(self.config, name, side, self.degree).both_ways for name in PASSES)
            for side in SIDES
        )
        return RowCost(float(query), float(key))

    def seconds(self, loads: PassLoads, name: PassName) -> float:
        """Returns the predicted time of one pass; `loads`: of the head groups, for all heads."""
        per_share = replace(loads, areas=loads.areas / self.degree)
        return pass_seconds(per_share, self.config, name, self.degree) + self.exchange_seconds[name]

    @functools.cached_property
    def exchange_seconds(self) -> dict[PassName, float]:
        """How long heads are exchanged in each pass."""
        split = HeadSplit((tuple(range(self.degree)),))
        return {name: head_split_seconds(split, self._own, self.config, name) for name in PASSES}

    def compute_seconds(self, load: float, names: Iterable[PassName] = PASSES) -> float:
        """Returns the time of these passes to compute so many pairs of a head group of speed 1."""
        return sum(compute_seconds(load / self.degree, self.config, name) for name in names)

    def fair_seconds(self) -> float:
        """Returns what both passes take at least, wherever pairs are computed: all pairs, spread by speed."""
        return self.compute_seconds(self.placed.loads.sum() / self.speeds.sum())

    def least_seconds(self) -> float:
        """Returns what both passes take at least where queries stay at home: the pairs of the slowest head group."""
        return self.compute_seconds((self.placed.loads / self.speeds).max())

    def least_seconds_at_keys(self) -> float:
        """Returns what both passes take at least where pairs are computed with their keys."""
        loads = self.placed.areas_by_owner.sum(axis=0)
        return self.compute_seconds((loads / self.speeds).max())

    def all_keys_seconds(self) -> float:
        """Returns what both passes take at least where every head group receives all keys."""
        num_ranks = self.placed.num_ranks
        inside = np.minimum(self.links.sizes, num_ranks)
        rows = np.append(inside[0] - 1, num_ranks - inside) * self.placed.own_rows
        return float((rows * self.row_cost().key * self.links.seconds_per_byte).max())

    def moved_bytes(self, rows: dict[Side, float], name: PassName) -> float:
        """Returns what all ranks send in a pass; `rows`: moved per side by all head groups together."""
        moved = self.placed.num_ranks * head_split_bytes(self._own, self.degree, self.config, name)
        for side in SIDES:
            moved += rows[side] * row_size(self.config, name, side, self.degree).both_ways
        return self.degree * moved

    def same_both_ways(
        self, loads: PassLoads, key_rows: float, build: Callable[[], Pass]
    ) -> Strategy:
        """Returns the strategy whose backward pass moves and computes as its forward pass does; keys move."""
        rows: dict[Side, float] = {"q": 0.0, "k": key_rows}
        build_once = functools.cache(lambda: split_heads(build(), self.degree))
        uneven = self.imbalance(loads.areas.sum(axis=0))
        return {
            name: PassOption(
                self.seconds(loads, name),
                self.moved_bytes(rows, name),
                uneven,
                build_once,
                is_published=True,
            )
            for name in PASSES
        }

    def imbalance(self, areas: FloatArray) -> float:
        """Returns the largest time of the head groups over the fair one; `areas` `[P]`: their pairs."""
        return imbalance(areas, self.speeds)
