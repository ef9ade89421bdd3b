"""Which tokens each rank owns: int64 `[cp_size, tokens_per_rank]`, equal counts on every rank, always.

Ids at or above the number of tokens are padding; they sit at the tail of the pack only. A placement is an
assignment of equal chunks of the padded stream, or a fixed rule (zigzag).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_cp.config import CPConfig
from megatron_cp.mask import interval
from megatron_cp.mask.interval import IntArray
from megatron_cp.plan.schema import OwnRows

# What half and double of each do: benchmarks/bench_search.py; results are linked in docs/plan.md.
MAX_CHUNKS_PER_RANK = 32
MIN_CHUNKS_PER_RANK = 8
MAX_PADDING = 1 / 64  # more rows than needed, for the sake of finer chunks
TARGET_CHUNKS = 512  # over all ranks; planning time grows with its square
MIN_CHUNK_TOKENS = 64
MAX_CHUNKS = 1024  # over all ranks, or two per rank if that is more; the table of chunks is square


def tokens_per_rank(num_tokens: int, cp_size: int, config: CPConfig, pieces: int = 1) -> int:
    """Returns the smallest legal row count per rank that divides into `pieces` equal pieces."""
    multiple = math.lcm(config.token_multiple, pieces)
    return math.ceil(num_tokens / (cp_size * multiple)) * multiple


def contiguous(num_tokens: int, cp_size: int, config: CPConfig) -> "Placement":
    """Returns the stream cut into `cp_size` equal pieces, in order."""
    return Placement.in_pieces(cp_size, tokens_per_rank(num_tokens, cp_size, config))


def zigzag(num_tokens: int, cp_size: int, config: CPConfig) -> "Placement":
    """Returns pieces r and 2P-1-r of 2P for rank r: balanced under a causal mask.

    Source: Megatron-Core and ring-flash-attention; exactly Megatron's split when 2P divides the tokens.
    """
    rows = tokens_per_rank(num_tokens, cp_size, config, pieces=2)
    return Placement.in_mirrored_halves(cp_size, rows // 2)


def per_document_zigzag(lengths: Sequence[int], cp_size: int) -> IntArray:
    """Returns the zigzag split of every document by itself, documents in order.

    Source: TransformerEngine's and Megatron's THD context parallelism. Raises ValueError, naming the
    document, when a length does not divide by 2P: that layout pads documents, ours never does.
    """
    if cp_size == 1:  # nothing is cut
        return np.arange(sum(lengths), dtype=np.int64)[None]
    rows: list[list[IntArray]] = [[] for _ in range(cp_size)]
    start = 0
    for index, length in enumerate(lengths):
        if length % (2 * cp_size):
            near = math.ceil(length / (2 * cp_size)) * 2 * cp_size
            raise ValueError(
                f"document {index} has {length} tokens; the per-document zigzag layout needs a multiple "
                f"of 2 * cp_size = {2 * cp_size} (nearest: {near}): pad it, or use planner='auto'"
            )
        halves = np.arange(start, start + length, dtype=np.int64).reshape(2 * cp_size, -1)
        for rank in range(cp_size):
            rows[rank] += [halves[rank], halves[2 * cp_size - 1 - rank]]
        start += length
    return np.stack([np.concatenate([np.zeros(0, np.int64), *pieces]) for pieces in rows])


def chunk_layout(
    num_tokens: int, cp_size: int, config: CPConfig, per_rank: int | None = None
) -> tuple[int, int]:
    """Returns (chunk size, chunks per rank) of a chunk assignment.

    The chunk is the config's, else there are `per_rank` chunks if tokens suffice, or a good number of them.
    """

    def rows_of(pieces: int) -> int:
        return tokens_per_rank(num_tokens, cp_size, config, pieces)

    if config.chunk_size is not None:
        return config.chunk_size, rows_of(config.chunk_size) // config.chunk_size
    rows = rows_of(1)
    if per_rank is not None:
        count = min(per_rank, rows)
    else:
        wished = min(MAX_CHUNKS_PER_RANK, max(MIN_CHUNKS_PER_RANK, TARGET_CHUNKS // cp_size))
        wished = min(wished, most_chunks(cp_size) // cp_size)
        most = min(wished, max(rows // MIN_CHUNK_TOKENS, min(4, rows), 1))
        count = max(n for n in range(1, most + 1) if rows_of(n) <= rows * (1 + MAX_PADDING))
    return rows_of(count) // count, count


def most_chunks(cp_size: int) -> int:
    """Returns the largest number of chunks that a chunk assignment may have over all ranks."""
    return max(MAX_CHUNKS, 2 * cp_size)


def check_chunk_size(num_tokens: int, cp_size: int, config: CPConfig) -> None:
    """Raises ValueError, with the nearest legal value, for a chunk size that no sensible chunk assignment can have.

    Too large: it would more than double the rows of a rank. Too small: more than `most_chunks` chunks.
    """
    chosen = config.chunk_size
    if chosen is None:
        return
    least = tokens_per_rank(num_tokens, cp_size, config)

    def layout(chunk: int) -> tuple[int, int]:
        rows = tokens_per_rank(num_tokens, cp_size, config, pieces=chunk)
        return rows, cp_size * (rows // chunk)

    def is_legal(chunk: int) -> bool:
        rows, num_chunks = layout(chunk)
        return rows <= 2 * least and num_chunks <= most_chunks(cp_size)

    if not is_legal(chosen):
        rows, num_chunks = layout(chosen)
        middle = min(chosen, 2 * least)
        outwards = (middle + sign * by for by in range(2 * least) for sign in (-1, 1))
        near = next(size for size in outwards if 1 <= size <= 2 * least and is_legal(size))
        raise ValueError(
            f"chunk_size={chosen} deals {num_tokens} tokens to {cp_size} ranks as {num_chunks} chunks, {rows} "
            f"rows each; at most {most_chunks(cp_size)} chunks and {2 * least} rows are allowed: use chunk_size={near} "
            "(the nearest) or leave it out"
        )


@dataclass(frozen=True)
class Placement:
    """The tokens of ranks, equally many for each, as runs of consecutive ids: O(runs) where a table is O(tokens)."""

    ids: IntArray
    """int64 `[n, 2]`, rank by rank, in local order; neighbours of one rank do not touch."""
    rank: IntArray
    """The owner of each run: int64 `[n]`, ascending."""
    num_ranks: int

    @classmethod
    def of_chunks(cls, chunks_of_rank: IntArray, chunk_size: int) -> "Placement":
        """Returns the placement in which rank r owns the chunks `chunks_of_rank[r]` `[P, n]`, in this order."""
        num_ranks, per_rank = chunks_of_rank.shape
        start = chunks_of_rank.reshape(-1) * chunk_size
        return cls.of_runs(
            interval.columns(start, start + chunk_size),
            np.repeat(np.arange(num_ranks), per_rank),
            num_ranks,
        )

    @classmethod
    def in_pieces(cls, num_ranks: int, rows: int) -> "Placement":
        """Returns the placement in which each rank owns the next `rows` tokens."""
        return cls.of_chunks(np.arange(num_ranks)[:, None], rows)

    @classmethod
    def in_mirrored_halves(cls, num_ranks: int, half: int) -> "Placement":
        """Returns the placement in which rank r owns the r-th `half` tokens from the front and from the back."""
        first = np.arange(num_ranks)
        return cls.of_chunks(np.stack([first, 2 * num_ranks - 1 - first], axis=1), half)

    @classmethod
    def of_runs(cls, ids: IntArray, rank: IntArray, num_ranks: int) -> "Placement":
        """Returns the placement of runs in local order, rank by rank; runs that touch are joined."""
        opens, closes = np.ones((2, len(ids)), dtype=bool)
        opens[1:] = (ids[1:, 0] != ids[:-1, 1]) | (rank[1:] != rank[:-1])
        closes[:-1] = opens[1:]
        joined = interval.columns(ids[:, 0].compress(opens), ids[:, 1].compress(closes))
        return cls(joined, rank.compress(opens), num_ranks)

    def in_order(self) -> "Placement":
        """Returns the placement with the tokens of every rank ascending; runs may be in any order before."""
        order = np.lexsort((self.ids[:, 0], self.rank))
        return Placement.of_runs(self.ids.take(order, axis=0), self.rank[order], self.num_ranks)

    @cached_property
    def tokens(self) -> IntArray:
        """The tokens of each rank: int64 `[P, T]`."""
        return interval.to_indices(self.ids).reshape(self.num_ranks, -1)

    @property
    def own_rows(self) -> int:
        """Returns how many tokens each rank owns."""
        return interval.length(self.ids) // self.num_ranks

    @property
    def own(self) -> OwnRows:
        """Returns how many rows of each side a rank owns."""
        return OwnRows.of_tokens(self.own_rows)

    def regrouped(self, num_ranks: int) -> "Placement":
        """Returns the placement on so many ranks, each a piece of a rank here or several that follow each other."""
        rows, over = divmod(interval.length(self.ids), num_ranks)
        assert not over, "ranks own equally many tokens"
        sizes = self.ids[:, 1] - self.ids[:, 0]
        stop = np.cumsum(sizes)  # of each run, in the order of ranks
        start = stop - sizes
        which, rank = interval.expand_ranges(start // rows, (stop - 1) // rows + 1)
        shift = (self.ids[:, 0] - start).take(which)
        low = np.maximum(start.take(which), rank * rows) + shift
        high = np.minimum(stop.take(which), (rank + 1) * rows) + shift
        return Placement.of_runs(interval.columns(low, high), rank, num_ranks)
