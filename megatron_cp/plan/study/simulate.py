"""Plays a plan's pass event by event on a topology: who computes, sends, receives and waits, and when.

    rank 0  compute   [ stage 0 ][ stage 1   ]      [ stage 2 ]      a rank enters stage i when it has left
            comm      [cast 1][cast 2        ][ret 1]                stage i-1 and its rows have arrived

The rules are those of `runtime/dist_attn.py`. On entering stage i a rank starts the transfers of stage i+1
and computes; then it starts the results of stage i on their way home and waits for those of stage i-1. The
transfers of one rank run one after the other, in the order in which it starts them, as in one queue of a
communication library. In a hop a rank sends all its messages at once, on all levels (`hardware/links.py`) at the same
time; a receiver has its rows when every sender has sent them, and no sooner than its own links can take them.
While rows move, a rank computes more slowly (`contention`). Before and after the stages comes the head split.

Compared with `cost.py` ranks wait here for late senders, and a link is busy in one direction only: the
result is usually a little above or below the predicted time. Nothing here was measured; sources of the
constants stand in `topology.py`. `overlap=False` never computes while rows travel: the published ring
measurements of UltraAttn (SC'25) behave like that.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from megatron_cp.config import Topology
from megatron_cp.mask.interval import IntArray
from megatron_cp.plan.hardware.cost import compute_seconds, head_split_seconds
from megatron_cp.plan.hardware.links import Links
from megatron_cp.plan.hardware.makespan import weighted_areas
from megatron_cp.plan.hardware.rows import FP32_BYTES, RowSize, row_size
from megatron_cp.plan.hardware.speeds import check_rank_speeds, rank_speeds
from megatron_cp.plan.hardware.topology import get_topology
from megatron_cp.plan.schema import (
    DST,
    SIDES,
    SRC,
    START,
    STOP,
    FloatArray,
    PassName,
    PlanData,
    Side,
    Transfer,
)

COMPUTE, NODE_OUT, NODE_IN, LINK_OUT, LINK_IN = RESOURCES = (
    "compute",
    "network out",
    "network in",
    "node link out",
    "node link in",
)


@dataclass(frozen=True)
class Event:
    """One rank busy with one thing on one resource, in seconds from the start of the pass."""

    resource: str
    start: float
    end: float
    what: str


@dataclass(frozen=True)
class Simulation:
    """How a pass went."""

    seconds: float
    """When the last rank is done."""
    finished: FloatArray
    """When each rank is done: `[P]`."""
    computing: FloatArray
    """Seconds that each rank computes: `[P]`."""
    busy: dict[str, FloatArray]
    """Seconds that each rank's resources are in use: `[P]` each."""
    timeline: tuple[tuple[Event, ...], ...]
    """The events of each rank that was asked for, in order of start."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Returns the ranks of the timeline: the first ones."""
        return tuple(range(len(self.timeline)))

    @property
    def exposed(self) -> FloatArray:
        """Returns the seconds in which a rank does not compute before the last one is done: `[P]`."""
        return self.seconds - self.computing


