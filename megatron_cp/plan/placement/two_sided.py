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

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from megatron_cp.mask import AttentionMask
from megatron_cp.mask.interval import IntArray, columns, expand_ranges
from megatron_cp.mask.slice import K_END, K_START, Q_END, Q_START, cut_rows, shift_rows
from megatron_cp.plan.placement.placement import Placement
from megatron_cp.plan.schema import OwnRows


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


def queries_by_blocks(mask: AttentionMask) -> IntArray:
    """Returns where runs of queries begin that share no slice with the run before, and the end: int64 `[n + 1]`."""
    rows = mask.array[np.argsort(mask.array[:, Q_START], kind="stable")]
    reached = np.maximum.accumulate(rows[:, Q_END])
    opens = np.flatnonzero(rows[1:, Q_START] >= reached[:-1]) + 1
    return np.r_[0, rows[opens, Q_START], mask.num_queries]


def keys_beside_queries(mask: AttentionMask, queries: Placement, chunk: int, count: int) -> Placement:
    """Returns `count` chunks of keys for each rank, those first of which its queries see the most.

    The most wanted goes first; where ranks want a chunk alike, it stays in order.
    """
    num_ranks = queries.num_ranks
    order = np.argsort(queries.ids[:, 0])
    runs, owner = queries.ids.take(order, axis=0), queries.rank.take(order)
    parts, _, run = cut_rows(mask.array, runs, Q_START, Q_END)
    cells = columns(np.arange(num_ranks * count) * chunk, np.arange(1, num_ranks * count + 1) * chunk)
    parts, source, cell = cut_rows(parts, cells, K_START, K_END)
    rank = owner.take(run.take(source))
    wants = np.zeros((num_ranks * count, num_ranks), dtype=np.int64)
    np.add.at(wants, (cell, rank), parts[:, K_END] - parts[:, K_START])
    wants = 2 * np.minimum(wants, chunk)
    wants[np.arange(num_ranks * count), np.repeat(np.arange(num_ranks), count)] += 1
    room, owned = np.full(num_ranks, count), np.full(num_ranks * count, -1)
    for place in np.argsort(-wants.reshape(-1), kind="stable"):
        one, reader = divmod(int(place), num_ranks)
        if owned[one] < 0 and room[reader]:
            owned[one], room[reader] = reader, room[reader] - 1
    return Placement.of_chunks(np.argsort(owned, kind="stable").reshape(num_ranks, count), chunk)
