"""The head split of a pass: exchange tokens against heads inside groups of ranks, and back.

    [T tokens, N heads] on each of h ranks   <->   [h T tokens, N/h heads]

All tensors of one direction travel in one message, as bytes side by side; those of as many rows, where queries and keys
are not as many. A member whose query heads share a
key/value head with other members gets a copy of it (GQA with fewer key/value heads than members); on the way
back the copies' gradients are summed. Source: arXiv 2309.14509.
"""

# T tokens of a rank, h members, n heads of this rank inside the pass; trailing dims are free

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp.comm.all_to_all import start_all_to_all
from megatron_cp.comm.packed import PackedRows, Rows
from megatron_cp.plan.schema import HeadSplit


@dataclass(frozen=True)
class HeadExchange:
    """The exchange as one rank sees it: who its group is. Collective calls over the whole `group`."""

    members: tuple[int, ...]  # ascending ranks of this rank's head group
    rank: int
    num_ranks: int
    group: dist.ProcessGroup

    @classmethod
    def compile(
        cls, split: HeadSplit, rank: int, num_ranks: int, group: dist.ProcessGroup
    ) -> "HeadExchange":
        """Returns the exchange of `rank` under `split`."""
        return cls(split.group_of(rank), rank, num_ranks, group)

    def head_ranges(self, num_heads: int) -> list[tuple[int, int]]:
        """Returns the heads that each member works on; overlapping where heads are fewer than members.

        Raises ValueError when the heads can be neither cut nor repeated evenly.
        """
        degree = len(self.members)
        if num_heads % degree and degree % num_heads:
            raise ValueError(
                f"num_heads={num_heads} must divide or be a multiple of the head degree {degree}; "
                "use a plan with another head split"
            )
        width = max(1, num_heads // degree)
        starts = [member * num_heads // degree for member in range(degree)]
        return [(start, start + width) for start in starts]

    def own_heads(self, num_heads: int) -> slice:
        """Returns the heads that this rank works on."""
        return slice(*self.head_ranges(num_heads)[self.members.index(self.rank)])

    def split_heads(self, tensors: Rows) -> Rows:
        """Returns `[h T, n, ...]` for each `[T, heads, ...]`: the group's tokens in member order, own heads.

        Collective: one message to every member, for each run of tensors of as many rows.
        """
        runs = itertools.groupby(tensors, key=len)
        return tuple(x for _, run in runs for x in self._split_heads(tuple(run)))

    def _split_heads(self, tensors: Rows) -> Rows:
        degree, num_tokens = len(self.members), len(tensors[0])
        ranges = [self.head_ranges(x.shape[1]) for x in tensors]
        like = [x[:, slice(*heads[0])] for x, heads in zip(tensors, ranges, strict=True)]
        message = PackedRows.empty(degree * num_tokens, tuple(like))
        for target, x, heads in zip(message.tensors, tensors, ranges, strict=True):
            for part, (start, stop) in zip(target.chunk(degree), heads, strict=True):
                part.copy_(x[:, start:stop])
        return self._exchange(message).tensors

    def join_heads(self, tensors: Rows, whole: Sequence[tuple[int, torch.dtype]]) -> Rows:
        """Returns `[T, heads, ...]` of this rank's tokens for each `[h T, n, ...]`; `whole`: its heads and dtype.

        A head that one member holds travels in that dtype: nothing is added to it any more, so it rounds once,
        here or there. Copies of a head travel as they are (gradients: fp32) and are summed in member order, then
        rounded. The adjoint of `split_heads`, and its inverse where no head was repeated. Collective.
        """
        runs = itertools.groupby(zip(tensors, whole, strict=True), key=lambda one: len(one[0]))
        return tuple(x for _, run in runs for x in self._join_heads(*zip(*run, strict=True)))

    def _join_heads(self, tensors: Rows, whole: Sequence[tuple[int, torch.dtype]]) -> Rows:
        degree = len(self.members)
        like = tuple(
            x if num_heads < degree else x.new_empty((0, *x.shape[1:]), dtype=dtype)
            for x, (num_heads, dtype) in zip(tensors, whole, strict=True)
        )
        message = PackedRows.empty(len(tensors[0]), like)
        message.fill_(tensors)
        received = self._exchange(message).tensors
        return tuple(
            self._join(x, num_heads).to(dtype)
            for x, (num_heads, dtype) in zip(received, whole, strict=True)
        )

    def _join(self, received: Tensor, num_heads: int) -> Tensor:
        parts = received.chunk(len(self.members))
        if num_heads >= len(parts):
            return torch.cat(parts, dim=1)
        joined = received.new_zeros((len(parts[0]), num_heads, *received.shape[2:]))
        for (start, stop), part in zip(self.head_ranges(num_heads), parts, strict=True):
            joined[:, start:stop] += part
        return joined

    def _exchange(self, message: PackedRows) -> PackedRows:
        """Sends T rows of the message to each member, and returns as many from each, in member order."""
        num_tokens = len(message) // len(self.members)
        splits = [num_tokens if rank in self.members else 0 for rank in range(self.num_ranks)]
        received = PackedRows.empty(len(message), message.tensors)
        start_all_to_all(message.data, splits, splits, self.group, received.data).wait()
        return received
