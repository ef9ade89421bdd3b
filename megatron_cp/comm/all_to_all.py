"""The one collective that moves rows: all-to-all-v, gloo and NCCL. Every rank of the group calls it."""

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor


@dataclass
class PendingRows:
    """Rows on their way; `wait()` returns them and keeps the buffer that is being sent alive until then."""

    received: Tensor
    sent: Tensor
    work: dist.Work | None

    def wait(self) -> Tensor:
        """Returns the received rows `[sum(recv_splits), ...]`; on CUDA the current stream waits, not the host."""
        if self.work is not None:
            self.work.wait()
        return self.received


def start_all_to_all(
    rows: Tensor,
    send_splits: list[int],
    recv_splits: list[int],
    group: dist.ProcessGroup,
    received: Tensor | None = None,
) -> PendingRows:
    """Starts sending `rows` (dim 0 cut by `send_splits`, one piece per rank of `group`) without waiting.

    What arrives is written into `received` `[sum(recv_splits), ...]`, contiguous, if it is given.
    Collective: every rank of `group` calls it, also one that sends and receives nothing.
    """
    rows = rows.contiguous()
    if received is None:
        received = rows.new_empty((sum(recv_splits), *rows.shape[1:]))
    work = dist.all_to_all_single(
        received, rows, recv_splits, send_splits, group=group, async_op=True
    )
    return PendingRows(received, rows, work)
