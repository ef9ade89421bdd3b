"""In-order issue of a quarter of a multiprocessor: how long its warps take for the instructions they are given.

Every quarter has one warp of each consumer warpgroup, and all quarters do the same. Modelled: one instruction a
cycle, the stalls and scoreboards that the compiler set, the pipes' throughput, products in the order of their
issue, the port of shared memory, named barriers. Not modelled: waiting for what other warps load or store (all
is there), register banks, the instruction cache, clocks and power. A model, never a measurement.
"""

import re
from dataclasses import dataclass, field

from tools.kernel_model.listing import NO_BOARD, Instruction
from tools.kernel_model.machine import PIPE, Machine

NEVER = float("inf")
MAX_SHARE = 0.8  # of the shared-memory port, for TMA
SHARE_TOLERANCE, SHARE_STEPS = 0.002, 8

_PRODUCT = re.compile(r"HGMMA\.64x(\d+)x16")
_BARRIER = re.compile(r"(\w+)(?:, 0x([0-9a-f]+))?$")
_PENDING = re.compile(r"gsb0, 0x([0-9a-f]+)")


class DeadlockError(RuntimeError):
    """No warp can go on: the ways given to the warps do not belong together."""


@dataclass(frozen=True)
class Work:
    """What the warps do again and again. `ways`: the instructions of each consumer's warp, once round.

    `in_turn`: a barrier whose number is in a register is a consumer's turn at the tensor cores, passed to the
    next one. `tma_bytes`: moved through shared memory meanwhile. `reads_earlier`: predicated loads happen.
    """

    ways: tuple[tuple[Instruction, ...], ...]
    in_turn: bool = False
    tma_bytes: int = 0
    reads_earlier: bool = False


@dataclass(frozen=True)
class Steady:
    """Cycles of one round, in the steady state; how busy what was; what a warp waited for, in cycles of a round."""

    cycles: float
    busy: dict[str, float]
    waited: dict[str, float]


@dataclass
class _Warp:
    index: int
    way: tuple[Instruction, ...]
    at: int = 0
    rounds: int = 0
    ready: float = 0.0
    boards: list[float] = field(default_factory=lambda: [0.0] * NO_BOARD)
    groups: list[float] = field(default_factory=list)  # when committed products end
    starts: list[float] = field(default_factory=list)  # when queued products start
    phase: tuple[str, int] | None = None  # of the barrier at which it has arrived

    @property
    def next(self) -> Instruction:
        return self.way[self.at]


@dataclass
class _Barrier:
    """A named barrier: when its participants arrived. Or a turn: how often, and when last, it was given."""

    arrivals: list[float] = field(default_factory=list)
    given: int = 0
    given_at: float = 0.0


