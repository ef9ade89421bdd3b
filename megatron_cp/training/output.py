"""Lines that nobody takes are left out: a log on a full disk, or a reader that is gone, ends no run.

    print ──> buffer ──> TakesAll ──> file, pipe or terminal
                             └── refused: dropped, told once on standard error until something is taken again

Nothing but the standard library is imported here, so that the first line of a run is covered too.
"""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import Any, TextIO


class TakesAll(io.RawIOBase):
    """A descriptor to write to; what it refuses is dropped."""

    def __init__(self, descriptor: int, name: str) -> None:
        self._descriptor, self._is_refused = descriptor, False
        self.name = name
        """For people."""

    def write(self, data: Any) -> int:
        """Writes bytes, or drops them; returns how many there were."""
        view = memoryview(data).cast("B")
        done = 0
        try:
            while done < len(view):
                done += os.write(self._descriptor, view[done:])
            self._is_refused = False
        except OSError as problem:
            if not self._is_refused:
                self._tell(problem)
            self._is_refused = True
        return len(view)

    def _tell(self, problem: OSError) -> None:
        line = f"WARNING: lines are lost: {self.name}: {problem.strerror}; the run goes on\n"
        with suppress(OSError):  # it may be the one that refuses
            os.write(2, line.encode())

    def writable(self) -> bool:
        """Returns True."""
        return True

    def fileno(self) -> int:
        """Returns the descriptor, which stays open."""
        return self._descriptor

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return os.isatty(self._descriptor)


def leave_out_what_is_refused() -> None:
    """Makes standard output and standard error of this process raise no error. Call it first."""
    sys.stdout = _patient(sys.stdout, "standard output")
    sys.stderr = _patient(sys.stderr, "standard error")


def _patient(stream: TextIO, name: str) -> TextIO:
    """Returns a stream like this one to the same place; one that is no file stays."""
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    with suppress(OSError):
        stream.flush()
    taker: Any = TakesAll(stream.fileno(), name)
    return io.TextIOWrapper(
        taker if stream.write_through else io.BufferedWriter(taker),  # as Python does with -u
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
