"""Stages of an assignment: what is computed first, so that rows travel while there is other work.

    stage     0           1 ... K                                        K + 1 (optional)
    work      local       pairs with foreign rows, equal areas           the rest of the local pairs
    moves     -           rows needed for the first time; keys stay      results go home under it

Local pairs hide the first rows on their way; a part of them, left for the end, hides the last results. Pairs of
foreign queries come before pairs of own queries, because own queries send no results. A foreign query is in one
stage only; a foreign key arrives with the first stage that needs it and is kept.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megatron_cp.mask import interval
from megatron_cp.mask.interval import IntArray
from megatron_cp.mask.slice import K_END, K_START, Q_END, Q_START, cut_rows, rows_area
from megatron_cp.plan.assignment import Assignment
from megatron_cp.plan.routing import Route, direct
from megatron_cp.plan.schema import Pass, Side
from megatron_cp.plan.stages import COLUMNS, PassBuilder, PlacedMask

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Staging:
    """How the pairs of an assignment are spread over stages."""

    num_remote: int
    keeps_rest: bool
    """Half of the local pairs come last."""


class AssignedMask:
    """A placed mask with a rank for every pair: what is local, and which rows have to move."""

    def __init__(self, placed: PlacedMask, assignment: Assignment):
        self.placed = placed
        parts, ranks = assignment.parts, assignment.ranks
        for start, end in ((Q_START, Q_END), (K_START, K_END)):
            parts, ranks = _cut_at_owners(parts, ranks, placed.owners.ids, (start, end))
        self.parts, self.ranks = parts, ranks
        self.area = rows_area(parts).astype(np.float64)
        self.has_own_query = placed.owners.rank_of(parts[:, Q_START]) == ranks
        self.is_local = self.has_own_query & (placed.owners.rank_of(parts[:, K_START]) == ranks)

    @property
    def local_areas(self) -> FloatArray:
        """Returns the pairs of each rank that need no foreign row: `[P]`."""
        return self._per_rank(self.area * self.is_local)

    @property
    def areas(self) -> FloatArray:
        """Returns the pairs of each rank: `[P]`."""
        return self._per_rank(self.area)

    def _per_rank(self, area: FloatArray) -> FloatArray:
        return np.bincount(self.ranks, area, self.placed.num_ranks).astype(np.float64)

    def requests(self, side: Side) -> IntArray:
        """Returns the foreign rows of one side that ranks need: int64 `[m, 4]` (owner, reader, ids)."""
        start, end = COLUMNS[side]
        space = self.placed.space
        wanted = self.parts[:, [start, end]] + (self.ranks * space.stride)[:, None]
        return self.placed.owners.requests(space.missing(interval.normalise(wanted)))

    def build(self, staging: Staging, route: Route = direct) -> Pass:
        """Returns the pass that computes the assignment in these stages."""
        stage = self._stage_of_parts(staging)
        builder = PassBuilder(self.placed, route)
        for index in range(staging.num_remote + 1 + staging.keeps_rest):
            now = stage == index
            is_kept = 1 < index <= staging.num_remote
            builder.add(self.parts[now], self.ranks[now], keeps_k=is_kept)
        return builder.build()

    def _stage_of_parts(self, staging: Staging) -> IntArray:
        stage = np.zeros(len(self.parts), dtype=np.int64)
        if staging.keeps_rest:
            stage[self.is_local & (self._share_before(self._in_rows, self.is_local) > 0.5)] = (
                staging.num_remote + 1
            )
        remote = ~self.is_local
        share = self._share_before(self._foreign_first, remote)
        stage[remote] = 1 + np.minimum(share[remote] * staging.num_remote, staging.num_remote - 1)
        return stage

    @cached_property
    def _in_rows(self) -> IntArray:
        """Parts of a rank by query."""
        return np.stack([self.ranks, self.parts[:, Q_START]])

    @cached_property
    def _foreign_first(self) -> IntArray:
        """Parts of a rank: those of foreign queries by query, then those of own queries by key."""
        along = np.where(self.has_own_query, self.parts[:, K_START], self.parts[:, Q_START])
        return np.stack([self.ranks, self.has_own_query * self.placed.space.stride + along])

    def _share_before(self, keys: IntArray, chosen: NDArray[np.bool_]) -> FloatArray:
        """Returns the share of its rank's chosen area that lies before the middle of each part's run of equal keys."""
        order = np.lexsort(keys[::-1])
        area = (self.area * chosen)[order]
        opens = np.r_[True, (np.diff(keys[:, order]) != 0).any(axis=0)]
        run = np.cumsum(opens) - 1
        size = np.bincount(run, area)
        middle = (np.cumsum(size) - size / 2)[run]
        rank = self.ranks[order]
        total = np.bincount(rank, area, self.placed.num_ranks)
        before = (np.cumsum(total) - total)[rank]
        share = np.zeros(len(order))
        share[order] = (middle - before) / np.where(total > 0, total, 1.0)[rank]
        return share


def _cut_at_owners(
    parts: IntArray, ranks: IntArray, ids: IntArray, columns: tuple[int, int]
) -> tuple[IntArray, IntArray]:
    start, end = columns
    low = np.searchsorted(ids[:, 1], parts[:, start], side="right")
    high = np.searchsorted(ids[:, 0], parts[:, end], side="left")
    pieces, _ = cut_rows(parts, ids, start, end)
    return pieces, np.repeat(ranks, high - low)