@dataclass
class _Clock:
    """What ranks are doing: their compute and communication queues, and what is written down."""

    topology: Topology
    links: Links
    num_ranks: int
    num_traced: int
    compute_free: FloatArray
    comm_free: FloatArray
    computing: FloatArray
    busy: dict[str, FloatArray]
    moving: FloatArray  # seconds of the transfers that were started since the last stage
    timeline: list[list[Event]] = field(default_factory=list)

    def run(self, ready: FloatArray, seconds: FloatArray, what: str) -> FloatArray:
        """Computes on every rank from when it is ready; returns when each is done.

        What travels meanwhile takes its share of the processors.
        """
        start = np.maximum(ready, self.compute_free)
        slowed = seconds + self.topology.contention * self.moving
        self.moving = np.zeros_like(self.moving)
        self.compute_free = start + slowed
        self.computing += slowed
        self.note(COMPUTE, start, self.compute_free, what)
        return self.compute_free

    def hop(
        self, src: IntArray, dst: IntArray, size: FloatArray, ready: FloatArray, what: str
    ) -> FloatArray:
        """Sends `size[i]` bytes from `src[i]` to `dst[i]`; returns when each rank is through.

        A rank that neither sends nor receives is not held up.
        """
        links = self.links
        takes = links.seconds(links.moved(src, dst, size, self.num_ranks))  # [2, P, levels]
        # out of a node and out of a rack at the same time: what takes longer is shown
        takes = np.stack([takes[:, :, 0], takes[:, :, 1:].max(axis=2)], axis=2)
        self.moving = self.moving + np.maximum(takes[0].max(axis=1), takes[1].max(axis=1))
        takes_part = np.zeros(self.num_ranks, dtype=bool)
        takes_part[src] = takes_part[dst] = True
        start = np.maximum(ready, self.comm_free)
        sent = start + takes[0].max(axis=1)
        received = start + takes[1].max(axis=1)
        np.maximum.at(received, dst, sent[src])
        latency = np.zeros(self.num_ranks)
        np.maximum.at(latency, dst, np.array(links.latency)[links.level(src, dst)])
        received += latency
        through = np.where(takes_part, np.maximum(sent, received), ready)
        self.comm_free = np.where(takes_part, through, self.comm_free)
        for level, (out, into) in enumerate(((LINK_OUT, LINK_IN), (NODE_OUT, NODE_IN))):
            self.busy[out] += takes[0][:, level]
            self.busy[into] += takes[1][:, level]
            self.note(out, start, start + takes[0][:, level], what)
            # the link is idle while senders are late
            begin = received - latency - takes[1][:, level]
            self.note(into, begin, np.where(takes[1][:, level] > 0, received, begin), what)
        return through

    def note(self, resource: str, start: FloatArray, end: FloatArray, what: str) -> None:
        """Writes down what the traced ranks do; nothing lasts no time."""
        for rank in range(self.num_traced):
            if end[rank] > start[rank]:
                self.timeline[rank].append(
                    Event(resource, float(start[rank]), float(end[rank]), what)
                )


def simulate_pass(
    plan: PlanData,
    pass_name: PassName,
    *,
    topology: Topology | str | None = None,
    overlap: bool = True,
    num_traced: int = 0,
    gradient_bytes: int = FP32_BYTES,
) -> Simulation:
    """Returns how one pass of one layer goes; a timeline for the first `num_traced` ranks.

    `topology`: where to run it, by default that of the plan's config. `gradient_bytes`: see `row_size`.
    O(messages + stages x ranks).
    """
    row = get_topology(plan.config.topology if topology is None else topology)
    check_rank_speeds(replace(plan.config, topology=row), plan.cp_size)
    return _Player(plan, pass_name, row, overlap, num_traced, gradient_bytes).play()


