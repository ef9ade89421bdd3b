"""Line charts: values over steps, and shares over document lengths.

Every line carries its points, so that `chart.js` can show their values.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megatron_cp.report.draw.svg import (
    Markup,
    Scale,
    Value,
    line,
    nice_ticks,
    path,
    picture,
    rect,
    tag,
    text,
    tick_words,
)

MAX_POINTS = 500
LONGEST_NAME = 40
LEGEND_ROW = 19.0
CHARACTER = 9.4  # pixels of a character where a narrow page makes them large
LEFT, RIGHT, TOP, BOTTOM = 54.0, 14.0, 26.0, 42.0
Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """A named line: finite points in order of x, a colour 1 ... 8, and how it is drawn."""

    name: str
    points: tuple[Point, ...]
    colour: int = 1
    style: str = "line"
    """"line", "faint" (behind a smooth line of the same colour; not in the legend) or "dots"."""


@dataclass(frozen=True, kw_only=True)
class Axes:
    """Size, words and range of a chart; a None side of the y range follows the data."""

    x_label: str
    y_label: str
    width: float = 580.0
    height: float = 250.0
    x_log2: bool = False
    y_low: float | None = None
    y_high: float | None = None
    x_text: Callable[[float], str] | None = None
    y_text: Callable[[float], str] | None = None
    """How a tick is written; None: with the digits that tell it from the next."""
    level: float | None = None
    """A dashed reference line at this y."""
    mark: tuple[float, str] | None = None
    """A dashed vertical line at this x, with words."""
    top: float = TOP
    """Where the plot begins, below the legend."""


def finite_points(xs: Sequence[float | None], ys: Sequence[float | None]) -> tuple[Point, ...]:
    """Returns the pairs in which both numbers are there and finite."""
    pairs = ((x, y) for x, y in zip(xs, ys, strict=True) if x is not None and y is not None)
    return tuple((float(x), float(y)) for x, y in pairs if math.isfinite(x) and math.isfinite(y))


def thin(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """Returns at most about `limit` points: of every bucket the lowest and the highest stay."""
    if len(points) <= limit:
        return list(points)
    size = math.ceil(2 * len(points) / limit)
    kept: list[Point] = []
    for start in range(0, len(points), size):
        bucket = points[start : start + size]
        low, high = min(bucket, key=lambda p: p[1]), max(bucket, key=lambda p: p[1])
        kept += sorted({low, high})
    return kept


def smoothed(points: Sequence[Point], window: int) -> tuple[Point, ...]:
    """Returns the mean of the `window` points around each point (fewer at both ends)."""
    sums, half = [0.0], window // 2
    for _, y in points:
        sums.append(sums[-1] + y)
    spans = [(max(0, i - half), min(len(points), i + half + 1)) for i in range(len(points))]
    means = ((sums[stop] - sums[start]) / (stop - start) for start, stop in spans)
    return tuple((x, mean) for (x, _), mean in zip(points, means, strict=True))


def line_chart(label: str, series: Sequence[Series], axes: Axes) -> Markup:
    """Returns a chart of all series on one pair of axes; a sentence in it where there is no point."""
    drawn = [one for one in series if one.points]
    if not drawn:
        words = text(axes.width / 2, axes.height / 2, "no values logged", "muted", "middle")
        return picture(axes.width, axes.height, label, words)
    legend, extra = _legend(drawn, axes)
    axes = replace(axes, height=axes.height + extra, top=axes.top + extra)
    x, y = _scales(drawn, axes)
    parts = [*legend, *_y_axis(y, axes), *_x_axis(x, axes)]
    if axes.level is not None and y.low <= axes.level <= y.high:
        parts.append(line(x.start, y(axes.level), x.end, y(axes.level), "mean"))
    if axes.mark is not None and x.low <= axes.mark[0] <= x.high:
        parts += _mark(x(axes.mark[0]), axes)
    for one in drawn:
        parts += _draw(one, x, y)
    frame: dict[str, Value] = {
        "data_chart": axes.x_label,
        "data_top": axes.top,
        "data_bottom": axes.height - BOTTOM,
    }
    return picture(axes.width, axes.height, label, *parts, **frame)


def _scales(drawn: Sequence[Series], axes: Axes) -> tuple[Scale, Scale]:
    xs = [x for one in drawn for x, _ in one.points]
    ys = [y for one in drawn for _, y in one.points]
    low = min(ys) if axes.y_low is None else axes.y_low
    high = max(ys) if axes.y_high is None else axes.y_high
    if axes.level is not None:
        low, high = min(low, axes.level), max(high, axes.level)
    spare = (high - low) * 0.06 or abs(high) * 0.05 or 1.0
    low = low - spare if axes.y_low is None else low
    high = high + spare if axes.y_high is None else high
    x = Scale(min(xs), max(xs), LEFT, axes.width - RIGHT, log=axes.x_log2)
    return x, Scale(low, high, axes.height - BOTTOM, axes.top)


def _y_axis(y: Scale, axes: Axes) -> list[Markup]:
    parts = [text(2, 11, axes.y_label, "muted")]
    ticks = nice_ticks(y.low, y.high)
    for value, words in zip(ticks, _words(ticks, axes.y_text), strict=True):
        parts.append(line(LEFT, y(value), axes.width - RIGHT, y(value), "grid"))
        parts.append(text(LEFT - 7, y(value) + 4, words, anchor="end"))
    return parts


def _x_axis(x: Scale, axes: Axes) -> list[Markup]:
    bottom = axes.height - BOTTOM
    if axes.x_log2:
        low, high = math.ceil(math.log2(x.low)), math.floor(math.log2(x.high))
        stride = 1 if high - low <= 10 else 2
        ticks = [2.0**power for power in range(low, high + 1, stride)]
    else:
        ticks = nice_ticks(x.low, x.high, 6)
    parts = [line(LEFT, bottom, axes.width - RIGHT, bottom, "axis")]
    parts += [
        text(x(value), bottom + 17, words, anchor="middle")
        for value, words in zip(ticks, _words(ticks, axes.x_text), strict=True)
    ]
    middle = (x.start + x.end) / 2
    return [*parts, text(middle, axes.height - 3, axes.x_label, "muted", "middle")]


def _words(ticks: list[float], to_text: Callable[[float], str] | None) -> list[str]:
    return tick_words(ticks) if to_text is None else [to_text(tick) for tick in ticks]


def _mark(at: float, axes: Axes) -> list[Markup]:
    assert axes.mark is not None
    near_end = at > axes.width * 0.7
    words = text(
        at - 5 if near_end else at + 5,
        axes.top + 10,
        axes.mark[1],
        "muted",
        "end" if near_end else "",
    )
    return [line(at, axes.top, at, axes.height - BOTTOM, "mean"), words]


def _draw(one: Series, x: Scale, y: Scale) -> list[Markup]:
    kept = thin(one.points)
    points = [(x(a), y(b)) for a, b in kept]
    colour = (one.colour - 1) % 8 + 1
    parts = []
    if one.style != "dots" and len(points) > 1:
        style = "faint" if one.style == "faint" else "line"
        parts.append(path(points, f"{style} l{colour}"))
    if one.style == "dots" or len(points) == 1:
        parts += [tag("circle", cx=a, cy=b, r=3.0, class_=f"s{colour}") for a, b in points]
    if one.style == "line+dots":
        parts += [tag("circle", cx=a, cy=b, r=2.6, class_=f"s{colour}") for a, b in points]
    values = [
        [float(f"{a:.7g}"), float(f"{b:.6g}"), round(at, 1)]
        for (a, b), (at, _) in zip(kept, points, strict=True)
    ]
    packed = json.dumps(values, separators=(",", ":"))
    return [tag("g", *parts, data_name=one.name, data_points=packed)]


def _legend(drawn: Sequence[Series], axes: Axes) -> tuple[list[Markup], float]:
    """Returns the names of the lines, in as many rows as they need below the axis's name, and the height of these."""
    named = [one for one in drawn if one.style != "faint"]
    parts: list[Markup] = []
    if len(named) < 2:
        return parts, 0.0
    at, y = 2.0, 4.0 + LEGEND_ROW
    for one in named:
        name = one.name if len(one.name) <= LONGEST_NAME else one.name[: LONGEST_NAME - 1] + "…"
        width = 26 + CHARACTER * len(name)
        if at + width > axes.width and at > 2.0:
            at, y = 2.0, y + LEGEND_ROW
        parts.append(rect(at, y, 10, 8, f"s{(one.colour - 1) % 8 + 1}", rx=2))
        parts.append(text(at + 14, y + 7.5, name))
        at += width
    return parts, y - 4.0
