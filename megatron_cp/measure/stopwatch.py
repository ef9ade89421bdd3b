"""How long a call takes on the slowest of all ranks."""

import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist

Call = Callable[[], object]
Tick = Callable[[str], None]
"""Shows people what is measured now."""
Name = TypeVar("Name", bound=Hashable)


class Stopwatch:
    """Times calls on all ranks at once; collective, every rank times the same calls in the same order."""

    def __init__(self, device: torch.device, rounds: int):
        self.device, self.rounds = device, rounds

    def seconds(self, call: Call) -> float:
        """Returns the time of one call on this rank, begun by all ranks together."""
        self._settle()
        dist.barrier()
        started = time.perf_counter()
        call()
        self._settle()
        return time.perf_counter() - started

    def own_least(self, calls: Mapping[Name, Call], tick: Tick, what: str) -> dict[Name, float]:
        """Returns each call's least time on this rank; a busy moment hits different calls in each round."""
        least = dict.fromkeys(calls, float("inf"))
        for turn in range(self.rounds + 1):  # the first round compiles and connects
            tick(f"{what}, round {turn} of {self.rounds}" if turn else f"{what}, warming up")
            for name, call in calls.items():
                seconds = self.seconds(call)
                least[name] = min(least[name], seconds) if turn else least[name]
        return least

    def least(self, calls: Mapping[Name, Call], tick: Tick, what: str) -> dict[Name, float]:
        """Returns each call's least time on the slowest rank."""
        own = self.own_least(calls, tick, what)
        slowest = torch.tensor(list(own.values()), dtype=torch.float64, device=self.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return dict(zip(own, slowest.tolist(), strict=True))

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
