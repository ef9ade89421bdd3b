"""The simulate command: what it reads, prints, refuses and draws."""

import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest

from megatron_cp import mask as masks
from megatron_cp.__main__ import main
from megatron_cp.commands.arguments import tokens
from megatron_cp.config import CPConfig
from megatron_cp.data import IndexedWriter
from megatron_cp.plan import PLANNERS, make_plan
from megatron_cp.plan.hardware.simulate import simulate_pass
from megatron_cp.plan.study.compare import Outcome
from megatron_cp.report.figures.planners import against
from megatron_cp.report.figures.timeline import chrome_trace, timeline_drawing, timeline_picture
from megatron_cp.report.simulation.replicas import packs_of
from megatron_cp.report.simulation.study import run_study, study_text
from megatron_cp.report.sources import (
    MaskChoice,
    source_of_corpus,
    source_of_lengths,
    source_of_path,
    source_of_workload,
)

HEADS = ["--num-attention-heads", "8", "--num-query-groups", "2", "--kv-channels", "64"]
SMALL = [*HEADS, "--context-parallel-size", "2,4", "--tokens-per-rank", "1K"]
QUICK = [*SMALL, "--cp-planner", "auto,zigzag,ulysses"]
LENGTHS = (700, 3, 45, 1200, 88, 301, 2, 999)


def refusal(capsys, *words):
    with pytest.raises(SystemExit) as caught:
        main(["simulate", *words])
    printed = capsys.readouterr()
    *progress, last = printed.err.splitlines()
    assert caught.value.code == 2 and printed.out == "" and "simulate: error: " in last
    assert all(re.match(r"simulate: \d+ ranks, planner \d", line) for line in progress)
    return last


def printed_rows(text, planner):
    """The numbers of a planner's lines: simulated, predicted, gap, ..."""
    lines = [line for line in text.splitlines() if re.match(rf"[* ] {planner} +[>=\d]", line)]
    return [[float(word.lstrip(">=")) for word in line[2:].split()[1:]] for line in lines]


# ------------------------------------------------------------------ what it prints


def test_it_prints_every_planner_at_every_size_with_the_plan_s_own_figures(capsys):
    assert main(["simulate", "--workload", "W4", "--mask", "causal", *QUICK]) == 0
    text = capsys.readouterr().out
    assert text.startswith("SIMULATED, not measured")
    for index, cp_size in enumerate((2, 4)):
        options = CPConfig(planner="zigzag", num_heads=8, num_kv_heads=2, head_dim=64)
        plan = make_plan(masks.causal(1024 * cp_size), cp_size, options)
        stats = [plan.stats(name) for name in ("forward", "backward")]
        simulated = sum(simulate_pass(plan, name).seconds for name in ("forward", "backward"))
        row = printed_rows(text, "zigzag")[index]
        predicted = sum(one["makespan_ms"] for one in stats)
        assert row[0] == pytest.approx(simulated * 1e3, rel=1e-3)
        assert row[1] == pytest.approx(predicted, rel=1e-3)
        assert row[2] == pytest.approx(predicted / sum(s["bound_ms"] for s in stats), abs=0.01)
        assert row[4] == pytest.approx(stats[0]["volume_mean"], abs=0.01)
    assert f"{1024 * 4:,} tokens in 1 document," in text


def test_the_ratio_is_that_of_the_fastest_other_planner_and_never_below_one(capsys):
    words = ["--mask", "full", *SMALL, "--cp-planner", "auto,zigzag,ulysses,per_document_zigzag"]
    main(["simulate", *words])
    text = capsys.readouterr().out
    found = re.findall(
        r"auto is predicted (as fast as|([\d.]+) x (faster|slower) than) (\w+)", text
    )
    assert len(found) == 2
    for index, (whole, number, direction, name) in enumerate(found):
        ours = printed_rows(text, "auto")[index][1]
        others = {
            n: printed_rows(text, n)[index][1] for n in ("zigzag", "ulysses", "per_document_zigzag")
        }
        assert others[name] == pytest.approx(min(others.values()), rel=1e-3)
        ratio = others[name] / ours
        if whole == "as fast as":
            assert ratio == pytest.approx(1, abs=6e-3)
        else:
            assert direction == ("faster" if ratio > 1 else "slower") and float(number) >= 1
            assert float(number) == pytest.approx(max(ratio, 1 / ratio), rel=1e-2)


