"""Samples of text on a run's page: every character shown or replaced, nothing of them is markup."""

import json
import re

import pytest

from megatron_cp.report.run.media import run_media
from megatron_cp.report.run.page import run_page
from megatron_cp.report.run.record import read_run
from megatron_cp.training.logging.records import RunFiles
from tests.report.runs import description, write_run

HOSTILE = "</p><script>alert(1)</script>&amp;\x00\x1b[31m\N{RIGHT-TO-LEFT OVERRIDE}\N{REPLACEMENT CHARACTER}x"


def text(iteration: int, document: int, continuation: str, **other) -> dict:
    return {
        "iteration": iteration,
        "split": "valid",
        "document": document,
        "prompt": f"prompt {document}",
        "continuation": continuation,
        "original": f"original {document}",
        "ended": False,
        **other,
    }


@pytest.fixture
def folder(tmp_path):
    write_run(tmp_path, cp_size=2)
    return tmp_path


def write(folder, *rows) -> None:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / "text_samples.jsonl").write_text("\n".join(lines) + "\n")


def section_of(page: str) -> str:
    return page[page.index('<section id="texts"') :].split("</section>")[0]


def test_newest_texts_stand_in_front_and_earlier_ones_are_folded_away(folder):
    write(folder, *(text(i, d, f"written {i} {d}") for i in (10, 20) for d in (3, 7)))
    shown = section_of(run_page(read_run(folder)))
    assert re.findall(r"<h3>(.*?)</h3>", shown) == ["Document 3, step 20", "Document 7, step 20"]
    assert "after step 20" in shown and "2 held-out documents" in shown
    for document in (3, 7):
        order = ["prompt", "written 20", "original", "written 10"]
        places = [
            shown.index(f"{word} {document}", shown.index(f"<h3>Document {document}"))
            for word in order
        ]
        assert places == sorted(places)


def test_what_a_model_writes_is_no_markup_and_shows_what_was_no_text(folder):
    write(folder, text(10, 3, HOSTILE))
    shown = section_of(run_page(read_run(folder)))
    assert "<script" not in shown and "\x00" not in shown and "\x1b" not in shown
    written = re.search(r"<mark>(.*?)</mark>", shown, flags=re.DOTALL).group(1)
    assert written.startswith("&lt;/p&gt;&lt;script&gt;") and "&amp;amp;" in written
    assert written.endswith("\N{REPLACEMENT CHARACTER}x")
    assert "\N{RIGHT-TO-LEFT OVERRIDE}" not in written


def test_lines_that_are_no_samples_are_left_out(folder):
    wrong = [
        '{"iteration": 3, "prom',
        "[]",
        "null",
        text(1, 2, 3),
        text("1", 2, "x"),
        {"iteration": 1},
        text(True, 2, "x"),
    ]
    write(folder, *wrong, text(10, 3, "right"))
    run = read_run(folder)
    assert [one.continuation for one in run.texts] == ["right"]


def test_a_tracker_gets_them_as_a_table(folder):
    write(folder, text(10, 3, "a"), text(20, 3, "b"))
    table = run_media(folder).tables["report/text_samples"]
    assert [(row[0], row[3]) for row in table.rows] == [(10, "a"), (20, "b")]


def test_a_run_that_asked_for_none_has_no_section(folder):
    assert 'id="texts"' not in run_page(read_run(folder))
    assert "report/text_samples" not in run_media(folder).tables


def test_a_resumed_run_replaces_the_texts_after_its_checkpoint(tmp_path):
    told = description("a run", 2, 1024)
    files = RunFiles(tmp_path, told)
    files.add_texts([text(i, 3, f"first {i}") for i in (10, 20)])
    resumed = RunFiles(tmp_path, {**told, "iteration": 15})
    resumed.add_texts([text(20, 3, "second 20")])
    rows = [json.loads(line) for line in (tmp_path / "text_samples.jsonl").read_text().splitlines()]
    assert [row["continuation"] for row in rows] == ["first 10", "second 20"]