class Quarter:
    """The machine and its warps, somewhere in their work."""

    def __init__(self, work: Work, machine: Machine, background: float) -> None:
        self.work, self.machine = work, machine
        self.port = machine.shared_bytes * (1 - background)
        self.warps = [_Warp(index, way) for index, way in enumerate(work.ways)]
        self.pipes = dict.fromkeys(PIPE.values(), 0.0)
        self.tensor = self.shared = self.clock = 0.0
        self.busy = dict.fromkeys(("tensor", "issue", "mufu", "shared"), 0.0)
        self.waited: dict[str, float] = {}
        self.barriers: dict[str, _Barrier] = {"turn 0": _Barrier(given=1)}
        self.last = 0

    def step(self, rounds: int) -> None:
        """Issues the next instruction of the warp that can go first; of two, the one that went last."""
        running = [warp for warp in self.warps if warp.rounds < rounds]
        options = [(*self._earliest(warp), warp) for warp in running]
        when, reason, chosen = min(
            options, key=lambda o: (max(o[0], self.clock), o[2].index != self.last, o[2].index)
        )
        if when == NEVER:
            raise DeadlockError(f"all warps wait: {[str(w.next) for w in running]}")
        when = max(when, self.clock)
        if reason and when > chosen.ready:
            late = when - chosen.ready
            self.waited[reason] = self.waited.get(reason, 0.0) + late
        self._issue(chosen, when)
        self.clock, self.last = when + 1, chosen.index

    # ------------------------------------------------------------------ when

    def _earliest(self, warp: _Warp) -> tuple[float, str]:
        """Returns when the warp's next instruction may issue, and what it waits for."""
        i = warp.next
        reasons = [(warp.ready, "")]
        reasons += [(warp.boards[board], "scoreboard") for board in i.waits]
        if i.base in PIPE:
            reasons.append((self.pipes[PIPE[i.base]], PIPE[i.base]))
        time, reason = max(reasons, key=lambda r: r[0])
        later, why = time, reason
        if i.base == "HGMMA":
            later, why = self._room_in_queue(warp, time), "product queue"
        elif "DEPBAR" in i.name and (pending := _PENDING.search(i.operands)):
            keep = int(pending[1], 16)
            if len(warp.groups) > keep:
                later, why = max(time, warp.groups[-keep - 1]), f"products <= {keep}"
        elif i.name.startswith("BAR.SYNC"):
            later, why = self._past_barrier(warp, i, time)
        return (later, why) if later > time else (time, reason)

    def _room_in_queue(self, warp: _Warp, time: float) -> float:
        queued = sorted(start for start in warp.starts if start > time)
        queue = self.machine.product_queue
        return queued[-queue] if len(queued) >= queue else time

    def _past_barrier(self, warp: _Warp, i: Instruction, time: float) -> tuple[float, str]:
        if self._is_turn(i):
            turn = self.barriers.setdefault(f"turn {warp.index}", _Barrier())
            return (max(time, turn.given_at) if turn.given else NEVER), "turn"
        members = self._members(i)
        if not members:
            return time, ""
        if warp.phase is None:
            warp.phase = self._arrive(i, time)
        name, phase = warp.phase
        arrivals = self.barriers[name].arrivals
        if len(arrivals) < (phase + 1) * members:
            return NEVER, "meet"
        met = max(arrivals[phase * members : (phase + 1) * members])
        return max(time, met + self.machine.barrier_latency), "meet"

    def _arrive(self, i: Instruction, time: float) -> tuple[str, int]:
        name = i.operands.split(",")[0]
        barrier = self.barriers.setdefault(name, _Barrier())
        barrier.arrivals.append(time)
        return name, (len(barrier.arrivals) - 1) // self._members(i)

    def _is_turn(self, i: Instruction) -> bool:
        return self.work.in_turn and i.operands.startswith("R")

    def _members(self, i: Instruction) -> int:
        """Returns how many warpgroups meet; 0: others take part, who are not modelled."""
        match = _BARRIER.match(i.operands)
        threads = int(match[2], 16) if match and match[2] else 128 * len(self.warps)
        return 0 if threads % 128 or threads > 128 * len(self.warps) else threads // 128

    # ------------------------------------------------------------------ what

    def _issue(self, warp: _Warp, time: float) -> None:
        i, machine = warp.next, self.machine
        self.busy["issue"] += 1
        done, read = time + self._latency(i), time + machine.read_latency
        if i.base in ("LDS", "LDSM", "STS", "STSM"):
            self._move(i, time)
            done, read = self.shared + machine.shared_latency, self.shared + machine.read_latency
        elif i.base == "HGMMA":
            self._multiply(warp, i, time)
        elif i.base in PIPE:
            interval = getattr(machine, f"{_INTERVAL.get(PIPE[i.base], PIPE[i.base])}_interval")
            self.pipes[PIPE[i.base]] = time + interval
            self.busy["mufu"] += interval if i.base == "MUFU" else 0
        elif i.base == "BAR":
            self._pass_barrier(warp, i, time)
        elif i.base in ("MEMBAR", "FENCE"):
            read = done
        for board, when in ((i.result_board, done), (i.read_board, read)):
            if board < NO_BOARD - 1:
                warp.boards[board] = max(warp.boards[board], when)
        warp.ready = time + max(1, i.stall)
        warp.at += 1
        if warp.at == len(warp.way):
            warp.at, warp.rounds = 0, warp.rounds + 1

    def _latency(self, i: Instruction) -> int:
        if i.base in ("LDG", "LD"):
            skipped = bool(i.predicate) and not self.work.reads_earlier
            return self.machine.result_latency if skipped else self.machine.global_latency
        name = _LATENCY.get(i.base)
        return getattr(self.machine, f"{name}_latency") if name else self.machine.result_latency

    def _move(self, i: Instruction, time: float) -> None:
        """A warp of each of four quarters. Lanes of a row load the same pair of statistics: an eighth."""
        width = (
            16 if ".128" in i.name or i.base in ("STSM", "LDSM") else 8 if ".64" in i.name else 4
        )
        warp_bytes = 32 * width / (8 if i.base == "LDS" and width < 16 else 1)
        self.shared = max(self.shared, time) + 4 * warp_bytes / self.port
        self.busy["shared"] += 4 * warp_bytes
        self.pipes["mio"] = time + 4 * warp_bytes / self.machine.shared_bytes

    def _multiply(self, warp: _Warp, i: Instruction, time: float) -> None:
        """A product of a warpgroup: bound by the tensor cores, or by its operands in shared memory."""
        columns = int(_PRODUCT.findall(i.name)[0])
        a_from_shared = i.operands.split(",")[1].strip().startswith("gdesc")
        cycles = 2 * 64 * columns * 16 / self.machine.product_flops
        moved = 32 * columns + (32 * 64 if a_from_shared else 0)
        begin = max(self.tensor, time + self.machine.product_start)
        self.shared = max(self.shared, begin) + moved / self.port
        self.tensor = begin + max(cycles, moved / self.port)
        self.busy["tensor"] += cycles
        self.busy["shared"] += moved
        warp.starts = [start for start in warp.starts if start > time] + [begin]
        if "gsb0" in i.operands:
            warp.groups = [*warp.groups[-8:], self.tensor + self.machine.product_drain]

    def _pass_barrier(self, warp: _Warp, i: Instruction, time: float) -> None:
        arrives = "ARV" in i.name
        if not arrives and not i.name.startswith("BAR.SYNC"):
            return
        if self._is_turn(i):
            receiver = (warp.index + 1) % len(self.warps) if arrives else warp.index
            turn = self.barriers.setdefault(f"turn {receiver}", _Barrier())
            turn.given += 1 if arrives else -1
            if arrives:
                turn.given_at = time + self.machine.barrier_latency
        elif arrives and self._members(i):
            self._arrive(i, time)
        warp.phase = None


