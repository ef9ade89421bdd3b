"""Schemes that place document by document: every document zigzag over a group of ranks.

A document is a run of tokens that no pair of the mask leaves; any mask falls apart into such runs, if only
into one. Its group's members own two mirrored pieces of it each, and keys go round the group:

    ranks 0 1, documents of 8 and 4 tokens     0 0 1 1 1 1 0 0 | 0 1 1 0

per_document_zigzag   all ranks are the group of every document
document_groups       one rank, one node or all ranks, by the document's share of tokens and pairs

Pieces differ by a token where lengths do not divide; ranks take turns, so that all own equally many.
"""

from dataclasses import dataclass

import numpy as np

from megatron_cp.config import CPConfig
from megatron_cp.mask import AttentionMask
from megatron_cp.mask.interval import IntArray, to_indices
from megatron_cp.mask.slice import K_END, K_START, Q_END, Q_START
from megatron_cp.plan.placement import tokens_per_rank
from megatron_cp.plan.schema import AttentionPlan, Pass
from megatron_cp.plan.schemes.gather import one_pass_plan
from megatron_cp.plan.schemes.layout import check_pieces, ranks_per_node
from megatron_cp.plan.schemes.ring import ring_pass
from megatron_cp.plan.stages import PassBuilder, PlacedMask

MOST_LOAD = 1.25  # of the fair share: a document that brings more to a group goes to a larger one
LIGHT = 64  # a document of less than this part of the fair share does not decide the load


