"""Measured stages on a run's page: those of the traces, of training steps alone, on one clock."""

import json
import tracemalloc
from pathlib import Path

import pytest

from megatron_cp.report.run.page import run_page
from megatron_cp.report.run.record import read_run
from megatron_cp.report.run.trace import measured_stages
from tests.report.runs import write_run

NAME = "rank{}.steps11-12.pt.trace.json"


def span(name: str, start: float, length: float, kind: str = "user_annotation") -> dict:
    return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": length}


def call(start: float, attend: float, pass_name: str = "forward", kind: str = "user_annotation"):
    """A call of one stage: rows leave for 10 us, are waited for 20, attention takes `attend`."""
    parts = (("send rows", 0, 10), ("wait for rows", 10, 20), ("attend", 30, attend))
    return [
        span(f"cp {pass_name}: {what}, stage 0", start + begin, length, kind)
        for what, begin, length in parts
    ]


def write_trace(folder: Path, rank: int, events: list, base: int = 0, name: str = NAME) -> None:
    content = {"baseTimeNanoseconds": base, "traceEvents": [{"ph": "M", "name": "x"}, *events]}
    (folder / name.format(rank)).write_text(json.dumps(content))


@pytest.fixture
def folder(tmp_path):
    write_run(tmp_path, cp_size=2)
    return tmp_path


def microseconds(events) -> list[tuple[str, float, float]]:
    return [(e.resource, round(e.start * 1e6, 1), round(e.end * 1e6, 1)) for e in events]


def test_the_call_of_median_duration_is_shown_on_the_clock_of_all_ranks(folder):
    step = [span("cp step 11", 0, 5000), span("cp step 12", 6000, 1000)]
    outside = call(5200, 1.0)  # an evaluation between the steps
    last = [span("cp forward: attend, stage 3", 1, 2)]  # the end of a call that the trace cut
    ours = [*last, *call(100, 500), *call(1000, 70), *call(2000, 90), *outside]
    theirs = [*call(140, 100), *call(1010, 65), *call(2050, 60), *call(5300, 1.0)]
    write_trace(folder, 0, [*step, *reversed(ours)])
    write_trace(folder, 1, [*(dict(e, ts=e["ts"] - 3) for e in [*step, *theirs])], base=3000)
    (one,) = measured_stages(read_run(folder)).passes.values()
    assert (one.number, one.num_calls, one.ranks) == (3, 3, (0, 1))
    assert microseconds(one.timeline[0]) == [
        ("sends", 0, 10),
        ("waits", 10, 30),
        ("compute", 30, 120),
    ]
    assert microseconds(one.timeline[1]) == [
        ("sends", 50, 60),
        ("waits", 60, 80),
        ("compute", 80, 140),
    ]
    assert one.seconds == pytest.approx(140e-6, abs=1e-6)


def test_the_page_has_measured_stages_above_the_predicted_ones(folder):
    events = [span("cp step 11", 0, 5000), *call(100, 50), *call(900, 70, "backward")]
    write_trace(folder, 0, events)
    page = run_page(read_run(folder))
    figure = page[page.index("<h3>Stages, measured and predicted") :].split("</figure>")[0]
    measured, simulated = figure.index("measured timeline"), figure.index("simulated timeline")
    assert measured < figure.index("measured backward (call 1 of 1)") < simulated
    assert "measured forward (call 1 of 1),0,compute" in figure  # the numbers behind it
    assert ">predicted: auto, backward: " in figure
    assert "not the pack drawn" in figure and "predicted</span>" not in figure.split("</h3>")[0]


def test_a_gpus_trace_is_read_on_the_device(folder):
    """Never run on a GPU: the kind of these ranges is Kineto's."""
    step = span("cp step 11", 0, 5000)
    on_device = call(400, 800, kind="gpu_user_annotation")
    write_trace(folder, 0, [step, *call(100, 5), *on_device])
    stages = measured_stages(read_run(folder))
    assert stages.on_device and stages.passes["forward"].seconds == pytest.approx(830e-6, abs=1e-6)


def test_shares_of_traced_steps_are_counted_over_both_passes_and_ranks(folder):
    step = [span("cp step 11", 0, 5000), span("cp step 12", 6000, 1000)]
    write_trace(folder, 0, [*step, *call(100, 500), *call(1000, 70, "backward"), *call(5200, 900)])
    write_trace(folder, 1, [*step, *call(100, 300), *call(1000, 130, "backward"), *call(5200, 9)])
    shares = measured_stages(read_run(folder)).shares
    assert shares["attend"] == pytest.approx(((500 + 70) + (300 + 130)) / 2 / 6000)
    assert shares["wait"] == pytest.approx(2 * 20 / 6000)
    words = run_page(read_run(folder)).split("What limits now")[1].split("</figure>")[0]
    assert "8.3% attention, computing" in words and "0.7% attention, waiting for rows" in words
    assert "mean over the ranks that traced steps 11 to 12" in words


def test_ranks_of_one_context_group_and_the_newest_steps_are_taken(folder):
    events = [span("cp step 11", 0, 5000), *call(100, 50)]
    for rank in (0, 1, 2, 3):
        write_trace(folder, rank, events)
    old = "rank{}.steps2-3.pt.trace.json"
    write_trace(folder, 0, [span("cp step 2", 0, 50), *call(1, 1)], name=old)
    run = read_run(folder)
    layouts = {(1, 2): (0, 1), (2, 2): (0, 2), (1, 4): (0, 1, 2, 3), (1, 1): (0,)}
    for (tensor, context), ranks in layouts.items():
        run.description["layout"] |= {"tensor": tensor, "context": context}
        stages = measured_stages(run)
        assert stages.passes["forward"].ranks == ranks and stages.steps == "11 to 12"


def test_two_traces_take_no_more_memory_than_one(folder):
    run = read_run(folder)
    others = [span(f"kernel {index}", index, 1) for index in range(20_000)]
    peaks = {}
    for rank in (0, 1):
        write_trace(folder, rank, [span("cp step 11", 0, 5000), *call(100, 50), *others])
        tracemalloc.start()
        stages = measured_stages(run)
        peaks[rank + 1] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(stages.passes["forward"].ranks) == rank + 1
    assert peaks[2] < 1.2 * peaks[1]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "cannot be read"),
        ("[]", "is no trace"),
        ('{"traceEvents": [{"ph": "X", "name": "cp step 1"}]}', "cannot be read"),
        ('{"traceEvents": []}', "show no stage of attention"),
    ],
)
def test_a_trace_that_shows_nothing_is_said_and_the_prediction_stays(folder, content, words):
    (folder / NAME.format(0)).write_text(content)
    page = run_page(read_run(folder))
    figure = page[page.index("<h3>Stages") :].split("</figure>")[0]
    assert "Nothing measured: " in figure and words in figure
    assert "predicted" in figure.split("</h3>")[0] and "simulated timeline" in figure


def test_without_a_trace_nothing_is_said_of_measuring(folder):
    assert measured_stages(read_run(folder)) is None
    assert "measured" not in run_page(read_run(folder)).split("<h3>Stages")[1].split("</figure>")[0]
