"""The rows of one side (queries, or keys and values) while stages run, and the results for them.

    own        the rank's own rows, never moved or copied
    received   one buffer per chain of stages, written where it is read: | stage i | stage i+1 | ...

A stage that keeps a side goes on with what the stage before received. Results for own rows stay; those for received
rows wait until their chain ends and then go home along its casts, backwards. The first result for rows *is* the
result; later ones are combined with it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp.attn.merge import PartJoiner, merge_rows_, merge_span_
from megatron_cp.comm import Joins, Pending, add_rows_, group_cast, group_reduce
from megatron_cp.comm.packed import PackedRows, matrices
from megatron_cp.runtime.session import RankSide, Rows, Source


@dataclass(frozen=True)
class Combination:
    """How two results for one row become one."""

    span_: Callable[[Rows, Rows], None]
    """Joins results for the same rows in the same order into the first."""
    rows_: Callable[[Rows, Joins, Rows], None]
    """Joins results into some rows of the first."""
    neutral: tuple[float, ...]
    """What a row without results holds, per tensor."""


def _add_span_(target: Rows, part: Rows) -> None:
    for tensor, rows in zip(target, part, strict=True):
        tensor.add_(rows)


def _apart(held: Rows, part: Rows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (out, lse), (part_out, part_lse) = held, part
    return out, lse, part_out, part_lse


def _merge_runs_(held: Rows, joins: Joins, parts: Rows) -> None:
    for index, part in joins.by_run(parts):
        out, lse, *of_run = _apart(held, part)
        merge_rows_(out, lse, index, *of_run)


def merging(joiner: PartJoiner | None) -> Combination:
    """Returns how partial `(out, lse)` over disjoint keys become one: by a backend's kernels, or by torch."""
    neutral = (0.0, -torch.inf)
    if joiner is None:
        return Combination(
            lambda held, part: merge_span_(*_apart(held, part)), _merge_runs_, neutral
        )
    return Combination(
        lambda held, part: joiner.merge_parts_(*_apart(held, part)),
        lambda held, joins, parts: joiner.merge_parts_(*_apart(held, parts), joins.by_row),
        neutral,
    )


def adding(joiner: PartJoiner | None) -> Combination:
    """Returns how gradients become one: by a backend's kernels, or by torch."""
    neutral = (0.0, 0.0)
    if joiner is None:
        return Combination(_add_span_, add_rows_, neutral)

    def add_rows(held: Rows, joins: Joins, parts: Rows) -> None:
        for total, part in zip(held, parts, strict=True):
            joiner.add_parts_(total, part, joins.by_row)

    return Combination(_add_span_, add_rows, neutral)


class SideRows:
    """What one side holds: its own rows, and those received in the chain so far."""

    def __init__(self, own: Rows):
        self._own = own
        self._sent: Rows = ()  # as a gather reads them, from the first cast on
        self._arrived: PackedRows | None = None
        # Of the chain that arrived last, then of the next; None where it brings this rank nothing.
        self._buffers: list[PackedRows | None] = []

    @cached_property
    def _empty(self) -> PackedRows:
        return PackedRows.empty(0, self._own)

    def start_cast(
        self, side: RankSide, group: dist.ProcessGroup | None
    ) -> Pending[PackedRows] | None:
        """Starts the cast of the next stage; None if that stage brings nothing to anybody."""
        if not side.keeps:
            rows = side.chain_rows
            self._buffers.append(self._empty.room(rows) if rows else None)
        if side.cast is None:
            return None
        begin = side.num_received - side.cast.num_received
        self._sent = self._sent or matrices(self._own)
        buffer = self._buffers[-1]
        into = self._empty if buffer is None else buffer
        return group_cast(self._sent, side.cast, _moving(group), into, begin)

    def arrive(self, side: RankSide, pending: Pending[PackedRows] | None) -> None:
        """Waits for the rows of a stage; from now on `rows` returns those that it holds."""
        if pending is not None:
            pending.wait()
        if not side.keeps:
            del self._buffers[:-1]
        buffer = self._buffers[0]
        self._arrived = None if buffer is None else buffer.rows(0, side.num_received)

    def rows(self, source: Source) -> Rows:
        """Returns the own rows, or those received in the chain so far."""
        if source == "own":
            return self._own
        return (self._empty if self._arrived is None else self._arrived).tensors


class SideResults:
    """Results for the rows of one side, in fp32 (fp64 for fp64 inputs)."""

    def __init__(
        self,
        own: Tensor,
        shapes: tuple[tuple[int, ...], ...],
        dtype: torch.dtype,
        combination: Combination,
    ):
        """`own`: any tensor with the own rows of the side; `shapes` and `dtype` are those of a row's results."""
        self._own, self._shapes, self._dtype, self._combination = own, shapes, dtype, combination
        self._held: dict[Source, Rows] = {}

    def of(self, source: Source, num_rows: int) -> Rows | None:
        """Returns what is held for so many rows, to be combined with in place; None if there is nothing yet."""
        held = self._held.get(source)
        return held if held is not None and held[0].shape[0] == num_rows else None

    def take(self, source: Source, part: Rows) -> None:
        """Takes results, which belong to the side from now on; results held for fewer rows join them."""
        held = self._held.get(source)
        if held is not None:
            self._combination.span_(tuple(x[: len(held[0])] for x in part), held)
        self._held[source] = part

    def drop(self, source: Source) -> None:
        """Forgets what is held, if anything."""
        self._held.pop(source, None)

    def own(self) -> Rows:
        """Returns the results for own rows; neutral ones where there are none."""
        return self._whole("own", self._own.shape[0])

    def send_home(self, side: RankSide, group: dist.ProcessGroup | None) -> Pending[None] | None:
        """Starts the way home of results after the last stage of a chain; None if nothing is to go."""
        if side.returns is None:
            return None
        received = self._whole("received", side.num_received)
        del self._held["received"]
        return group_reduce(
            self.own(), received, side.returns, _moving(group), self._combination.rows_
        )

    def _whole(self, source: Source, num_rows: int) -> Rows:
        """Returns results for all rows of a source."""
        if self.of(source, num_rows) is None:
            values = zip(self._shapes, self._combination.neutral, strict=False)
            self.take(source, tuple(self._filled((num_rows, *shape), v) for shape, v in values))
        return self._held[source]

    def _filled(self, shape: tuple[int, ...], value: float) -> Tensor:
        return self._own.new_full(shape, value, dtype=self._dtype)


def _moving(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    assert group is not None, "a plan for one rank moves nothing"
    return group
