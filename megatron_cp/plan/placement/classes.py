"""Tokens reordered so that those that meet lie together: residue classes, and blocks that only some blocks see.

Documents are runs of tokens that no pair leaves. A dilated window falls apart as well, but into every d-th token, and a
strided mask into every d-th block; one behind the other these classes are documents, and are placed as such:

    dilated, d = 2      0 1 2 3 4 5 6 7   ->   0 2 4 6 | 1 3 5 7      a diagonal for every second key becomes one band

Classes are looked for where they are cheap to see: all slices are single diagonals whose distances have a common
divisor; or their rows and columns, as islands of tokens, are linked to some islands only.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_cp.mask import AttentionMask, interval
from megatron_cp.mask.interval import IntArray
from megatron_cp.mask.slice import (
    HI,
    K_END,
    K_START,
    LO,
    Q_END,
    Q_START,
    make_rows,
    tighten,
)

MOST_ROWS = 1 << 20  # slices of a mask in residue classes before neighbours are merged: a second
MOST_ROUNDS = (
    64  # of passing on labels; chains of islands that take longer are no classes worth a look
)


@dataclass(frozen=True)
class Reordering:
    """Masks on reordered tokens."""

    masks: list[AttentionMask]
    order: IntArray
    """The token at each new place: int64 `[S]`."""

    def tokens_of(self, places: IntArray) -> IntArray:
        """Returns the tokens at new places, in any shape; padding behind the last keeps its id."""
        num_tokens = len(self.order)
        tokens: IntArray = np.where(
            places < num_tokens, self.order[np.minimum(places, num_tokens - 1)], places
        )
        return tokens


def classes_together(masks: Sequence[AttentionMask]) -> Reordering | None:
    """Returns the masks with the tokens of each class together, where all masks share them; None without classes."""
    if not all(mask.num_slices for mask in masks):
        return None
    period = common_period(masks)
    if period > 1 and period * sum(mask.num_slices for mask in masks) <= MOST_ROWS:
        order = [np.arange(first, masks[0].num_queries, period) for first in range(period)]
        return Reordering([_in_residues(mask, period) for mask in masks], np.concatenate(order))
    blocks = linked_blocks(masks)
    if blocks is None:
        return None
    moved = [mask.gather(blocks, blocks).merged() for mask in masks]
    return Reordering(moved, interval.to_indices(blocks))


def common_period(masks: Sequence[AttentionMask]) -> int:
    """Returns the greatest common divisor of all distances, where every slice is one diagonal; 1 if one is not."""
    rows = np.concatenate([mask.array for mask in masks])
    if (rows[:, LO] != rows[:, HI]).any():
        return 1
    return min(int(np.gcd.reduce(rows[:, LO])), masks[0].num_queries)


def stripe_rows(
    rows: IntArray, stride: int, q_first: int | IntArray, k_first: int | IntArray
) -> IntArray:
    """Returns what queries q_first + a stride and keys k_first + b stride share, as slices in (a, b), not tight."""
    q0, q1, k0, k1, lo, hi = rows.T
    offset = k_first - q_first
    return make_rows(
        -((q_first - q0) // stride),  # the first a with q_first + a stride >= q0
        -((q_first - q1) // stride),
        -((k_first - k0) // stride),
        -((k_first - k1) // stride),
        -((offset - lo) // stride),
        (hi - offset) // stride,
    )


def _in_residues(mask: AttentionMask, period: int) -> AttentionMask:
    size = mask.num_queries
    first = np.tile(np.arange(period), mask.num_slices)
    begins = np.cumsum(np.r_[0, -((np.arange(period - 1) - size) // period)])
    rows = stripe_rows(np.repeat(mask.array, period, axis=0), period, first, first)
    rows[:, [Q_START, Q_END, K_START, K_END]] += begins[first][:, None]
    return AttentionMask(size, size, tighten(rows)).merged()


def linked_blocks(masks: Sequence[AttentionMask]) -> IntArray | None:
    """Returns runs of tokens `[n, 2]`, class by class; None where the classes lie one behind the other as it is.

    An island is a run of tokens that rows or columns of slices cover without a gap; a slice links two.
    """
    rows = np.concatenate([mask.array for mask in masks])
    queries, keys = rows[:, [Q_START, Q_END]], rows[:, [K_START, K_END]]
    islands = interval.islands(np.concatenate([queries, keys]))
    ends = [
        np.searchsorted(islands[:, 0], side[:, 0], side="right") - 1 for side in (queries, keys)
    ]
    apart = ends[0] != ends[1]
    if not apart.any():
        return None
    label = _labels(len(islands), *(end[apart] for end in ends))
    if label is None or len(interval.distinct(label)) == 1 + np.count_nonzero(np.diff(label)):
        return None
    ordered = islands.take(np.argsort(label, kind="stable"), axis=0)
    whole = np.array([[0, masks[0].num_queries]])
    return np.concatenate([ordered, interval.subtract(whole, interval.normalise(islands))])


def _labels(count: int, a: IntArray, b: IntArray) -> IntArray | None:
    """Returns the first member of each one's class, where `a[i]` and `b[i]` are linked; None if chains are too long."""
    label = np.arange(count)
    for _ in range(MOST_ROUNDS):
        least = np.minimum(label[a], label[b])
        if np.array_equal(label[a], label[b]):
            return label
        for end in (label[a], label[b]):
            np.minimum.at(label, end, least)
        label = label[label]
    return None
