"""Turns "this rank wants these keys" into a Stage: messages, and the work in local coordinates.

The casts built here are zero-redundant: a rank receives exactly the key rows that its queries may see and
it does not own, each once, straight from the owner (the group-cast of MagiAttention).
"""

from collections.abc import Sequence

import numpy as np

from megatron_cp.mask import AttentionMask, interval
from megatron_cp.mask.interval import IntArray
from megatron_cp.plan.schema import Hop, Stage, Transfer

GLOBAL_START, GLOBAL_STOP, OWNER, LOCAL_START = range(4)


class Owners:
    """Where every token lives: runs of consecutive ids per rank, and one table sorted by id."""

    def __init__(self, own_ids: IntArray):
        self.own_rows, self.num_ids = own_ids.shape[1], int(own_ids.max()) + 1
        self.runs = [interval.from_indices(ids) for ids in own_ids]
        parts = [self._rows(rank, runs) for rank, runs in enumerate(self.runs)]
        table = np.concatenate(parts)
        self.table = table[np.argsort(table[:, GLOBAL_START], kind="stable")]

    @staticmethod
    def _rows(rank: int, runs: IntArray) -> IntArray:
        sizes = runs[:, 1] - runs[:, 0]
        return np.stack(
            [runs[:, 0], runs[:, 1], np.full(len(runs), rank), np.cumsum(sizes) - sizes], axis=1
        )

    def pad(self, mask: AttentionMask) -> AttentionMask:
        """Returns `mask` on the grid of all ids: padding at the tail sees nothing and is not seen."""
        if mask.num_queries == self.num_ids:
            return mask
        return mask.shift(num_queries=self.num_ids, num_keys=self.num_ids)

    def locate(self, wanted: IntArray) -> IntArray:
        """Returns the pieces of `wanted` (normalised id intervals) as table rows, by (owner, local row)."""
        table = self.table
        low = np.searchsorted(table[:, GLOBAL_STOP], wanted[:, 0], side="right")
        high = np.searchsorted(table[:, GLOBAL_START], wanted[:, 1], side="left")
        which, run = interval.expand_ranges(low, np.maximum(low, high))
        pieces = table[run]
        start = np.maximum(pieces[:, GLOBAL_START], wanted[which, 0])
        pieces[:, LOCAL_START] += start - pieces[:, GLOBAL_START]
        pieces[:, GLOBAL_START] = start
        pieces[:, GLOBAL_STOP] = np.minimum(pieces[:, GLOBAL_STOP], wanted[which, 1])
        return pieces[np.lexsort((pieces[:, LOCAL_START], pieces[:, OWNER]))]


def remote_keys(mask: AttentionMask, owners: Owners) -> list[IntArray]:
    """Returns, for each rank, the keys that its queries may see and it does not own, as id intervals."""
    mask = owners.pad(mask)
    mine = [interval.normalise(runs) for runs in owners.runs]
    return [
        interval.subtract(mask.needed_keys(runs), own)
        for runs, own in zip(owners.runs, mine, strict=True)
    ]


def local_stage(mask: AttentionMask, owners: Owners) -> Stage:
    """Returns the stage in which every rank attends to the keys that it owns; nothing moves."""
    mask = owners.pad(mask)
    return Stage(work=tuple(mask.gather(runs, runs).merged() for runs in owners.runs))


def key_stage(
    mask: AttentionMask, owners: Owners, wanted: Sequence[IntArray], include_own: bool = False
) -> Stage:
    """Returns the stage in which rank r receives the keys `wanted[r]` and attends to them.

    `wanted[r]`: normalised id intervals without r's own tokens. With `include_own` the rank attends to
    its own keys in the same stage.
    """
    mask = owners.pad(mask)
    messages, work = [], []
    for rank, intervals in enumerate(wanted):
        pieces = owners.locate(intervals)
        messages.append(_messages(rank, pieces))
        q_runs, received = owners.runs[rank], pieces[:, [GLOBAL_START, GLOBAL_STOP]]
        own_rows = owners.own_rows
        if include_own:
            work.append(mask.gather(q_runs, np.concatenate([q_runs, received])).merged())
        else:
            arrived = mask.gather(q_runs, received)
            work.append(arrived.shift(k=own_rows, num_keys=own_rows + arrived.num_keys).merged())
    return Stage(work=tuple(work), k_cast=Transfer((Hop(np.concatenate(messages)),)))


def _messages(dst: int, pieces: IntArray) -> IntArray:
    """Returns the messages that bring `pieces` to `dst`; neighbours in the owner's rows travel as one."""
    src, start = pieces[:, OWNER], pieces[:, LOCAL_START]
    stop = start + pieces[:, GLOBAL_STOP] - pieces[:, GLOBAL_START]
    opens = np.ones(len(pieces), dtype=bool)
    opens[1:] = (src[1:] != src[:-1]) | (start[1:] != stop[:-1])
    first = np.flatnonzero(opens)
    last = np.r_[first[1:], len(pieces)] - 1 if len(first) else first
    return np.stack([src[first], np.full(len(first), dst), start[first], stop[last]], axis=1)


def split_evenly(intervals: IntArray, num_parts: int) -> list[IntArray]:
    """Returns the intervals cut into `num_parts` sets of equal size (to one), in order."""
    sizes = intervals[:, 1] - intervals[:, 0]
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if len(ends) else 0
    cuts = np.linspace(0, total, num_parts + 1).astype(np.int64)
    parts = []
    for low, high in zip(cuts[:-1], cuts[1:], strict=True):
        start = intervals[:, 0] + np.maximum(low - (ends - sizes), 0)
        stop = intervals[:, 1] - np.maximum(ends - high, 0)
        parts.append(np.stack([start, stop], axis=1)[start < stop])
    return parts
