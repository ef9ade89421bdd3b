"""Who is busy with what, and when: a picture of ranks, simulated or measured, and a trace for Perfetto or chrome://tracing.

rank 0  compute  [stage 0][stage 1    ]   [stage 2 ]      one lane per resource that is used at all
        network     [keys of stage 1]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_cp.plan.hardware.play import RESOURCES, Event, Simulation
from megatron_cp.plan.hardware.simulate import simulate_pass
from megatron_cp.plan.schema import PassName
from megatron_cp.report.draw.html import Figure, Table
from megatron_cp.report.draw.svg import (
    Markup,
    escape,
    join,
    nice_ticks,
    picture,
    plain,
    short,
    tag,
    text,
)
from megatron_cp.report.figures.view import PackView

MAX_RANKS_DRAWN = 8
MAX_EVENTS_DRAWN = 4000
LEFT, RIGHT, WIDTH, LANE = 124.0, 16.0, 900.0, 11.0
MOST_TICKS = 4  # about: numbers must not touch where a telephone leaves 200 pixels
LEAST_SEEN = 0.0006  # of the width: half a pixel
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
    """Returns one panel per pass (title, ranks), one above the other, on one time scale, as wide as there is room."""
    parts = []
    for title, words, panel in _panels(panels):
        parts.append(tag("p", escape(words), class_="panel-title"))
        high = f"height:{panel.height:.0f}px"
        names = tag(
            "svg", panel.names, style=f"flex:none;width:{LEFT:.0f}px;{high}", aria_hidden="true"
        )
        style = f"flex:1 1 0;min-width:0;overflow:visible;{high}"
        plot = tag("svg", panel.plot, role="img", aria_label=title, style=style)
        parts.append(tag("div", names, plot, class_="lanes"))
    return tag("div", *parts, role="group", aria_label=label, class_="timeline")


def timeline_drawing(panels: Panels) -> Markup:
    """Returns the same as one drawing of a fixed width, for a file that stands alone."""
    parts, top = [], 0.0
    for _, words, panel in _panels(panels):
        width = WIDTH - LEFT - RIGHT
        plot = tag("svg", panel.plot, x=LEFT, width=width, height=panel.height, overflow="visible")
        parts.append(text(0, top + 13, words, "strong"))
        parts.append(tag("g", panel.names, plot, transform=f"translate(0 {top + 22:.0f})"))
        top += panel.height + 36
    return picture(WIDTH, top, "simulated timeline of ranks", *parts)


@dataclass(frozen=True)
class _Panel:
    """One pass: the names of ranks and lanes, and beside them what happens, in parts of whatever width is left."""

    names: Markup
    plot: Markup
    height: float


def _panels(panels: Panels) -> list[tuple[str, str, _Panel]]:
    """Returns title, title with duration, and drawing of each pass."""
    longest = max(run.seconds for _, run in panels) or 1.0
    return [
        (title, f"{title}: {plain(run.seconds * 1e3, 4)} ms", _panel(run, longest * 1e3))
        for title, run in panels
    ]


def _panel(run: Timeline, longest_ms: float) -> _Panel:
    lanes = _used(run)
    ranks = run.timeline[:MAX_RANKS_DRAWN]
    height = len(lanes) * LANE
    budget = MAX_EVENTS_DRAWN // max(1, len(ranks))
    names, plot = [], []
    for number, (rank, events) in enumerate(zip(run.ranks, ranks, strict=False)):
        y = 2 + number * (height + 5)
        names.append(text(0, y + height / 2 + 4, f"rank {rank}"))
        plot.append(tag("rect", x=0, y=y, width="100%", height=height, class_="empty"))
        names += [
            text(LEFT - 5, y + lane * LANE + LANE - 2, name, "tiny muted", "end")
            for lane, name in enumerate(lanes)
        ]
        plot += [_bar(event, lanes, longest_ms, y) for event in _longest(events, budget)]
    bottom = 2 + len(ranks) * (height + 5)
    names.append(text(LEFT - 9, bottom + 11, "ms", "tiny muted", "end"))
    for value in nice_ticks(0, longest_ms, MOST_TICKS):
        at = _share(value, longest_ms)
        plot.append(tag("line", x1=at, x2=at, y1=0, y2=bottom, class_="grid"))
        words = escape(short(value))
        plot.append(
            tag("text", words, x=at, y=bottom + 11, class_="tiny muted", text_anchor="middle")
        )
    end = _share(run.seconds * 1e3, longest_ms)
    plot.append(tag("line", x1=end, x2=end, y1=0, y2=bottom, class_="mean"))
    return _Panel(join(names), join(plot), bottom + 16)


def _share(value: float, longest: float) -> str:
    """Returns a place or a width in per cent of the room beside the names."""
    return f"{value / longest:.3%}"


def _bar(event: Event, lanes: Sequence[str], longest_ms: float, y: float) -> Markup:
    start, end = event.start * 1e3, event.end * 1e3
    hint = f"{event.what}: {plain(start, 4)} to {plain(end, 4)} ms"
    return tag(
        "rect",
        tag("title", escape(hint)),
        x=_share(start, longest_ms),
        y=y + lanes.index(event.resource) * LANE + 1,
        width=_share(max(end - start, longest_ms * LEAST_SEEN), longest_ms),
        height=LANE - 2,
        class_=_COLOURS[event.resource],
    )


def _longest(events: Sequence[Event], budget: int) -> list[Event]:
    """Returns at most `budget` events: the shortest cannot be seen anyway."""
    return sorted(events, key=lambda event: event.start - event.end)[:budget]


def _used(run: Timeline) -> list[str]:
    seen = {event.resource for events in run.timeline[:MAX_RANKS_DRAWN] for event in events}
    return [name for name in _LANES if name in seen]


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
