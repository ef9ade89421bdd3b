"""Turns "these ranks want these keys" into a Stage: messages, and the work in local coordinates.

The casts built here are zero-redundant: a rank receives exactly the key rows that it asked for and does
not own, each once, straight from the owner (the group-cast of MagiAttention).

All ranks are handled at once, because a Python loop over ranks and stages would cost more than the plan.
Their rows stand below each other, and each rank sees a copy of all keys of its own:

    key r * stride + k   =   key k as rank r sees it          (stride > number of ids: copies never touch)
"""

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megatron_cp.mask import AttentionMask, interval
from megatron_cp.mask.interval import IntArray
from megatron_cp.mask.slice import K_END, K_START, Q_START, rows_area, shift_rows
from megatron_cp.plan.schema import Hop, Stage, Transfer

ID_START, ID_STOP, OWNER, LOCAL_START, READER = range(5)


class Owners:
    """Where every token lives, as runs of consecutive ids: rank by rank, and in one table sorted by id."""

    def __init__(self, own_ids: IntArray):
        self.num_ranks, self.own_rows = own_ids.shape
        self.num_ids = own_ids.size
        self.stride = self.num_ids + 1
        ids = own_ids.reshape(-1)
        opens = np.ones(ids.size, dtype=bool)
        opens[1:] = ids[1:] != ids[:-1] + 1
        opens[:: self.own_rows] = True
        first = np.flatnonzero(opens)
        sizes = np.diff(np.r_[first, ids.size])
        rank, local = np.divmod(first, self.own_rows)
        self.runs = np.stack([ids[first], ids[first] + sizes], axis=1)
        self.rank_of_run = rank
        table = np.column_stack([self.runs, rank, local])
        self.table = table[np.argsort(table[:, ID_START], kind="stable")]

    @cached_property
    def own_keys(self) -> IntArray:
        """The keys that each rank owns, as it sees them, in its local order: int64 `[runs, 2]`."""
        return self.runs + (self.rank_of_run * self.stride)[:, None]

    @cached_property
    def all_keys(self) -> IntArray:
        """Every key as every rank sees it: int64 `[P, 2]`."""
        start = np.arange(self.num_ranks, dtype=np.int64) * self.stride
        return np.stack([start, start + self.num_ids], axis=1)

    def without_own(self, keys: IntArray) -> IntArray:
        """Returns `keys` (normalised) less those that the rank asking owns."""
        return interval.subtract(keys, interval.normalise(self.own_keys))

    def locate(self, wanted: IntArray) -> IntArray:
        """Returns the pieces of `wanted`, int64 `[n, 5]`: table rows, and the rank that reads them.

        `wanted`: normalised keys as ranks see them. Pieces are sorted by (reader, owner, local row), the
        order in which they arrive.
        """
        reader = wanted[:, 0] // self.stride
        ids = wanted - (reader * self.stride)[:, None]
        low = np.searchsorted(self.table[:, ID_STOP], ids[:, 0], side="right")
        high = np.searchsorted(self.table[:, ID_START], ids[:, 1], side="left")
        which, run = interval.expand_ranges(low, np.maximum(low, high))
        pieces = np.column_stack([self.table[run], reader[which]])
        start = np.maximum(pieces[:, ID_START], ids[which, 0])
        pieces[:, LOCAL_START] += start - pieces[:, ID_START]
        pieces[:, ID_START] = start
        pieces[:, ID_STOP] = np.minimum(pieces[:, ID_STOP], ids[which, 1])
        return pieces[np.lexsort(pieces[:, [LOCAL_START, OWNER, READER]].T)]


