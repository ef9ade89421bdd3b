"""Pictures of a plan: who computes how much of which chunk, and who sends how much to whom."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_cp.mask.interval import IntArray
from megatron_cp.report.draw.style import HEAT_STEPS
from megatron_cp.report.draw.svg import (
    EMPTY,
    Markup,
    escape,
    join,
    line,
    picture,
    rect,
    short,
    short_bytes,
    short_tokens,
    tag,
    text,
)
from megatron_cp.report.figures.view import PlanView

FloatArray = NDArray[np.float64]
MAX_ROWS_LABELLED = 16
MAX_NUMBERS = 8  # ranks up to which a matrix has its values written in
FIRST = 16.0  # where the rows of a map begin, below its heads
MAP_WIDTH, BARS_WIDTH, BAR = 512.0, 228.0, 118.0


def heat_step(value: float, high: float) -> int:
    """Returns the colour step 1 ... HEAT_STEPS-1 of a value in `(0, high]`, 0 for nothing."""
    if value <= 0 or high <= 0:
        return 0
    return max(1, min(HEAT_STEPS - 1, int(np.ceil(value / high * (HEAT_STEPS - 1)))))


# ---------------------------------------------------------------------- rank x chunk


def heat_maps(named: Sequence[tuple[str, PlanView, FloatArray]], bounds: IntArray) -> Markup:
    """Returns one panel per plan, one above the other, on one colour scale.

    `named`: title, plan, area `[P, chunks]`. Bars at the right, or below where a page is narrow: area and tokens of
    each rank, on one scale over all panels.
    """
    high = max(float(heat.max()) for _, _, heat in named)
    widest = max(float(view.load.max()) for _, view, _ in named)
    parts = []
    for title, view, heat in named:
        row_height = max(4.0, min(52.0, 128.0 / view.cp_size))
        height = FIRST + view.cp_size * row_height + 2
        cells = join(_cells(view, heat, bounds, (high, row_height)))
        bars = join(_bars(view, widest, row_height))
        parts.append(tag("p", escape(title), class_="panel-title"))
        sides = (
            _side(MAP_WIDTH, height, f"area by rank and chunk, {title}", cells),
            _side(BARS_WIDTH, height, f"area and tokens of each rank, {title}", bars),
        )
        parts.append(tag("div", *sides, class_="heat"))
    legend = picture(MAP_WIDTH, 14, "colours of the cells", _heat_legend(high))
    return tag("div", *parts, tag("div", legend, class_="heat"), class_="heats")


def _side(width: float, height: float, label: str, content: Markup) -> Markup:
    """Returns a picture that shares a row with another in proportion to its width, so that both have one scale."""
    view = f"0 0 {width:g} {height:.2f}"
    return tag(
        "svg",
        content,
        viewBox=view,
        role="img",
        aria_label=label,
        style=f"flex:{width:g} 1 0;max-width:{width * 1.25:g}px",
    )


def _cells(
    view: PlanView, heat: FloatArray, bounds: IntArray, frame: tuple[float, float]
) -> list[Markup]:
    """Returns the map of one plan; `frame` is its largest cell, and the height of a row."""
    high, row_height = frame
    left, map_width, num_ranks = 60.0, MAP_WIDTH - 60.0, view.cp_size
    parts = [text(left, FIRST - 5, "chunks of the pack →", "tiny muted")]
    edges = left + bounds / bounds[-1] * map_width
    gap = 1.0 if row_height > 8 else 0.4
    owned = _owned(view, bounds)
    for rank in range(num_ranks):
        y = FIRST + rank * row_height
        if num_ranks <= MAX_ROWS_LABELLED or rank % 8 == 0:
            parts.append(text(left - 8, y + row_height / 2 + 4, f"rank {rank}", anchor="end"))
        parts.append(rect(left, y, map_width, row_height - gap, "empty"))
        for chunk in np.flatnonzero((heat[rank] > 0) | owned[rank]).tolist():
            parts.append(
                rect(
                    float(edges[chunk]),
                    y,
                    float(edges[chunk + 1] - edges[chunk]),
                    row_height - gap,
                    f"h{heat_step(heat[rank, chunk], high)}",
                    f"rank {rank}, tokens {bounds[chunk]}–{bounds[chunk + 1]}: "
                    f"{short(heat[rank, chunk])} pairs",
                )
            )
    return parts


def _bars(view: PlanView, widest: float, row_height: float) -> list[Markup]:
    """Returns each rank's load over the mean, the mean, and its tokens."""
    parts = [
        text(0, FIRST - 5, f"{view.load_words} / mean", "tiny muted"),
        text(BAR + 42, FIRST - 5, "tokens", "tiny muted"),
    ]
    gap = 1.0 if row_height > 8 else 0.4
    for rank in range(view.cp_size):
        parts += _rank_bars(view, rank, FIRST + rank * row_height, row_height - gap, widest)
    mean = BAR / max(widest, 1.0)
    bottom = FIRST + view.cp_size * row_height
    return [*parts, line(mean, FIRST - 2, mean, bottom, "mean")]


