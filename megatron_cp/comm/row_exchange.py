"""Rows of one tensor to the ranks that asked for them, in one all-to-all; differentiable.

Backward sends gradients the other way and adds them at home reader by reader, so that sums repeat bit for bit.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megatron_cp.comm.all_to_all import start_all_to_all

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
        if not self.is_needed:
            return x[:0]
        received: Tensor = _Exchange.apply(x, self, group)
        return received


class _Exchange(torch.autograd.Function):
    """Rows out and in; backward, their gradients in and out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: RowExchange, group: dist.ProcessGroup) -> Tensor:
        ctx.exchange, ctx.group, ctx.num_rows = exchange, group, len(x)
        sent = x.index_select(0, exchange.sent_rows)
        splits = list(exchange.send_splits), list(exchange.recv_splits)
        return start_all_to_all(sent, *splits, group).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        grad_x: Tensor = _Return.apply(grad, ctx.num_rows, ctx.exchange, ctx.group)
        return grad_x, None, None


class _Return(torch.autograd.Function):
    """What arrived, back to the rows that it came from, summed there; backward, those rows out and in again."""

    @staticmethod
    def forward(
        ctx: Any, grad: Tensor, num_rows: int, exchange: RowExchange, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.exchange, ctx.group = exchange, group
        send, receive = list(exchange.send_splits), list(exchange.recv_splits)
        back = start_all_to_all(grad, receive, send, group).wait()
        grad_x = back.new_zeros((num_rows, *back.shape[1:]))
        parts = zip(exchange.sent_rows.split(send), back.split(send), strict=True)
        for rows, part in parts:  # no row twice in a part
            if len(rows):
                grad_x.index_add_(0, rows, part)
        return grad_x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _Exchange.apply(grad, ctx.exchange, ctx.group), None, None, None
