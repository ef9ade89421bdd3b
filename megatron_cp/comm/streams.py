"""Where the hops of a transfer run: on CUDA beside the computation, on a CPU in the caller's own order.

    compute stream   ..rows.. pack, all-to-all . attention of a stage ----------- wait ..use..
                                        |                                          |
    side stream                         +- wait, pack, all-to-all (later hops) ----+

A transfer is a *chain*, a generator that stops after starting each of its collectives. On CUDA `start_chain`
enqueues it up to its last collective: the first where the rows were computed, later ones, which wait for those before,
on a side stream of the device: one for all transfers, in the order started. `wait` makes the compute stream wait for
the last one. Tensors that cross streams are recorded on the stream that did not allocate them, so their memory is not
used again before both are done. The host waits for nothing.

Attention holds every multiprocessor that it gets until it ends, so what is to run under it must be there first:
the first message is packed in front of it, on its own stream, and a stage leaves some multiprocessors to the
transfers that are under way (`RankStage.sm_share`). It waits for no hop of another transfer.

On a CPU nothing can be enqueued: `start_chain` goes to the first collective, `wait` runs the later hops. To run
them earlier would mean to wait earlier, because all ranks start collectives in one order.

The order of streams is tested on recorded fakes of them. It ran on one H200, with two ranks over gloo and four over
NCCL through sockets; **none has run between GPUs**. Where CUDA_DEVICE_MAX_CONNECTIONS=1 puts all streams into one
hardware queue, kernels launched after `start_chain` may be held up by the hops before the last one; so nothing that
follows the last one is enqueued at the start.
"""

from collections.abc import Generator
from dataclasses import dataclass
from types import ModuleType
from typing import Generic, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
Chain = Generator[tuple[Tensor, ...], None, Result]
"""Yields after each collective that it starts: the tensors on which it goes on."""

_side_streams: dict[torch.device, torch.cuda.Stream] = {}


@dataclass
class _Beside:
    """What a chain left on the side stream: the tensors on which it goes on."""

    tensors: tuple[Tensor, ...]
    streams: ModuleType

    def hand_over(self) -> None:
        """Keeps the tensors' memory for the current stream.

        The chain goes on by waiting for its last collective, which was behind everything on the side stream.
        """
        for tensor in self.tensors:
            tensor.record_stream(self.streams.current_stream(tensor.device))


@dataclass
class Pending(Generic[Result]):
    """A transfer under way; call `wait()` once."""

    chain: Chain[Result]
    beside: _Beside | None

    def wait(self) -> Result:
        """Returns what the transfer brings; on CUDA the current stream waits, not the host."""
        if self.beside is not None:
            self.beside.hand_over()
        while True:
            try:
                next(self.chain)
            except StopIteration as end:
                return end.value


def start_chain(
    chain: Chain[Result], num_collectives: int, inputs: tuple[Tensor, ...]
) -> Pending[Result]:
    """Starts a chain of `num_collectives` that reads `inputs`, tensors of the current stream; `wait()` on the result.

    Collective: all ranks of the chain's group start their chains in one order.
    """
    if not num_collectives:
        return Pending(chain, None)
    device = inputs[0].device
    streams = _streams_of(device)
    going_on_with = next(chain)
    if streams is None or num_collectives == 1:
        return Pending(chain, None)
    if device not in _side_streams:  # urgent: short copies must not queue behind attention's blocks
        _side_streams[device] = streams.Stream(device, priority=-1)
    side = _side_streams[device]
    side.wait_stream(streams.current_stream(device))
    for tensor in (*inputs, *going_on_with):
        tensor.record_stream(side)
    with streams.stream(side):
        for _ in range(num_collectives - 1):
            going_on_with = next(chain)
    return Pending(chain, _Beside(going_on_with, streams))


def _streams_of(device: torch.device) -> ModuleType | None:
    """Returns the module with the device's streams, None for a CPU."""
    return torch.cuda if device.type == "cuda" else None