def split_evenly(pieces: IntArray, num_parts: int) -> list[IntArray]:
    """Returns located pieces in `num_parts` sets, with an equal share (to one row) of every pair of ranks.

    Every set loads every link alike: cutting by key instead would send all readers of a document to the
    owner of its beginning at the same time.
    """
    opens = np.r_[True, (np.diff(pieces[:, [OWNER, READER]], axis=0) != 0).any(axis=1)]
    pair = np.cumsum(opens) - 1
    ends = np.cumsum(pieces[:, ID_STOP] - pieces[:, ID_START])
    begins = np.r_[0, ends[:-1]]
    first = begins[opens][pair]  # where the piece's pair begins
    total = np.diff(np.r_[begins[opens], ends[-1]])[pair]
    parts = []
    for part in range(num_parts):
        skip = np.maximum(first + total * part // num_parts - begins, 0)
        drop = np.maximum(ends - first - total * (part + 1) // num_parts, 0)
        cut = pieces.copy()
        cut[:, [ID_START, LOCAL_START]] += skip[:, None]
        cut[:, ID_STOP] -= drop
        parts.append(cut[cut[:, ID_START] < cut[:, ID_STOP]])
    return parts


class PlacedMask:
    """A mask on a placement: knows who needs what, and builds stages."""

    def __init__(self, mask: AttentionMask, placement: IntArray):
        self.mask, self.placement = mask, placement
        self.owners = Owners(placement)

    @cached_property
    def _spread(self) -> AttentionMask:
        """The rows of all ranks below each other, each with its rank's copy of the keys."""
        owners = self.owners
        padded = self.mask.shift(num_queries=owners.num_ids, num_keys=owners.num_ids)
        rows = padded.gather(owners.runs, interval.as_intervals([(0, owners.num_ids)])).array
        rank = rows[:, Q_START] // owners.own_rows
        num_keys = owners.num_ranks * owners.stride
        return AttentionMask(owners.num_ids, num_keys, shift_rows(rows, k=rank * owners.stride))

    @cached_property
    def remote_pieces(self) -> IntArray:
        """The keys that each rank's queries may see and it does not own, located."""
        seen = interval.normalise(self._spread.array[:, [K_START, K_END]])
        return self.owners.locate(self.owners.without_own(seen))

    def areas_by_owner(self) -> NDArray[np.float64]:
        """Returns the pairs between the queries of one rank and the keys of another: float64 `[q, k]`."""
        owners, num_ranks = self.owners, self.owners.num_ranks
        ranks = np.arange(num_ranks, dtype=np.int64)
        ids = np.tile(owners.table[:, [ID_START, ID_STOP]], (num_ranks, 1))
        keys = ids + np.repeat(ranks * owners.stride, len(owners.table))[:, None]
        # Keys gathered in the order of ids, rank by rank: key k of rank r stands at r * num_ids + k.
        rows = self._spread.gather(_everything(owners.num_ids), keys).array
        rank = rows[:, Q_START] // owners.own_rows
        start = rows[:, K_START] - rank * owners.num_ids
        run = np.searchsorted(owners.table[:, ID_START], start, side="right") - 1
        pair = rank * num_ranks + owners.table[run, OWNER]
        return _square(pair, rows_area(rows), num_ranks)

    def rows_by_owner(self) -> NDArray[np.float64]:
        """Returns the key rows that one rank needs of another: float64 `[owner, reader]`."""
        num_ranks = self.owners.num_ranks
        pieces = self.remote_pieces
        sizes = pieces[:, ID_STOP] - pieces[:, ID_START]
        pair = pieces[:, OWNER] * num_ranks + pieces[:, READER]
        return _square(pair, sizes, num_ranks)

    def local_stage(self) -> Stage:
        """Returns the stage in which every rank attends to the keys that it owns; nothing moves."""
        owners = self.owners
        held = np.full(owners.num_ranks, owners.own_rows)
        return Stage(work=self._work(owners.own_keys, owners.rank_of_run, held, first_row=0))

    def key_stage(self, pieces: IntArray, include_own: bool = False) -> Stage:
        """Returns the stage in which ranks receive the keys of `pieces` (as `locate` gives them) and use them.

        With `include_own` every rank attends to its own keys in the same stage.
        """
        owners = self.owners
        reader, received = pieces[:, READER], pieces[:, ID_STOP] - pieces[:, ID_START]
        held = owners.own_rows + np.bincount(reader, received, owners.num_ranks).astype(np.int64)
        keys = pieces[:, [ID_START, ID_STOP]] + (reader * owners.stride)[:, None]
        hop = Hop(_messages(pieces))
        first_row = owners.own_rows
        if include_own:
            keys, reader = np.r_[owners.own_keys, keys], np.r_[owners.rank_of_run, reader]
            order = np.argsort(reader, kind="stable")
            keys, reader, first_row = keys[order], reader[order], 0
        return Stage(work=self._work(keys, reader, held, first_row), k_cast=Transfer((hop,)))

    def _work(
        self, keys: IntArray, rank_of_keys: IntArray, held: IntArray, first_row: int
    ) -> tuple[AttentionMask, ...]:
        """Returns each rank's mask on `own_rows x held[rank]`; `keys` stand in its rows from `first_row` on.

        `keys` are sorted by rank. All ranks are merged in one go, on a diagonal of blocks so far apart
        that slices of two ranks are never neighbours, in queries, keys or distance.
        """
        owners = self.owners
        rows = self._spread.gather(_everything(owners.num_ids), keys).array
        rank = rows[:, Q_START] // owners.own_rows
        ends = np.cumsum(keys[:, 1] - keys[:, 0])
        begin = np.r_[0, ends][np.searchsorted(rank_of_keys, np.arange(owners.num_ranks))]
        q_step = owners.own_rows + 1
        k_step = 2 * q_step + int(held.max())
        rows = shift_rows(rows, q=rank, k=first_row - begin[rank] + rank * k_step)
        shape = owners.num_ranks * q_step, owners.num_ranks * k_step
        rows = AttentionMask(*shape, rows).merged().array
        rank = rows[:, Q_START] // q_step
        rows = shift_rows(rows, q=-rank * q_step, k=-rank * k_step)
        cuts = np.searchsorted(rank, np.arange(owners.num_ranks + 1))
        return tuple(
            AttentionMask(owners.own_rows, int(held[r]), rows[cuts[r] : cuts[r + 1]])
            for r in range(owners.num_ranks)
        )


def _square(cell: IntArray, amounts: IntArray, size: int) -> NDArray[np.float64]:
    """Returns the sums of `amounts` by cell of a square matrix: float64 `[size, size]`."""
    sums = np.bincount(cell, amounts, minlength=size * size).astype(np.float64)
    return sums.reshape(size, size)


def _everything(size: int) -> IntArray:
    return interval.as_intervals([(0, size)])


def _messages(pieces: IntArray) -> IntArray:
    """Returns the messages that bring `pieces` to their readers; neighbours in the owner's rows travel as one."""
    src, dst, start = pieces[:, OWNER], pieces[:, READER], pieces[:, LOCAL_START]
    stop = start + pieces[:, ID_STOP] - pieces[:, ID_START]
    opens = np.ones(len(pieces), dtype=bool)
    opens[1:] = (dst[1:] != dst[:-1]) | (src[1:] != src[:-1]) | (start[1:] != stop[:-1])
    first = np.flatnonzero(opens)
    last = np.r_[first[1:], len(pieces)] - 1 if len(first) else first
    return np.stack([src[first], dst[first], start[first], stop[last]], axis=1)
