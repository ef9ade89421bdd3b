"""Many runs of pretrain_gpt.py for the price of one import: each rank is a fork of a warm process.

A launch costs ten seconds and more, nearly all of it imports; a fork costs milliseconds. The forks run
the real ``main()`` with their own command line, environment, output and exit code, over real gloo groups.
A rank may be told to signal itself at the n-th call of a function: a fault at an exact place, every time.

    outcomes = run_program([Launch(flags, world_size=2), ...])        # outcomes[i][rank]

    test session --spawn once--> warm process --fork per call--> runs its launches --fork--> ranks
"""

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import torch.distributed as dist

from tests.processes import HANG_SECONDS

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Kill:
    """Signals to ``rank`` at the ``call``-th call (from 1) of ``module``.``function``, before or after it.

    With ``delay_s`` so many seconds after the call began, whatever the rank then does.
    """

    rank: int
    module: str
    function: str
    call: int = 1
    after: bool = False
    signals: tuple[int, ...] = (signal.SIGKILL,)
    delay_s: float = 0.0


@dataclass(frozen=True)
class Launch:
    """One run. ``per_rank`` adds flags to single ranks, to make them disagree.

    ``plant``, "module.function", is called with the rank before the program begins.
    """

    flags: tuple[str, ...]
    world_size: int = 1
    per_rank: tuple[tuple[str, ...], ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    kill: Kill | None = None
    plant: str = ""
    timeout: float = HANG_SECONDS


@dataclass(frozen=True)
class Outcome:
    """How a rank ended: exit code (negative: signal; None: it hung or was stopped), and what it said."""

    code: int | None
    stdout: str
    stderr: str
    seconds: float


def run_program(launches: list[Launch], *, at_once: int = 1) -> list[list[Outcome]]:
    """The outcome of every rank of every launch, run in a process of its own, `at_once` launches at a time.

    More than one is for runs that wait for a time-out, not for a processor.
    """
    kept = {name: v for name, v in os.environ.items() if not name.startswith("WANDB_")}
    # A killed rank cannot remove its temporary files.
    with tempfile.TemporaryDirectory() as folder:
        environment = {**kept, **_ENVIRONMENT, "TMPDIR": folder, "HOME": folder}
        warm = _warm_process()
        warm.send((environment, [asdict(launch) for launch in launches], at_once))
        seconds = HANG_SECONDS * (1 + len(launches))
        assert warm.poll(seconds), f"the warm process gave no answer in {seconds:.0f} s"
        problem, told = warm.recv()
    assert problem is None, problem
    return [[Outcome(**rank) for rank in ranks] for ranks in told]


_STACKS_SIGNAL = signal.SIGQUIT

_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "ERROR"}


# What the program imports after its arguments, and while it saves: once here, and not in every rank. Ranks of another
# user may not read the interpreter's files, and can import nothing.
_IMPORTED_LATE = (
    "megatron_cp.attn.cpu.backend",
    "megatron_cp.report.run.media",
    "megatron_cp.training.arguments",
    "megatron_cp.training.gpt",
    "megatron_cp.training.output",
    "megatron_cp.training.pretrain",
    "megatron_cp.mcore.versions.latent",
    "megatron.core.datasets.blended_megatron_dataset_builder",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.dist_checkpointing.strategies.torch",
    "multiprocessing.queues",
    "numpy.ma",
    "psutil",
    "torch._dynamo",  # by the first optimizer
    "torch.utils.serialization.config",
    "wandb.sdk.launch",  # by the first run, half a second in a process that has torch
)