class _Player:
    """Plays the stages of one pass."""

    def __init__(
        self,
        plan: PlanData,
        pass_name: PassName,
        topology: Topology,
        overlap: bool,
        num_traced: int,
        gradient_bytes: int,
    ):
        num_ranks = plan.cp_size
        self.gradient_bytes = gradient_bytes
        self.plan, self.pass_name, self.overlap = plan, pass_name, overlap
        self.pass_ = plan.get_pass(pass_name)
        self.degree = self.pass_.head_degree
        self.config = replace(plan.config, topology=topology)
        zero = np.zeros(num_ranks)
        busy = {name: np.zeros(num_ranks) for name in RESOURCES[1:]}
        num_traced = min(num_traced, num_ranks)
        self.clock = _Clock(
            topology, Links.of(topology), num_ranks, num_traced, zero, zero, zero.copy(), busy, zero,
            [[] for _ in range(num_traced)],
        )  # fmt: skip

    def play(self) -> Simulation:
        """Returns the whole pass."""
        plan, clock, stages = self.plan, self.clock, self.pass_.stages
        exchange = head_split_seconds(
            self.pass_.head_split, plan.own_rows, self.config, self.pass_name
        )
        areas = weighted_areas(plan, self.pass_name, clock.topology)
        seconds = compute_seconds(areas, self.config, self.pass_name)
        seconds = seconds / rank_speeds(self.config, plan.cp_size)
        now = self._exchange(np.zeros(plan.cp_size), exchange / 2, "heads for tokens")
        arrived = self._cast(0, now)
        clock.moving = np.zeros(plan.cp_size)  # nothing is computed yet
        home = now  # when the results of the stage before are home
        for index in range(len(stages)):
            now = np.maximum(now, arrived)
            if not self.overlap:
                now = np.maximum(now, home)
            if self.overlap and index + 1 < len(stages):
                arrived = self._cast(index + 1, now)
            if not self.overlap:
                clock.moving = np.zeros(plan.cp_size)
            done = clock.run(now, seconds[index], f"stage {index}")
            now = np.maximum(done, home)
            home = self._returns(index, done)
            if not self.overlap and index + 1 < len(stages):
                arrived = self._cast(index + 1, home)
        now = self._exchange(np.maximum(now, home), exchange / 2, "tokens for heads")
        timeline = tuple(
            tuple(sorted(events, key=lambda event: (event.start, event.end)))
            for events in clock.timeline
        )
        busy = {COMPUTE: clock.computing, **clock.busy}
        return Simulation(float(now.max()), now, clock.computing, busy, timeline)

    def _cast(self, index: int, ready: FloatArray) -> FloatArray:
        """Starts the transfers of a stage on every rank; returns when its rows are there."""
        for side in SIDES:
            cast = self.pass_.stages[index].cast(side)
            size = self._row_size(side).there
            for number, hop in enumerate(cast.hops if cast else ()):
                what = f"{_NAMES[side]} of stage {index}" + (f", hop {number}" if number else "")
                ready = self._move(hop.messages, size, ready, what)
        return ready

    def _returns(self, index: int, ready: FloatArray) -> FloatArray:
        """Starts the results of a stage on their way home; returns when they are there."""
        for side in SIDES:
            size = self._row_size(side).back
            if not size or not self.pass_.ends_chain(index, side):
                continue
            casts = [self.pass_.stages[i].cast(side) for i in self.pass_.chain(index, side)]
            for cast in reversed([cast for cast in casts if cast is not None]):
                ready = self._back(cast, size, ready, f"{_NAMES[side]} results of stage {index}")
        return ready

    def _row_size(self, side: Side) -> RowSize:
        return row_size(self.config, self.pass_name, side, self.degree, self.gradient_bytes)

    def _back(self, cast: Transfer, size: int, ready: FloatArray, what: str) -> FloatArray:
        for hop in reversed(cast.hops):
            messages = hop.messages[:, [DST, SRC, START, STOP]]
            ready = self._move(messages, size, ready, what)
        return ready

    def _move(self, messages: IntArray, size: int, ready: FloatArray, what: str) -> FloatArray:
        if not len(messages):
            return ready
        moved: FloatArray = (messages[:, STOP] - messages[:, START]) * np.float64(size)
        return self.clock.hop(messages[:, SRC], messages[:, DST], moved, ready, what)

    def _exchange(self, now: FloatArray, seconds: float, what: str) -> FloatArray:
        """Exchanges tokens against heads; all members of a group enter and leave together."""
        split = self.pass_.head_split
        if split is None or split.degree == 1:
            return now
        groups = np.array(split.groups)
        start = np.empty_like(now)
        start[groups] = now[groups].max(axis=1, keepdims=True)
        end = start + seconds
        nodes = groups // self.clock.topology.node_size
        is_inside = (nodes == nodes[:, :1]).all()
        for name in (LINK_OUT, LINK_IN) if is_inside else (NODE_OUT, NODE_IN):
            self.clock.busy[name] += seconds
            self.clock.note(name, start, end, what)
        self.clock.comm_free = np.maximum(self.clock.comm_free, end)
        return end


_NAMES: dict[Side, str] = {"q": "query rows", "k": "key rows"}
