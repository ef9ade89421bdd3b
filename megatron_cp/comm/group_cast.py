"""group_cast sends rows along a plan's Transfer; group_reduce is its adjoint.

A rank's row space is `[own | received in hop 0 | received in hop 1 | ...]`. `group_cast` fills the part
behind `own`, hop by hop. `group_reduce` takes one contribution per received row and runs the hops
backwards: each goes back to the rank that sent the row and is combined there with what that rank holds
for it, own or received, so a relay merges before it passes on. For sums

    <group_cast(x), y> = <x, group_reduce(y)>

Rows are tuples of tensors with a common dim 0; they travel as bytes in one message. The order of
combination is fixed (hops backwards, destinations ascending), so results repeat bit for bit.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp.comm.all_to_all import pack_rows, start_all_to_all, unpack_rows
from megatron_cp.comm.streams import Chain, Pending, start_chain
from megatron_cp.plan.schema import DST, Hop, Transfer, message_rows

Rows = tuple[Tensor, ...]
Combine = Callable[
    [Rows, Tensor, Rows], None
]  # (target rows, int64 indices, contributions), in place


@dataclass(frozen=True)
class _Return:
    """Where contributions coming back from one destination go: rows `index` of one segment."""

    segment: int  # 0 = own rows, i + 1 = rows received in hop i
    begin: int  # first row of the contribution within what came back
    index: Tensor


@dataclass(frozen=True)
class RankHop:
    """One hop as one rank sees it."""

    send_index: Tensor  # int64, rows of the space before this hop, by destination
    send_splits: list[int]
    recv_splits: list[int]
    returns: tuple[_Return, ...]
    is_silent: bool  # nobody sends anything: no collective takes place


@dataclass(frozen=True)
class RankTransfer:
    """A Transfer compiled for one rank and device."""

    hops: tuple[RankHop, ...]
    own_rows: int

    @property
    def num_received(self) -> int:
        """Returns how many rows this rank receives over all hops."""
        return sum(sum(hop.recv_splits) for hop in self.hops)

    @property
    def num_collectives(self) -> int:
        """Returns how many hops move anything on any rank: the same number on all of them."""
        return sum(not hop.is_silent for hop in self.hops)

    @classmethod
    def compile(
        cls, transfer: Transfer, rank: int, num_ranks: int, own_rows: int, device: torch.device
    ) -> "RankTransfer":
        """Returns what `rank` of `num_ranks` does in `transfer`, with index tensors on `device`."""
        hops: list[RankHop] = []
        segment_ends = [own_rows]
        for hop in transfer.hops:
            hops.append(_compile_hop(hop, rank, num_ranks, segment_ends, device))
            segment_ends.append(segment_ends[-1] + sum(hops[-1].recv_splits))
        return cls(tuple(hops), own_rows)


def _compile_hop(
    hop: Hop, rank: int, num_ranks: int, segment_ends: list[int], device: torch.device
) -> RankHop:
    sent, received = hop.sent_by(rank), hop.received_by(rank)
    send_splits, recv_splits = [0] * num_ranks, [0] * num_ranks
    for _, dst, start, stop in sent.tolist():
        send_splits[dst] += stop - start
    for src, _, start, stop in received.tolist():
        recv_splits[src] += stop - start
    returns, begin = [], 0
    for dst in sorted(set(sent[:, DST].tolist())):
        rows = torch.from_numpy(message_rows(sent[sent[:, DST] == dst]))
        segments = torch.bucketize(rows, torch.tensor(segment_ends), right=True)
        cuts = (segments.diff().nonzero().flatten() + 1).tolist()
        for first, stop in itertools.pairwise([0, *cuts, len(rows)]):
            segment = int(segments[first])  # messages may name segments in any order, and again
            base = segment_ends[segment - 1] if segment else 0
            index = (rows[first:stop] - base).to(device)
            returns.append(_Return(segment, begin + first, index))
        begin += len(rows)
    send_index = torch.from_numpy(message_rows(sent)).to(device)
    return RankHop(send_index, send_splits, recv_splits, tuple(returns), not len(hop.messages))


def group_cast(rows: Rows, transfer: RankTransfer, group: dist.ProcessGroup) -> Pending[Rows]:
    """Starts sending `rows` (`[own_rows, ...]` each) along `transfer`; `wait()` on the result.

    `wait()` returns the received rows of all hops, `[num_received, ...]` each, in the order of the space.
    Collective: every rank of `group` calls it with the same plan; one without rows to send or receive
    takes part too. `streams.py` says which hops run before `wait()`.
    """
    return start_chain(_cast_chain(rows, transfer, group), transfer.num_collectives, rows)


def _cast_chain(rows: Rows, transfer: RankTransfer, group: dist.ProcessGroup) -> Chain[Rows]:
    arrived: list[Rows] = []
    for hop in transfer.hops:
        if hop.is_silent:
            continue
        space = _concatenate([rows, *arrived]) if arrived else rows
        packed = pack_rows(tuple(tensor.index_select(0, hop.send_index) for tensor in space))
        pending = start_all_to_all(packed, hop.send_splits, hop.recv_splits, group)
        yield (pending.received, pending.sent, *itertools.chain.from_iterable(arrived))
        arrived.append(unpack_rows(pending.wait(), rows))
    if len(arrived) == 1:
        return arrived[0]
    return _concatenate([_empty_rows(rows), *arrived])


def group_reduce(
    own: Rows, received: Rows, transfer: RankTransfer, group: dist.ProcessGroup, combine: Combine
) -> Pending[None]:
    """Starts returning contributions for received rows to their owners; `wait()` on the result.

    `own`: what this rank holds for its own rows, `[own_rows, ...]` each, updated in place by `wait()` alone.
    `received`: one contribution per received row, `[num_received, ...]` each, same dtypes and row shapes; a
    relay combines in it what it passes on, so it belongs to the reduce from now on.
    `combine(target, index, part)` joins `part` into rows `index` (without repeats) of `target`, in place:
    `add_rows_` for gradients, the merge of partial `(out, lse)` for results. Collective.
    """
    chain = _reduce_chain(own, received, transfer, group, combine)
    return start_chain(chain, transfer.num_collectives, received)


def _reduce_chain(
    own: Rows, received: Rows, transfer: RankTransfer, group: dist.ProcessGroup, combine: Combine
) -> Chain[None]:
    sizes = [sum(hop.recv_splits) for hop in transfer.hops]
    segments = list(zip(*(torch.split(tensor, sizes) for tensor in received), strict=True))
    home: list[
        tuple[Tensor, Rows]
    ] = []  # for own rows, which the caller goes on changing until `wait()`
    for hop, segment in zip(reversed(transfer.hops), reversed(segments), strict=True):
        if hop.is_silent:
            continue
        pending = start_all_to_all(pack_rows(segment), hop.recv_splits, hop.send_splits, group)
        yield (pending.received, pending.sent, *(tensor for _, part in home for tensor in part))
        back = unpack_rows(pending.wait(), own)
        for item in hop.returns:
            part = tuple(tensor[item.begin : item.begin + len(item.index)] for tensor in back)
            if item.segment:
                combine(segments[item.segment - 1], item.index, part)
            else:
                home.append((item.index, part))
    for index, part in home:
        combine(own, index, part)


def add_rows_(target: Rows, index: Tensor, part: Rows) -> None:
    """Adds `part` to rows `index` (without repeats) of `target`, in place, in the target's dtype."""
    for tensor, rows in zip(target, part, strict=True):
        tensor.index_add_(0, index, rows.to(tensor.dtype))


def _concatenate(parts: Sequence[Rows]) -> Rows:
    return tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))


def _empty_rows(like: Rows) -> Rows:
    return tuple(tensor[:0] for tensor in like)


__all__ = [
    "RankTransfer",
    "add_rows_",
    "group_cast",
    "group_reduce",
]
