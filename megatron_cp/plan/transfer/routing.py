"""Where rows are, and how they get to the ranks that want them: messages of a Transfer.

All ranks are handled at once, because a Python loop over ranks would cost more than the plan. Every rank
sees a copy of all token ids of its own:

    key r * stride + i   =   token i as rank r sees it        (stride > number of ids: copies never touch)

A route turns "these ranks want these keys" into hops. Whatever the route, a rank is never sent a row that it
holds already.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_cp.mask import interval
from megatron_cp.mask.interval import IntArray
from megatron_cp.plan.placement.placement import Placement
from megatron_cp.plan.schema import BoolArray, Hop, Transfer

SRC, DST, ID_START, ID_STOP = range(4)


@dataclass(frozen=True)
class RowSpace:
    """The rows of one side that the ranks hold, as runs of consecutive ids in local order."""

    runs: IntArray
    """Keys int64 `[n, 2]`, rank by rank; a rank's rows stand in the order of its runs."""
    num_ranks: int
    stride: int

    @classmethod
    def placed(cls, placement: Placement) -> "RowSpace":
        """Returns the space in which the ranks hold the rows of their own tokens; O(runs)."""
        stride = placement.num_ranks * placement.own_rows + 1
        runs = placement.ids + (placement.rank * stride)[:, None]
        return cls(runs, placement.num_ranks, stride)

    @classmethod
    def one_after_another(cls, spaces: "Sequence[RowSpace]") -> "RowSpace":
        """Returns the space of as many times the ranks; the ranks of each space follow those of the one before."""
        num_ranks, stride = spaces[0].num_ranks, spaces[0].stride
        runs = [index * num_ranks * stride + one.runs for index, one in enumerate(spaces)]
        return cls(np.concatenate(runs), len(spaces) * num_ranks, stride)

    def keys_of(self, ids: IntArray, ranks: IntArray) -> IntArray:
        """Returns ranges of token ids `[n, 2]` as `ranks` `[n]` see them."""
        return ids + (ranks * self.stride)[:, None]

    @cached_property
    def rank_of_run(self) -> IntArray:
        """The rank that holds each run: int64 `[n]`."""
        return self.runs[:, 0] // self.stride

    @cached_property
    def sizes(self) -> IntArray:
        """The rows that each rank holds: int64 `[P]`."""
        rows = self.runs[:, 1] - self.runs[:, 0]
        return np.bincount(self.rank_of_run, rows, self.num_ranks).astype(np.int64)

    @cached_property
    def first_row_of_run(self) -> IntArray:
        """Where each run begins among its rank's rows: int64 `[n]`."""
        begin = np.cumsum(self.runs[:, 1] - self.runs[:, 0]) - (self.runs[:, 1] - self.runs[:, 0])
        return begin - np.r_[0, np.cumsum(self.sizes)][self.rank_of_run]

    def shifts(self, step: int) -> IntArray:
        """Returns what to add to the keys of each run to stand at `rank * step + local row`: int64 `[n]`."""
        return self.first_row_of_run + self.rank_of_run * step - self.runs[:, 0]

    @cached_property
    def keys(self) -> IntArray:
        """What is held, as normalised intervals of keys."""
        return interval.normalise(self.runs)

    def missing(self, wanted: IntArray) -> IntArray:
        """Returns the keys of `wanted` (normalised) that are not held."""
        return interval.subtract(wanted, self.keys)

    def plus(self, keys: IntArray) -> "RowSpace":
        """Returns the space with other keys besides, as a set: their local rows mean nothing."""
        return RowSpace(np.concatenate([self.runs, keys]), self.num_ranks, self.stride)

    def send(self, requests: IntArray) -> tuple[Hop, "RowSpace"]:
        """Returns the hop that serves `requests` int64 `[m, 4]` (src, dst, id start, id stop), and what is held then.

        The sources hold the ids; no two requests bring one id to one rank.
        """
        order = np.argsort(self.runs[:, 0])
        table = self.runs.take(order, axis=0)
        wanted = self.keys_of(requests[:, ID_START:], requests[:, SRC])
        which, run, shared = interval.overlaps(wanted, table)
        start, stop = shared.T
        row = self.first_row_of_run.take(order.take(run)) + start - table[:, 0].take(run)
        src, dst = requests[:, SRC].take(which), requests[:, DST].take(which)
        arrival = np.lexsort((row, src, dst))
        messages = interval.columns(src, dst, row, row + stop - start).take(arrival, axis=0)
        came = self.keys_of(shared, dst - src)
        runs = np.concatenate([self.runs, came.take(arrival, axis=0)])
        runs = runs.take((runs[:, 0] // self.stride).argsort(kind="stable"), axis=0)
        return Hop(_join(messages)), RowSpace(runs, self.num_ranks, self.stride)


class Owners:
    """Which rank owns which token ids: the runs of the own space sorted by id."""

    def __init__(self, own: RowSpace):
        rank = own.rank_of_run
        ids = own.keys_of(own.runs, -rank)
        order = np.argsort(ids[:, 0])
        self.ids, self.rank = ids.take(order, axis=0), rank.take(order)
        self.num_ranks, self.stride = own.num_ranks, own.stride

    @property
    def num_ids(self) -> int:
        """Returns the number of token ids, padding included."""
        return self.stride - 1

    def rank_of(self, ids: IntArray) -> IntArray:
        """Returns the owner of each token id."""
        return self.rank[np.searchsorted(self.ids[:, 1], ids, side="right")]

    def requests(self, wanted: IntArray) -> IntArray:
        """Returns normalised keys `[n, 2]`, cut by owner: int64 `[m, 4]` (owner, reader, id start, id stop)."""
        reader, ids = interval.ungrouped(wanted, self.stride)
        which, run, shared = interval.overlaps(ids, self.ids)
        return interval.columns(self.rank.take(run), reader.take(which), *shared.T)

    def blocks(self, distances: Iterable[int]) -> IntArray:
        """Returns requests by which every rank asks for all rows of the ranks so many places before it."""
        runs = [
            np.column_stack([self.rank, (self.rank + distance) % self.num_ranks, self.ids])
            for distance in distances
        ]
        return np.concatenate([np.zeros((0, 4), dtype=np.int64), *runs])


Route = Callable[[Owners, RowSpace, IntArray], list[IntArray]]
"""(owners, what is held, normalised keys that are wanted and not held) -> requests, hop by hop.

A hop's sources hold what they send, from the start or from an earlier hop.
"""


def direct(owners: Owners, held: RowSpace, wanted: IntArray) -> list[IntArray]:
    """Sends every row from its owner straight to each rank that wants it (the group-cast of MagiAttention)."""
    return [owners.requests(wanted)]


def tree(owners: Owners, held: RowSpace, wanted: IntArray) -> list[IntArray]:
    """Passes every row on from reader to reader: after t hops 2^t ranks hold it, so no rank sends it often."""
    return tree_rounds(owners.requests(wanted))


@dataclass(frozen=True)
class ThroughNodes:
    """Sends a row to another node once, to the rank at its owner's place there, which passes it on inside.

    With `tree`, a row that many nodes want is passed on from node to node as well, in rounds: after t rounds
    2^t nodes hold it, so no owner's link carries it more than log2(nodes) times. Partial results merge
    and gradients add up in the ranks between, on the way back.
    """

    node_size: int
    tree: bool = False

    def __call__(self, owners: Owners, held: RowSpace, wanted: IntArray) -> list[IntArray]:
        """See `Route`."""
        requests = owners.requests(wanted)
        far, relay = self.relays(requests, held.num_ranks)
        keys = held.keys_of(requests[far, ID_START:], relay[far])
        first = owners.requests(held.missing(interval.normalise(keys)))
        rounds = tree_rounds(first) if self.tree else [first]
        rounds[0] = np.concatenate([requests.compress(~far, axis=0), rounds[0]])
        passed_on = far & (relay != requests[:, DST])
        last = requests.compress(passed_on, axis=0)
        last[:, SRC] = relay[passed_on]
        return [sent for sent in [*rounds, last] if len(sent)]

    def relays(self, requests: IntArray, num_ranks: int) -> tuple[BoolArray, IntArray]:
        """Returns which requests go to another node, and the rank there at their owner's place: both `[n]`."""
        src, dst = requests[:, SRC], requests[:, DST]
        far = src // self.node_size != dst // self.node_size
        place = dst // self.node_size * self.node_size + src % self.node_size
        return far, np.minimum(place, num_ranks - 1)


def enters_twice(requests: IntArray, node_size: int, stride: int) -> bool:
    """Returns whether some row, sent straight, would enter a node for several of its ranks."""
    node = requests[:, DST] // node_size
    far = requests[:, SRC] // node_size != node
    ids = requests[:, ID_START:].compress(far, axis=0)
    keys = ids + (node[far] * stride)[:, None]
    return interval.length(interval.normalise(keys)) < interval.length(keys)


def send(
    route: Route, owners: Owners, held: RowSpace, wanted: IntArray
) -> tuple[Transfer, RowSpace]:
    """Returns the transfer that brings what is wanted by a route, and what is held then."""
    hops = []
    for requests in route(owners, held, wanted):
        hop, held = held.send(requests)
        hops.append(hop)
    return Transfer(tuple(hops)), held


def tree_rounds(requests: IntArray) -> list[IntArray]:
    """Returns owner-to-reader requests as rounds in which readers pass rows on.

    Reader number i of a row (counted from 1, in the order of ranks from the owner on) gets it in round
    floor(log2 i) from reader i - 2^round, where 0 is the owner.
    """
    if not len(requests):
        return [requests]
    cuts = interval.distinct(requests[:, ID_START:])
    low = np.searchsorted(cuts, requests[:, ID_START])
    high = np.searchsorted(cuts, requests[:, ID_STOP])
    which, segment = interval.expand_ranges(low, high)
    src, dst = requests[which, SRC], requests[which, DST]
    size = int(max(src.max(), dst.max())) + 1
    order = np.lexsort(((dst - src) % size, segment))
    src, dst, segment = src[order], dst[order], segment[order]
    opens = np.flatnonzero(np.r_[True, segment[1:] != segment[:-1]])
    first = opens[np.searchsorted(opens, np.arange(len(segment)), side="right") - 1]
    number = np.arange(len(segment)) - first + 1
    level = np.frexp(number.astype(np.float64))[1] - 1  # exact: floor of log2
    parent = number - (1 << level)
    sender = np.where(parent == 0, src, dst[first + np.maximum(parent, 1) - 1])
    passed = interval.columns(sender, dst, cuts[segment], cuts[segment + 1])
    return [passed[level == t] for t in range(int(level.max()) + 1)]


def split_evenly(requests: IntArray, num_parts: int) -> list[IntArray]:
    """Returns requests in `num_parts` sets, with an equal share (to one row) of every pair of ranks.

    Every set loads every link alike: cutting by key instead would send all readers of a document to the
    owner of its beginning at the same time.
    """
    requests = requests[np.lexsort(requests[:, [ID_START, SRC, DST]].T)]
    opens = np.r_[True, (np.diff(requests[:, [SRC, DST]], axis=0) != 0).any(axis=1)]
    pair = np.cumsum(opens) - 1
    ends = np.cumsum(requests[:, ID_STOP] - requests[:, ID_START])
    begins = np.r_[0, ends[:-1]]
    first = begins[opens][pair]  # where the request's pair of ranks begins
    total = np.diff(np.r_[begins[opens], ends[-1]])[pair]
    parts = []
    for part in range(num_parts):
        skip = np.maximum(first + total * part // num_parts - begins, 0)
        drop = np.maximum(ends - first - total * (part + 1) // num_parts, 0)
        cut = requests.copy()
        cut[:, ID_START] += skip
        cut[:, ID_STOP] -= drop
        parts.append(cut[cut[:, ID_START] < cut[:, ID_STOP]])
    return parts


def _join(messages: IntArray) -> IntArray:
    """Returns messages with neighbours in the sender's rows joined; they are sorted by (dst, src, row)."""
    src, dst, start, stop = messages.T
    opens = np.ones(len(messages), dtype=bool)
    opens[1:] = (dst[1:] != dst[:-1]) | (src[1:] != src[:-1]) | (start[1:] != stop[:-1])
    first = np.flatnonzero(opens)
    last = np.r_[first[1:], len(messages)] - 1 if len(first) else first
    return interval.columns(src[first], dst[first], start[first], stop[last])
