"""Assigns equal numbers of chunks to ranks so that every rank has its share of the attention area, near its keys.

A share is by speed: of what ranks take for their pairs, the longest is made shorter.

Starts from the stream in order (the best locality there is) and exchanges single chunks between a loaded
and an idle rank, always the pair that moves the fewest additional key rows among those that help enough.
MagiAttention's area dispatch (`schemes/magi.py`) balances as well, but scatters documents over ranks.

All sums are of whole numbers, so they are exact in any order of summation: the same on every machine.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_cp.mask import AttentionMask, interval
from megatron_cp.mask.interval import IntArray
from megatron_cp.mask.slice import K_END, K_START, Q_END, Q_START, cut_rows, rows_area
from megatron_cp.plan.schema import BoolArray, FloatArray

# What half and double of each do: benchmarks/bench_search.py; results are linked in docs/plan.md.
MAX_EXCHANGES_PER_RANK = 64
PARTNERS = 4  # idle ranks looked at per exchange; an eighth of all ranks if that is more
USEFUL_SHARE = 0.5  # an exchange must reach this share of the best improvement on offer


@dataclass(frozen=True)
class ChunkTable:
    """What chunks of the stream have to do with each other."""

    areas: FloatArray
    """Pairs between the queries of chunk i and the keys of chunk j: `[C, C]`, or `[C, 2 C]` where keys are others."""
    needs: FloatArray
    """Key rows of chunk j that queries of chunk i may see, of the same shape."""
    chunk_size: int

    @property
    def chunk_areas(self) -> FloatArray:
        """Returns the area of each chunk's query rows: `[C]`."""
        return self.areas.sum(axis=1)


def chunk_table(
    mask: AttentionMask, chunk_size: int, num_chunks: int, key_chunk: int | None = None
) -> ChunkTable:
    """Returns the table of a mask; areas are exact.

    Slices of one chunk that share keys are counted once each in `needs`, capped at the chunk: an estimate
    from above. O(slices x chunks that they meet). With `key_chunk` keys are other tokens, in as many chunks of that
    size, whose columns stand behind those of the queries' chunks: who owns queries owns none of them.
    """
    key_size, first_key = (chunk_size, 0) if key_chunk is None else (key_chunk, num_chunks)
    parts, _, _ = cut_rows(mask.array, interval.chunks(num_chunks, chunk_size), Q_START, Q_END)
    parts, _, column = cut_rows(parts, interval.chunks(num_chunks, key_size), K_START, K_END)
    shape = num_chunks, first_key + num_chunks
    cell = parts[:, Q_START] // chunk_size * shape[1] + first_key + column
    areas = np.bincount(cell, rows_area(parts), minlength=shape[0] * shape[1])
    rows = parts[:, K_END] - parts[:, K_START]
    needs = np.bincount(cell, rows, minlength=shape[0] * shape[1])
    return ChunkTable(
        areas.reshape(shape).astype(np.float64),
        np.minimum(needs, key_size).reshape(shape).astype(np.float64),
        chunk_size,
    )


def weighted_sum(tables: Sequence[ChunkTable], weights: Sequence[float]) -> ChunkTable:
    """Returns the table of a family of masks, each counted as often as its layers run."""
    areas = sum((w * t.areas for t, w in zip(tables, weights, strict=True)), np.zeros(1))
    needs = sum((w * t.needs for t, w in zip(tables, weights, strict=True)), np.zeros(1))
    return ChunkTable(areas, needs, tables[0].chunk_size)


def zigzag_chunks(num_chunks: int, cp_size: int) -> IntArray:
    """Returns runs r and 2P-1-r of 2P runs for rank r (one run over for an odd number goes in order)."""
    half = num_chunks // cp_size // 2
    ranks = np.arange(cp_size)
    runs = np.arange(2 * cp_size * half, dtype=np.int64).reshape(2 * cp_size, half)
    rest = np.arange(2 * cp_size * half, num_chunks, dtype=np.int64).reshape(cp_size, -1)
    return np.concatenate([runs[ranks], runs[2 * cp_size - 1 - ranks], rest], axis=1)


def exchange_chunks(
    owned: IntArray, table: ChunkTable, tolerance: float, speeds: FloatArray
) -> IntArray:
    """Returns `owned` after exchanges that bring the longest time to `1 + tolerance` of the fair one, or near.

    `speeds` `[P]`: a rank takes its area over its speed.
    """
    state = _ChunkAssignment(owned.copy(), table, speeds)
    target = state.areas[owned].sum(axis=1).sum() / speeds.sum() * (1 + tolerance)
    for _ in range(MAX_EXCHANGES_PER_RANK * len(owned)):
        if state.loads.max() <= target or not state.exchange_best_pair():
            break
    return state.owned


class _ChunkAssignment:
    """Chunks of ranks under exchange, with what each rank takes and which key rows it holds anyway."""

    def __init__(self, owned: IntArray, table: ChunkTable, speeds: FloatArray):
        self.owned, self.needs, self.areas = owned, table.needs, table.chunk_areas
        self.speeds = speeds
        self.loads = self.areas[owned].sum(axis=1) / speeds
        self.covered = np.stack([self._covered_by(chunks) for chunks in owned])

    def _covered_by(self, chunks: IntArray) -> FloatArray:
        covered: FloatArray = self.needs[chunks].max(axis=0)
        covered[chunks] = np.inf  # own rows are never received
        return covered

    def exchange_best_pair(self) -> bool:
        """Exchanges a chunk of the most loaded rank for one of an idle rank; False if nothing helps."""
        a = int(self.loads.argmax())
        idle = np.argsort(self.loads, kind="stable")[: max(PARTNERS, len(self.loads) // 8)]
        idle = idle[idle != a]
        mine, theirs = self.owned[a], self.owned[idle]
        change = self.areas[mine][None, :, None] - self.areas[theirs][:, None, :]
        less, more = change / self.speeds[a], change / self.speeds[idle][:, None, None]
        after = np.maximum(self.loads[a] - less, self.loads[idle][:, None, None] + more)
        gain = self.loads[a] - after
        best_gain = gain.max(axis=(1, 2), initial=0.0)
        useful = (gain >= USEFUL_SHARE * best_gain[:, None, None]) & (gain > 1e-9 * self.loads[a])
        if not useful.any():
            return False
        cost = np.full(gain.shape, np.inf)
        extra = self._extra_rows(a, mine, idle, theirs, useful)
        np.divide(1 + extra, gain, out=cost, where=useful)
        which, i, j = (int(x) for x in np.unravel_index(int(cost.argmin()), cost.shape))
        b = int(idle[which])
        self.owned[a, i], self.owned[b, j] = self.owned[b, j], self.owned[a, i]
        for rank in (a, b):
            chunks = self.owned[rank]
            self.loads[rank] = self.areas[chunks].sum() / self.speeds[rank]
            self.covered[rank] = self._covered_by(chunks)
        return True

    def _extra_rows(
        self, a: int, mine: IntArray, idle: IntArray, theirs: IntArray, useful: BoolArray
    ) -> FloatArray:
        """Returns an estimate of the key rows moved more if chunks `[b, i, j]` change places; right where useful."""
        leave, enter = np.zeros(useful.shape[:2]), np.zeros(theirs.shape)
        b, i = useful.any(axis=2).nonzero()
        leave[b, i] = np.maximum(self.needs[mine[i]] - self.covered[idle[b]], 0).sum(axis=1)
        b, j = useful.any(axis=1).nonzero()
        enter[b, j] = np.maximum(self.needs[theirs[b, j]] - self.covered[a], 0).sum(axis=1)
        return leave[:, :, None] + enter[:, None, :]
