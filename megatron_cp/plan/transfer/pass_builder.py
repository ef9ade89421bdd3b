"""Turns "this rank computes these pairs in this stage" into a Pass: transfers, and work in local rows.

A scheme says three things: which rank owns which tokens (`PlacedMask`), which rank computes which parts of the
mask in which stage (`PassBuilder.add`), and which way rows travel (a route). Everything else follows.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_cp.mask import AttentionMask, interval, sweep
from megatron_cp.mask.interval import IntArray
from megatron_cp.mask.slice import (
    K_END,
    K_START,
    Q_END,
    Q_START,
    cut_rows,
    rows_area,
    shift_rows,
)
from megatron_cp.plan.placement.placement import Placement
from megatron_cp.plan.schema import FloatArray, Pass, Side, Stage, Transfer
from megatron_cp.plan.transfer.routing import (
    DST,
    ID_START,
    ID_STOP,
    SRC,
    Owners,
    Route,
    RowSpace,
    direct,
    send,
)

COLUMNS: dict[Side, list[int]] = {"q": [Q_START, Q_END], "k": [K_START, K_END]}


class PlacedMask:
    """A mask on a placement of its tokens: which rank's queries meet which rank's keys where."""

    def __init__(self, mask: AttentionMask, placement: IntArray | Placement):
        """`placement`: also as the table of tokens int64 `[P, T]`."""
        if not isinstance(placement, Placement):
            placement = Placement.of_chunks(placement, chunk_size=1)
        self.mask, self.tokens = mask, placement
        self.space = RowSpace.placed(placement)
        self.num_ranks, self.own_rows = placement.num_ranks, placement.own_rows
        self.owners = Owners(self.space)

    @property
    def placement(self) -> IntArray:
        """The tokens of ranks: int64 `[P, T]`."""
        return self.tokens.tokens

    @cached_property
    def _by_q_owner(self) -> tuple[IntArray, IntArray]:
        rows, _, q_run = cut_rows(self.mask.array, self.owners.ids, Q_START, Q_END)
        return rows, self.owners.rank.take(q_run)

    @cached_property
    def _by_owner(self) -> tuple[IntArray, IntArray, IntArray]:
        rows, q_owner = self._by_q_owner
        parts, row, k_run = cut_rows(rows, self.owners.ids, K_START, K_END)
        return parts, q_owner.take(row), self.owners.rank.take(k_run)

    def has_parts(self, most: int) -> bool:
        """Returns whether the mask is cut into no more than `most` parts; found without them, they may fill memory."""
        is_few = self.mask.num_slices * len(self.owners.ids) ** 2 <= most
        return is_few or (self._num_by_q_owner <= most and self._num_by_owner <= most)

    @cached_property
    def _num_by_q_owner(self) -> int:
        return interval.num_overlapping_pairs(self.mask.array[:, COLUMNS["q"]], self.owners.ids)

    @cached_property
    def _num_by_owner(self) -> int:
        rows, _ = self._by_q_owner
        return interval.num_overlapping_pairs(rows[:, COLUMNS["k"]], self.owners.ids)

    @cached_property
    def loads(self) -> FloatArray:
        """The pairs of each rank's queries: float64 `[P]`; known before the mask is cut by keys."""
        rows, q_owner = self._by_q_owner
        return np.bincount(q_owner, rows_area(rows), self.num_ranks).astype(np.float64)

    @property
    def parts(self) -> IntArray:
        """The mask cut so that every slice has queries of one rank and keys of one rank: int64 `[n, 6]`, token ids."""
        return self._by_owner[0]

    @property
    def q_owner(self) -> IntArray:
        """The rank that owns the queries of each part: int64 `[n]`."""
        return self._by_owner[1]

    @property
    def k_owner(self) -> IntArray:
        """The rank that owns the keys of each part: int64 `[n]`."""
        return self._by_owner[2]

    @cached_property
    def remote_keys(self) -> IntArray:
        """The keys that each rank's queries may see and it does not own: requests (owner, reader, ids)."""
        remote = self.q_owner != self.k_owner
        ids = self.parts[:, COLUMNS["k"]].compress(remote, axis=0)
        wanted = self.space.keys_of(ids, self.q_owner.compress(remote))
        return self.owners.requests(interval.normalise(wanted))

    @cached_property
    def areas_by_owner(self) -> FloatArray:
        """The pairs between the queries of one rank and the keys of another: float64 `[q, k]`."""
        pair = self.q_owner * self.num_ranks + self.k_owner
        return _square(pair, rows_area(self.parts), self.num_ranks)

    @cached_property
    def rows_by_owner(self) -> FloatArray:
        """The key rows that one rank needs of another: float64 `[owner, reader]`."""
        requests = self.remote_keys
        pair = requests[:, SRC] * self.num_ranks + requests[:, DST]
        return _square(pair, requests[:, ID_STOP] - requests[:, ID_START], self.num_ranks)

    def parts_on_keys(self, requests: IntArray) -> tuple[IntArray, IntArray]:
        """Returns the pairs between a reader's queries and the keys it requests: slices, and their ranks."""
        stride = self.space.stride
        keys = self.space.keys_of(requests[:, ID_START:], requests[:, DST])
        shifted = shift_rows(self.parts, k=self.q_owner * stride)
        rows, _, _ = cut_rows(shifted, interval.normalise(keys), K_START, K_END)
        rank = rows[:, K_START] // stride
        return shift_rows(rows, k=-rank * stride), rank


