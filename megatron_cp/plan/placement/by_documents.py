"""Tokens placed document by document: as few ranks per document as its size allows.

A document is a run of tokens that no pair of the mask leaves; any mask falls apart into such runs, if only
into one. Its group's members own two mirrored pieces of it each, so that a causal document is balanced:

    ranks 0 1, documents of 8 and 4 tokens     0 0 1 1 1 1 0 0 | 0 1 1 0

Pieces differ by a token where lengths do not divide; ranks take turns, so that all own equally many.
Sources: Zeppelin (EuroSys'26), FlexSP (ASPLOS'25), ByteScale (arXiv 2502.21231).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_cp.mask import interval
from megatron_cp.mask.interval import IntArray
from megatron_cp.plan.placement.placement import Placement
from megatron_cp.plan.schema import FloatArray

# What half and double of each do: benchmarks/bench_search.py; results are linked in docs/plan.md.
LIGHT = 64  # a document of less than this part of the fair share does not decide the load
WIDEST = 8  # times the ranks that a document wants: it is scattered rather than in a larger group
STEP = 0.01  # of the fair share, by which the limit is raised until a scattered document fits
MOST_PLACED = 2  # documents per rank placed one by one; others fill the room that is left


@dataclass(frozen=True)
class Ranks:
    """Ranks, or head groups, that documents are placed on."""

    speeds: FloatArray
    """How fast each computes: `[P]`."""
    whole: tuple[int, ...]
    """Ranks of a node, of a rack, ..., ascending: each divides the next, the last divides P."""

    @property
    def count(self) -> int:
        """Returns how many there are."""
        return len(self.speeds)


def whole_documents(
    bounds: IntArray, areas: FloatArray, ranks: Ranks, rows: int, most_load: float
) -> tuple[Placement, tuple[float, float]]:
    """Returns documents `bounds[i]` to `bounds[i+1]` on as few ranks as they fit, `rows` tokens for each rank.

    Also the smallest and the largest limit with which the placement is the same.

    `areas` float64 `[documents, loads]`: each column is balanced by itself; `most_load`: see `DocumentGroups`. The
    largest documents, by tokens or pairs, are placed one by one; the others, and padding behind the last, follow each
    other through the room that is left, so that few are cut.
    """
    num_ranks, sizes = ranks.count, group_sizes(ranks.count, *ranks.whole)
    groups = DocumentGroups(sizes, rows, areas.sum(axis=0), most_load, ranks)
    lengths = np.diff(bounds)
    largest = np.argsort(-groups.ranks_wanted(lengths, areas), kind="stable")
    heavy = np.sort(largest[: MOST_PLACED * num_ranks])
    light = np.delete(np.arange(len(lengths) + 1), heavy)  # the last one is padding
    shares = groups.place(lengths[heavy], areas[heavy])
    pieces = mirrored(shares, bounds[heavy])
    amounts = np.append(lengths, num_ranks * rows - bounds[-1])[light]
    stop, end_of_room = np.cumsum(amounts), np.cumsum(groups.room)
    start, begin_of_room = stop - amounts, end_of_room - groups.room
    free = np.flatnonzero(groups.room)
    which, place, shared = interval.overlaps(
        interval.columns(start, stop), interval.columns(begin_of_room, end_of_room)[free]
    )
    shift = bounds[light[which]] - start[which]
    ids = np.concatenate([pieces.ids, shared + shift[:, None]])
    placed = Placement(ids, np.concatenate([pieces.rank, free[place]]), num_ranks).in_order()
    return placed, groups.equal_limits()


def group_sizes(num_ranks: int, *nodes: int) -> list[int]:
    """Returns group sizes of which each divides the next, from one rank over a node to all ranks.

    For 24 ranks in nodes of 8: 1, 2, 4, 8, 24. `nodes`: ranks of a node, of a rack, ...; each divides the next, and
    the last `num_ranks`.
    """
    sizes = [1]
    for whole in (*nodes, num_ranks):
        while sizes[-1] < whole:
            left = whole // sizes[-1]
            sizes.append(sizes[-1] * next(n for n in range(2, left + 1) if left % n == 0))
    return sizes


@dataclass(frozen=True)
class Pieces:
    """Runs of tokens: which document, whose."""

    document: IntArray
    rank: IntArray
    ids: IntArray  # [n, 2]
    num_ranks: int

    @cached_property
    def placement(self) -> Placement:
        """The tokens of every rank, ascending."""
        return Placement(self.ids, self.rank, self.num_ranks).in_order()


def mirrored(shares: IntArray, starts: IntArray) -> Pieces:
    """Returns two pieces of each document for each rank, in order and then in reverse, `shares` `[D, P]` in all."""
    document, rank = np.nonzero(shares)
    share = shares[document, rank]
    sizes = np.concatenate([share - share // 2, share // 2])
    turn = np.concatenate([rank, -rank])  # there, and back behind it
    is_back = np.arange(len(turn)) >= len(rank)
    order = np.lexsort((turn, is_back, np.tile(document, 2)))
    order = order[sizes[order] > 0]
    document, sizes = np.tile(document, 2)[order], sizes[order]
    stop = np.cumsum(sizes)
    before = np.searchsorted(document, document)  # the first piece of the same document
    stop += starts[document] - (stop - sizes)[before]
    ids = interval.columns(stop - sizes, stop)
    return Pieces(document, np.abs(turn)[order], ids, shares.shape[1])


class DocumentGroups:
    """Ranks while documents are placed: room in tokens, one or several loads in pairs over speed."""

    def __init__(
        self,
        sizes: Sequence[int],
        rows: int,
        area: FloatArray,
        most_load: float,
        ranks: Ranks | None = None,
    ):
        """Groups are of `sizes`, ascending, each divides the next, the last is all ranks.

        `area`: of all documents, `[loads]`. A document that would bring a group more than `most_load` times its
        fair share of one goes to a larger group; to one much larger only without `ranks`, which are alike then. With
        them, such a document is scattered over few of them.
        """
        self.sizes, self.rows, self.most_load, self.ranks = sizes, rows, most_load, ranks
        self.speeds = np.ones(sizes[-1]) if ranks is None else ranks.speeds
        self.fair = np.maximum(1.0, area / self.speeds.sum())
        self.room = np.full(sizes[-1], rows, dtype=np.int64)
        self.load = np.zeros((sizes[-1], len(self.fair)))
        self.reached = 0.0
        """The largest load, over its fair share, that was compared with `most_load` and found within it."""
        self.is_limited = self.is_scattered = False
        """Whether `most_load` kept some document out of a group, or decided how it was scattered."""

    def ranks_wanted(self, lengths: IntArray, areas: FloatArray) -> FloatArray:
        """Returns to how many ranks' tokens, or pairs of some load, each document comes: `[D]` of `[D, loads]`."""
        return np.maximum(lengths / self.rows, (areas / self.fair).max(axis=1))

    def equal_limits(self) -> tuple[float, float]:
        """Returns the smallest and the largest `most_load` that would have placed the documents so."""
        if self.is_scattered:
            return self.most_load, self.most_load
        return self.reached, self.most_load if self.is_limited else np.inf

    def place(self, lengths: IntArray, areas: FloatArray) -> IntArray:
        """Returns the tokens of each document that each rank takes: int64 `[D, P]`; `areas` `[D, loads]`."""
        zone = np.searchsorted(self.sizes[:-1], self.ranks_wanted(lengths, areas))
        shares = np.zeros((len(lengths), len(self.room)), dtype=np.int64)
        largest = (areas / self.fair).max(axis=1)
        for document in np.lexsort((-largest, -zone)).tolist():
            length, area = int(lengths[document]), areas[document]
            limit = np.where(area > self.fair / LIGHT, self.most_load * self.fair, np.inf)
            wanted, most = self.sizes[int(zone[document])], self.sizes[-1]
            widest = most if self.ranks is None else WIDEST * wanted
            sizes = [size for size in self.sizes if wanted <= size <= widest]
            ranks = self._group(length, area, sizes, limit)
            if ranks is None and self.ranks is not None and wanted < most:
                ranks, taken = self._scattered(length, area, limit, self.ranks.whole)
            else:
                ranks = np.arange(most) if ranks is None else ranks
                taken = _even_shares(self.room[ranks], length)
            shares[document, ranks] = taken
            self.room[ranks] -= taken
            self.load[ranks] += area * taken[:, None] / max(1, length) / self.speeds[ranks, None]
        return shares

    def _group(
        self, length: int, area: FloatArray, sizes: Sequence[int], limit: FloatArray
    ) -> IntArray | None:
        """Returns the least loaded group with room, of the first size that keeps to `limit`, if any does."""
        for size in sizes:
            room, load, speed = self.room, self.load, self.speeds
            if size > 1:
                room = room.reshape(-1, size).sum(axis=1)
                load = load.reshape(-1, size, load.shape[1]).max(axis=1)
                speed = speed.reshape(-1, size).min(axis=1)
            more = area / size / speed[:, None]
            added = more / self.fair
            # Less the smallest, which changes no comparison: where every group gets as much, nothing is added, and
            # loads are compared without a rounding.
            after = (load / self.fair + (added - added.min())).max(axis=1)
            open_load = np.where(room >= length, after, np.inf)
            least = int(open_load.argmin())
            if open_load[least] < np.inf:
                reached = load[least] + more[least]
                if (reached <= limit).all():
                    counted = (reached / self.fair)[limit < np.inf]
                    self.reached = max(self.reached, counted.max(initial=0.0))
                    return np.arange(least * size, (least + 1) * size)
                self.is_limited = True
        return None

    def _scattered(
        self, length: int, area: FloatArray, limit: FloatArray, nodes: Sequence[int]
    ) -> tuple[IntArray, IntArray]:
        """Returns few ranks that have room within `limit`, of one node if one has enough, and what each takes."""
        self.is_scattered |= bool((limit < np.inf).any())
        capacity = self._capacity(length, area, limit)
        while capacity.sum() < length:
            limit = limit + STEP * self.fair
            capacity = self._capacity(length, area, limit)
        ranks = np.arange(len(capacity))
        for size in nodes:
            of_node = capacity.reshape(-1, size).sum(axis=1)
            if of_node.max() >= length:
                ranks = ranks[ranks // size == of_node.argmax()]
                break
        ranks = ranks[np.argsort(-capacity[ranks], kind="stable")]
        upto = np.cumsum(capacity[ranks])
        ranks = ranks[: int(np.searchsorted(upto, length)) + 1]
        taken = capacity[ranks]
        taken[-1] -= upto[len(ranks) - 1] - length
        return ranks, taken

    def _capacity(self, length: int, area: FloatArray, limit: FloatArray) -> IntArray:
        """Returns how many tokens of a document each rank has room for, within the limit of its load: `[P]`."""
        counts = limit < np.inf
        if not counts.any():
            return self.room
        left = np.maximum(limit - self.load, 0.0)[:, counts] * self.speeds[:, None]
        most = (left * (length / area[counts])).min(axis=1)
        return np.minimum(self.room, np.ceil(most)).astype(np.int64)


def _even_shares(room: IntArray, amount: int) -> IntArray:
    """Returns what each rank takes of `amount`, as evenly as room allows; most room takes what is over."""
    if len(room) == 1:
        return np.array([amount])
    ascending, others = np.sort(room), np.arange(len(room), 0, -1)
    left = amount - (np.cumsum(ascending) - ascending)  # when all ranks with less room are full
    first = int((left <= ascending * others).argmax())  # from this one on all take the same
    shares = np.minimum(room, left[first] // others[first])
    over = amount - int(shares.sum())
    shares[np.argsort(-(room - shares), kind="stable")[:over]] += 1
    return shares
