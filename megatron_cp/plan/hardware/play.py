"""Plays a pass event by event: who computes, sends, receives and waits, and when.

    rank 0  compute   [ stage 0 ][ stage 1   ]      [ stage 2 ]      a rank enters stage i when it has left
            comm      [cast 1][cast 2        ][ret 1]                stage i-1 and its rows have arrived

The rules are those of `runtime/dist_attn.py`. On entering stage i a rank starts the transfers of stage i+1
and computes; then it starts the results of stage i on their way home and waits for those of stage i-1. The
transfers of one rank run one after the other, in the order in which it starts them, as in one queue of a
communication library. In a hop a rank sends all its messages at once, on all levels (`links.py`) at the same
time; a receiver has its rows when every sender has sent them, and no sooner than its own links can take them.
While rows move, a rank computes more slowly (`contention`). Before and after the stages comes the head split.

Compared with `cost.py` ranks wait here for late senders, and a link is busy in one direction only: the
result is usually a little above or below the predicted time. Nothing here was measured; sources of the
constants stand in `topology.py`. `overlap=False` never computes while rows travel: the published ring
measurements of UltraAttn (SC'25) behave like that.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_cp.mask import interval
from megatron_cp.mask.interval import IntArray
from megatron_cp.plan.hardware.links import Links
from megatron_cp.plan.schema import BoolArray, FloatArray

COMPUTE, NODE_OUT, NODE_IN, LINK_OUT, LINK_IN = RESOURCES = (
    "compute",
    "network out",
    "network in",
    "node link out",
    "node link in",
)
LEVELS = ((LINK_OUT, LINK_IN), (NODE_OUT, NODE_IN))


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


@dataclass(frozen=True, eq=False)
class Sends:
    """What ranks send at once, in one hop."""

    ends: IntArray
    """Who sends to whom: `[2, pairs]`."""
    takes: FloatArray
    """Seconds of sending and of receiving on each level: `[2, P, levels]`."""
    longest: FloatArray
    """The same on the slowest level: `[2, P]`."""
    latency: FloatArray
    """Seconds until anything is there, of each sender, for the way back, and of each receiver: `[2, P]`."""
    takes_part: BoolArray
    """Whether a rank sends or receives: `[P]`."""
    what: str = ""

    @classmethod
    def of_stages(
        cls, requests: IntArray, stage: IntArray, num_stages: int, num_ranks: int, links: Links
    ) -> "list[Sends | None]":
        """Returns what each stage sends, for rows of one byte; None where it sends nothing.

        `requests[i]`, (owner, reader, ids), is for stage `stage[i]`. All stages are counted at once.
        """
        src, dst, start, stop = requests.T
        rows, level = (stop - start).astype(np.float64), links.level(src, dst)
        first = num_ranks * stage  # every stage has ranks of its own
        moved = links.moved(first + src, first + dst, rows, num_stages * num_ranks, level)
        takes = links.seconds(moved.reshape(2, num_stages, num_ranks, -1))
        longest = takes.max(axis=3)
        late = np.array(links.latency)[level]
        latency = np.zeros((2, num_stages, num_ranks))
        takes_part = np.zeros((num_stages, num_ranks), dtype=bool)
        for of_end, rank in zip(latency, (src, dst), strict=True):
            np.maximum.at(of_end, (stage, rank), late)
            takes_part[stage, rank] = True
        pairs = interval.distinct((first + src) * num_ranks + dst)
        ends = np.stack([pairs // num_ranks % num_ranks, pairs % num_ranks])
        edges = pairs.searchsorted(num_ranks**2 * np.arange(num_stages + 1)).tolist()
        return [
            cls(ends[:, low:high], takes[:, i], longest[:, i], latency[:, i], takes_part[i])
            if low < high
            else None
            for i, (low, high) in enumerate(itertools.pairwise(edges))
        ]

    def shown(self) -> FloatArray:
        """Returns the seconds inside a node, then out of it, each way: `[2, 2, P]`.

        Out of a node and out of a rack rows go at the same time: what takes longer is shown.
        """
        return np.stack([self.takes[:, :, 0], self.takes[:, :, 1:].max(axis=2)])

    def there(self, row_bytes: int, what: str = "") -> "Sends":
        """Returns rows of so many bytes on their way."""
        takes, longest = self.takes * row_bytes, self.longest * row_bytes
        return Sends(self.ends, takes, longest, self.latency, self.takes_part, what)

    def back(self, row_bytes: int, what: str = "") -> "Sends":
        """Returns as many results on their way home."""
        takes, longest = self.takes[::-1] * row_bytes, self.longest[::-1] * row_bytes
        return Sends(self.ends[::-1], takes, longest, self.latency[::-1], self.takes_part, what)


@dataclass(frozen=True, eq=False)
class Script:
    """A pass as it is played."""

    seconds: FloatArray
    """What each stage computes: `[stages, P]`."""
    casts: Sequence[Sequence[Sends]]
    """The rows of each stage on their way, hop after hop."""
    returns: Sequence[Sequence[Sends]]
    """The results on their way home after each stage."""
    exchange: float
    """Seconds in which heads are exchanged, before and after the stages together."""
    groups: IntArray | None
    """Who exchanges heads with whom, `[groups, degree]`; None where each rank here stands for a whole group."""


@dataclass
class _Clock:
    """What ranks are doing: their compute and communication queues, and what is written down."""

    contention: float
    links: Links
    num_ranks: int
    num_traced: int
    compute_free: FloatArray = field(init=False)
    comm_free: FloatArray = field(init=False)
    moving: FloatArray = field(init=False)  # seconds of the transfers begun since the last stage
    computing: FloatArray = field(init=False)
    started: list[Sends] = field(default_factory=list)
    exchanging: dict[str, float] = field(default_factory=dict)
    timeline: list[list[Event]] = field(init=False)

    def __post_init__(self) -> None:
        self.compute_free, self.comm_free, self.moving, self.computing = np.zeros(
            (4, self.num_ranks)
        )
        self.timeline = [[] for _ in range(self.num_traced)]

    def run(self, ready: FloatArray, seconds: FloatArray, what: str) -> FloatArray:
        """Computes on every rank from when it is ready; returns when each is done.

        What travels meanwhile takes its share of the processors.
        """
        start = np.maximum(ready, self.compute_free)
        slowed = seconds + self.contention * self.moving
        self.moving = np.zeros_like(self.moving)
        self.compute_free = start + slowed
        self.computing += slowed
        self.note(COMPUTE, start, self.compute_free, what)
        return self.compute_free

    def transfer(self, hops: Sequence[Sends], ready: FloatArray) -> FloatArray:
        """Starts hops, one after the other; returns when each rank is through the last."""
        for sends in hops:
            ready = self.hop(sends, ready)
        return ready

    def hop(self, sends: Sends, ready: FloatArray) -> FloatArray:
        """Sends messages; returns when each rank is through. One that neither sends nor receives is not held up."""
        (src, dst), (_, latency) = sends.ends, sends.latency
        self.moving = self.moving + sends.longest.max(axis=0)
        start = np.maximum(ready, self.comm_free)
        sent, received = start + sends.longest
        np.maximum.at(received, dst, sent[src])
        received += latency
        through = np.where(sends.takes_part, np.maximum(sent, received), ready)
        self.comm_free = np.where(sends.takes_part, through, self.comm_free)
        self.started.append(sends)
        if self.num_traced:
            self._note_hop(sends, start, received)
        return through

    def _note_hop(self, sends: Sends, start: FloatArray, received: FloatArray) -> None:
        for names, (out, into) in zip(LEVELS, sends.shown(), strict=True):
            self.note(names[0], start, start + out, sends.what)
            # the link is idle while senders are late
            begin = received - sends.latency[1] - into
            self.note(names[1], begin, np.where(into > 0, received, begin), sends.what)

    def exchange(self, script: Script, now: FloatArray, what: str) -> FloatArray:
        """Exchanges tokens against heads; all members of a group enter and leave together."""
        if not script.exchange:
            return now
        start, seconds, is_inside = now.copy(), script.exchange / 2, True
        if script.groups is not None:
            start[script.groups] = now[script.groups].max(axis=1, keepdims=True)
            nodes = script.groups // self.links.node_size
            is_inside = bool((nodes == nodes[:, :1]).all())
        end = start + seconds
        for name in LEVELS[not is_inside]:
            self.exchanging[name] = 2 * seconds
            self.note(name, start, end, what)
        self.comm_free = np.maximum(self.comm_free, end)
        return end

    def busy(self) -> dict[str, FloatArray]:
        """Returns the seconds that each rank's resources are in use."""
        shown = [sends.shown() for sends in self.started]
        total = np.sum([np.zeros((2, 2, self.num_ranks)), *shown], axis=0)
        links = {
            name: seconds + self.exchanging.get(name, 0.0)
            for names, both in zip(LEVELS, total, strict=True)
            for name, seconds in zip(names, both, strict=True)
        }
        return {COMPUTE: self.computing, **links}

    def note(self, resource: str, start: FloatArray, end: FloatArray, what: str) -> None:
        """Writes down what the traced ranks do; nothing lasts no time."""
        for rank in range(self.num_traced):
            if end[rank] > start[rank]:
                self.timeline[rank].append(
                    Event(resource, float(start[rank]), float(end[rank]), what)
                )


