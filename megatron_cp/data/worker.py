"""A loader worker: a Python process that turns packs into planned batches.

It is a fresh interpreter, not a fork: it imports NumPy and this package, never torch, and inherits
neither threads, locks nor a CUDA context from the trainer. It answers one task at a time over a
socket. It ends when the trainer's end of the socket closes, however that came about; if the worker
dies, the trainer sees the closed socket at once.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megatron_cp.data.batch import BatchConfig, PlannedBatch, PlanRequest, build_batch, plan_batch
from megatron_cp.data.document_set import Documents
from megatron_cp.data.hybrid import BothLayouts, HybridBuilder
from megatron_cp.data.packing import Pack
from megatron_cp.processes import die_with_parent

_SIGNALS_OF_THE_TRAINER = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}
_COMMAND = "import sys; from megatron_cp.data.worker import main; main(*map(int, sys.argv[1:]))"


@dataclass(frozen=True)
class BatchBuilder:
    """What turns packs into a planned batch: a pure function that can be sent to a process.

    `HybridBuilder` of `hybrid.py` is another one.
    """

    documents: Documents
    config: BatchConfig
    request: PlanRequest

    def __call__(self, packs: tuple[Pack, ...]) -> PlannedBatch:
        """Returns the planned batch of these packs."""
        return plan_batch(build_batch(self.documents, packs, self.config), self.request)


# What a worker says in words alone: the line is for the user.
_REFUSALS: dict[str, type[Exception]] = {
    "ValueError": ValueError,
    "NotImplementedError": NotImplementedError,
}
Builder = BatchBuilder | HybridBuilder
Built = PlannedBatch | BothLayouts


class WorkerError(RuntimeError):
    """A worker gives no batch, and not because the data is wrong."""


class WorkerProcess:
    """The trainer's end of one worker.

    At most one task is in flight, so neither side can block on a full socket for ever.
    """

    def __init__(self, index: int, builder: Builder, *, timeout_s: float = 600.0) -> None:
        self.index, self._timeout_s = index, timeout_s
        ours, theirs = socket.socketpair()
        # The package may be on the trainer's sys.path without being installed.
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        with theirs, _without_signals():
            self._process = subprocess.Popen(
                [sys.executable, "-c", _COMMAND, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            )
        self._connection = Connection(ours.detach())
        self._send(builder)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def submit(self, packs: tuple[Pack, ...]) -> None:
        """Gives the worker its next task; the one before must have been received."""
        self._send(packs)

    def receive(self) -> Built:
        """Returns the result of the task in flight.

        Raises:
            ValueError: the worker found bad data, or files that went; the message is the worker's.
            NotImplementedError: the planner cannot plan these packs; likewise.
            WorkerError: the worker failed otherwise, died, or did not answer in time.
        """
        try:
            if not self._connection.poll(self._timeout_s):
                raise WorkerError(
                    f"{self._name()} gave no batch within {self._timeout_s:.0f} s; look at what it "
                    "waits for, or use fewer --num-workers"
                )
            result, text = self._connection.recv()
        except (EOFError, OSError):
            raise self._death() from None
        if isinstance(result, PlannedBatch | BothLayouts):
            return result
        if result in _REFUSALS:
            raise _REFUSALS[result](text)
        raise WorkerError(f"{self._name()} failed with\n{text}")

    def close(self) -> None:
        """Ends the worker; safe to call twice."""
        self._connection.close()
        if self._process.poll() is None:
            self._process.kill()  # it has nothing to save, and a stopped one ignores the rest
        self._process.wait()

    def _send(self, message: Any) -> None:
        try:
            self._connection.send(message)
        except OSError:  # a broken pipe is one
            raise self._death() from None

    def _death(self) -> WorkerError:
        try:
            code: int | str = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            code = "unknown: it closed its socket but lives"
        if isinstance(code, int) and code < 0:
            code = f"{code} ({signal.Signals(-code).name})"
        return WorkerError(
            f"{self._name()} died, exit status {code}; see its output above. A killed worker often "
            "means too little host memory: use fewer --num-workers, then resume the run"
        )

    def _name(self) -> str:
        return f"data worker {self.index} (pid {self.pid})"


@contextmanager
def _without_signals() -> Iterator[None]:
    """What is started within the block never sees these signals.

    They go to every process of a terminal or a job; the trainer decides what they mean, and may need
    batches until it has saved. They wait for the trainer itself until the block ends.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS_OF_THE_TRAINER)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def serve(connection: Connection) -> None:
    """Answers tasks until the trainer goes away. The first message is the builder."""
    try:
        builder = _read_builder(connection)
        while True:
            connection.send(_answer(builder, connection.recv()))
    except (EOFError, OSError):
        return  # the trainer is gone


def _read_builder(connection: Connection) -> Builder | Exception:
    """Returns the builder, or why its files cannot be opened here, which is the answer to every task."""
    try:
        builder: Builder = connection.recv()
    except (ValueError, FileNotFoundError, PermissionError) as problem:  # none is of the socket
        return problem
    return builder


def _answer(builder: Builder | Exception, packs: tuple[Pack, ...]) -> tuple[Built | str, str]:
    try:
        if isinstance(builder, Exception):
            raise builder
        return builder(packs), ""
    except NotImplementedError as error:
        return "NotImplementedError", str(error)
    except (ValueError, OSError) as error:
        return "ValueError", str(error)
    except Exception:
        return "Exception", traceback.format_exc()


def main(descriptor: int, trainer: int) -> None:
    """Serves on an inherited socket until the trainer closes it, or dies, in the middle of a plan too."""
    die_with_parent(trainer)
    serve(Connection(descriptor))
