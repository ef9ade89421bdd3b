"""The head split of a pass: exchange tokens against heads inside groups of ranks, and back.

    [T tokens, N heads] on each of h ranks   <->   [h T tokens, N/h heads]

A member whose query heads share a key/value head with other members gets a copy of it (GQA with fewer
key/value heads than members); on the way back the copies' gradients are summed. Source: arXiv 2309.14509.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp.comm.all_to_all import start_all_to_all
from megatron_cp.plan.schema import HeadSplit


@dataclass(frozen=True)
class HeadExchange:
    """The exchange as one rank sees it: who its group is. Collective calls over the whole `group`."""

    members: tuple[int, ...]  # ascending ranks of this rank's head group
    num_ranks: int
    group: dist.ProcessGroup

    @classmethod
    def compile(
        cls, split: HeadSplit, rank: int, num_ranks: int, group: dist.ProcessGroup
    ) -> "HeadExchange":
        """Returns the exchange of `rank` under `split`."""
        return cls(split.group_of(rank), num_ranks, group)

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

    def split_heads(self, x_TNH: Tensor) -> Tensor:
        """Returns `[h T, n, H]`: all tokens of the group, in member order, for this rank's heads."""
        ranges = self.head_ranges(x_TNH.shape[1])
        sent = torch.cat([x_TNH[:, start:stop] for start, stop in ranges])
        splits = self._splits(x_TNH.shape[0])
        return start_all_to_all(sent, splits, splits, self.group).wait()

    def join_heads(self, x_RNH: Tensor, num_heads: int) -> Tensor:
        """Returns `[T, num_heads, H]` of this rank's tokens; contributions to one head are summed in order.

        The adjoint of `split_heads`, and its inverse where no head was repeated.
        """
        num_tokens = x_RNH.shape[0] // len(self.members)
        splits = self._splits(num_tokens)
        received = start_all_to_all(x_RNH, splits, splits, self.group).wait()
        joined = received.new_zeros((num_tokens, num_heads, *x_RNH.shape[2:]))
        for (start, stop), part in zip(
            self.head_ranges(num_heads), received.split(num_tokens), strict=True
        ):
            joined[:, start:stop] += part
        return joined

    def _splits(self, num_tokens: int) -> list[int]:
        members = set(self.members)
        return [num_tokens if rank in members else 0 for rank in range(self.num_ranks)]
