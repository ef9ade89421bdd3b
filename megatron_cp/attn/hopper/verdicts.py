"""Verdicts of self-tests, kept in the user's cache: one file for a GPU, driver and build of kernels.

    KEY.begun    a byte for each process whose test did not end: after two the kernels are not tried again
    KEY.json     what the test found

A kernel with an illegal instruction takes the GPU away from its process, or ends it. Without a trace of that every
later process would end alike.
"""

import json
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from megatron_cp.kernels import cache
from megatron_cp.kernels.driver import CudaError

ATTEMPTS = 2  # tests that may end with their process
_FIRST_FAULT = 700  # of CUresult and cudaError_t: an illegal address; failures of loading lie below
_FAULTS = (torch.AcceleratorError, CudaError)


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
    found: list[Verdict] = []
    try:
        path = cache.user_folder("verdicts", "self-test") / f"{key}.json"
        cache.make_once(path, lambda: _judge_once(path, judge, found))
        return found[0] if found else Verdict(**json.loads(path.read_text()))
    except OSError as problem:
        warnings.warn(
            f"the self-test of the kernels is repeated in every process: {problem}", stacklevel=2
        )
        return found[0] if found else _judged(judge, None)


def _judge_once(path: Path, judge: Callable[[], Verdict], found: list[Verdict]) -> None:
    """Judges and writes the verdict, after adding it to `found`.

    It runs under the lock, so tests that have begun and left no verdict did not end. One may have been killed by
    chance, with its job.
    """
    begun, again = path.with_suffix(".begun"), f"delete {path} to try again"
    attempts = len(begun.read_bytes()) if begun.exists() else 0
    if attempts < ATTEMPTS:
        with begun.open("ab") as file:
            file.write(b".")
        try:
            found.append(
                _judged(judge, lambda what: _keep(path, Verdict(False, f"{what} ({again})")))
            )
        except BaseException:
            begun.unlink(missing_ok=True)
            raise
    else:
        told = f"{attempts} processes that tested them did not end it ({again})"
        found.append(Verdict(False, told))
    _keep(path, found[0])
    begun.unlink(missing_ok=True)


def _keep(path: Path, verdict: Verdict) -> None:
    cache.write_whole(path, json.dumps(asdict(verdict)).encode())


def _judged(judge: Callable[[], Verdict], keep_fault: Callable[[str], None] | None) -> Verdict:
    """Returns the verdict. Raises RuntimeError for a fault of the GPU, which `keep_fault` is told of before."""
    try:
        return judge()
    except _FAULTS as fault:
        if not _is_fault(fault):
            raise
        what = f"the self-test ended in a fault of the GPU: {str(fault).splitlines()[0]}"
        told = "give backend='flash' or 'flex'"
        if keep_fault is not None:
            with suppress(OSError):
                keep_fault(what)
                told = "start again: it goes on with another backend"
        raise RuntimeError(
            f"backend='hopper' cannot be used here: {what}; this process has lost its GPU; {told}"
        ) from fault


def _is_fault(error: Exception) -> bool:
    """Returns whether an error is one of executing; memory may be short, and a cubin not fit, elsewhere too."""
    code = getattr(error, "status", getattr(error, "error_code", None))
    return code >= _FIRST_FAULT if code is not None else "out of memory" not in str(error)
