"""Stages of an assignment: what is computed first, so that rows travel while there is other work.

    stage     0           1 ... K                                        K + 1 (optional)
    work      local       pairs with foreign rows, equal areas           the rest of the local pairs
    moves     -           rows needed for the first time; keys stay      results go home under it

Local pairs hide the first rows on their way; a part of them, left for the end, hides the last results. Where ranks
have unequally many, the stages of some would be longer than those of others, who wait for their rows: what a rank has
beyond a quantile of all (`most_apart`) fills its remote stages.

One side is kept: its rows arrive with the first stage that needs them and stay, and their results go home at the end.
A foreign row of the other side is in one stage only, and its results go home under the next. Forward keeps keys
(they have no results); backward keeps the side whose gradients are cheaper to send late. Pairs with foreign
rows of the passing side come first, because own rows send no results. Foreign rows come in one of three orders:

    tokens    as they stand in the stream: fewest slices, but readers of a document all begin with its first owner
    ring      owner after owner, beginning behind the rank itself: every owner serves a part of its readers in a stage
    shares    an equal share of every owner's rows in each stage: links are even, slices are most
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from megatron_cp.mask import interval
from megatron_cp.mask.interval import IntArray
from megatron_cp.mask.slice import Q_START, cut_rows, rows_area
from megatron_cp.plan.compute.bisection import Assignment
from megatron_cp.plan.schema import BoolArray, FloatArray, Pass, Side
from megatron_cp.plan.transfer.pass_builder import COLUMNS, PassBuilder, PlacedMask
from megatron_cp.plan.transfer.routing import (
    DST,
    ID_START,
    ID_STOP,
    SRC,
    Route,
    ThroughNodes,
    direct,
    tree,
    tree_rounds,
)

# What half and double of each do: benchmarks/bench_search.py; results are linked in docs/plan.md.
PIECES = 256  # of the stream: slices are cut so finely, for stages to be equal
LEAST_PIECES_PER_RANK, MOST_PIECES_PER_RANK = 2, 8

Order = Literal["tokens", "ring", "shares"]
ORDERS: tuple[Order, ...] = ("tokens", "ring", "shares")


@dataclass(frozen=True)
class Staging:
    """How the pairs of an assignment are spread over stages."""

    num_remote: int
    keeps_rest: bool
    """Half of the local pairs outside of remote stages come last."""
    kept: Side
    """The side whose foreign rows stay over all remote stages."""
    order: Order = "tokens"
    """In which foreign rows come."""
    most_apart: float = 1.0
    """Of ranks by their local pairs, the quantile above which more of them fill the remote stages."""

    @property
    def num_stages(self) -> int:
        """Returns the number of all stages."""
        return 1 + self.num_remote + self.keeps_rest

    def keeps(self, index: int) -> Side | None:
        """Returns the side of which a stage keeps what the stage before held."""
        return self.kept if 1 < index <= self.num_remote else None


@dataclass(frozen=True)
class StagedRequests:
    """Rows that arrive, in which stages."""

    requests: IntArray
    """(owner, reader, ids): int64 `[n, 4]`."""
    stage: IntArray
    """int64 `[n]`."""

    def chosen(self, which: BoolArray) -> "StagedRequests":
        """Returns some of them."""
        return StagedRequests(self.requests.compress(which, axis=0), self.stage[which])

    def plus(self, other: "StagedRequests") -> "StagedRequests":
        """Returns these and others."""
        requests = np.concatenate([self.requests, other.requests])
        return StagedRequests(requests, np.concatenate([self.stage, other.stage]))


def _first_stages(wanted: IntArray, per_stage: int) -> IntArray:
    """Returns keys that are needed in several stages cut so that each is there once, in its first stage.

    `wanted`: normalised; those of a stage are `per_stage` behind those of the stage before.
    """
    stage, keys = interval.ungrouped(wanted, per_stage)
    cuts = interval.distinct(keys)
    low, high = (cuts.searchsorted(end) for end in keys.T)
    which, segment = interval.expand_ranges(low[::-1], high[::-1])
    first = np.full(len(cuts), -1)
    first[segment] = stage[::-1][which]  # the last one written is the first stage
    needed = np.flatnonzero(first >= 0)
    found = interval.columns(cuts[needed], cuts[np.minimum(needed + 1, len(cuts) - 1)])
    return interval.grouped(found, first[needed], per_stage)


def _rounds(sent: StagedRequests, num_ranks: int) -> list[StagedRequests]:
    """Returns requests as rounds in which readers pass rows on, each stage with ranks and rows of its own."""
    step = np.full(4, num_ranks)
    step[ID_START:] = sent.requests[:, ID_STOP].max(initial=0)
    rounds = []
    for requests in tree_rounds(sent.requests + sent.stage[:, None] * step):
        stage = requests[:, DST] // num_ranks
        rounds.append(StagedRequests(requests - stage[:, None] * step, stage))
    return rounds


class AssignedMask:
    """A placed mask with a rank for every pair: what is local, and which rows have to move."""

    def __init__(self, placed: PlacedMask, assignment: Assignment):
        """Every part has queries of one owner and keys of one."""
        self.placed = placed
        self.parts, self.ranks = assignment.parts, assignment.ranks
        self.area = rows_area(self.parts).astype(np.float64)
        self.owner: dict[Side, IntArray] = {
            side: placed.owners.rank_of(self.parts[:, start])
            for side, (start, _) in COLUMNS.items()
        }
        self.is_own: dict[Side, BoolArray] = {
            side: owner == self.ranks for side, owner in self.owner.items()
        }
        self.is_local = self.is_own["q"] & self.is_own["k"]
        self._pieces: dict[Side, AssignedPieces] = {}

    @cached_property
    def local_areas(self) -> FloatArray:
        """The pairs of each rank that need no foreign row: `[P]`."""
        return self._per_rank(self.area * self.is_local)

    @cached_property
    def areas(self) -> FloatArray:
        """The pairs of each rank: `[P]`."""
        return self._per_rank(self.area)

    def _per_rank(self, area: FloatArray) -> FloatArray:
        return np.bincount(self.ranks, area, self.placed.num_ranks).astype(np.float64)

    @cached_property
    def foreign(self) -> dict[Side, IntArray]:
        """The foreign rows of each side that ranks need, as normalised keys."""
        found: dict[Side, IntArray] = {}
        for side, columns in COLUMNS.items():
            away = ~self.is_own[side]
            ids = self.parts[:, columns].compress(away, axis=0)
            found[side] = interval.normalise(self.placed.space.keys_of(ids, self.ranks[away]))
        return found

    def arriving(self, side: Side, route: Route) -> list[IntArray]:
        """Returns the foreign rows of one side that ranks need, hop by hop: requests (owner, reader, ids)."""
        wanted = self.foreign[side]
        return route(self.placed.owners, self.placed.space, wanted) if len(wanted) else []

    def in_pieces(self, kept: Side) -> "AssignedPieces":
        """Returns the same in pieces that are spread over stages, of which one side's foreign rows are kept."""
        if kept not in self._pieces:
            self._pieces[kept] = AssignedPieces(self, kept)
        return self._pieces[kept]


