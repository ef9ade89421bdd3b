"""Tests over several ranks: one forked pool of gloo workers per world size and test session.

Starting processes with torch costs 18 s (two ranks) to 72 s (eight ranks) per test; a call to a
waiting pool costs 5 to 26 ms. A pool that saw a failure is thrown away, because its other ranks may
hang in a collective; the next call forks a new one.

Import what the ranks need at the top of the test module: the workers inherit it from the parent. An
import of megatron.core inside `fn` costs seconds on every rank (26 s on four ranks and two cores).

    def sum_of_ranks(rank, world_size, start):            # at module level: sent by reference
        x = torch.tensor(float(rank + start))
        dist.all_reduce(x)
        return x.item()

    def test_every_rank_sees_the_sum():
        assert run_on_ranks(3, sum_of_ranks, 10) == [33.0, 33.0, 33.0]
"""

import contextlib
import datetime
import faulthandler
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.fx.experimental.symbolic_shapes

from tests.processes import HANG_SECONDS

_SEED = 1234
# gloo never quite forgets a process group: its threads keep polling. Megatron makes dozens of groups per
# set-up; without renewal 2,000 threads a rank leave no time for the tests.
_MAX_THREADS = 40
_pools: dict[int, "_RankPool"] = {}


class RankError(RuntimeError):
    """A rank failed; the text names the rank and holds its traceback."""


class RankTimeoutError(RankError):
    """A rank did not answer in time; the text shows where each one stands."""


def run_on_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = HANG_SECONDS,
    return_exceptions: bool = False,
) -> list[Any]:
    """Returns `[fn(rank, world_size, *args) for every rank]`, each computed in its own process.

    The default process group is gloo over all ranks; torch's generator has a fixed seed. `fn` must
    be defined at module level, because it is sent by name; arguments and results are pickled. A
    function that initialises Megatron's parallel state destroys it before it returns.

    With `return_exceptions` a failing rank's exception stands in the list in place of its result,
    as in `asyncio.gather`; for tests where every rank must fail: nothing interrupts the others.

    Raises:
        The exception of the first rank that failed, caused by a RankError with rank and traceback.
        RankTimeoutError: after `timeout` seconds, with the stack of each rank that still ran.
    """
    task = pickle.dumps((fn, args))
    pool = _pools.get(world_size)
    if pool is None:
        pool = _pools[world_size] = _RankPool(world_size)
    answers: dict[int, Any] = {}
    try:
        pool.send(task)
        answers = pool.collect(timeout, stop_at_failure=not return_exceptions)
    finally:
        failed = [rank for rank, answer in answers.items() if isinstance(answer, _Failure)]
        if failed or len(answers) < world_size:
            del _pools[world_size]
            pool.kill()
        elif pool.num_threads() > _MAX_THREADS:
            del _pools[world_size]
            pool.close()
    if failed and not return_exceptions:
        failure = answers[min(failed)]
        if isinstance(failure.exception, RankError):
            raise failure.exception
        raise failure.exception from RankError(failure.text)
    return [a.exception if isinstance(a, _Failure) else a for _, a in sorted(answers.items())]


def close_pools() -> None:
    """Ends every pool. Called once, at the end of the test session."""
    while _pools:
        _pools.popitem()[1].close()


class _Failure:
    def __init__(self, exception: BaseException, text: str):
        self.exception = exception
        self.text = text


class _RankPool:
    def __init__(self, world_size: int):
        self.world_size = world_size
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self.connections: list[Connection] = []
        self.processes = []
        context = multiprocessing.get_context("fork")
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            # A worker ends when the last copy of our end of its pipe closes, so none keeps one.
            not_theirs = [ours, *self.connections, *_connections_of_other_pools(self)]
            process = context.Process(
                target=_serve, args=(rank, world_size, self.folder, theirs, not_theirs), daemon=True
            )
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)

    def send(self, task: bytes) -> None:
        for connection in self.connections:
            connection.send_bytes(task)

    def collect(self, timeout: float, stop_at_failure: bool) -> dict[int, Any]:
        """Returns answers by rank: all of them, or those that came with the first failure."""
        answers: dict[int, Any] = {}
        end = time.monotonic() + timeout
        waiting = {connection: rank for rank, connection in enumerate(self.connections)}
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                raise RankTimeoutError(self._describe_hang(sorted(waiting.values()), timeout))
            for connection in ready:
                rank = waiting.pop(connection)
                answers[rank] = self._receive(rank, connection)
            if stop_at_failure and any(isinstance(a, _Failure) for a in answers.values()):
                break
        return answers

    def _receive(self, rank: int, connection: Connection) -> Any:
        try:
            return pickle.loads(connection.recv_bytes())
        except EOFError:
            self.processes[rank].join(5)
            text = (
                f"rank {rank} of {self.world_size} died with exit code "
                f"{self.processes[rank].exitcode} (negative: a signal)"
            )
            return _Failure(RankError(text), text)

    def _describe_hang(self, ranks: list[int], timeout: float) -> str:
        for rank in ranks:
            os.kill(self.processes[rank].pid, signal.SIGUSR1)
        stacks = "\n".join(
            f"--- rank {rank}:\n{_written_stack(_stack_file(self.folder, rank))}" for rank in ranks
        )
        return (
            f"ranks {ranks} of {self.world_size} did not answer in {timeout} s: deadlock?\n{stacks}"
        )

    def num_threads(self) -> int:
        """Returns the largest number of threads of a worker."""
        return max(len(list(Path(f"/proc/{p.pid}/task").iterdir())) for p in self.processes)

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.join(2)
        self.kill()

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
            process.close()
        for connection in self.connections:
            connection.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _connections_of_other_pools(pool: _RankPool) -> list[Connection]:
    return [c for other in _pools.values() if other is not pool for c in other.connections]


def _stack_file(folder: Path, rank: int) -> Path:
    return folder / f"stack.{rank}"


def _written_stack(path: Path) -> str:
    """Returns a stack once it stands still; what there is after ten seconds (a stopped rank)."""
    before, text = None, ""
    for _ in range(100):
        if text and text == before:
            break
        time.sleep(0.1)  # faulthandler writes in a signal handler: there is nothing to wait on
        before, text = text, path.read_text()
    return text


def _serve(
    rank: int, world_size: int, folder: Path, tasks: Connection, not_ours: list[Connection]
) -> None:
    """Runs tasks until the parent closes its end of the pipe."""
    for connection in not_ours:
        connection.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when we end
    _pools.clear()
    torch.set_num_threads(1)
    with _stack_file(folder, rank).open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(folder / "store"), world_size),
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(minutes=30),  # the parent's timeout speaks first
        )
        with contextlib.suppress(EOFError, BrokenPipeError):
            while True:
                tasks.send_bytes(_answer(rank, world_size, tasks.recv_bytes()))
    os._exit(0)  # gloo's threads may wait for ranks that are gone


def _answer(rank: int, world_size: int, task: bytes) -> bytes:
    try:
        fn, args = pickle.loads(task)
        torch.manual_seed(_SEED)
        return pickle.dumps(fn(rank, world_size, *args))
    except BaseException as exception:
        text = f"rank {rank} of {world_size}:\n{traceback.format_exc()}"
        return pickle.dumps(_Failure(_as_picklable(exception, text), text))


def _as_picklable(exception: BaseException, text: str) -> BaseException:
    """Returns the exception itself if it may be re-raised and survives pickling, else RankError."""
    if not isinstance(exception, Exception):  # SystemExit and the like must not end the parent
        return RankError(text)
    try:
        pickle.loads(pickle.dumps(exception))
    except Exception:
        return RankError(text)
    return exception
