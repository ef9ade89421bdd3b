"""Curves of a run: loss, balance, step time, and two runs laid over each other."""

from __future__ import annotations

import bisect
import math

import numpy as np

from megatron_cp.report.draw.charts import Axes, Series, finite_points, line_chart, smoothed
from megatron_cp.report.draw.html import Figure, Table
from megatron_cp.report.draw.svg import count_of, plain
from megatron_cp.report.figures.view import USUAL_WORDS
from megatron_cp.report.run.record import LOSS, Run

_STEP = "iteration"


def loss_figure(run: Run) -> Figure:
    """Returns the training loss, plain and smoothed, and the loss on held-out documents."""
    points = finite_points(*run.column(LOSS))
    window = max(1, len(points) // 30) | 1
    held_out = finite_points(*run.column(run.held_out_loss))
    name = "training" if window == 1 else f"training, mean of {window} steps logged"
    series = [
        Series("training, each step logged", points, 1, "faint"),
        Series(name, smoothed(points, window), 1),
        Series("held-out documents", held_out, 2, "line+dots"),
    ]
    at = dict(held_out)
    trained = dict(points)
    steps = sorted({*trained, *at})
    rows = [(int(x), trained.get(x, ""), at.get(x, "")) for x in steps]
    axes = Axes(x_label=_STEP, y_label="loss per token (nats)")
    return Figure(
        title="Loss",
        caption="Should fall and flatten. Held-out documents are never trained on: a growing gap to "
        "the training curve would be memorising.",
        picture=line_chart("training and held-out loss", series, axes),
        table=Table((_STEP, LOSS, run.held_out_loss), rows),
    )


def balance_figure(run: Run) -> Figure:
    """Returns the balance of steps logged, worst micro-batch, beside that of two usual splits of the same packs."""
    points = finite_points(*run.column("cp/area_max_over_mean"))
    zigzag = finite_points(*run.column("cp/zigzag_area_max_over_mean"))
    per_document = finite_points(*run.column("cp/per_document_area_max_over_mean"))
    values = [y for _, y in points]
    words = (
        f"Median {np.median(values):.3f}, 99% of the steps logged at or below {np.percentile(values, 99):.3f}. "
        if values
        else ""
    )
    axes = Axes(
        x_label=_STEP,
        y_label="max / mean area",
        level=1.0,
        y_high=max([1.1, *values, *(y for _, y in (*zigzag, *per_document))]) if values else None,
    )
    usual = {"zigzag": dict(zigzag), USUAL_WORDS: dict(per_document)}
    series = [
        Series("this run", points, 1),
        Series("zigzag on the same packs", zigzag, 2),
        Series(USUAL_WORDS, per_document, 3),
    ]
    return Figure(
        title="Balance by step",
        caption=f"{words}1 (dashed) is perfect: every rank waits for the busiest. Worst micro-batch "
        "of a step; counted.",
        picture=line_chart("balance by step", series, axes),
        table=Table(
            (_STEP, "max over mean area", *usual),
            [(int(x), y, *(at.get(x, "") for at in usual.values())) for x, y in points],
        ),
    )


def gradient_figure(run: Run) -> Figure:
    """Returns the gradient norm before clipping, plain and smoothed."""
    points = finite_points(*run.column("grad-norm"))
    window = max(1, len(points) // 30) | 1
    name = "gradient norm" if window == 1 else f"mean of {window} steps logged"
    series = [
        Series("each step logged", points, 1, "faint"),
        Series(name, smoothed(points, window), 1),
    ]
    clip = run.argument("clip_grad")
    level = float(clip) if isinstance(clip, (int, float)) and clip else None
    words = f"Clipped at {level:g} (dashed). " if level is not None else ""
    axes = Axes(x_label=_STEP, y_label="gradient norm", y_low=0.0, level=level)
    return Figure(
        title="Gradient norm",
        caption=f"{words}Before clipping. Flat or slowly falling is good; spikes are batches unlike the "
        "others, growth is a learning rate too high.",
        picture=line_chart("gradient norm by step", series, axes),
        table=Table((_STEP, "grad-norm"), [(int(x), y) for x, y in points]),
    )


def step_time_figure(run: Run) -> Figure:
    """Returns seconds per step, a mean of the steps that a row tells of."""
    points = finite_points(*run.column("iteration-time"))
    values = [y for _, y in points]
    middle = f"Median {plain(float(np.median(values)))} s. " if values else ""
    axes = Axes(
        x_label=_STEP,
        y_label="seconds per step",
        y_low=0.0,
        y_high=_without_spikes(values),
    )
    inside = tuple((x, min(y, axes.y_high or y)) for x, y in points)
    cut = sum(y > (axes.y_high or y) for y in values)
    drawn = "is" if cut == 1 else "are"
    above = f" {count_of(cut, 'point')} above the frame {drawn} drawn at its edge." if cut else ""
    mean = f"Each point is the mean of {run.interval} steps. " if run.interval > 1 else ""
    return Figure(
        title="Step time",
        caption=f"{middle}{mean}Measured. Flat is good; spikes are checkpoints, evaluation or other users "
        f"of the machine.{above}",
        picture=line_chart("seconds per step", [Series("step time", inside, 1)], axes),
        table=Table((_STEP, "seconds"), [(int(x), y) for x, y in points]),
    )


def _without_spikes(values: list[float]) -> float | None:
    """Returns an upper end that a few slow steps do not decide."""
    if not values:
        return None
    return float(min(max(values), 3 * np.percentile(values, 90))) * 1.05


def comparison_figures(run: Run, other: Run) -> tuple[Figure, Figure]:
    """Returns both losses in one chart, and their difference at the steps that both logged."""
    mine, theirs = finite_points(*run.column(LOSS)), finite_points(*other.column(LOSS))
    names = (run.name, other.name) if run.name != other.name else ("this run", "the other")
    overlaid = line_chart(
        "losses of two runs",
        [Series(names[0], mine, 1), Series(names[1], theirs, 2)],
        Axes(x_label=_STEP, y_label="training loss"),
    )
    logged = common_steps(*(tuple(zip(*one.logged(LOSS), strict=True)) for one in (run, other)))
    rows = [(x, a, b) for x, a, b in logged if math.isfinite(a - b)]
    broken = len(logged) - len(rows)
    without = f"; at {broken} more a loss is not finite" if broken else ""
    gaps = tuple((x, a - b) for x, a, b in rows)
    largest = max((abs(gap) for _, gap in gaps), default=float("nan"))
    difference = line_chart(
        "difference of the losses",
        [Series("difference", gaps, 5)],
        Axes(x_label=_STEP, y_label="difference", level=0.0),
    )
    table = Table((_STEP, *names), [(int(x), a, b) for x, a, b in rows])
    gap_table = Table((_STEP, "difference"), [(int(x), gap) for x, gap in gaps])
    return (
        Figure(
            "Loss of two runs",
            "The same data and seed should give the same curve whatever the number of ranks.",
            overlaid,
            table,
        ),
        Figure(
            "Difference of the two losses",
            f"First minus second at {len(gaps)} common steps; the largest is {largest:.2g}{without}. Rounding "
            "wanders around 0, an error drifts away from it.",
            difference,
            gap_table,
        ),
    )


def common_steps(
    mine: tuple[tuple[float, float], ...], theirs: tuple[tuple[float, float], ...]
) -> list[tuple[float, float, float]]:
    """Returns (step, mine, theirs) for the steps that both have."""
    steps = [x for x, _ in theirs]
    found = []
    for x, y in mine:
        index = bisect.bisect_left(steps, x)
        if index < len(steps) and steps[index] == x:
            found.append((x, y, theirs[index][1]))
    return found
