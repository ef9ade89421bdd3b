"""The one collective that moves rows: all-to-all-v, gloo and NCCL. Every rank of the group calls it."""

import math
from dataclasses import dataclass

import torch
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
    rows: Tensor, send_splits: list[int], recv_splits: list[int], group: dist.ProcessGroup
) -> PendingRows:
    """Starts sending `rows` (dim 0 cut by `send_splits`, one piece per rank of `group`) without waiting.

    Collective: every rank of `group` calls it, also one that sends and receives nothing.
    """
    rows = rows.contiguous()
    received = rows.new_empty((sum(recv_splits), *rows.shape[1:]))
    work = dist.all_to_all_single(
        received, rows, recv_splits, send_splits, group=group, async_op=True
    )
    return PendingRows(received, rows, work)


def pack_rows(tensors: tuple[Tensor, ...]) -> Tensor:
    """Returns the rows of several tensors side by side as bytes, so that they travel in one message.

    `tensors` share dim 0; the result is uint8 `[rows, bytes per row]`.
    """
    parts = [_bytes_of(tensor) for tensor in tensors]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _bytes_of(tensor: Tensor) -> Tensor:
    # A contiguous tensor may have any stride along a dim of one element; a view as bytes wants it to be 1.
    flat = tensor.contiguous().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).view(
        len(tensor), math.prod(tensor.shape[1:]) * tensor.element_size()
    )


def unpack_rows(packed: Tensor, like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Returns what `pack_rows` packed; row shapes and dtypes are those of `like`."""
    tensors, begin = [], 0
    for model in like:
        size = math.prod(model.shape[1:]) * model.element_size()
        part = packed[:, begin : begin + size]
        if size < packed.shape[1]:  # a single row counts as contiguous wherever it begins
            part = part.clone(memory_format=torch.contiguous_format)
        part = part.view(model.dtype)
        tensors.append(part.reshape(packed.shape[0], *model.shape[1:]))
        begin += size
    return tuple(tensors)
