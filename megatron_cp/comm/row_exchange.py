"""Rows of one tensor to the ranks that asked for them, in one all-to-all; differentiable.

    flight = exchange.start(x, group)      forward: sends        backward: waits, adds gradients up
    ...                                    computed while rows travel, and while gradients travel back
    received = flight.wait()               forward: waits        backward: sends gradients the other way

Backward adds gradients at home reader by reader, so that sums repeat bit for bit. Autograd goes through a graph from
what was computed last, so what stands between the two lines forward stands between them backward.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megatron_cp.comm.all_to_all import PendingRows, start_all_to_all

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class RowExchange:
    """An exchange as one rank sees it. Collective calls over the whole group, where anybody sends."""

    sent_rows: Tensor
    """Own rows, by reader: int64."""
    send_splits: tuple[int, ...]
    recv_splits: tuple[int, ...]
    is_needed: bool
    """Somebody sends something: the same on every rank."""

    @classmethod
    def compile(
        cls, reader: IntArray, owner: IntArray, row: IntArray, rank: int, num_ranks: int
    ) -> tuple["RowExchange", IntArray]:
        """Returns the part of `rank`, and which requests the rows that it receives answer, in order of arrival.

        A request, one entry of each array: `reader` wants row `row` of `owner`; none is made twice.
        """
        foreign = reader != owner
        asked = np.flatnonzero(foreign & (owner == rank))
        asked = asked[reader[asked].argsort(kind="stable")]
        wanted = np.flatnonzero(foreign & (reader == rank))
        wanted = wanted[owner[wanted].argsort(kind="stable")]
        send, receive = (
            tuple(np.bincount(peers, minlength=num_ranks).tolist())
            for peers in (reader[asked], owner[wanted])
        )
        rows = torch.from_numpy(np.ascontiguousarray(row[asked]))
        return cls(rows, send, receive, bool(foreign.any())), wanted

    def receive(self, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        """Returns the rows `[sum(recv_splits), ...]` that arrive from other ranks' `x`, source by source."""
        return self.start(x, group).wait()

    def start(self, x: Tensor, group: dist.ProcessGroup | None) -> "Flight":
        """Sends; the rows are those of `Flight.wait`, which every rank calls as well."""
        return Flight(x, self, group)

    def send(self, x: Tensor, group: dist.ProcessGroup) -> PendingRows:
        """Starts the rows on their way."""
        splits = list(self.send_splits), list(self.recv_splits)
        return start_all_to_all(x.index_select(0, self.sent_rows), *splits, group)

    def send_back(self, grad: Tensor, group: dist.ProcessGroup) -> PendingRows:
        """Starts gradients of received rows on their way home."""
        return start_all_to_all(grad, list(self.recv_splits), list(self.send_splits), group)

    def summed(self, back: Tensor, num_rows: int) -> Tensor:
        """Returns the gradients that came back, added up in the rows that were sent."""
        total = back.new_zeros((num_rows, *back.shape[1:]))
        parts = zip(
            self.sent_rows.split(self.send_splits), back.split(self.send_splits), strict=True
        )
        for rows, part in parts:  # no row twice in a part
            if len(rows):
                total.index_add_(0, rows, part)
        return total


class Flight:
    """Rows on their way, of one call."""

    def __init__(self, x: Tensor, exchange: RowExchange, group: dist.ProcessGroup | None):
        self.exchange, self.group, self.num_rows = exchange, group, len(x)
        self.there: PendingRows | None = None
        self.back: PendingRows | None = None
        self._ticket: Tensor | None = _Departure.apply(x, self) if exchange.is_needed else x[:0]

    def wait(self) -> Tensor:
        """Returns the rows that arrive."""
        ticket, self._ticket = self._ticket, None  # its graph holds the flight
        assert ticket is not None, "rows are waited for once"
        if not self.exchange.is_needed:
            return ticket
        received: Tensor = _Arrival.apply(ticket, self)
        return received


class _Departure(torch.autograd.Function):
    """Sends rows; backward, waits for their gradients. Its result stands for the rows in autograd's graph, empty."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, flight: Flight) -> Tensor:
        ctx.flight = flight
        assert flight.group is not None
        flight.there = flight.exchange.send(x, flight.group)
        return x.new_zeros(()).expand(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        flight, back = ctx.flight, ctx.flight.back
        flight.back = None
        if back is None:  # the graph of this pass is kept, and holds the whole way back
            return grad, None
        return flight.exchange.summed(back.wait(), flight.num_rows), None


class _Arrival(torch.autograd.Function):
    """Waits for rows; backward, sends their gradients."""

    @staticmethod
    def forward(ctx: Any, ticket: Tensor, flight: Flight) -> Tensor:
        ctx.flight, there = flight, flight.there
        flight.there = None
        assert there is not None
        return there.wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        flight = ctx.flight
        if torch.is_grad_enabled():  # a second derivative is wanted
            return _Return.apply(grad, flight), None
        flight.back = flight.exchange.send_back(grad, flight.group)
        return grad.new_zeros(()).expand(flight.num_rows, *grad.shape[1:]), None


class _Return(torch.autograd.Function):
    """What arrived, back to the rows that it came from, summed there; backward, those rows out and in again."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, flight: Flight) -> Tensor:
        ctx.flight = flight
        back = flight.exchange.send_back(grad, flight.group)  # type: ignore[arg-type]
        return flight.exchange.summed(back.wait(), flight.num_rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.flight.exchange.receive(grad, ctx.flight.group), None
