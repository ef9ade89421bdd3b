"""Device tensors that one stream fills, once, and any stream may read: no host waits, and no stream twice.

    stream of the first call   fill ── event        copies come from pinned memory
    another stream             wait for the event, keep the memory, read

A stream that records a CUDA graph waits for nothing: the capture began behind a synchronisation.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class SharedTensor:
    """A tensor, the event behind what filled it (None where devices have no streams), and who knows of it."""

    data: Tensor
    filled: "torch.cuda.Event | None"
    streams: set[int]

    def wait(self, stream: int | None = None) -> None:
        """Lets the current stream read: it waits at its first call, on the device.

        `stream`: the current one as the driver knows it, from a caller who has asked already.
        """
        stream = current_stream(self.data.device) if stream is None else stream
        if stream in self.streams or is_capturing(self.data.device):
            return
        if self.filled is not None:
            here = torch.cuda.current_stream(self.data.device)
            here.wait_event(self.filled)
            self.data.record_stream(here)
        self.streams.add(stream)


def share(data: Tensor) -> SharedTensor:
    """Returns a tensor that the current stream fills, for all streams."""
    filled = None
    if data.device.type == "cuda":
        filled = torch.cuda.Event()
        filled.record(torch.cuda.current_stream(data.device))
    return SharedTensor(data, filled, {current_stream(data.device)})


def copy_to(x: Tensor, device: torch.device) -> Tensor:
    """Returns a CPU tensor on `device` without waiting for the copy. A CUDA graph must not record it.

    A replay would copy again, from memory of the host that holds something else by then.
    """
    if device.type != "cuda":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


def current_stream(device: torch.device) -> int:
    """Returns the current stream of a device as the driver knows it; 0 where devices have no streams.

    As torch's own compiled code asks for it: every launch does, and `torch.cuda.current_stream` makes an object first.
    """
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0


def is_capturing(device: torch.device) -> bool:
    """Returns whether the current stream records a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
