import math
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_cp.report.draw.charts import Axes, Series, finite_points, line_chart, smoothed, thin
from megatron_cp.report.draw.html import MAX_CSV_ROWS, Table
from megatron_cp.report.draw.style import HEAT_STEPS
from megatron_cp.report.draw.svg import (
    Scale,
    escape,
    nice_ticks,
    plain,
    short,
    short_tokens,
    tag,
    tick_words,
)
from megatron_cp.report.figures.plan import heat_step

NUMBERS = st.floats(-1e6, 1e6)


@given(st.text())
def test_escaped_text_reads_back_as_its_printable_characters(words):
    element = ElementTree.fromstring(f"<p>{escape(words)}</p>")
    kept = "".join(c for c in words if c in "\n\t" or c.isprintable())
    assert (element.text or "") == kept


@given(st.text())
def test_attributes_cannot_be_left_by_any_text(words):
    element = ElementTree.fromstring(tag("g", title=words))
    assert list(element.attrib) == ["title"] and len(element) == 0


@given(NUMBERS, st.floats(1e-3, 1e6))
def test_ticks_lie_inside_the_range_and_are_evenly_spaced(low, width):
    ticks = nice_ticks(low, low + width)
    slack = 1e-6 * (abs(low) + width)
    assert all(low - slack <= tick <= low + width + slack for tick in ticks)
    if len(ticks) > 2:
        assert np.allclose(np.diff(ticks), ticks[1] - ticks[0], atol=slack)


def labels_of(chart, anchor):
    return re.findall(rf'<text [^>]*text-anchor="{anchor}"[^>]*>([^<]*)</text>', chart)


@pytest.mark.parametrize(
    ("points", "across", "up"),
    [
        (
            ((100_001.0, 10.82), (100_300.0, 10.84)),
            ["100.05k", "100.1k", "100.15k", "100.2k", "100.25k", "100.3k"],
            ["10.82", "10.825", "10.83", "10.835", "10.84"],
        ),
        (
            ((1.0, 2.312), (20.0, 2.334)),
            ["5", "10", "15", "20"],
            ["2.315", "2.32", "2.325", "2.33", "2.335"],
        ),
    ],
)
def test_labels_of_a_narrow_range_say_where_their_lines_lie(points, across, up):
    chart = line_chart("c", [Series("a", points)], Axes(x_label="x", y_label="y"))
    assert labels_of(chart, "middle") == [*across, "x"] and labels_of(chart, "end") == up


@given(NUMBERS, st.floats(1e-3, 1e6))
def test_no_two_ticks_have_the_same_words(low, width):
    words = tick_words(nice_ticks(low, low + width))
    assert len(set(words)) == len(words)


def test_logarithmic_scale_gives_equal_steps_for_equal_ratios():
    scale = Scale(1, 1024, 0, 100, log=True)
    assert [scale(2.0**power) for power in (0, 5, 10)] == pytest.approx([0, 50, 100])


@given(st.lists(NUMBERS, min_size=1, max_size=3000))
def test_thinned_points_keep_order_and_extremes(values):
    points = list(enumerate(values))
    kept = thin(points, 100)
    assert kept == sorted(kept, key=lambda point: point[0]) and set(kept) <= set(points)
    assert len(kept) <= max(100, 2)
    assert {min(values), max(values)} <= {y for _, y in kept}


@given(st.lists(NUMBERS, min_size=1, max_size=40), st.sampled_from([1, 3, 9]))
def test_smoothed_line_is_the_mean_of_the_points_around(values, window):
    points = [(float(i), value) for i, value in enumerate(values)]
    half = window // 2
    expected = [np.mean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]
    assert [y for _, y in smoothed(points, window)] == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_points_without_a_finite_number_are_left_out():
    assert finite_points([1, 2, None, 4], [1.0, math.nan, 3.0, math.inf]) == ((1.0, 1.0),)


def test_line_lies_where_the_axis_says():
    axes = Axes(x_label="x", y_label="y", width=580, height=250, y_low=0.0, y_high=10.0)
    chart = line_chart("c", [Series("a", ((0.0, 0.0), (10.0, 10.0)))], axes)
    (words,) = re.findall(r'<path d="M([^"]+)" class="line l1">', chart)
    (x0, y0), (x1, y1) = ([float(n) for n in pair.split()] for pair in words.split("L"))
    grid = [float(y) for y in re.findall(r'y1="([\d.]+)"[^>]*class="grid"', chart)]
    assert (y0, y1) == (max(grid), min(grid)) and x0 < x1


def test_chart_without_points_says_so():
    assert "no values logged" in line_chart("c", [Series("a", ())], Axes(x_label="", y_label=""))


@given(st.floats(0, 1e12), st.floats(1, 1e12))
def test_colour_grows_with_the_value_and_only_nothing_is_blank(value, high):
    step = heat_step(min(value, high), high)
    assert 0 <= step < HEAT_STEPS and (step == 0) == (value == 0)
    assert step <= heat_step(high, high) == HEAT_STEPS - 1


def test_numbers_for_people():
    assert [short(n) for n in (0, 0.00421, 999, 1234, 3.05e6)] == [
        "0",
        "0.00421",
        "999",
        "1.23k",
        "3.05M",
    ]
    assert [plain(n) for n in (0, 0.00421, 36.14, 99.96, 280.8, 2808.2)] == [
        "0",
        "0.00421",
        "36.1",
        "100",
        "281",
        "2,808",
    ]
    assert [plain(n, 4) for n in (1.23456, 280.84, 2808.2, 28082)] == [
        "1.235",
        "280.8",
        "2,808",
        "28,082",
    ]
    assert [short_tokens(n) for n in (5, 1024, 131072, 1 << 20)] == ["5", "1K", "128K", "1M"]


def test_csv_of_many_rows_is_thinned_evenly_and_keeps_both_ends():
    table = Table(("step", "value"), [(step, step * 0.5) for step in range(10 * MAX_CSV_ROWS)])
    lines = table.as_csv().splitlines()
    steps = [int(line.split(",")[0]) for line in lines[2:]]
    assert lines[0].startswith("#") and lines[1] == "step,value"
    assert steps[0] == 0 and steps[-1] == 10 * MAX_CSV_ROWS - 1
    assert len(steps) <= MAX_CSV_ROWS + 1
