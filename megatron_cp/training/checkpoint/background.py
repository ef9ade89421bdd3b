"""A checkpoint that a forked process writes while training goes on.

    rank     state dict, on a GPU copied to the host ──> fork ──> next steps ──> finish: index, on all ranks
    writer                                                └─> files ──> results through a pipe ──┘

The fork is the copy: pages that training changes meanwhile are copied by the kernel, so the files hold
every value as it was at the fork. Megatron-Core plans the files and writes them. Its own callers are not
used (0.16.1): both report through a manager process of 270 MB that nobody ends, and the persistent one divides
by the number of GPUs as it starts. Here the writer and what it forks end with the rank.
"""

from __future__ import annotations

import gc
import multiprocessing
import signal
from multiprocessing.connection import Connection
from typing import Any

from megatron_cp.training.checkpoint.writer import saving_in_this_process


class Results:
    """What Megatron-Core puts and gets as its queue of results: a pipe from the writer to the rank."""

    def __init__(self) -> None:
        self.receiver, self.sender = multiprocessing.Pipe(duplex=False)

    def put(self, results: Any) -> None:
        """Sends what was written; in the writer."""
        self.sender.send(results)

    def get_nowait(self) -> Any:
        """Returns what was written, or why it was not; waits for it. In the rank."""
        try:
            return self.receiver.recv()
        except (EOFError, OSError):
            return RuntimeError("the process that wrote it was killed")


class BackgroundWrite:
    """One checkpoint on its way to the disk."""

    def __init__(self, request: Any, results: Results) -> None:
        """Forks the writer of a request of Megatron-Core, if this rank has anything to write."""
        self._finalizers, self._results = request.finalize_fns, results
        self._process: Any = None
        if request.async_fn is None:
            return
        arguments = list(request.async_fn_args)
        if request.preload_fn is not None:
            arguments[1] = request.preload_fn()  # from a GPU to the host
        context = multiprocessing.get_context("fork")
        self._process = context.Process(
            target=_write,
            args=(request.async_fn, arguments, request.async_fn_kwargs, results.receiver),
        )
        with saving_in_this_process():
            self._process.start()
        results.sender.close()  # so that a writer that dies closes the pipe

    def is_done(self) -> bool:
        """Whether the writer of this rank has finished, well or not."""
        return self._process is None or self._results.receiver.poll()

    def finish(self) -> None:
        """Waits for the writers of all ranks and writes the index. Collective: every rank calls it.

        Raises CheckpointException on every rank if any writer failed, and OSError or RuntimeError on a
        rank that could not write the index; the caller tells the others.
        """
        failures: list[OSError | RuntimeError] = []
        try:
            with saving_in_this_process(self._results, failures):
                for finalize in self._finalizers:
                    finalize()
        finally:
            self._end()
        if failures:
            raise failures[0]

    def abandon(self) -> None:
        """Kills the writer; what it wrote stays aside. Not collective: for a run that fails."""
        if self._process is not None:
            self._process.kill()
        self._end()

    def _end(self) -> None:
        if self._process is not None:
            self._process.join()
            self._process = None
        self._results.receiver.close()


def _write(function: Any, arguments: list[Any], keywords: dict[str, Any], ours: Connection) -> None:
    """Writes the files; in the forked process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the rank's to handle
    gc.disable()  # a tensor of the rank's GPU must not be freed here
    ours.close()
    with saving_in_this_process():  # the processes that write single files end with this one
        function(*arguments, **keywords)