@functools.cache
def _warm_process() -> Connection:
    """The session's end of a pipe to a new interpreter that has imported everything; it ends with the session.

    Not a daemon: ranks are forks of it, and those of `--async-save` fork on.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    os.environ.update(_ENVIRONMENT)  # read by imports
    process = context.Process(target=_serve, args=(theirs,))
    try:
        process.start()
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    theirs.close()
    atexit.register(lambda: (ours.close(), process.join()))  # before Python waits for it
    return ours


def _serve(calls: Connection) -> None:
    """Answers each call from a fork of its own, so that none leaves anything to the next."""
    gc.disable()  # what imports make stays
    sys.path.insert(0, str(ROOT))
    from megatron_cp.mcore import cpu
    from megatron_cp.mcore.versions import compat

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the session decides when we end
    compat.silence_known_warnings()
    cpu.install()
    for name in _IMPORTED_LATE:
        importlib.import_module(name)
    importlib.import_module("wandb").Table(data=[])  # imports pandas, where that is installed
    gc.collect()
    gc.freeze()  # a collection in a fork would copy every page
    gc.enable()
    with contextlib.suppress(EOFError):
        while True:
            environment, launches, at_once = calls.recv()
            pid = os.fork()
            if pid == 0:
                _answer(calls, environment, launches, at_once)
            os.waitpid(pid, 0)


def _answer(
    calls: Connection, environment: dict[str, str], launches: list[dict], at_once: int
) -> None:
    """Never returns: this process runs the launches of one call and says how they went."""
    from megatron_cp.training import leftovers

    semaphores = f"megatron_cp_{os.getpid()}_"
    leftovers.name_semaphores(semaphores)
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(environment)
        tempfile.tempdir = environment["TMPDIR"]
        told = _run_all(launches, at_once)
        leftovers.remove_own_semaphores(Path("/dev/shm"), semaphores)  # killed ranks cannot
        calls.send((None, told))
    except BaseException:
        calls.send((traceback.format_exc(), None))
    finally:
        os._exit(0)


def _run_all(launches: list[dict], at_once: int) -> list[list[dict]]:
    waiting, running, done = list(enumerate(launches)), {}, {}
    while waiting or running:
        while waiting and len(running) < at_once:
            place, launch = waiting.pop(0)
            running[place] = _Running(launch)
        for place in list(running):
            if running[place].has_ended():
                done[place] = running.pop(place).outcomes()
        if running:
            time.sleep(0.005)
    return [done[place] for place in range(len(launches))]


class _Running:
    """The ranks of one launch, from their start on."""

    def __init__(self, launch: dict):
        self.store, port = _start_store()
        self.launch, self.start = launch, time.monotonic()
        self.folder = tempfile.TemporaryDirectory()
        self.ranks: dict[int, int] = {}
        self.ended: dict[int, tuple[int | None, float]] = {}
        for rank in range(launch["world_size"]):
            pid = os.fork()
            if pid == 0:
                _become_rank(launch, rank, port, Path(self.folder.name))
            self.ranks[pid] = rank

    def has_ended(self) -> bool:
        """Whether every rank has; those that are stopped, or take too long, are ended here."""
        seconds = time.monotonic() - self.start
        for pid in list(self.ranks):
            if (status := os.waitpid(pid, os.WNOHANG)) != (0, 0):
                self.ended[self.ranks.pop(pid)] = (os.waitstatus_to_exitcode(status[1]), seconds)
        hung = seconds > self.launch["timeout"]
        if hung:
            self._write_stacks()
        if hung or all(map(_is_stopped, self.ranks)):
            for pid in self.ranks:
                _kill(pid)
            self.ended |= dict.fromkeys(self.ranks.values(), (None, seconds))
            self.ranks = {}
        if not self.ranks:
            _kill(self.store)
        return not self.ranks

    def _write_stacks(self) -> None:
        """Where each rank hangs, to the end of what it said."""
        for pid in self.ranks:
            os.kill(pid, _STACKS_SIGNAL)
        time.sleep(1.0)  # written in a signal handler: there is nothing to wait on

    def outcomes(self) -> list[dict]:
        """How each rank ended, and what it said."""
        found = []
        with self.folder as folder:
            for rank, (code, seconds) in sorted(self.ended.items()):
                said = [
                    (Path(folder) / f"{rank}.{name}").read_text(errors="replace")
                    for name in ("out", "err")
                ]
                found.append(asdict(Outcome(code, *said, seconds)))
        return found


def _start_store() -> tuple[int, int]:
    """The process and the port of a store.

    As with torchrun the ranks' starter holds it from the beginning, but in a process of its own: the store has
    threads, and a rank forked beside them could find a lock held for ever by one that it does not have.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            os.write(writer, str(store.port).encode())
            signal.pause()
        finally:
            os._exit(0)
    os.close(writer)
    port = int(os.read(reader, 5))
    os.close(reader)
    return pid, port


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def _become_rank(launch: dict, rank: int, port: int, folder: Path) -> None:
    """Never returns: this process is now a rank of the launched program."""
    code = 1
    try:
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(folder / f"{rank}.{name}", os.O_WRONLY | os.O_CREAT), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        faulthandler.register(_STACKS_SIGNAL)
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(launch["world_size"]),
            MASTER_ADDR="localhost",
            MASTER_PORT=str(port),
            TORCHELASTIC_USE_AGENT_STORE="True",
            **launch["environment"],
        )
        own = launch["per_rank"][rank] if launch["per_rank"] else ()
        sys.argv = ["pretrain_gpt.py", *launch["flags"], *own]
        kill = launch["kill"]
        if kill is not None and kill["rank"] == rank:
            _arm(Kill(**kill))
        if launch["plant"]:
            module, _, function = launch["plant"].rpartition(".")
            getattr(importlib.import_module(module), function)(rank)
        from pretrain_gpt import main

        main()
        code = 0
    except SystemExit as leave:
        code = leave.code if isinstance(leave.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _arm(kill: Kill) -> None:
    """Replaces the function by one that kills this process at the wanted call."""
    owner = importlib.import_module(kill.module)
    *path, name = kill.function.split(".")
    for part in path:
        owner = getattr(owner, part)
    function, calls = getattr(owner, name), [0]

    def wrapper(*args, **kwargs):
        calls[0] += 1
        fatal = calls[0] == kill.call
        if fatal and kill.delay_s:
            threading.Timer(kill.delay_s, send).start()
        elif fatal and not kill.after:
            send()
        result = function(*args, **kwargs)
        if fatal and kill.after:
            send()
        return result

    def send():
        for number in kill.signals:
            os.kill(os.getpid(), number)

    setattr(owner, name, wrapper)