class AssignedPieces:
    """An assignment cut so finely that stages can be equal.

    A part is cut along one side alone: foreign rows of the side that passes, else foreign ones of the side that is
    kept, else queries.
    """

    def __init__(self, assigned: AssignedMask, kept: Side):
        self.placed, self.kept = assigned.placed, kept
        placed, passing = self.placed, self.passing
        by_passing = ~assigned.is_own[passing]
        by_queries = by_passing == (passing == "q")
        by_queries |= assigned.is_local
        per_rank = int(
            np.clip(PIECES // placed.num_ranks, LEAST_PIECES_PER_RANK, MOST_PIECES_PER_RANK)
        )
        runs = interval.cut(placed.owners.ids, max(1, placed.own_rows // per_rank))
        chosen: dict[Side, BoolArray] = {"q": by_queries, "k": ~by_queries}
        cuts = []
        for side, is_cut in chosen.items():
            which = np.flatnonzero(is_cut)
            parts, source, piece = cut_rows(
                assigned.parts.take(which, axis=0), runs, *COLUMNS[side]
            )
            cuts.append((parts, which.take(source), piece))
        self.parts, source, self.piece = (
            np.concatenate(found) for found in zip(*cuts, strict=True)
        )
        self.num_pieces = len(runs)
        self.ranks = assigned.ranks.take(source)
        self.owner = {side: owner.take(source) for side, owner in assigned.owner.items()}
        self.is_own = {side: is_own.take(source) for side, is_own in assigned.is_own.items()}
        self.is_local = assigned.is_local.take(source)
        self.local_areas = assigned.local_areas
        self.area = rows_area(self.parts).astype(np.float64)
        self._shares: dict[Order, FloatArray] = {}

    @property
    def passing(self) -> Side:
        """The side whose foreign rows are in one stage only."""
        return "q" if self.kept == "k" else "k"

    def build(self, staging: Staging, route: Route = direct) -> Pass:
        """Returns the pass that computes the assignment in these stages."""
        stage = self._stage_of_parts(staging)
        builder = PassBuilder(self.placed, route)
        for index in range(staging.num_stages):
            now, keeps = stage == index, staging.keeps(index)
            parts, ranks = self.parts.compress(now, axis=0), self.ranks[now]
            builder.add(parts, ranks, keeps_k=keeps == "k", keeps_q=keeps == "q")
        return builder.build()

    def areas(self, staging: Staging) -> FloatArray:
        """Returns the pairs of every rank in every stage: `[stages, P]`."""
        cell = self._stage_of_parts(staging) * self.placed.num_ranks + self.ranks
        sums = np.bincount(cell, self.area, staging.num_stages * self.placed.num_ranks)
        return sums.astype(np.float64).reshape(staging.num_stages, -1)

    def arriving(self, staging: Staging, route: Route, side: Side) -> list[StagedRequests]:
        """Returns the foreign rows of one side that arrive in all stages, hop by hop."""
        placed, away = self.placed, ~self.is_own[side]
        if not away.any():
            return []
        keys = placed.space.keys_of(self.parts[:, COLUMNS[side]], self.ranks).compress(away, axis=0)
        stage = self._stage_of_parts(staging).compress(away)
        is_kept = staging.kept == side and staging.num_remote > 1
        near = self._requests(keys, stage, is_kept)
        if isinstance(route, ThroughNodes):
            return self._through_nodes(near, route, is_kept)
        return _rounds(near, placed.num_ranks) if route is tree else [near]

    def _requests(self, keys: IntArray, stage: IntArray, is_kept: bool) -> StagedRequests:
        """Returns the rows that ranks need in stages: where they are kept, in the first of them alone."""
        placed = self.placed
        per_stage = placed.num_ranks * placed.space.stride  # every stage has ranks of its own
        wanted = interval.normalise(interval.grouped(keys, stage, per_stage))
        if is_kept:
            wanted = interval.normalise(_first_stages(wanted, per_stage))
        requests = placed.owners.requests(wanted)
        stage, reader = np.divmod(requests[:, DST], placed.num_ranks)
        requests[:, DST] = reader
        return StagedRequests(requests, stage)

    def _through_nodes(
        self, wanted: StagedRequests, route: ThroughNodes, is_kept: bool
    ) -> list[StagedRequests]:
        """Returns what `ThroughNodes` sends, in all stages: a relay that keeps rows gets them once."""
        num_ranks = self.placed.num_ranks
        far, relay = route.relays(wanted.requests, num_ranks)
        keys = self.placed.space.keys_of(wanted.requests[far, ID_START:], relay[far])
        first = self._requests(keys, wanted.stage[far], is_kept)
        rounds = _rounds(first, num_ranks) if route.tree else [first]
        passed_on = far & (relay != wanted.requests[:, DST])
        last = wanted.chosen(passed_on)
        last.requests[:, SRC] = relay[passed_on]
        return [wanted.chosen(~far).plus(rounds[0]), *rounds[1:], last]

    def _stage_of_parts(self, staging: Staging) -> IntArray:
        stage = np.zeros(len(self.parts), dtype=np.int64)
        if staging.num_remote:
            stage[self._local] = self._stage_of_local(staging)
            share = self._foreign_share(staging.order)
            stage[self._remote] = 1 + _one_of(staging.num_remote, share)
        return stage

    def _stage_of_local(self, staging: Staging) -> IntArray:
        """Returns the stage of each local part: `[local parts]`."""
        share, areas = self._local_share, self.local_areas
        apart = np.sort(areas)[int(staging.most_apart * (len(areas) - 1))]
        outside = (apart / np.maximum(areas, max(apart, 1.0)))[self.ranks.take(self._local)]
        first = outside / 2 if staging.keeps_rest else outside
        inside = (share - first) / np.maximum(1 - outside, 1e-9)
        stage = 1 + _one_of(staging.num_remote, inside)
        stage[share <= first] = 0
        if staging.keeps_rest:
            stage[share > 1 - first] = 1 + staging.num_remote
        return stage

    @cached_property
    def _remote(self) -> IntArray:
        """The parts with foreign rows."""
        return np.flatnonzero(~self.is_local)

    @cached_property
    def _local(self) -> IntArray:
        """The parts without."""
        return np.flatnonzero(self.is_local)

    @cached_property
    def _local_share(self) -> FloatArray:
        """The share of a rank's local area before each local part, by query rows: `[local parts]`."""
        share = self._share_before(self.ranks, self.parts[:, Q_START], self.is_local)
        return share.compress(self.is_local)

    def _foreign_share(self, order: Order) -> FloatArray:
        """Returns the share of its group's area before each part with foreign rows: `[foreign parts]`; found once."""
        if order not in self._shares:
            share = self._share_before(*self._foreign_first(order), ~self.is_local)
            self._shares[order] = share.compress(~self.is_local)
        return self._shares[order]

    def _foreign_first(self, order: Order) -> tuple[IntArray, IntArray]:
        """Returns the groups that are spread over stages, each by itself, and the places of parts in their group.

        Foreign rows of the side that passes come first, then own ones along the side that is kept.
        """
        num_ranks = self.placed.num_ranks
        is_own = self.is_own[self.passing]
        owner = np.where(is_own, self.owner[self.kept], self.owner[self.passing])
        if order == "shares":
            return (self.ranks * 2 + is_own) * num_ranks + owner, self.piece
        turn = (owner - self.ranks) % num_ranks if order == "ring" else 0
        return self.ranks, (is_own * num_ranks + turn) * self.num_pieces + self.piece

    def _share_before(self, group: IntArray, along: IntArray, chosen: BoolArray) -> FloatArray:
        """Returns the share of its group's chosen area that lies before the middle of each part's run of equals."""
        order = np.lexsort((along, group))
        area = (self.area * chosen)[order]
        opens_group = _differs(group[order])
        run = np.cumsum(opens_group | _differs(along[order])) - 1
        size = np.bincount(run, area)
        middle = (np.cumsum(size) - size / 2)[run]
        which = np.cumsum(opens_group) - 1
        total = np.bincount(which, area)
        before = (np.cumsum(total) - total)[which]
        share = np.zeros(len(order))
        share[order] = (middle - before) / np.where(total > 0, total, 1.0)[which]
        return share


def _one_of(count: int, share: FloatArray) -> IntArray:
    """Returns which of `count` equal intervals of 0 to 1 each share is in."""
    which: IntArray = np.clip(share * count, 0, count - 1).astype(np.int64)
    return which


def _differs(values: IntArray) -> BoolArray:
    """Returns whether each value differs from the one before; the first does."""
    differs = np.ones(len(values), dtype=bool)
    differs[1:] = values[1:] != values[:-1]
    return differs
