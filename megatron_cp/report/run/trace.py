"""The stages of attention as they went in this run: one forward and one backward call, read from `--profile`'s traces.

    rank0.steps11-12.pt.trace.json    cp forward: send rows, stage 0 | wait for rows | attend | send rows, stage 1 ...
    rank1.steps11-12.pt.trace.json    (runtime/spans.py names the ranges)

Only what lies in a training step counts (`cp step 11`). Every call begins with sending the rows of stage 0. Ranks make
the same calls in the same order, so the n-th call of one is the n-th of all. Shown is the call of median duration. Of
a trace from a GPU the device's ranges are taken, not the host's; no page of one was looked at yet.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron_cp.plan.hardware.play import COMPUTE, Event
from megatron_cp.plan.schema import PassName
from megatron_cp.report.figures.timeline import MAX_RANKS_DRAWN, SENDS, WAITS
from megatron_cp.report.run.record import Run

MAX_TRACE_BYTES = 512_000_000
_FILE = re.compile(r"rank(\d+)\.steps(\d+)-(\d+)\.pt\.trace\.json")
_SPAN = re.compile(
    r"cp (forward|backward): (send rows|wait for rows|wait for results|attend), stage (\d+)"
)
_STEP = re.compile(r"cp step \d+")
_LANES = {"attend": COMPUTE, "send rows": SENDS}
SHARES = ("attend", "wait")
_SHARE_OF = {COMPUTE: "attend", WAITS: "wait"}
_ON_DEVICE = "gpu_user_annotation"
PASSES: tuple[PassName, ...] = ("forward", "backward")
Call = list[Event]
_UNREADABLE = (
    ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError, OSError
)  # fmt: skip


@dataclass(frozen=True)
class _Ranges:
    """What is needed of one rank's trace."""

    spans: Sequence[tuple[str, PassName, Event]]
    """Kind, pass and event of every named range, by begin; times are those of the machine's clock."""
    steps_seconds: float
    """Of its training steps, by the host's ranges."""


@dataclass(frozen=True)
class MeasuredPass:
    """One call of attention as it went on the ranks that wrote traces."""

    ranks: tuple[int, ...]
    """Global ranks, all of one context-parallel group."""
    timeline: tuple[tuple[Event, ...], ...]
    """The events of each, in seconds from when the first of them began."""
    seconds: float
    number: int
    """Which call it is, from 1."""
    num_calls: int


@dataclass(frozen=True)
class MeasuredStages:
    """What the traces of a run show, or why they show nothing."""

    passes: Mapping[PassName, MeasuredPass]
    steps: str = ""
    on_device: bool = False
    problem: str = ""
    shares: Mapping[str, float] = field(default_factory=dict)
    """Of the traced steps' time, mean over these ranks: `attend` computing, `wait` for rows; empty for no trace."""


def measured_stages(run: Run) -> MeasuredStages | None:
    """Returns the measured stages of the newest traced steps; None for a run that wrote no trace."""
    named = run.argument("tensorboard_dir")
    folder = Path(named) if isinstance(named, str) and Path(named).is_dir() else run.folder
    found = [(match, path) for path in folder.iterdir() if (match := _FILE.fullmatch(path.name))]
    if not found:
        return None
    newest = max((int(match[2]), int(match[3])) for match, _ in found)
    files = {int(m[1]): path for m, path in found if (int(m[2]), int(m[3])) == newest}
    ranks = _one_group(sorted(files), run.section("layout"))[:MAX_RANKS_DRAWN]
    steps = f"{newest[0]} to {newest[1]}"
    try:
        traces = {
            rank: _ranges(_read(files[rank])) for rank in ranks
        }  # one file in memory at a time
        on_device = all(any(cat == _ON_DEVICE for cat, *_ in one.spans) for one in traces.values())
        passes = {name: _middle_call(traces, name, on_device) for name in PASSES}
        parts = [_shares(one, on_device) for one in traces.values()]
    except _UNREADABLE as error:
        words = f"traces of steps {steps} cannot be read ({error})"
        return MeasuredStages({}, steps, problem=words)
    shown = {name: one for name, one in passes.items() if one is not None}
    nothing = "" if shown else f"traces of steps {steps} show no stage of attention"
    shares = {key: fmean(one[key] for one in parts) for key in SHARES} if shown else {}
    return MeasuredStages(shown, steps, on_device, nothing, shares)


