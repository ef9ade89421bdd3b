"""Segments: what linear attention and short convolutions see of a placement. NumPy only, linear in the tokens.

A *segment* is a longest run of consecutive tokens of one document that lie in consecutive rows of one rank. State flows
through the segments of a document in the order of tokens, wherever they lie:

    document   |  0  0  0  0  0  0 | 1  1  1  1  1  1  1 |        two ranks, zigzag: rank 0 owns both ends
    owner         0  0  0  1  1  1   1  1  1  0  0  0  0
    segment      [   0   ][   1   ] [   2   ][    3     ]         1 waits for the state of 0, 3 for that of 2

What a rank wants of others is a list of `WantedRows`: summaries of earlier segments, or the tokens before its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_cp.mask.interval import IntArray, distinct, expand_ranges
from megatron_cp.plan.schema import PlanData, owners_and_rows


@dataclass(frozen=True, eq=False)
class Segments:
    """All segments of a pack, in the order of tokens: int64 `[n]` each."""

    length: IntArray
    """Tokens, one at least."""
    document: IntArray
    rank: IntArray
    """The owner."""
    row: IntArray
    """The owner's row of the first token."""

    @cached_property
    def order(self) -> IntArray:
        """Returns how many segments of its document precede each."""
        return np.arange(len(self.document)) - self.document.searchsorted(self.document)

    def of(self, rank: int) -> IntArray:
        """Returns the indices of a rank's segments, in the order of tokens."""
        return np.flatnonzero(self.rank == rank)


@dataclass(frozen=True, eq=False)
class WantedRows:
    """Who needs what, itself included: int64 `[n]` each, sorted by (reader, item), without repeats."""

    reader: IntArray
    item: IntArray
    """A segment, or a token."""


@dataclass(frozen=True, eq=False)
class SegmentCounts:
    """What a placement costs linear attention: int64 `[P]` each."""

    owned: IntArray
    """Segments of each rank."""
    cut: IntArray
    """Of these, the segments of documents that have several."""
    received: IntArray
    """States that each rank receives forward; backward it sends as many."""


def check_document_lengths(document_lengths: Sequence[int], plan: PlanData) -> tuple[int, ...]:
    """Returns the lengths as a tuple of ints.

    Raises ValueError where one is negative, where they do not add up to the tokens of the plan, and for a plan of cross
    attention; TypeError where one is no integer.
    """
    if plan.key_tokens is not None:
        raise ValueError(
            "the plan is one of cross attention, which has two streams of tokens; dispatch these rows by the plan of "
            "their self attention, and give that one"
        )
    lengths = np.asarray(document_lengths)
    if lengths.ndim != 1 or (len(lengths) and not np.issubdtype(lengths.dtype, np.integer)):
        raise TypeError(
            f"document_lengths is {lengths.dtype} of shape {lengths.shape}, it must be one list of integers; "
            "give the number of tokens of each document of the pack, in order"
        )
    if len(lengths) and lengths.min() < 0:
        raise ValueError(
            f"document_lengths[{lengths.argmin()}]={lengths.min()} must not be negative; 0 is an empty document"
        )
    if lengths.sum() != plan.num_tokens:
        raise ValueError(
            f"document_lengths add up to {lengths.sum():.0f} tokens, the plan has {plan.num_tokens}; give the length "
            "of every document of the pack that the plan was made for"
        )
    return tuple(int(length) for length in lengths)


def find_segments(plan: PlanData, document_lengths: Sequence[int]) -> Segments:
    """Returns the segments of a plan's placement under checked `document_lengths`."""
    return _segments(*_tokens(plan, document_lengths))


def states_received(tokens: IntArray, document_bounds: IntArray) -> IntArray:
    """Returns the states that each rank receives, as `count_segments` does of a plan: int64 `[P]`.

    `tokens` `[P, T]` of each rank; document i is `document_bounds[i]` to `document_bounds[i + 1]`.
    """
    owner, row = (column[: document_bounds[-1]] for column in owners_and_rows(tokens))
    document = np.repeat(np.arange(len(document_bounds) - 1), np.diff(document_bounds))
    return _received(_segments(owner, row, document), len(tokens))


def _received(segments: Segments, num_ranks: int) -> IntArray:
    wanted = wanted_states(segments)
    travels = segments.rank[wanted.item] != wanted.reader
    return np.bincount(wanted.reader[travels], minlength=num_ranks)


def _segments(owner: IntArray, row: IntArray, document: IntArray) -> Segments:
    opens = np.ones(len(owner), dtype=bool)
    opens[1:] = (np.diff(owner) != 0) | (np.diff(row) != 1) | (np.diff(document) != 0)
    start = np.flatnonzero(opens)
    length = np.diff(start, append=len(owner))
    return Segments(length, document[start], owner[start], row[start])


def wanted_states(segments: Segments) -> WantedRows:
    """Returns, for each rank, the segments that precede one of its own in a document."""
    pair = np.stack([segments.rank, segments.document])
    order = np.lexsort((segments.order, *pair[::-1]))
    last = np.ones(len(order), dtype=bool)
    last[:-1] = np.diff(pair[:, order], axis=1).any(axis=0)
    mine = order[last]  # the last segment of each rank in each document, by rank
    which, item = expand_ranges(mine - segments.order[mine], mine)
    return WantedRows(segments.rank[mine][which], item)


def wanted_tokens(
    plan: PlanData, document_lengths: Sequence[int], num_before: int
) -> tuple[WantedRows, IntArray]:
    """Returns the tokens that each rank needs, its own apart, to see `num_before` tokens before each of its own.

    Second, the tokens seen: int64 `[num_before + 1, num_tokens]`. Token i sees i - o at offset o, -1 where that is
    outside its document.
    """
    owner, _, document = _tokens(plan, document_lengths)
    starts = np.cumsum([0, *document_lengths])
    tokens = np.arange(len(owner))
    seen = tokens - np.arange(num_before + 1)[:, None]
    seen[seen < starts[document]] = -1
    foreign = (seen >= 0) & (owner[seen] != owner)
    keys = distinct((owner * len(owner) + seen)[foreign])
    return WantedRows(*np.divmod(keys, max(len(owner), 1))), seen


def count_segments(plan: PlanData, document_lengths: Sequence[int]) -> SegmentCounts:
    """Returns the segments of each rank, those of cut documents, and the states that it receives.

    A layer of linear attention sends `received` x heads x K x (V + 1) fp32 numbers to a rank forward, and takes as many
    back from it backward; with `beta`, K x (V + K) in place of K x (V + 1).

    Raises ValueError for lengths that do not add up to the plan's tokens.
    """
    segments = find_segments(plan, check_document_lengths(document_lengths, plan))
    pieces = np.bincount(segments.document, minlength=len(document_lengths))
    is_cut = pieces[segments.document] > 1

    def per_rank(ranks: IntArray) -> IntArray:
        return np.bincount(ranks, minlength=plan.cp_size)

    return SegmentCounts(
        per_rank(segments.rank),
        per_rank(segments.rank[is_cut]),
        _received(segments, plan.cp_size),
    )


def _tokens(plan: PlanData, document_lengths: Sequence[int]) -> tuple[IntArray, IntArray, IntArray]:
    """Returns owner, row and document of each token."""
    owner, row = (column[: plan.num_tokens] for column in plan.local_from_global)
    return owner, row, np.repeat(np.arange(len(document_lengths)), document_lengths)