@pytest.mark.parametrize(
    ("ours", "theirs", "is_best_case", "expected"),
    [
        (10.0, 12.2, False, "1.22 x faster than magi"),
        (10.0, 12.2, True, "at least 1.22 x faster than magi"),
        (10.7, 10.0, False, "1.07 x slower than magi"),
        (10.7, 10.0, True, "at most 1.07 x slower than magi"),
        (10.0, 10.01, False, "as fast as magi"),
    ],
)
def test_a_loss_is_called_a_loss_and_a_win_a_win(ours, theirs, is_best_case, expected):
    mine = Outcome("auto", predicted_ms=ours)
    assert (
        against(mine, Outcome("magi", predicted_ms=theirs, is_best_case=is_best_case)) == expected
    )


def test_a_planner_that_cannot_serve_says_why_beside_the_others(capsys):
    main(["simulate", *HEADS, "--context-parallel-size", "16", "--tokens-per-rank", "256",
          "--cp-planner", "contiguous,ulysses"])  # fmt: skip
    text = capsys.readouterr().out
    assert "ulysses" in text and "head degree 16" in text and printed_rows(text, "contiguous")


def test_rings_on_many_ranks_are_marked_as_prices_from_below(capsys):
    main(["simulate", *HEADS, "--context-parallel-size", "256", "--tokens-per-rank", "64",
          "--cp-planner", "contiguous,ring"])  # fmt: skip
    text = capsys.readouterr().out
    assert re.search(r"ring +>=[\d.]+ +>=[\d.]+", text) and "priced from below" in text


# ------------------------------------------------------------------ what it reads


def test_lengths_are_read_from_lists_lines_and_arrays(tmp_path):
    (tmp_path / "a.json").write_text("[5, 7, 0]")
    (tmp_path / "a.txt").write_text("5\n7\n0\n")
    np.save(tmp_path / "a.npy", np.array([5, 7, 0]))
    for name in ("a.json", "a.txt", "a.npy"):
        source = source_of_path(tmp_path / name)
        assert source.lengths.tolist() == [5, 7, 0]
        assert source.documents(20, seed=0).tolist() == [5, 7, 5, 3]


