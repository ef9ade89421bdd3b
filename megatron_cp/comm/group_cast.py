"""group_cast sends rows along a plan's Transfer; group_reduce is its adjoint.

A rank's row space is `[own | received before | received in hop 0 | received in hop 1 | ...]`. `group_cast`
fills the part behind, hop by hop, and later hops may pass on what earlier ones brought. `group_reduce` takes one
contribution per received row and runs the hops backwards: each goes back to the rank that sent the row and is
combined there with what that rank holds for it, own or received, so a relay merges before it passes on. For sums

    <group_cast(x), y> = <x, group_reduce(y)>

Rows are tuples of tensors with a common dim 0; they travel side by side in one message (packed.py): gathered
into it, and read where they arrived. The order of combination is fixed (hops backwards, destinations ascending),
so results repeat bit for bit.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp.comm.all_to_all import start_all_to_all
from megatron_cp.comm.joins import Joins
from megatron_cp.comm.packed import PackedRows, Rows, packed
from megatron_cp.comm.streams import Chain, Pending, start_chain
from megatron_cp.mask.interval import IntArray
from megatron_cp.plan.schema import DST, Hop, Transfer, message_rows

Combine = Callable[[Rows, Joins, Rows], None]  # (target rows, joins, contributions), in place
_Runs = list[tuple[int, IntArray]]  # as in `Joins.of`


@dataclass(frozen=True)
class _Sources:
    """The rows of a message, by destination: own ones, received ones, or both in the places given."""

    own: Tensor  # int64 rows of the own tensors
    received: Tensor  # int64 rows of what was received
    own_places: Tensor  # int64 rows of the message; unused where all rows are of one kind
    received_places: Tensor

    def pack(self, own: Rows, received: PackedRows) -> PackedRows:
        """Returns the message."""
        num_own, num_received = self.own.shape[0], self.received.shape[0]
        if not num_received:
            return received.gathered(own, self.own)
        message = received.room(num_own + num_received)
        if not num_own:
            torch.index_select(received.data, 0, self.received, out=message.data)
            return message
        message.data.index_copy_(0, self.own_places, received.gathered(own, self.own).data)
        passed_on = received.data.index_select(0, self.received)
        message.data.index_copy_(0, self.received_places, passed_on)
        return message


@dataclass(frozen=True)
class RankHop:
    """One hop as one rank sees it."""

    sources: _Sources
    send_splits: list[int]
    recv_splits: list[int]
    relayed: tuple[tuple[int, Joins], ...]
    """Of what comes back: what goes to rows that were received in the hop of this number."""
    is_silent: bool  # nobody sends anything: no collective takes place

    @cached_property
    def num_sent(self) -> int:
        """Returns how many rows this rank sends."""
        return sum(self.send_splits)

    @cached_property
    def num_received(self) -> int:
        """Returns how many rows this rank receives."""
        return sum(self.recv_splits)


@dataclass(frozen=True)
class RankTransfer:
    """A Transfer compiled for one rank; its index tensors are on the CPU until `upload` moves them."""

    hops: tuple[RankHop, ...]
    home: Joins | None
    """Of all that comes back, the last hop's first: what goes to own rows. None where nothing ever comes back."""

    @cached_property
    def num_sent(self) -> int:
        """Returns how many rows this rank sends over all hops."""
        return sum(hop.num_sent for hop in self.hops)

    @cached_property
    def num_received(self) -> int:
        """Returns how many rows this rank receives over all hops."""
        return sum(hop.num_received for hop in self.hops)

    @cached_property
    def indices(self) -> tuple[Tensor, ...]:
        """Returns the index tensors that a cast reads."""
        pairs = ((hop.sources.own, hop.sources.received) for hop in self.hops)
        return tuple(index for index in itertools.chain(*pairs) if len(index))

    @cached_property
    def num_collectives(self) -> int:
        """Returns how many hops move anything on any rank: the same number on all of them."""
        return sum(not hop.is_silent for hop in self.hops)

    @classmethod
    def compile(
        cls,
        transfer: Transfer,
        rank: int,
        num_ranks: int,
        own_rows: int,
        received_before: int = 0,
        comes_home: bool = True,
    ) -> "RankTransfer":
        """Returns what `rank` of `num_ranks` does in `transfer`, behind rows that it received before.

        Without `comes_home` there is no `group_reduce` along it.
        """
        hops: list[RankHop] = []
        back: list[dict[int, _Runs]] = []
        segment_ends = [own_rows + received_before]
        for hop in transfer.hops:
            sent = hop.sent_by(rank)
            back.append(_runs_back(sent, segment_ends) if comes_home else {})
            hops.append(_compile_hop(hop, sent, (rank, num_ranks), own_rows, back[-1]))
            segment_ends.append(segment_ends[-1] + hops[-1].num_received)
        runs, begin = [], 0
        for compiled, by_segment in zip(reversed(hops), reversed(back), strict=True):
            runs += [(begin + first, rows) for first, rows in by_segment.get(0, [])]
            begin += compiled.num_sent
        return cls(tuple(hops), Joins.of(runs) if comes_home else None)