@dataclass(frozen=True)
class _Added:
    """A stage before its work is in local rows: who computes what, what moves, what is held then."""

    parts: IntArray
    ranks: IntArray
    casts: dict[Side, Transfer | None]
    keeps: dict[Side, bool]
    held: dict[Side, RowSpace]


class PassBuilder:
    """Collects the stages of a pass on one placement."""

    def __init__(self, placed: PlacedMask, route: Route = direct):
        self.placed, self.route = placed, route
        self._added: list[_Added] = []
        self._held: dict[Side, RowSpace] = {"q": placed.space, "k": placed.space}

    def add(
        self,
        parts: IntArray,
        ranks: IntArray,
        *,
        keeps_k: bool = False,
        keeps_q: bool = False,
        all_keys: IntArray | None = None,
    ) -> None:
        """Appends the stage in which `ranks[i]` computes slice `parts[i]` (int64 `[n, 6]`, token ids).

        Rows that a rank needs and does not hold travel by the route. `keeps_*`: rows of the stage before
        are still held. `all_keys`: requests (owner, reader, ids) served besides, as schemes do that send
        whole blocks.
        """
        keeps: dict[Side, bool] = {"q": keeps_q, "k": keeps_k}
        casts: dict[Side, Transfer | None] = {}
        keys_of = self.placed.space.keys_of
        for side, columns in COLUMNS.items():
            wanted = keys_of(parts[:, columns], ranks)
            if side == "k" and all_keys is not None:
                more = keys_of(all_keys[:, ID_START:], all_keys[:, DST])
                wanted = np.concatenate([wanted, more])
            held = self._held[side] if keeps[side] else self.placed.space
            missing = held.missing(interval.normalise(wanted))
            casts[side], self._held[side] = None, held
            if len(missing):
                casts[side], self._held[side] = send(self.route, self.placed.owners, held, missing)
        self._added.append(_Added(parts, ranks, casts, keeps, dict(self._held)))

    def add_own(self) -> None:
        """Appends the stage in which every rank attends to the keys that it owns; nothing moves."""
        placed = self.placed
        own = placed.q_owner == placed.k_owner
        self.add(placed.parts[own], placed.q_owner[own])

    def build(self) -> Pass:
        """Returns the pass of the stages added so far."""
        works = _local_works(self._added) if self._added else []
        return Pass(
            tuple(
                Stage(work, one.casts["k"], one.casts["q"], one.keeps["k"], one.keeps["q"])
                for work, one in zip(works, self._added, strict=True)
            )
        )


def _local_works(added: list[_Added]) -> list[tuple[AttentionMask, ...]]:
    """Returns each rank's mask on the rows that it holds, for every stage.

    Ranks and stages are handled in one go, on a diagonal of blocks so far apart that slices of two are
    never neighbours, in queries, keys or distance.
    """
    queries, keys = (
        RowSpace.one_after_another([one.held[side] for one in added]) for side in COLUMNS
    )
    q_step = int(queries.sizes.max()) + 1
    k_step = 2 * q_step + int(keys.sizes.max())
    num_ranks = added[0].held["q"].num_ranks
    rank = np.concatenate([index * num_ranks + one.ranks for index, one in enumerate(added)])
    rows = np.concatenate([one.parts for one in added])
    rows = shift_rows(rows, q=rank * queries.stride, k=rank * keys.stride)
    rows, _, run = cut_rows(rows, queries.runs, Q_START, Q_END)
    rows = shift_rows(rows, q=queries.shifts(q_step)[run])
    rows, _, run = cut_rows(rows, keys.runs, K_START, K_END)
    rows = sweep.merge(shift_rows(rows, k=keys.shifts(k_step)[run]))
    block = rows[:, Q_START] // q_step
    rows = shift_rows(rows, q=-block * q_step, k=-block * k_step)
    masks = AttentionMask.many(queries.sizes, keys.sizes, rows, block)
    return [masks[i : i + num_ranks] for i in range(0, len(masks), num_ranks)]


def _square(cell: IntArray, amounts: IntArray, size: int) -> FloatArray:
    """Returns the sums of `amounts` by cell of a square matrix: float64 `[size, size]`."""
    sums = np.bincount(cell, amounts, minlength=size * size).astype(np.float64)
    return sums.reshape(size, size)