def test_texts_of_a_folder_count_by_their_size(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.txt").write_text("x" * 330)
    (tmp_path / "deep" / "b.md").write_text("y" * 33)
    (tmp_path / "c.bin").write_text("z" * 999)
    assert source_of_path(tmp_path).lengths.tolist() == [100, 10]


def test_token_files_give_the_lengths_of_their_documents(tmp_path):
    prefix = tmp_path / "corpus"
    with IndexedWriter(prefix, dtype=np.dtype(np.uint16)) as writer:
        for length in LENGTHS:
            writer.add_document(np.arange(length) % 500)
        writer.finish()
    source = source_of_corpus(str(prefix), "1", seed=5)
    assert sorted(source.lengths.tolist()) == sorted(LENGTHS)
    other = source_of_corpus(str(prefix), "1", seed=6)
    assert other.lengths.tolist() != source.lengths.tolist()
    step = run_study(source, MaskChoice(), [(2, 3338)], CPConfig(), ["zigzag"]).steps[0]
    assert step.mask == masks.documents(source.lengths)


@pytest.mark.parametrize(
    ("text", "expected"), [("512", 512), ("128K", 131_072), ("2m", 2 << 20), ("16M", 16 << 20)]
)
def test_tokens_may_be_written_in_powers_of_two(text, expected):
    assert tokens(text) == expected


BAD = {
    "unknown workload": (["--workload", "W9"], ["workload='W9'", "nearest: W8"]),
    "unknown mask": (["--mask", "causl"], ["mask='causl'", "nearest: causal"]),
    "unknown planner": (["--cp-planner", "auto,zag"], ["planner='zag'", "nearest: zigzag"]),
    "unknown topology": (["--cp-topology", "H200"], ["topology='H200'", "nearest: h200"]),
    "no profile": (["--cp-topology", "none.json"], ["none.json"]),
    "speeds of other ranks": (
        ["--cp-rank-speeds", "1,1,.5"],
        ["are 3 for cp_size=8", "give 8 numbers"],
    ),
    "speeds of text": (["--cp-rank-speeds", "1,fast"], ["--cp-rank-speeds '1,fast'", "1,1,0.5,1"]),
    "no file": (["--lengths", "/none"], ["/none"]),
    "ranks": (["--context-parallel-size", "8,x"], ["'x' must be a whole number"]),
    "too many ranks": (["--context-parallel-size", "99999999"], ["at most 8192"]),
    "too many ranks of replicas": (
        ["--data-parallel-size", "4096", "--context-parallel-size", "4"],
        ["--data-parallel-size 4096 times --context-parallel-size 4", "at most 8192 ranks"],
    ),
    "tokens": (["--seq-length", "K"], ["must be a whole number"]),
    "ranks over tokens": (["--seq-length", "7"], ["cp_size=8 is more than the 7 tokens"]),
    "a pack that nobody plans": (
        ["--seq-length", "9999999999999"],
        ["--seq-length", "at most 2147483648"],
    ),
    "3G by letter": (["--seq-length", "3000M"], ["'3000M'", "at most 2147483648"]),
    "more digits than int reads": (
        ["--tokens-per-rank", "9" * 5000],
        ["--tokens-per-rank", "at most 2147483648"],
    ),
    "a pack that grows too long": (
        ["--tokens-per-rank", "1024M"],
        ["--tokens-per-rank 1073741824 on 8 ranks", "give at most 268435456"],
    ),
    "split of no corpus": (["--split", "0,0,0"], ["--split 0,0,0 is for --data-path"]),
    "heads": (
        ["--num-attention-heads", "6", "--num-query-groups", "4"],
        ["--num-query-groups 4 must divide"],
    ),
    "two sources": (["--workload", "W1", "--lengths", "x"], ["not allowed with"]),
}


@pytest.mark.parametrize("name", sorted(BAD))
def test_bad_input_is_one_line_and_exit_code_2(capsys, name):
    words, fragments = BAD[name]
    said = refusal(capsys, *words)
    for fragment in fragments:
        assert fragment in said


@pytest.mark.parametrize("content", ["", "five", "[1, [2]]", "3 -1", "0 0", "1.5", '{"a": 1}'])
def test_a_bad_file_of_lengths_is_named(capsys, tmp_path, content):
    path = tmp_path / "lengths.txt"
    path.write_text(content)
    assert str(path) in refusal(capsys, "--lengths", str(path))


NO_LENGTHS = {
    "strings": np.array(["5", "7"]), "booleans": np.array([True]), "a square": np.ones((2, 2)),
    "dates": np.array(["2020-01-01"], "M8[D]"), "complex": np.array([5 + 1j]), "long": np.array([2**62]),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(NO_LENGTHS))
def test_an_array_of_anything_but_lengths_is_named(capsys, tmp_path, name):
    path = tmp_path / "lengths.npy"
    np.save(path, NO_LENGTHS[name])
    assert f"{path} must hold whole numbers" in refusal(capsys, "--lengths", str(path))


def test_an_empty_array_file_and_truths_are_named(capsys, tmp_path):
    for name, text in (("lengths.npy", ""), ("lengths.json", "[true, 7]")):
        (path := tmp_path / name).write_text(text)
        assert f"{path} must hold whole numbers" in refusal(capsys, "--lengths", str(path))


# ------------------------------------------------------------------ pictures and traces


@pytest.fixture(scope="module")
def runs():
    options = CPConfig(planner="ring", num_heads=8, num_kv_heads=8, head_dim=64)
    plan = make_plan(masks.causal(4096), 4, options)
    return {name: simulate_pass(plan, name, num_traced=3) for name in ("forward", "backward")}


def test_a_trace_holds_what_the_traced_ranks_do_one_pass_after_the_other(runs):
    trace = json.loads(json.dumps(chrome_trace(runs, "a title")))
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == {0, 1, 2}
    for rank in range(3):
        spent = sum(e["dur"] for e in spans if e["pid"] == rank and e["cat"] == "compute")
        expected = sum(run.computing[rank] for run in runs.values())
        assert spent == pytest.approx(expected * 1e6)
    forward = [e["ts"] + e["dur"] for e in spans if e["name"].startswith("forward")]
    backward = [e["ts"] for e in spans if e["name"].startswith("backward")]
    assert max(forward) <= runs["forward"].seconds * 1e6 + 1e-6 <= min(backward) + 2e-6
    names = {(e["pid"], e["args"]["name"]) for e in trace["traceEvents"] if e["ph"] == "M"}
    assert (2, "rank 2 (simulated)") in names and (0, "network in") in names
    assert "nothing was measured" in trace["otherData"]["simulated"]


def test_a_timeline_draws_every_event_where_it_happens(runs):
    drawn = timeline_picture([("ring <forward>", runs["forward"])])
    assert "ring &lt;forward&gt;" in drawn
    bars = re.findall(
        r'<rect x="([\d.]+)%" y="[\d.]+" width="([\d.]+)%"[^>]*class="s1"><title>', drawn
    )
    stages = [e for events in runs["forward"].timeline for e in events if e.resource == "compute"]
    assert len(bars) == len(stages)
    seconds = runs["forward"].seconds
    starts = sorted(float(x) for x, _ in bars)
    assert starts == pytest.approx(sorted(100 * e.start / seconds for e in stages), abs=1e-3)
    ends = sorted(float(x) + float(width) for x, width in bars)
    assert ends[-1] == pytest.approx(100 * max(e.end for e in stages) / seconds, abs=0.1)


def test_a_timeline_fits_any_width_on_a_page_and_is_one_drawing_in_a_file(runs):
    panels = [("ours", runs["forward"]), ("theirs", runs["backward"])]
    page, file = timeline_picture(panels), timeline_drawing(panels)
    outer = re.findall(r'<svg role="img" aria-label="(\w+)" style="flex:1 1 0', page)
    assert outer == ["ours", "theirs"] and "viewBox" not in page
    bars = r'<rect (x="[\d.]+%" y="[\d.]+" width="[\d.]+%" height="[\d.]+" class="s\d")>'
    assert re.findall(bars, page) == re.findall(bars, file) != []
    assert file.startswith("<svg viewBox") and file.count("<g transform") == 2


class Structure(HTMLParser):
    """Counts figures and refuses what would reach for the network."""

    def __init__(self):
        super().__init__()
        self.figures = 0

    def handle_starttag(self, tag, attrs):
        self.figures += tag == "figure"
        assert tag not in ("img", "link", "iframe")
        assert not any(key == "src" or (key == "href" and value[0] != "#") for key, value in attrs)


def test_the_page_shows_ours_beside_the_baselines_and_says_that_it_is_simulated(tmp_path, capsys):
    page, figures, trace = (tmp_path / name for name in ("a.html", "a.json", "t.json"))
    svg = tmp_path / "a.svg"
    words = ["--html", str(page), "--json", str(figures), "--trace", str(trace), "--svg", str(svg)]
    assert main(["simulate", "--workload", "W1", *QUICK, *words]) == 0
    assert f"wrote {page}" in capsys.readouterr().err
    content = page.read_text()
    parser = Structure()
    parser.feed(content)
    assert parser.figures == 5  # scaling, planners, timeline, heat map, traffic
    assert "measured nowhere" in content and "predicted" in content
    assert "auto, forward" in content
    values = json.loads(figures.read_text())
    assert [step["ranks"] for step in values["steps"]] == [2, 4]
    planners = [one["planner"] for one in values["steps"][0]["planners"]]
    assert planners == ["auto", "zigzag", "ulysses"]
    assert json.loads(trace.read_text())["traceEvents"]
    root = ElementTree.parse(svg).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg" and len(root.findall(".//*")) > 50
    assert "auto, backward" in svg.read_text()


def test_a_first_planner_that_cannot_serve_is_said_on_the_page(tmp_path):
    words = ["--context-parallel-size", "16", "--tokens-per-rank", "256", "--cp-planner"]
    main(["simulate", *HEADS, *words, "ulysses,zigzag", "--html", f"{tmp_path}/a.html"])
    content = (tmp_path / "a.html").read_text()
    assert "ulysses has no plan on 16 ranks: head degree" in content and ">nan" not in content


def test_pictures_of_many_ranks_are_refused_in_one_line(capsys, tmp_path):
    words = ["--context-parallel-size", "65", "--tokens-per-rank", "64", "--cp-planner", "zigzag"]
    said = refusal(capsys, *HEADS, *words, "--svg", str(tmp_path / "a.svg"))
    assert "no plan at 65 ranks to draw; ask for at most 64 ranks" in said


def test_a_study_of_every_planner_names_each_once():
    study = run_study(
        source_of_workload("W2"), MaskChoice(), [(4, 2048)], CPConfig(), list(PLANNERS)
    )
    text = study_text(study)
    for planner in PLANNERS:
        assert len(re.findall(rf"^[* ] {planner} (?!is )", text, flags=re.M)) == 1


REPLICAS = ["--data-parallel-size", "2", "--context-parallel-size", "2", *HEADS]


def test_a_step_of_replicas_says_each_layout_and_takes_the_faster_one(capsys):
    """One replica has a long document; counted by hand: pairs are what an even step divides by all ranks."""
    lengths = [32768, *[512] * 64]
    words = ["--lengths", ",".join(map(str, lengths)), "--seq-length", "32K"]
    assert main(["simulate", *REPLICAS, *words, "--json"]) == 0
    (step,) = json.loads(capsys.readouterr().out)["steps"]
    layouts = {one["layout"]: one for one in step["layouts"]}
    assert (step["context ranks"], step["replicas"], step["micro-batches"]) == (2, 2, 1)
    pairs = [32768 * 32769 // 2, 64 * (512 * 513 // 2)]
    fixed, hybrid = layouts["fixed, by area"], layouts["hybrid"]
    # the busiest rank of the fixed layout has half of the long document's pairs
    assert fixed["busiest_ms"] / fixed["mean_ms"] == pytest.approx(
        pairs[0] / 2 / (sum(pairs) / 4), rel=0.02
    )
    assert hybrid["busiest_ms"] < 1.1 * hybrid["mean_ms"]
    assert layouts["chosen"] == {**hybrid, "layout": "chosen"}
    assert layouts["chosen"]["simulated_ms"] < fixed["simulated_ms"]


def test_packs_that_are_alike_stay_where_they_are(capsys):
    words = ["--lengths", ",".join(["512"] * 8), "--seq-length", "1K", "--global-batch-size", "4"]
    assert main(["simulate", *REPLICAS, *words]) == 0
    printed = capsys.readouterr().out
    assert "SIMULATED, not measured" in printed and "2 micro-batches a step" in printed
    rows = dict(re.findall(r"^(fixed, by area|fixed, by time|chosen) +([\d.]+)", printed, re.M))
    assert rows["chosen"] == rows["fixed, by time"] == rows["fixed, by area"]


def test_a_stream_of_lengths_is_cut_into_packs():
    packs = packs_of(source_of_lengths([5, 3, 9, 2]), 6, 4, seed=0)
    assert [one.tolist() for one in packs] == [[5, 1], [2, 4], [5, 1], [1, 5]]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--global-batch-size", "4"], "--global-batch-size 4 is for --data-parallel-size"),
        ([*REPLICAS, "--global-batch-size", "3"], "--data-parallel-size 2; give 4"),
        ([*REPLICAS, "--html", "a.html"], "leave out --data-parallel-size"),
        ([*REPLICAS, "--cp-rank-speeds", "1,.5"], "--data-parallel-size with --cp-rank-speeds"),
        ([*REPLICAS, "--seq-length", "1"], "use 1 ranks or fewer"),
    ],
)
def test_replicas_that_cannot_be_simulated_are_refused_in_one_line(capsys, words, said):
    assert said in refusal(capsys, *words)