def play(
    script: Script, links: Links, contention: float, *, overlap: bool = True, num_traced: int = 0
) -> Simulation:
    """Returns how a pass goes; a timeline for the first `num_traced` ranks. O(messages + stages x ranks)."""
    num_ranks = script.seconds.shape[1]
    clock = _Clock(contention, links, num_ranks, min(num_traced, num_ranks))
    now = _run(script, clock, overlap)
    timeline = tuple(
        tuple(sorted(events, key=lambda event: (event.start, event.end)))
        for events in clock.timeline
    )
    return Simulation(float(now.max()), now, clock.computing, clock.busy(), timeline)


def played_seconds(script: Script, links: Links, contention: float) -> float:
    """Returns when the last rank is done, and nothing else: the search asks for it hundreds of times."""
    clock = _Clock(contention, links, script.seconds.shape[1], num_traced=0)
    return float(_run(script, clock, overlap=True).max())


def _run(script: Script, clock: _Clock, overlap: bool) -> FloatArray:
    """Returns when each rank is done: `[P]`."""
    stages, zero = range(len(script.seconds)), np.zeros(clock.num_ranks)
    now = clock.exchange(script, zero, "heads for tokens")
    arrived = clock.transfer(script.casts[0], now)
    clock.moving = zero  # nothing is computed yet
    home = now  # when the results of the stage before are home
    for index in stages:
        now = np.maximum(now, arrived)
        next_cast = script.casts[index + 1] if index + 1 in stages else ()
        if overlap:
            arrived = clock.transfer(next_cast, now)
        else:
            now = np.maximum(now, home)
            clock.moving = zero
        done = clock.run(now, script.seconds[index], f"stage {index}")
        now = np.maximum(done, home)
        home = clock.transfer(script.returns[index], done)
        if not overlap:
            arrived = clock.transfer(next_cast, home)
    return clock.exchange(script, np.maximum(now, home), "tokens for heads")
