"""The modes of torch in which raw passes run: no autograd, and the precision that their tensors have."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

_NOTHING: AbstractContextManager[None] = nullcontext()


def raw_mode(x: Tensor) -> AbstractContextManager[None]:
    """Returns a block without autograd and without autocast for the device of `x`.

    It is empty where both are off already, as inside the stages of context parallelism: entering and leaving them
    costs 10 us, a third of a launch (benchmarks/bench_hopper_host.py, Xeon, 2026-11-27).
    """
    device_type = x.device.type
    if torch.is_grad_enabled() or torch.is_autocast_enabled(device_type):
        return _entered(device_type)
    return _NOTHING


@contextmanager
def _entered(device_type: str) -> Iterator[None]:
    with torch.no_grad(), torch.autocast(device_type, enabled=False):
        yield
