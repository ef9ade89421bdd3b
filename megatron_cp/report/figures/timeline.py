"""Who is busy with what, and when: a picture of simulated ranks, and a trace for Perfetto or chrome://tracing.

rank 0  compute  [stage 0][stage 1    ]   [stage 2 ]      one lane per resource that is used at all
        network     [keys of stage 1]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
    rect,
    short,
    text,
)
from megatron_cp.report.figures.view import PackView

MAX_RANKS_DRAWN = 8
MAX_EVENTS_DRAWN = 4000
LEFT, WIDTH, LANE = 150.0, 900.0, 11.0
_COLOURS = dict(zip(RESOURCES, ("s1", "s2", "s4", "s3", "s7"), strict=True))


def stages_figure(pack: PackView) -> Figure | None:
    """Returns the stages of our plan and of the first baseline, both passes; None where no plan is at hand."""
    plans = [(view.words, view.computed) for view in pack.plans[:2] if view.computed is not None]
    if not plans or pack.ours.cp_size == 1 or pack.ours.computed is None:
        return None
    passes: tuple[PassName, ...] = ("forward", "backward")
    runs = [
        (f"{words}, {name}", simulate_pass(plan, name, num_traced=MAX_RANKS_DRAWN))
        for words, plan in plans
        for name in passes
    ]
    rows = [
        (title, rank, event.resource, event.what, event.start * 1e3, event.end * 1e3)
        for title, run in runs
        for rank, events in enumerate(run.timeline)
        for event in events
    ]
    topology = plans[0][1].config.topology
    machine = topology if isinstance(topology, str) else topology.name
    caption = (
        f"One layer on {machine}, simulated from the plans: what each rank computes and what travels meanwhile. Gaps "
        "in the compute lane are waiting."
    )
    columns = ("plan and pass", "rank", "resource", "what", "begins at ms", "ends at ms")
    drawn = timeline_picture(runs)
    return Figure("Stages", caption, drawn, Table(columns, rows), 12, predicted=True)


def timeline_picture(panels: Sequence[tuple[str, Simulation]]) -> Markup:
    """Returns one panel per simulation (title, traced ranks), one above the other, on one time scale."""
    longest = max(run.seconds for _, run in panels) or 1.0
    scale = Scale(0, longest * 1e3, LEFT, WIDTH - 10)
    parts, top = [], 0.0
    for title, run in panels:
        panel, used = _panel(title, run, scale, top)
        parts.append(panel)
        top += used + 14
    parts.append(_legend(panels, top))
    return picture(WIDTH, top + 18, "simulated timeline of ranks", *parts)


def _panel(title: str, run: Simulation, scale: Scale, top: float) -> tuple[Markup, float]:
    """Returns a panel and its height."""
    lanes = _used(run)
    ranks = run.timeline[:MAX_RANKS_DRAWN]
    first = top + 22
    height = len(lanes) * LANE
    parts = [text(0, top + 13, f"{title}: {run.seconds * 1e3:.4g} ms", "strong")]
    budget = MAX_EVENTS_DRAWN // max(1, len(ranks))
    for number, events in enumerate(ranks):
        y = first + number * (height + 5)
        parts.append(text(0, y + height / 2 + 4, f"rank {number}"))
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
    hint = f"{event.what}: {event.start * 1e3:.4g} to {event.end * 1e3:.4g} ms"
    lane = lanes.index(event.resource)
    return rect(
        start, y + lane * LANE + 1, max(end - start, 0.5), LANE - 2, _COLOURS[event.resource], hint
    )


def _longest(events: Sequence[Event], budget: int) -> list[Event]:
    """Returns at most `budget` events: the shortest cannot be seen anyway."""
    return sorted(events, key=lambda event: event.start - event.end)[:budget]


def _used(run: Simulation) -> list[str]:
    seen = {event.resource for events in run.timeline[:MAX_RANKS_DRAWN] for event in events}
    return [name for name in RESOURCES if name in seen]


def _legend(panels: Sequence[tuple[str, Simulation]], y: float) -> Markup:
    names = [name for name in RESOURCES if any(name in _used(run) for _, run in panels)]
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
