"""The rows of one side (queries, or keys and values) while stages run, and the results for them.

    space of a stage     [ own | received in this stage and in those of its chain before it ]

A stage that keeps a side goes on with what the stage before received. Results for own rows are combined at
once; those for received rows wait until their chain ends and then go home along its casts, backwards.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp.attn.merge import merge_rows_, merge_span_
from megatron_cp.comm import Pending, add_rows_, group_cast, group_reduce
from megatron_cp.runtime.session import RankSide, Rows


@dataclass(frozen=True)
class Combination:
    """How two results for one row become one."""

    span_: Callable[[Rows, Rows], None]
    """Joins results for the same rows in the same order into the first."""
    rows_: Callable[[Rows, Tensor, Rows], None]
    """Joins results into rows `index` (without repeats) of the first."""
    neutral: tuple[float, ...]
    """What a row without results holds, per tensor."""


def _add_span_(target: Rows, part: Rows) -> None:
    for tensor, rows in zip(target, part, strict=True):
        tensor.add_(rows)


MERGE = Combination(
    lambda target, part: merge_span_(*target, *part),
    lambda target, index, part: merge_rows_(target[0], target[1], index, part[0], part[1]),
    (0.0, -torch.inf),
)
"""Partial `(out, lse)` over disjoint keys."""

ADD = Combination(_add_span_, add_rows_, (0.0, 0.0))
"""Gradients."""


class SideRows:
    """What one side holds: its own rows, and those received in the chain so far."""

    def __init__(self, own: Rows):
        self.own, self.received = own, tuple(t[:0] for t in own)

    def start_cast(self, side: RankSide, group: dist.ProcessGroup | None) -> Pending[Rows] | None:
        """Starts the cast of the next stage; None if that stage brings nothing to anybody."""
        if side.cast is None:
            return None
        space = self.own
        if side.keeps and side.forwards:
            space = _concatenate(self.own, self.received)
        return group_cast(space, side.cast, _moving(group))

    def arrive(self, side: RankSide, pending: Pending[Rows] | None) -> Rows:
        """Waits for the rows of a stage and returns those that its work counts in."""
        new = tuple(t[:0] for t in self.own) if pending is None else pending.wait()
        self.received = _concatenate(self.received, new) if side.keeps else new
        return side.held(self.own, self.received)


class SideResults:
    """Results for the rows of one side, in fp32 (fp64 for fp64 inputs)."""

    def __init__(self, own: Rows, combination: Combination):
        self.own, self.combination = own, combination
        self._received: Rows = tuple(t[:0] for t in own)  # of the chain so far

    def add(
        self, side: RankSide, part: Rows, num_received: int, group: dist.ProcessGroup | None
    ) -> Pending[None] | None:
        """Takes the results of a stage; returns what is then on its way home, if anything."""
        own, received = side.parts(part, num_received)
        if own is not None:
            self.combination.span_(self.own, own)
        before = len(self._received[0])
        if before:
            whole = [
                torch.cat([old, new.new_full((num_received - before, *new.shape[1:]), value)])
                for old, new, value in zip(
                    self._received, received, self.combination.neutral, strict=False
                )
            ]
            self.combination.span_(tuple(whole), received)
            received = tuple(whole)
        self._received = tuple(t[:0] for t in received) if side.ends_chain else received
        if side.returns is None:
            return None
        return group_reduce(
            self.own, received, side.returns, _moving(group), self.combination.rows_
        )


def _concatenate(first: Rows, second: Rows) -> Rows:
    return tuple(
        torch.cat(pair) if len(pair[0]) and len(pair[1]) else (pair[0] if len(pair[0]) else pair[1])
        for pair in zip(first, second, strict=True)
    )


def _moving(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    assert group is not None, "a plan for one rank moves nothing"
    return group
