"""Placements worth a look: tokens in order, zigzag, by documents, or in chunks by area.

Each is made for head groups, groups of `degree` ranks that exchange heads, and then cut evenly among their ranks:
what a head group holds is in order, so slices are few and large.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from megatron_cp.config import CPConfig
from megatron_cp.mask import AttentionMask
from megatron_cp.mask.interval import IntArray, distinct
from megatron_cp.mask.linked import document_bounds
from megatron_cp.plan.hardware.links import Links
from megatron_cp.plan.hardware.speeds import rank_speeds, total_speed
from megatron_cp.plan.hardware.topology import get_topology
from megatron_cp.plan.placement import by_area
from megatron_cp.plan.placement.by_area import ChunkTable
from megatron_cp.plan.placement.by_documents import (
    Ranks,
    whole_documents,
)
from megatron_cp.plan.placement.placement import Placement, chunk_layout

Family = Mapping[str, tuple[AttentionMask, float]]  # name -> (mask, number of layers)


@dataclass(frozen=True)
class PlacementLimits:
    """How fine placements are; `search/budget.py` says what set each number."""

    imbalance: float
    """Of chunks placed by area: exchanges end once the busiest rank is no further above the mean."""
    chunks: int
    """Over all head groups."""
    least_chunks: int
    """Of each head group."""
    coarse_chunks: int
    """Of each head group, where chunks are as large as they may be and still be balanced."""
    most_parts: int
    """Of a mask on documents in mirrored pieces: planning time grows with them."""
    most_parts_per_rank: int
    """More ranks may have more."""


class PlacementCandidates:
    """The placements of one family of masks on `cp_size` ranks; all have the same number of rows."""

    def __init__(
        self,
        masks: Family,
        cp_size: int,
        config: CPConfig,
        smallest_degree: int,
        limits: PlacementLimits,
    ):
        self.masks, self.cp_size, self.config, self.limits = masks, cp_size, config, limits
        self.smallest_degree = smallest_degree
        # One row count for all: it must not depend on the data, pipeline shapes are fixed by it.
        num_tokens = next(iter(masks.values()))[0].num_queries
        # Zigzag halves every rank's rows; of an odd chunk that was chosen it would double them.
        pieces = 2 if cp_size > 1 and config.chunk_size is None else 1
        even = replace(config, token_multiple=math.lcm(config.token_multiple, pieces))
        self.chunk, per_rank = chunk_layout(num_tokens, cp_size, even)
        self.rows = self.chunk * per_rank
        self._documents: dict[int, list[tuple[Placement, tuple[float, float]]]] = {}
        self._on_groups: dict[tuple[int, float, int], Placement | None] = {}
        layers = np.array([weight for _, weight in masks.values()])
        self.balances = [layers[None, :]]
        """What documents are balanced by, each `[loads, masks]`: all masks in one sum; each in a load of its own, all
        loads kept; one mask alone."""
        if len(masks) > 1:
            self.balances += [np.diag(layers), *np.diag(layers)[:, None, :]]

    def in_order(self) -> Placement:
        """Returns the stream cut into equal pieces, in order."""
        return Placement.in_pieces(self.cp_size, self.rows)

    @functools.cached_property
    def areas_in_order(self) -> dict[str, IntArray]:
        """The pairs of each rank's queries under each mask, tokens in order: `[P]`."""
        bounds = np.arange(self.cp_size + 1) * self.rows
        return {name: mask.area_of_rows(bounds) for name, (mask, _) in self.masks.items()}

    @functools.cached_property
    def is_even_in_order(self) -> bool:
        """Whether tokens in order have their share of the area already, as under a full mask."""
        areas = self.areas_in_order
        per_rank = np.sum([weight * areas[one] for one, (_, weight) in self.masks.items()], axis=0)
        fair = per_rank.sum() / total_speed(self.config, self.cp_size)
        longest = (per_rank / rank_speeds(self.config, self.cp_size)).max()
        return bool(longest <= (1 + self.limits.imbalance) * fair)

    def zigzag(self, degree: int) -> Placement:
        """Returns two mirrored pieces of the stream per head group; in order where a chosen chunk would be cut."""
        groups = self.cp_size // degree
        if groups == 1 or degree * self.rows % (2 * (self.config.chunk_size or 1)):
            return self.in_order()
        halves = Placement.in_mirrored_halves(groups, degree * self.rows // 2)
        return halves.regrouped(self.cp_size)

    def by_documents(self, degree: int, most_load: float, balance: int = 0) -> Placement | None:
        """Returns documents on as few ranks as they fit, and on more if one would have over `most_load` of its share.

        `balance` is one of `balances`. None if the mask is one document, or if the pieces would be too many. With a
        chosen chunk size documents begin at the nearest chunk.
        """
        if not self.has_documents:
            return None
        limit, placed = self._whole(most_load, balance)
        key = degree, limit, balance
        if key not in self._on_groups:
            self._on_groups[key] = self._documents_on_groups(placed, degree)
        return self._on_groups[key]

    def _documents_on_groups(self, whole: Placement, degree: int) -> Placement | None:
        groups = whole.regrouped(self.cp_size // degree).in_order()
        document = np.searchsorted(self._bounds, groups.ids[:, 0], side="right")
        pieces = np.bincount(document)
        parts = (pieces * (pieces + 1) // 2).sum()
        if parts > max(self.limits.most_parts, self.limits.most_parts_per_rank * self.cp_size):
            return None
        return groups.regrouped(self.cp_size)

    def _whole(self, most_load: float, balance: int) -> tuple[float, Placement]:
        """Returns documents on head groups, and a limit that gives the same; placed once for all such limits."""
        known = self._documents.setdefault(balance, [])
        for placed, (least, most) in known:
            if least <= most_load <= most:
                return most, placed
        placed, (least, most) = self._whole_documents(most_load, balance)
        known.append((placed, (least, most)))
        return most, placed

    @property
    def has_documents(self) -> bool:
        """Returns whether no mask links tokens of two parts of the stream."""
        return len(self._bounds) > 2

    @functools.cached_property
    def _bounds(self) -> IntArray:
        """Where documents of all masks begin, and the end."""
        return functools.reduce(
            np.intersect1d, (document_bounds(mask) for mask, _ in self.masks.values())
        )

    def _whole_documents(
        self, most_load: float, balance: int
    ) -> tuple[Placement, tuple[float, float]]:
        """Returns documents on the smallest head groups that are looked at, in whole chunks if those are chosen."""
        degree, chunk = self.smallest_degree, self.config.chunk_size or 1
        groups = self.cp_size // degree
        topology = get_topology(self.config.topology)
        whole = [topology.node_size, *(level.size for level in topology.outer_levels)]
        inside = zip(whole, Links.of(topology, degree).sizes, strict=True)
        sizes = [
            groups if self.cp_size <= size else math.gcd(groups, inner) for size, inner in inside
        ]
        ranks = Ranks(rank_speeds(self.config, groups), tuple(sizes))
        last = -(-self._bounds[-1] // chunk)
        bounds = distinct(np.append((self._bounds[:-1] + chunk // 2) // chunk, last))
        tokens = np.minimum(bounds * chunk, self._bounds[-1])
        areas = np.stack([mask.area_of_rows(tokens) for mask, _ in self.masks.values()], axis=1)
        rows, loads = degree * self.rows // chunk, areas @ self.balances[balance].T
        placed, limits = whole_documents(bounds, loads, ranks, rows, most_load)
        return replace(placed, ids=placed.ids * chunk), limits

    def by_area(self, degree: int, is_coarse: bool = False) -> Placement:
        """Returns zigzag chunks of head groups, exchanged until areas are as their speeds.

        In coarse ones fewer documents are cut, and fewer rows move.
        """
        groups, limits = self.cp_size // degree, self.limits
        wished = max(limits.least_chunks, limits.chunks // groups)
        per_group = _largest_divisor(
            degree * self.rows // self.chunk, limits.coarse_chunks if is_coarse else wished
        )
        size, count = degree * self.rows // per_group, groups * per_group
        tables = [self._chunk_table(mask, size, count) for mask, _ in self.masks.values()]
        table = by_area.weighted_sum(tables, [weight for _, weight in self.masks.values()])
        zigzag = by_area.zigzag_chunks(count, groups)
        speeds = rank_speeds(self.config, groups)
        owned = by_area.exchange_chunks(zigzag, table, self.limits.imbalance, speeds)
        return Placement.of_chunks(np.sort(owned, axis=1), size).regrouped(self.cp_size)

    def _chunk_table(self, mask: AttentionMask, size: int, count: int) -> ChunkTable:
        return by_area.chunk_table(mask, size, count)


def _largest_divisor(number: int, most: int) -> int:
    return next(n for n in range(min(number, most), 0, -1) if number % n == 0)
