"""Who is busy with what, and when: a picture of ranks, simulated or measured, and a trace for Perfetto or chrome://tracing.

rank 0  compute  [stage 0][stage 1    ]   [stage 2 ]      one lane per resource that is used at all
        network     [keys of stage 1]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from megatron_cp.plan.schema import PassName
from megatron_cp.plan.study.simulate import RESOURCES, Event, Simulation, simulate_pass
from megatron_cp.report.draw.html import Figure, Table
from megatron_cp.report.draw.svg import (
    Markup,
    Scale,
    join,
    line,
    nice_ticks,
    picture,
    plain,
    rect,
    short,
    text,
)
from megatron_cp.report.figures.view import PackView

MAX_RANKS_DRAWN = 8
MAX_EVENTS_DRAWN = 4000
LEFT, WIDTH, LANE = 150.0, 900.0, 11.0
SENDS, WAITS = "sends", "waits"  # what a trace of a run tells of transfers
_LANES = (*RESOURCES, SENDS, WAITS)
_COLOURS = dict(zip(_LANES, ("s1", "s2", "s4", "s3", "s7", "s2", "s6"), strict=True))
_COLUMNS = ("plan and pass", "rank", "resource", "what", "begins at ms", "ends at ms")


class Timeline(Protocol):
    """What ranks do in one pass."""

    @property
    def seconds(self) -> float:
        """Returns when the last rank is done."""

    @property
    def ranks(self) -> Sequence[int]:
        """Returns which ranks are shown."""

    @property
    def timeline(self) -> Sequence[Sequence[Event]]:
        """Returns the events of each."""


Panels = Sequence[tuple[str, Timeline]]


def stages_figure(pack: PackView, measured: Panels = (), words: str = "") -> Figure | None:
    """Returns the stages of a pass: measured, where there are some, above those of the plans, simulated.

    The plans are ours and the first baseline's, both passes. None where there is nothing to show. `words` say what
    was measured.
    """
    plans = [(view.words, view.computed) for view in pack.plans[:2] if view.computed is not None]
    if pack.ours.cp_size == 1 or pack.ours.computed is None:
        plans = []
    passes: tuple[PassName, ...] = ("forward", "backward")
    kind = "predicted: " if measured else ""
    runs = [
        (f"{kind}{title}, {name}", simulate_pass(plan, name, num_traced=MAX_RANKS_DRAWN))
        for title, plan in plans
        for name in passes
    ]
    if not runs and not measured:
        return None
    pictures, captions = [], [words] if words else []
    if measured:
        pictures.append(timeline_picture(measured, "measured timeline of ranks"))
    if runs:
        topology = plans[0][1].config.topology
        machine = topology if isinstance(topology, str) else topology.name
        captions.append(
            f"{'Below: one' if measured else 'One'} layer on {machine}, simulated from the plans: what each rank "
            "computes and what travels meanwhile. Gaps in the compute lane are waiting."
        )
        pictures.append(timeline_picture(runs))
    title = "Stages, measured and predicted" if measured and runs else "Stages"
    return Figure(
        f"{title}, measured" if measured and not runs else title,
        " ".join(captions),
        join(pictures),
        Table(_COLUMNS, [*_rows(measured), *_rows(runs)]),
        12,
        predicted=not measured,
    )


def _rows(panels: Panels) -> list[tuple[object, ...]]:
    """Returns the numbers behind a timeline."""
    return [
        (title, rank, event.resource, event.what, event.start * 1e3, event.end * 1e3)
        for title, run in panels
        for rank, events in zip(run.ranks, run.timeline, strict=True)
        for event in events
    ]


def timeline_picture(panels: Panels, label: str = "simulated timeline of ranks") -> Markup:
    """Returns one panel per pass (title, ranks), one above the other, on one time scale."""
    longest = max(run.seconds for _, run in panels) or 1.0
    scale = Scale(0, longest * 1e3, LEFT, WIDTH - 10)
    parts, top = [], 0.0
    for title, run in panels:
        panel, used = _panel(title, run, scale, top)
        parts.append(panel)
        top += used + 14
    parts.append(_legend(panels, top))
    return picture(WIDTH, top + 18, label, *parts)


def _panel(title: str, run: Timeline, scale: Scale, top: float) -> tuple[Markup, float]:
    """Returns a panel and its height."""
    lanes = _used(run)
    ranks = run.timeline[:MAX_RANKS_DRAWN]
    first = top + 22
    height = len(lanes) * LANE
    parts = [text(0, top + 13, f"{title}: {plain(run.seconds * 1e3, 4)} ms", "strong")]
    budget = MAX_EVENTS_DRAWN // max(1, len(ranks))
    for number, (rank, events) in enumerate(zip(run.ranks, ranks, strict=False)):
        y = first + number * (height + 5)
        parts.append(text(0, y + height / 2 + 4, f"rank {rank}"))
        parts.append(rect(LEFT, y, scale.end - LEFT, height, "empty"))
        parts += [
            text(LEFT - 5, y + lane * LANE + LANE - 2, name, "tiny muted", "end")
            for lane, name in enumerate(lanes)
        ]
        parts += [_bar(event, lanes, scale, y) for event in _longest(events, budget)]
    bottom = first + len(ranks) * (height + 5)
    for value in nice_ticks(0, scale.high, 8):
        parts.append(line(scale(value), first, scale(value), bottom, "grid"))
        parts.append(text(scale(value), bottom + 10, f"{short(value)} ms", "tiny muted", "middle"))
    end = scale(run.seconds * 1e3)
    parts.append(line(end, first - 2, end, bottom, "mean"))
    return join(parts), bottom + 14 - top


def _bar(event: Event, lanes: Sequence[str], scale: Scale, y: float) -> Markup:
    start, end = scale(event.start * 1e3), scale(event.end * 1e3)
    hint = f"{event.what}: {plain(event.start * 1e3, 4)} to {plain(event.end * 1e3, 4)} ms"
    lane = lanes.index(event.resource)
    return rect(
        start, y + lane * LANE + 1, max(end - start, 0.5), LANE - 2, _COLOURS[event.resource], hint
    )


def _longest(events: Sequence[Event], budget: int) -> list[Event]:
    """Returns at most `budget` events: the shortest cannot be seen anyway."""
    return sorted(events, key=lambda event: event.start - event.end)[:budget]


def _used(run: Timeline) -> list[str]:
    seen = {event.resource for events in run.timeline[:MAX_RANKS_DRAWN] for event in events}
    return [name for name in _LANES if name in seen]


def _legend(panels: Panels, y: float) -> Markup:
    names = [name for name in _LANES if any(name in _used(run) for _, run in panels)]
    parts, at = [], LEFT
    for name in names:
        parts.append(rect(at, y + 2, 10, 8, _COLOURS[name], rx=2))
        parts.append(text(at + 14, y + 10, name))
        at += 34 + 6.3 * len(name)
    return join(parts)


def chrome_trace(passes: Mapping[str, Simulation], title: str) -> dict[str, object]:
    """Returns the traced ranks as trace events: a process per rank, a thread per resource, times in us.

    Passes follow one another. `otherData` says that nothing was measured.
    """
    events: list[dict[str, object]] = []
    num_ranks = max((len(run.timeline) for run in passes.values()), default=0)
    for rank in range(num_ranks):
        events.append(_named("process_name", rank, 0, f"rank {rank} (simulated)"))
        events += [_named("thread_name", rank, lane, name) for lane, name in enumerate(RESOURCES)]
    begin = 0.0
    for name, run in passes.items():
        for rank, timeline in enumerate(run.timeline):
            events += [_complete(event, name, rank, begin) for event in timeline]
        begin += run.seconds
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"title": title, "simulated": "times come from a model; nothing was measured"},
    }


def _named(kind: str, rank: int, lane: int, name: str) -> dict[str, object]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": lane, "args": {"name": name}}


def _complete(event: Event, pass_name: str, rank: int, begin: float) -> dict[str, object]:
    return {
        "ph": "X",
        "name": f"{pass_name}: {event.what}",
        "cat": event.resource,
        "pid": rank,
        "tid": RESOURCES.index(event.resource),
        "ts": (begin + event.start) * 1e6,
        "dur": (event.end - event.start) * 1e6,
    }