_INTERVAL = {"mio": "shuffle"}
_LATENCY = {
    "MUFU": "mufu", "SHFL": "shuffle", "SYNCS": "wait", "LDC": "constant", "ULDC": "constant",
    "MEMBAR": "fence", "FENCE": "fence", "S2R": "register",
}  # fmt: skip


def steady_state(work: Work, machine: Machine, rounds: int = 12) -> Steady:
    """Returns the steady state after the first third of `rounds`.

    TMA takes its share of the shared-memory port: what it moves in a round over what the port can in the cycles of
    a round, which depend on it. Raises: DeadlockError.
    """
    steady, share = _run(work, machine, rounds, 0.0), 0.0
    for _ in range(SHARE_STEPS):
        wanted = min(MAX_SHARE, work.tma_bytes / (machine.shared_bytes * steady.cycles))
        if abs(wanted - share) < SHARE_TOLERANCE:
            break
        share = wanted
        steady = _run(work, machine, rounds, share)
    return steady


def _run(work: Work, machine: Machine, rounds: int, background: float) -> Steady:
    quarter = Quarter(work, machine, background)
    while min(warp.rounds for warp in quarter.warps) < max(2, rounds // 3):
        quarter.step(rounds + 2)
    begin, before = quarter.clock, dict(quarter.busy)
    done = sum(warp.rounds for warp in quarter.warps)
    quarter.waited = {}
    while min(warp.rounds for warp in quarter.warps) < rounds:
        quarter.step(rounds + 2)
    count = (sum(warp.rounds for warp in quarter.warps) - done) / len(quarter.warps)
    cycles = quarter.clock - begin
    busy = {name: (total - before[name]) / cycles for name, total in quarter.busy.items()}
    busy["shared"] = busy["shared"] / machine.shared_bytes + background
    by_length = sorted(quarter.waited.items(), key=lambda item: -item[1])
    waited = {reason: total / count / len(quarter.warps) for reason, total in by_length}
    return Steady(cycles / count, busy, waited)