def _one_group(ranks: Sequence[int], layout: Mapping[str, Any]) -> list[int]:
    """Returns the ranks that share a context-parallel group with the first (Megatron's order: tensor, then context)."""
    tensor, context = (max(1, int(layout.get(name) or 1)) for name in ("tensor", "context"))
    first = ranks[0]
    return [
        rank
        for rank in ranks
        if rank % tensor == first % tensor
        and rank // (tensor * context) == first // (tensor * context)
    ]


def _read(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    if size > MAX_TRACE_BYTES:
        raise ValueError(
            f"{path.name} has {size:,} bytes, at most {MAX_TRACE_BYTES:,} are read; profile fewer steps"
        )
    content = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} is no trace; profile again")
    return content


def _ranges(trace: Mapping[str, Any]) -> _Ranges:
    """Returns what is needed of a trace, and keeps nothing else of it."""
    base = float(trace.get("baseTimeNanoseconds", 0)) * 1e-9
    found: list[tuple[str, PassName, Event]] = []
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    named = [event for event in events if _STEP.fullmatch(str(event.get("name")))]
    steps = [(float(event["ts"]), float(event["ts"]) + float(event["dur"])) for event in named]
    for event in events:
        match = _SPAN.fullmatch(str(event.get("name")))
        if match is None or not any(a <= float(event["ts"]) <= b for a, b in steps):
            continue
        start = base + float(event["ts"]) * 1e-6
        lane = _LANES.get(match[2], WAITS)
        what = Event(
            lane, start, start + float(event["dur"]) * 1e-6, f"{match[2]}, stage {match[3]}"
        )
        name: PassName = "forward" if match[1] == "forward" else "backward"
        found.append((str(event.get("cat")), name, what))
    seconds = sum(float(event["dur"]) * 1e-6 for event in named if event.get("cat") != _ON_DEVICE)
    return _Ranges(sorted(found, key=lambda one: one[2].start), seconds)


def _shares(trace: _Ranges, on_device: bool) -> dict[str, float]:
    """Returns which part of a rank's traced steps attention computed, and which it waited, by the steps' own ranges."""
    spent = dict.fromkeys(SHARES, 0.0)
    for kind, _, event in trace.spans:
        key = _SHARE_OF.get(event.resource)
        if key is not None and (kind == _ON_DEVICE) == on_device:
            spent[key] += event.end - event.start
    steps = trace.steps_seconds
    return {key: seconds / steps if steps else 0.0 for key, seconds in spent.items()}


def _calls(events: Iterable[Event]) -> list[Call]:
    """Returns the events of each call."""
    calls: list[Call] = []
    for event in events:
        if event.what == "send rows, stage 0":
            calls.append([])
        if calls:  # before the first begin the trace holds the end of a call
            calls[-1].append(event)
    return calls


def _middle_call(
    traces: Mapping[int, _Ranges], name: PassName, on_device: bool
) -> MeasuredPass | None:
    """Returns the call of median duration, from the first rank's begin to the last rank's end."""
    by_rank = [
        _calls(
            event
            for kind, pass_name, event in trace.spans
            if pass_name == name and (kind == _ON_DEVICE) == on_device
        )
        for trace in traces.values()
    ]
    num_calls = min(map(len, by_rank))
    if not num_calls:
        return None

    def bounds(number: int) -> tuple[float, float]:
        events = [event for calls in by_rank for event in calls[number]]
        return min(e.start for e in events), max(e.end for e in events)

    order = sorted(range(num_calls), key=lambda n: bounds(n)[1] - bounds(n)[0])
    number = order[(num_calls - 1) // 2]
    first, last = bounds(number)
    timeline = tuple(
        tuple(Event(e.resource, e.start - first, e.end - first, e.what) for e in calls[number])
        for calls in by_rank
    )
    return MeasuredPass(tuple(traces), timeline, last - first, number + 1, num_calls)
