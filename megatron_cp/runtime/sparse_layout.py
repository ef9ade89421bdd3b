"""Which keys of a plan's ranks a rank needs for its own queries, and which of them each query sees.

Sparse attention picks keys by their content, so whatever a query may see must be there: the rows that the mask lets any
own query see travel once, latent and small, and lie in the order of tokens.
"""

# T rows of this rank, t of them tokens, R rows of keys that it holds

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from megatron_cp.comm.row_exchange import RowExchange
from megatron_cp.comm.upload import Uploaded, upload
from megatron_cp.mask import AttentionMask
from megatron_cp.mask.interval import IntArray, expand_ranges, from_indices, length, to_indices
from megatron_cp.mask.slice import HI, K_END, K_START, LO, Q_END, Q_START
from megatron_cp.plan import AttentionPlan

MAX_LAYOUTS = 16  # kept per process: micro-batches in flight, not history
MOST_ROWS = 256  # of a chunk; more would not fill a GPU better


@dataclass(frozen=True)
class SparseLayout:
    """What one rank must know."""

    rows: Tensor
    """Own rows of tokens that see a key, in the order of tokens: int64 `[t]`."""
    exchange: RowExchange
    held: Tensor
    """Keys in the order of tokens, as rows of [own | received]: int64 `[R]`."""
    intervals: Tensor
    """Keys that each of them sees, as m intervals of those held, `[m, 2, t]`; unused ones are empty."""
    reach: IntArray
    """From the first to behind the last key that each of them sees, `[2, t]`."""

    def chunks(
        self, bytes_of_row: Callable[[int], int], most_bytes: int
    ) -> Iterator[tuple[slice, slice]]:
        """Yields these tokens and the keys that any of them sees, so few at a time that they take `most_bytes`.

        `bytes_of_row` says what one token takes beside so many keys. One token is never cut.
        """
        waiting = [
            (begin, min(len(self.rows), begin + MOST_ROWS))
            for begin in range(0, len(self.rows), MOST_ROWS)
        ][::-1]
        while waiting:
            begin, end = waiting.pop()
            first, stop = self.reach[:, begin:end]
            keys = slice(int(first.min()), int(stop.max()))
            num_rows = end - begin
            if num_rows > 1 and num_rows * bytes_of_row(keys.stop - keys.start) > most_bytes:
                middle = begin + num_rows // 2
                waiting += [(middle, end), (begin, middle)]
            else:
                yield slice(begin, end), keys


@lru_cache(maxsize=MAX_LAYOUTS)
@torch.inference_mode(False)  # kept: a later call may want gradients
def sparse_layout(plan: AttentionPlan, rank: int, device: torch.device) -> Uploaded[SparseLayout]:
    """Returns the layout of `rank`, compiled once."""
    owner, row = plan.local_from_global
    tokens = [_tokens_of(plan, other) for other in range(plan.cp_size)]
    needed = [plan.mask.needed_keys(from_indices(own)) for own in tokens]
    reader = np.arange(plan.cp_size).repeat([length(keys) for keys in needed])
    wanted = np.concatenate([to_indices(keys) for keys in needed])
    exchange, arriving = RowExchange.compile(reader, owner[wanted], row[wanted], rank, plan.cp_size)
    place = np.where(owner == rank, row, 0)[wanted]
    place[arriving] = plan.tokens_per_rank + np.arange(len(arriving))
    intervals, reach = _intervals(plan.mask.gather(from_indices(tokens[rank]), needed[rank]))
    sees = reach[0] < reach[1]
    own_rows, held = row[tokens[rank]][sees], place[reader == rank]
    intervals = np.ascontiguousarray(intervals[:, :, sees])
    layout = SparseLayout(
        *(torch.from_numpy(own_rows), exchange, torch.from_numpy(held)),
        *(torch.from_numpy(intervals), reach[:, sees]),
    )
    return upload(layout, device)


def _tokens_of(plan: AttentionPlan, rank: int) -> IntArray:
    ids = plan.global_from_local[rank]
    return np.sort(ids[ids < plan.num_tokens])


def _intervals(mask: AttentionMask) -> tuple[IntArray, IntArray]:
    """Returns the keys of each row, as `[m, 2, rows]` with m intervals, and from the first to the last of them."""
    rows = mask.array
    part, query = expand_ranges(rows[:, Q_START], rows[:, Q_END])
    start = np.maximum(rows[part, K_START], query + rows[part, LO])
    stop = np.minimum(rows[part, K_END], query + rows[part, HI] + 1)
    order = np.lexsort((start, query))
    query, start, stop = query[order], start[order], stop[order]
    nth = np.arange(len(query)) - query.searchsorted(query)
    table = np.zeros((nth.max(initial=0) + 1, 2, mask.num_queries), dtype=np.int64)
    table[nth, 0, query], table[nth, 1, query] = start, stop
    reach = np.stack([table[0, 0], table[:, 1].max(axis=0)])
    return table, reach
