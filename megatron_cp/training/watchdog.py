"""When ranks wait too long: which rank keeps them, in which stage, and the stack of every rank.

    main thread      at("update") ... tick() ... tick()        where this rank is, and that it moves
    a thread a rank  a beat every 1/20 of --distributed-timeout-minutes: stage, innermost line, a count
                     no tick for 7/10 of it ──> reads the beats of all ranks, twice, 1/10 apart:
                         a count that stands still      the process is stopped, or gone
                         no line in a collective        this is whom the others wait for
                         all of them in collectives     they may not have called the same ones

So a rank is named before the collective that waits for it gives up, which then ends the run. Nothing is ended here.
Beats go through the store that the ranks met in. Never run on a GPU; there NCCL's flight recorder writes beside the
stacks.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from megatron_cp.training.config import TrainConfig

_PERIOD, _SUSPICION = 1 / 20, 7 / 10  # of the timeout: named at 8/10 of it, before collectives fail
# A line of these files, near the top of the stack, is a wait for other ranks.
_WAITS = (
    "torch/distributed/",
    "megatron_cp/comm/",
    "megatron/core/pipeline_parallel/p2p_communication",
    "megatron/core/distributed/param_and_grad_buffer",
    "megatron/core/tensor_parallel/",
)
_NUM_FRAMES = 4
_STAGE_BYTES = 100


@dataclass
class Progress:
    """Where the main thread of this rank is. It writes; the watchdog's thread, and those of ranks beside it, read."""

    iteration: int = 0
    stage: str = "setup"
    ticks: int = 0
    memory: int = field(default_factory=lambda: os.memfd_create("progress"))
    """A file without a name that holds the text: readable where this process is stopped."""

    def __post_init__(self) -> None:
        self._write()

    def at(self, stage: str, iteration: int | None = None) -> None:
        """Enters a stage."""
        self.iteration = self.iteration if iteration is None else iteration
        self.stage = stage
        self.ticks += 1
        self._write()

    def tick(self) -> None:
        """Says that the stage moves."""
        self.ticks += 1

    def _write(self) -> None:
        os.pwrite(self.memory, str(self).encode().ljust(_STAGE_BYTES)[:_STAGE_BYTES], 0)

    def __str__(self) -> str:
        return f"{self.stage} of step {self.iteration}" if self.iteration else self.stage


@dataclass(frozen=True)
class Beat:
    """What a rank says of itself."""

    rank: int
    host: str
    pid: int
    count: int
    place: str
    """Where it stands among pipeline stages, replicas and so on."""
    stage: str
    line: str
    """The innermost line of the main thread."""
    waits: bool
    """Whether that is in a collective."""
    memory: int = -1
    """The descriptor of its `Progress.memory`."""

    def last_stage(self) -> str:
        """Returns where the main thread is, or was before it was stopped; of another node, at the last beat."""
        if self.host == socket.gethostname():
            with suppress(OSError):
                return Path(f"/proc/{self.pid}/fd/{self.memory}").read_text().strip()
        return f"{self.stage}, when it was last heard of"


