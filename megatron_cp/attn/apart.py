"""What a call does for itself, once, and not for its caller: a first small case on a GPU, compared with float64."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Result = TypeVar("Result")


def run_apart(work: Callable[[], Result]) -> Result:
    """Returns what `work` returns in a thread of its own, where none of torch's modes is on.

    The caller may be inside a checkpoint, which counts what is saved and, if it is selective, hands products over in
    their order; inside `torch.device("cuda")`, which moves new tensors; or inside autocast. Its GPU stays current.
    """
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def on_device() -> Result:
        if device is not None:
            torch.cuda.set_device(device)
        return work()

    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(on_device).result()