def plan_per_document_zigzag(mask: AttentionMask, cp_size: int, config: CPConfig) -> AttentionPlan:
    """Returns every document zigzag over all ranks, and the ring over all keys.

    Volume per rank: 2 rho (P-1), whatever the lengths; balanced, in pieces of length / 2P. The published
    layouts pad documents to multiples of 2P; ours equals them where nothing is to pad, and never pads.
    Sources: TransformerEngine (THD), WLB-LLM (OSDI'25).
    """
    rows = tokens_per_rank(mask.num_queries, cp_size, config)
    bounds = np.r_[document_bounds(mask), cp_size * rows]  # the last one is padding
    lengths = np.diff(bounds)
    pieces = np.minimum(
        lengths[:-1], 2 * cp_size
    )  # of each document; about half of all pairs are seen
    check_pieces("per_document_zigzag", int((pieces**2).sum()) // 2, cp_size)
    before = np.cumsum(lengths % (2 * cp_size)) - lengths % (2 * cp_size)
    extra = lengths % (2 * cp_size)  # tokens over; ranks take turns, on through all documents
    turn = (np.arange(cp_size) - before[:, None]) % cp_size
    taken = (extra[:, None] - turn + cp_size - 1) // cp_size
    shares = 2 * (lengths // (2 * cp_size))[:, None] + taken
    placement = _mirrored(shares, bounds[:-1]).placement(cp_size)
    both = ring_pass(PlacedMask(mask, placement))
    return one_pass_plan(mask, config, "per_document_zigzag", placement, both)


def plan_document_groups(mask: AttentionMask, cp_size: int, config: CPConfig) -> AttentionPlan:
    """Returns documents on one rank, one node or all ranks, as little spread as their size allows.

    A document goes where its tokens fit and its pairs are no more than the ranks' fair share; the largest
    are placed first, each on the least loaded rank or node with room, and cut further where none has.
    Volume: 2 rho (d-1) rows for each row of a document over d ranks. Equal tokens per rank, always, so the
    balance is as good as the lengths allow.
    Sources: Zeppelin (EuroSys'26), FlexSP (ASPLOS'25), ByteScale (arXiv 2502.21231).
    """
    rows = tokens_per_rank(mask.num_queries, cp_size, config)
    bounds = document_bounds(mask)
    groups = _Groups(cp_size, ranks_per_node(cp_size, config), rows)
    shares = groups.place(np.diff(bounds), mask.area_of_rows(bounds))
    padded = np.concatenate([shares, groups.room[None]])
    pieces = _mirrored(padded, bounds)
    placed = PlacedMask(mask, pieces.placement(cp_size))
    both = group_rings_pass(placed, pieces, bounds, shares)
    return one_pass_plan(mask, config, "document_groups", placed.placement, both)


def document_bounds(mask: AttentionMask) -> IntArray:
    """Returns where documents begin, and the number of tokens behind: int64 `[documents + 1]`."""
    rows = mask.array
    start = np.minimum(rows[:, Q_START], rows[:, K_START])
    stop = np.maximum(rows[:, Q_END], rows[:, K_END])
    order = np.argsort(start, kind="stable")
    reach = np.maximum.accumulate(stop[order])
    start = start[order]
    opens = np.r_[True, start[1:] >= reach[:-1]][: len(start)]
    closes = np.r_[opens[1:], True][: len(start)]
    ends = np.array([0, mask.num_queries])
    return np.unique(np.concatenate([ends, start[opens], reach[closes]]))


@dataclass(frozen=True)
class _Pieces:
    """Runs of tokens: which document, whose."""

    document: IntArray
    rank: IntArray
    ids: IntArray  # [n, 2]

    def placement(self, cp_size: int) -> IntArray:
        """Returns the tokens of every rank, ascending: int64 `[P, T]`."""
        order = np.lexsort((self.ids[:, 0], self.rank))
        return to_indices(self.ids[order]).reshape(cp_size, -1)


def _mirrored(shares: IntArray, starts: IntArray) -> _Pieces:
    """Returns two pieces of each document for each rank, in order and then in reverse, `shares` `[D, P]` in all."""
    num_documents, num_ranks = shares.shape
    sizes = np.concatenate([shares - shares // 2, (shares // 2)[:, ::-1]], axis=1)
    stops = starts[:, None] + np.cumsum(sizes, axis=1)
    ranks = np.arange(num_ranks)
    rank = np.tile(np.r_[ranks, ranks[::-1]], num_documents)
    document = np.repeat(np.arange(num_documents), 2 * num_ranks)
    ids = np.stack([(stops - sizes).reshape(-1), stops.reshape(-1)], axis=1)
    solid = ids[:, 0] < ids[:, 1]
    return _Pieces(document[solid], rank[solid], ids[solid])


class _Groups:
    """Ranks while documents are placed: room in tokens, load in pairs."""

    def __init__(self, cp_size: int, node: int, rows: int):
        self.rows = rows
        self.sizes = sorted({1, node, cp_size})
        self.room = np.full(cp_size, rows, dtype=np.int64)
        self.load = np.zeros(cp_size)

    def place(self, lengths: IntArray, areas: IntArray) -> IntArray:
        """Returns the tokens of each document that each rank takes: int64 `[D, P]`."""
        fair = max(1.0, float(areas.sum()) / len(self.room))
        wanted = np.maximum(lengths / self.rows, areas / fair)  # ranks
        zone = np.searchsorted(self.sizes[:-1], wanted)
        shares = np.zeros((len(lengths), len(self.room)), dtype=np.int64)
        for document in np.lexsort((-areas, -zone)).tolist():
            length, area = int(lengths[document]), float(areas[document])
            limit = MOST_LOAD * fair if area > fair / LIGHT else np.inf
            members = self._group(length, area, self.sizes[int(zone[document]) :], limit)
            taken = _even_shares(self.room[members], length)
            shares[document, members] = taken
            self.room[members] -= taken
            self.load[members] += area * taken / max(1, length)
        return shares

    def _group(self, length: int, area: float, sizes: list[int], limit: float) -> slice:
        """Returns the least loaded group with room, of the first size that keeps its load below `limit`."""
        for size in sizes:
            room = self.room.reshape(-1, size).sum(axis=1)
            load = self.load.reshape(-1, size).max(axis=1) + area / size
            fits = (room >= length) & ((load <= limit) | (size == sizes[-1]))
            if fits.any():
                first = int(np.where(fits, load, np.inf).argmin()) * size
                return slice(first, first + size)
        raise AssertionError("all ranks together have room for all tokens")


def _even_shares(room: IntArray, amount: int) -> IntArray:
    """Returns what each rank takes of `amount`, as evenly as room allows; most room takes what is over."""
    ascending, others = np.sort(room), np.arange(len(room), 0, -1)
    left = amount - (np.cumsum(ascending) - ascending)  # when all ranks with less room are full
    first = int((left <= ascending * others).argmax())  # from this one on all take the same
    shares = np.minimum(room, left[first] // others[first])
    over = amount - int(shares.sum())
    shares[np.argsort(-(room - shares), kind="stable")[:over]] += 1
    return shares


def group_rings_pass(
    placed: PlacedMask, pieces: _Pieces, bounds: IntArray, shares: IntArray
) -> Pass:
    """Returns own keys first; in step s the keys of the member s places before, in groups of more than s."""
    is_member = shares > 0
    degree = is_member.sum(axis=1)
    place = np.cumsum(is_member, axis=1) - 1  # of a rank in the group of a document
    members = np.argsort(~is_member, axis=1, kind="stable")  # those first, in order
    of_part = np.searchsorted(bounds, placed.parts[:, Q_START], side="right") - 1
    distance = place[of_part, placed.q_owner] - place[of_part, placed.k_owner]
    distance %= np.maximum(1, degree[of_part])
    builder = PassBuilder(placed)
    builder.add_own()
    real = pieces.document < len(degree)
    document, rank, ids = pieces.document[real], pieces.rank[real], pieces.ids[real]
    for step in range(1, int(degree.max(initial=1))):
        sent = degree[document] > step
        where = document[sent]
        reader = members[where, (place[where, rank[sent]] + step) % degree[where]]
        now = distance == step
        requests = np.column_stack([rank[sent], reader, ids[sent]])
        builder.add(placed.parts[now], placed.q_owner[now], all_keys=requests)
    return builder.build()
