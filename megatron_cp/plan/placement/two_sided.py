"""Cross attention: queries and keys that are different tokens, placed each by itself and planned as one stream.

    6 queries x 4 keys on two ranks            one stream of 10 tokens

        keys    0 1 | 2 3                          6 7 | 8 9
    queries                                    0       .
    0 1 2       rank 0 owns 0 1 2, keys 0 1    1 2 3   .   rank 0 owns 0 1 2 6 7
    3 4 5       rank 1 owns 3 4 5, keys 2 3    4 5     .   rank 1 owns 3 4 5 8 9

All queries stand before all keys, and each rank has its queries before its keys. So whatever is known of the self
attention of one stream (who computes what, stages, routes, prices) holds for cross attention, in which no query is a
key. Only what is counted in own rows differs by side: `Placement.own`. A finished pass is taken apart again by
`plan/transfer/two_sided.py`.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megatron_cp.mask import AttentionMask, interval
from megatron_cp.mask.interval import IntArray
from megatron_cp.mask.slice import (
    K_END,
    K_START,
    Q_END,
    Q_START,
    cut_rows,
    shift_rows,
)
from megatron_cp.plan.placement import by_area
from megatron_cp.plan.placement.by_area import ChunkTable
from megatron_cp.plan.placement.candidates import PlacementCandidates
from megatron_cp.plan.placement.placement import Placement, chunk_layout
from megatron_cp.plan.schema import OwnRows, Side

KnownSides = Mapping[Side, Placement]
"""The sides whose tokens lie where another plan has them."""


@dataclass(frozen=True)
class TwoSidedPlacement(Placement):
    """The queries and keys of ranks as one stream: keys have the ids behind those of all queries."""

    queries: Placement
    keys: Placement
    """Ids of their own, from 0."""

    @classmethod
    def of(cls, queries: Placement, keys: Placement) -> "TwoSidedPlacement":
        """Returns both sides on the same ranks as one."""
        ids = np.concatenate([queries.ids, keys.ids + queries.num_ranks * queries.own_rows])
        rank = np.concatenate([queries.rank, keys.rank])
        order = np.argsort(rank, kind="stable")
        one = Placement.of_runs(ids.take(order, axis=0), rank[order], queries.num_ranks)
        return cls(one.ids, one.rank, one.num_ranks, queries, keys)

    @property
    def own(self) -> OwnRows:
        """Returns how many rows of each side a rank owns."""
        return OwnRows(self.queries.own_rows, self.keys.own_rows)

    def regrouped(self, num_ranks: int) -> "TwoSidedPlacement":
        """Returns both sides on so many ranks."""
        return TwoSidedPlacement.of(
            self.queries.regrouped(num_ranks), self.keys.regrouped(num_ranks)
        )

    def one_stream(self, mask: AttentionMask) -> AttentionMask:
        """Returns a mask of queries x keys as a mask of the stream with itself."""
        own = self.own
        size = self.num_ranks * (own.q + own.k)
        return AttentionMask(size, size, shift_rows(mask.array, k=self.num_ranks * own.q))


def keys_beside_queries(
    mask: AttentionMask, queries: Placement, chunk: int, count: int
) -> Placement:
    """Returns `count` chunks of keys for each rank, as far as there is room those that its queries see the most.

    Where ranks want a chunk alike, it stays in order.
    """
    num_ranks = queries.num_ranks
    num_chunks, home = num_ranks * count, np.repeat(np.arange(num_ranks), count)
    wants = 2 * _keys_seen(mask, queries, chunk, num_chunks)
    wants[np.arange(num_chunks), home] += 1
    owner, room = np.full(num_chunks, -1), np.full(num_ranks, count)
    while (free := np.flatnonzero(owner < 0)).size:
        open_wants = np.where(room > 0, wants[free], -1)
        wished = open_wants.argmax(axis=1)
        order = np.lexsort((-open_wants.max(axis=1), wished))
        turn = np.arange(len(free)) - np.searchsorted(wished[order], wished[order])
        taken = order[turn < room[wished[order]]]
        owner[free[taken]] = wished[taken]
        room -= np.bincount(wished[taken], minlength=num_ranks)
    chunks = np.argsort(owner, kind="stable").reshape(num_ranks, count)
    return Placement.of_chunks(chunks, chunk)


def _keys_seen(mask: AttentionMask, queries: Placement, chunk: int, num_chunks: int) -> IntArray:
    """Returns about how many keys of each chunk the queries of each rank see: int64 `[chunks, P]`.

    Slices that share keys count them once each, up to the chunk.
    """
    order = np.argsort(queries.ids[:, 0])
    parts, _, run = cut_rows(mask.array, queries.ids.take(order, axis=0), Q_START, Q_END)
    parts, source, cell = cut_rows(parts, interval.chunks(num_chunks, chunk), K_START, K_END)
    reader = queries.rank.take(order).take(run.take(source))
    seen = np.zeros((num_chunks, queries.num_ranks), dtype=np.int64)
    np.add.at(seen, (cell, reader), parts[:, K_END] - parts[:, K_START])
    return np.minimum(seen, chunk)


class CrossPlacements(PlacementCandidates):
    """The placements of a mask's queries worth a look; of keys there is one for each, beside the queries that see them.

    Of a transposed mask its queries are the keys.
    """

    def beside(self, queries: Placement, degree: int) -> Placement:
        """Returns the keys of ranks whose queries are placed, for head groups of `degree`."""
        mask, _ = next(iter(self.masks.values()))
        chunk, count = chunk_layout(mask.num_keys, self.cp_size, self.config)
        groups = queries.regrouped(self.cp_size // degree)
        return keys_beside_queries(mask, groups, chunk, count * degree).regrouped(self.cp_size)

    @functools.cached_property
    def _bounds(self) -> IntArray:
        """Where runs of queries begin that share no slice with those before, and the end."""
        mask, _ = next(iter(self.masks.values()))
        starts = interval.islands(mask.array[:, [Q_START, Q_END]])[:, 0]
        return np.r_[0, starts[1:], mask.num_queries]

    def _chunk_table(self, mask: AttentionMask, size: int, count: int) -> ChunkTable:
        key_chunk = -(-mask.num_keys // count)
        return by_area.chunk_table(mask, size, count, key_chunk)
