"""Documents as a mask has them: runs of tokens that no allowed pair links with others. Square masks, NumPy only."""

import functools

import numpy as np

from megatron_cp.mask.builders import causal
from megatron_cp.mask.interval import IntArray, columns, distinct, islands, to_indices
from megatron_cp.mask.mask import AttentionMask
from megatron_cp.mask.slice import HI, K_END, K_START, LO, Q_END, Q_START


def document_bounds(mask: AttentionMask) -> IntArray:
    """Returns where documents begin, and the number of tokens behind: int64 `[documents + 1]`.

    Tokens that see nothing and are not seen are a document wherever they lie side by side; so are those that see
    themselves alone where a slice holds several. Each slice lies in one document.
    """
    return _bounds(mask.num_queries, mask.array)


def _bounds(num_tokens: int, rows: IntArray) -> IntArray:
    start = np.minimum(rows[:, Q_START], rows[:, K_START])
    stop = np.maximum(rows[:, Q_END], rows[:, K_END])
    return distinct(np.r_[0, num_tokens, islands(columns(start, stop)).ravel()])


@functools.lru_cache(maxsize=8)
def causal_document_lengths(mask: AttentionMask) -> tuple[int, ...]:
    """Returns the lengths of the documents in which every token sees itself and all tokens before it.

    This is what a causal recurrence needs of a mask: its state holds all that came before in the document. Tokens that
    see nothing are documents too, and each that sees itself alone is one. A mask may allow more, such as a prefix that
    sees itself whole. The last eight are remembered.

    Raises ValueError where a token of a document does not see one before it: a state would let it.
    """
    size, rows = mask.num_queries, mask.array
    is_diagonal = (rows[:, LO] == 0) & (rows[:, HI] == 0)
    alone = to_indices(rows.compress(is_diagonal, axis=0)[:, Q_START : Q_END + 1])
    single = columns(alone, alone + 1, alone, alone + 1, 0 * alone, 0 * alone)
    bounds = _bounds(size, np.concatenate([rows.compress(~is_diagonal, axis=0), single]))
    lengths = np.diff(bounds)
    behind = (mask & causal(size)).area_of_rows(bounds)
    hides = np.flatnonzero(
        (mask.area_of_rows(bounds) != 0) & (behind != lengths * (lengths + 1) // 2)
    )
    if len(hides):
        first = int(hides[0])
        start, stop = bounds[first : first + 2].tolist()
        raise ValueError(
            f"tokens {start} to {stop - 1} of the mask are one document in which a token does not see all before it; "
            "the state of a linear layer would show it to them: such a mask is for models without linear layers"
        )
    return tuple(lengths.tolist())