@dataclass
class Watchdog:
    """The thread of one rank, from the process group's start to the end of the run."""

    config: TrainConfig
    progress: Progress = field(default_factory=Progress)
    finding: str | None = None
    """What was found when ranks waited too long; None again when they go on."""

    def __post_init__(self) -> None:
        """Starts the thread. Call it in the main thread, after the process group is there."""
        self._timeout_s = 60.0 * self.config.parallel.distributed_timeout_minutes
        self._main, self._count = threading.get_ident(), 0
        self.place = f"rank {self.config.parallel.rank}"
        self._store: Store | None = None
        self._stop = threading.Event()
        self._try_to_beat()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def settle(self, place: str) -> None:
        """Says where this rank stands, once the groups are made."""
        self.place = place
        self._try_to_beat()

    def close(self) -> None:
        """Ends the thread."""
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        period_s = _PERIOD * self._timeout_s
        ticks, since = self.progress.ticks, time.monotonic()
        while not self._stop.wait(period_s):
            self._try_to_beat()
            if self.progress.ticks != ticks:
                ticks, since, self.finding = self.progress.ticks, time.monotonic(), None
            elif self.finding is None and time.monotonic() - since > _SUSPICION * self._timeout_s:
                found = self._look_twice(period_s)
                if found is not None and self.progress.ticks == ticks:
                    self._tell(*found, time.monotonic() - since)

    def _try_to_beat(self) -> None:
        try:
            self._beat()
        except RuntimeError:  # the store is told of where it matters: in _look_twice
            self._store = None

    def _beat(self) -> None:
        self._count += 1
        frame = sys._current_frames().get(self._main)
        files: list[str] = []
        line = "no frame"
        while frame is not None and len(files) < _NUM_FRAMES:
            files.append(frame.f_code.co_filename)
            if len(files) == 1:
                line = f"{'/'.join(Path(files[0]).parts[-3:])}:{frame.f_lineno} ({frame.f_code.co_name})"
            frame = frame.f_back
        waits = any(part in file for file in files for part in _WAITS)
        rank = self.config.parallel.rank
        who = [rank, socket.gethostname(), os.getpid(), self._count, self.place]
        beat = [*who, str(self.progress), line, waits, self.progress.memory]
        self._connected().set(_key(rank), json.dumps(beat))

    def _connected(self) -> Store:
        if self._store is None:
            address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            patience = timedelta(seconds=_PERIOD * self._timeout_s)
            store = TCPStore(*address, is_master=False, timeout=patience)
            start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            self._store = PrefixStore(f"megatron_cp/beats/{start}", store)
        return self._store

    def _look_twice(self, period_s: float) -> tuple[str, int] | None:
        """Returns the verdict on two looks at the beats of all ranks, two periods apart.

        Where the store does not answer, the verdict is that, and each rank says it.
        """
        try:
            first = self._beats()
            for _ in range(2):
                if self._stop.wait(period_s):
                    return None
                self._beat()
            return verdict(first, self._beats())
        except RuntimeError:
            self._store = None
            address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            return (
                f"the store at {address} does not answer: rank 0, or torchrun on that node, is "
                "stopped or gone",
                self.config.parallel.rank,
            )

    def _beats(self) -> list[Beat]:
        size = self.config.parallel.world_size
        told = self._connected().multi_get([_key(rank) for rank in range(size)])
        return [Beat(*json.loads(text)) for text in told]

    def _tell(self, finding: str, speaker: int, waited_s: float) -> None:
        """Prints the line on the speaker, then writes this rank's stack: a disk that takes no more keeps no line."""
        folder = self.config.records.run_dir
        stacks = None if folder is None else Path(folder) / "stacks"
        self.finding = finding if stacks is None else f"{finding}; stacks are in {stacks}"
        if speaker == self.config.parallel.rank:
            _print(f"warning: nothing moved for {waited_s:.0f} s: {self.finding}")
        if stacks is not None:
            try:
                self._write_stack(stacks, finding)
            except OSError as failure:
                _print(f"warning: the stack of {self.place} could not be written: {failure}")

    def _write_stack(self, stacks: Path, finding: str) -> None:
        stacks.mkdir(parents=True, exist_ok=True)
        with (stacks / f"rank_{self.config.parallel.rank}.txt").open("w") as file:
            file.write(f"{self.place}, in {self.progress}\n{finding}\n\n")
            file.flush()
            faulthandler.dump_traceback(file)


def _print(line: str) -> None:
    with suppress(OSError):  # nobody reads it any more: the thread goes on
        os.write(2, f"{line}\n".encode())  # the main thread may hold the stream's lock


def _key(rank: int) -> str:
    return f"rank/{rank}"


def verdict(first: list[Beat], second: list[Beat]) -> tuple[str, int] | None:
    """Returns whom the ranks wait for, from two looks at the beats of all, and the rank that is to say so.

    None where no rank waits.
    """
    silent = [beat for beat, then in zip(second, first, strict=True) if beat.count == then.count]
    living = [beat for beat in second if beat not in silent]
    if silent:
        near = [beat for beat in living if beat.host == silent[0].host] or living
        speaker = near[0]
        said = [f"{_named(beat)}, {_state_of(beat)}" for beat in silent]
        return f"{' and '.join(said)}; its last stage: {silent[0].last_stage()}", speaker.rank
    busy = [beat for beat in living if not beat.waits]
    if busy and len(busy) < len(living):
        said = [f"{_named(beat)}, in {beat.stage}, at {beat.line}" for beat in busy]
        return f"the other ranks wait for {' and for '.join(said)}", living[0].rank
    if busy:
        return None
    said = sorted({f"{beat.stage} at {beat.line}" for beat in living})
    return (
        "every rank waits in a collective, perhaps not in the same one: " + ", ".join(said[:4]),
        living[0].rank,
    )


def _named(beat: Beat) -> str:
    return f"{beat.place} on {beat.host}, process {beat.pid}"


def _state_of(beat: Beat) -> str:
    """Returns what has become of a silent rank; more where it is on this machine."""
    if beat.host != socket.gethostname():
        return "does not answer: it is stopped, gone, or its node cannot be reached"
    try:
        state = Path(f"/proc/{beat.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "is gone"
    if state in "Tt":
        return "is stopped (SIGSTOP); kill -CONT lets it go on"
    return f"does not answer (state {state}): one call keeps Python's lock, or the machine is overloaded"


def record_collectives(run_dir: str | None, environment: Any) -> None:
    """Makes NCCL's flight recorder write beside the stacks. Before the process group; no time-out was seen yet."""
    if run_dir is None:
        return
    folder = Path(run_dir) / "stacks"
    folder.mkdir(parents=True, exist_ok=True)
    # The old name is a warning on every rank in torch 2.11 (seen there).
    is_new = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)
    size = "TORCH_FR_BUFFER_SIZE" if is_new else "TORCH_NCCL_TRACE_BUFFER_SIZE"
    environment.setdefault(size, "2000")
    environment.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    environment.setdefault("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(folder / "nccl_rank_"))
