"""Verdicts of self-tests, kept in the user's cache: one file for a GPU, driver and build of kernels.

    KEY.begun    a test runs, or the process that ran it is gone: then the kernels are not tried again
    KEY.json     what the test found

A kernel with an illegal instruction ends its process, or takes the GPU away from it. Without a trace of that every
later process would end alike.
"""

import json
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from megatron_cp.kernels import cache
from megatron_cp.kernels.driver import CudaError

_FIRST_FAULT = 700  # of CUresult: an illegal address; failures of loading lie below
FAULTS = (torch.AcceleratorError, CudaError)


@dataclass(frozen=True)
class Verdict:
    """Whether the kernels of a kind are right on a GPU, and the error that came nearest to its limit."""

    passed: bool
    result: str
    error: float | None = None
    """None where no result was found at all."""
    limit: float | None = None

    def __str__(self) -> str:
        """Returns the numbers as a sentence."""
        if self.error is None:
            return self.result
        return f"{self.result} is {self.error:.2g} off float64, at most {self.limit:.2g} is allowed"


def kept_verdict(key: str, judge: Callable[[], Verdict]) -> Verdict:
    """Returns the verdict that an earlier process kept under `key`, or that of `judge()`, which is kept.

    Where the cache cannot be used, a warning says so and the verdict is this process's alone. Processes that need
    one verdict at once wait for the first, where the file system has locks.

    Raises RuntimeError where the test ends in a fault of the GPU, which this process has lost then; a failed verdict
    is kept, so that later ones go on without these kernels.
    """
    try:
        path = cache.user_folder("verdicts", "self-test") / f"{key}.json"
    except OSError as problem:
        warnings.warn(
            f"the self-test of the kernels is repeated in every process: {problem}", stacklevel=2
        )
        return _judged(judge, keep=None)
    cache.make_once(path, lambda: _judge_once(path, judge))
    return Verdict(**json.loads(path.read_text()))


def _judge_once(path: Path, judge: Callable[[], Verdict]) -> None:
    """Writes the verdict; under the lock, so a test that has begun and left none did not end."""

    def keep(verdict: Verdict) -> None:
        cache.write_whole(path, json.dumps(asdict(verdict)).encode())

    begun = path.with_suffix(".begun")
    if begun.exists():
        keep(
            Verdict(
                False, f"a process that tested them did not end it (delete {path} to try again)"
            )
        )
    else:
        begun.touch()
        try:
            keep(_judged(judge, keep))
        except BaseException:
            begun.unlink(missing_ok=True)
            raise
    begun.unlink()


def _judged(judge: Callable[[], Verdict], keep: Callable[[Verdict], None] | None) -> Verdict:
    try:
        return judge()
    except FAULTS as fault:
        if getattr(fault, "status", _FIRST_FAULT) < _FIRST_FAULT:
            raise
        what = f"the self-test ended in a fault of the GPU: {str(fault).splitlines()[0]}"
        if keep is not None:
            keep(Verdict(False, what))
        told = (
            "start again: it goes on with another backend"
            if keep
            else "give backend='flash' or 'flex'"
        )
        raise RuntimeError(
            f"backend='hopper' cannot be used here: {what}; this process has lost its GPU; {told}"
        ) from fault