def _runs_back(sent: IntArray, segment_ends: list[int]) -> dict[int, _Runs]:
    """Returns where what comes back goes, run by run: by segment, 0 own rows, i + 1 those received in hop i."""
    returns: dict[int, _Runs] = {}
    begin = 0
    for dst in sorted(set(sent[:, DST].tolist())):
        rows = message_rows(sent[sent[:, DST] == dst])
        segments = np.searchsorted(segment_ends, rows, side="right")
        cuts = (np.flatnonzero(np.diff(segments)) + 1).tolist()
        for first, stop in itertools.pairwise([0, *cuts, len(rows)]):
            segment = int(segments[first])  # messages may name segments in any order, and again
            base = segment_ends[segment - 1] if segment else 0
            returns.setdefault(segment, []).append((begin + first, rows[first:stop] - base))
        begin += len(rows)
    return returns


def _compile_hop(
    hop: Hop, sent: IntArray, who: tuple[int, int], own_rows: int, back: dict[int, _Runs]
) -> RankHop:
    """`who`: rank and number of ranks."""
    rank, num_ranks = who
    send_splits, recv_splits = [0] * num_ranks, [0] * num_ranks
    for _, dst, start, stop in sent.tolist():
        send_splits[dst] += stop - start
    for src, _, start, stop in hop.received_by(rank).tolist():
        recv_splits[src] += stop - start
    rows = message_rows(sent)
    is_own = rows < own_rows
    arrays = (rows[is_own], rows[~is_own] - own_rows, is_own.nonzero()[0], (~is_own).nonzero()[0])
    sources = _Sources(*(torch.from_numpy(array) for array in arrays))
    relayed = tuple((segment - 1, Joins.of(runs)) for segment, runs in back.items() if segment)
    return RankHop(sources, send_splits, recv_splits, relayed, not len(hop.messages))


def group_cast(
    rows: Rows,
    transfer: RankTransfer,
    group: dist.ProcessGroup,
    buffer: PackedRows | None = None,
    begin: int = 0,
) -> Pending[PackedRows]:
    """Starts sending `rows` (`[own_rows, ...]` each, contiguous) along `transfer`; `wait()` on the result.

    `wait()` returns `buffer`, which holds the received rows of all hops from row `begin` on, in the order of the space,
    and in front of it those received before; without it a new one of the `num_received` rows of this transfer.
    Collective: every rank of `group` calls it with the same plan; one without rows to send or receive
    takes part too. `streams.py` says which hops run before `wait()`.
    """
    if buffer is None:
        buffer = PackedRows.empty(transfer.num_received, rows)
    chain = _cast_chain(rows, transfer, group, buffer, begin)
    return start_chain(chain, transfer.num_collectives, (*rows, buffer.data, *transfer.indices))


def _cast_chain(
    rows: Rows, transfer: RankTransfer, group: dist.ProcessGroup, buffer: PackedRows, begin: int
) -> Chain[PackedRows]:
    end = begin
    for hop in transfer.hops:
        if hop.is_silent:
            continue
        message = hop.sources.pack(rows, buffer)
        begin, end = end, end + hop.num_received
        into = buffer.rows(begin, end).data
        pending = start_all_to_all(message.data, hop.send_splits, hop.recv_splits, group, into)
        yield (pending.received, pending.sent)
        pending.wait()
    return buffer


def group_reduce(
    own: Rows, received: Rows, transfer: RankTransfer, group: dist.ProcessGroup, combine: Combine
) -> Pending[None]:
    """Starts returning contributions for received rows to their owners; `wait()` on the result.

    `own`: what this rank holds for its own rows, `[own_rows, ...]` each, updated in place by `wait()` alone.
    `received`: one contribution per received row, `[num_received, ...]` each, same dtypes and row shapes; a
    relay combines in it what it passes on, so it belongs to the reduce from now on.
    `combine(target, joins, parts)` joins contributions into rows of `target`, in place: `add_rows_` for gradients,
    the merge of partial `(out, lse)` for results. Collective.
    """
    chain = _reduce_chain(own, received, transfer, group, combine)
    return start_chain(chain, transfer.num_collectives, received)


def _reduce_chain(
    own: Rows, received: Rows, transfer: RankTransfer, group: dist.ProcessGroup, combine: Combine
) -> Chain[None]:
    assert transfer.home is not None, "compiled for casts alone"
    segments = [received]
    if len(transfer.hops) > 1:
        sizes = [hop.num_received for hop in transfer.hops]
        segments = list(zip(*(torch.split(tensor, sizes) for tensor in received), strict=True))
    back, end = PackedRows.empty(transfer.num_sent, own), 0
    for hop, segment in zip(reversed(transfer.hops), reversed(segments), strict=True):
        if hop.is_silent:
            continue
        begin, end = end, end + hop.num_sent
        arrived = back.rows(begin, end)
        message = packed(segment).data
        pending = start_all_to_all(message, hop.recv_splits, hop.send_splits, group, arrived.data)
        yield (pending.received, pending.sent)
        pending.wait()
        for number, joins in hop.relayed:
            combine(segments[number], joins, arrived.tensors)
    combine(own, transfer.home, back.tensors)  # the caller goes on changing them until `wait()`


__all__ = [
    "RankTransfer",
    "group_cast",
    "group_reduce",
]