def _rank_bars(view: PlanView, rank: int, y: float, height: float, widest: float) -> list[Markup]:
    """Returns the rank's load over the mean, and its tokens."""
    share = float(view.load[rank])
    thick = min(height, 18.0)
    middle = y + height / 2
    parts = [
        rect(0, middle - thick / 2, share / max(widest, 1.0) * BAR, thick, "bar", rx=1.5),
        rect(BAR + 42, middle - thick / 2, 30, thick, "bar-quiet", rx=1.5),
    ]
    if view.cp_size <= MAX_ROWS_LABELLED:
        parts.append(text(BAR + 4, middle + 4, f"{share:.2f}"))
        parts.append(text(4, middle + 4, f"rank {rank}", "tiny in-bar"))
        tokens = short_tokens(view.tokens.shape[1])
        parts.append(text(BAR + 76, middle + 4, tokens))
    return parts


def _owned(view: PlanView, bounds: IntArray) -> NDArray[np.bool_]:
    """Returns whether a rank owns a token of a chunk: `[P, chunks]`."""
    owned = np.zeros((view.cp_size, len(bounds) - 1), dtype=bool)
    for rank, ids in enumerate(view.tokens):
        owned[rank, np.unique(np.searchsorted(bounds, ids, side="right") - 1)] = True
    return owned


def _heat_legend(high: float) -> Markup:
    parts = [text(60, 11, "area of a cell: 0", "muted")]
    x = 60 + 128.0
    for step in range(HEAT_STEPS):
        parts.append(rect(x + step * 15, 2, 15, 10, f"h{step}"))
    parts.append(text(x + HEAT_STEPS * 15 + 6, 11, f"{short(high)} pairs", "muted"))
    return join(parts)


# ---------------------------------------------------------------------- rank x rank


def matrices(panels: Sequence[tuple[str, str, FloatArray]]) -> Markup:
    """Returns matrices of bytes on one colour scale: (title, subtitle, `[src, dst]`); rows as needed."""
    side, left, top = 168.0, 30.0, 62.0
    high = max(float(matrix.max()) for _, _, matrix in panels)
    drawn = []
    for title, subtitle, matrix in panels:
        parts = (
            text(left - 22, 22, title, "strong"),
            text(left - 22, 38, subtitle),
            _matrix(matrix, high, (left, top, side)),
        )
        width = max(left + side + 6, left + 6.6 * max(len(title), len(subtitle)))
        drawn.append(picture(width, top + side + 4, f"bytes from rank to rank, {title}", *parts))
    return tag("div", *drawn, class_="panels")


def _matrix(matrix: FloatArray, high: float, box: tuple[float, float, float]) -> Markup:
    x, y, side = box
    count = len(matrix)
    cell = side / count
    gap = 1.0 if cell > 6 else 0.0
    parts = [rect(x, y, side, side, "empty")]
    for src in range(count):
        if count <= MAX_ROWS_LABELLED or src % 8 == 0:
            at = (src + 0.5) * cell
            parts.append(text(x - 6, y + at + 4, src, "tiny muted", "end"))
            parts.append(text(x + at, y - 5, src, "tiny muted", "middle"))
        for dst in np.flatnonzero(matrix[src] > 0).tolist():
            step = heat_step(matrix[src, dst], high)
            left, top = x + dst * cell, y + src * cell
            hint = f"rank {src} to rank {dst}: {short_bytes(matrix[src, dst])}"
            parts.append(rect(left, top, cell - gap, cell - gap, f"h{step}", hint))
    if count <= MAX_NUMBERS:
        parts += [_number(matrix, src, dst, high, box) for src, dst in np.argwhere(matrix > 0)]
    return join(parts)


def _number(
    matrix: FloatArray, src: int, dst: int, high: float, box: tuple[float, float, float]
) -> Markup:
    x, y, side = box
    cell = side / len(matrix)
    value = matrix[src, dst] / byte_unit(high)[0]
    words = f"{value:.1f}" if value < 9.95 else f"{value:.0f}"
    if words == "0.0":  # its colour and hint say more
        return EMPTY
    shade = f"t{heat_step(matrix[src, dst], high)}"
    return text(
        x + (dst + 0.5) * cell, y + (src + 0.5) * cell + 4, words, f"tiny {shade}", "middle"
    )


def byte_unit(high: float) -> tuple[float, str]:
    """Returns the unit in which the largest value has at most four digits before the point."""
    for size, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if high >= size:
            return size, name
    return 1.0, "B"
