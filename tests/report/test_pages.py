import csv
import io
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from megatron_cp import CPConfig
from megatron_cp.report.draw.html import MAX_PAGE_BYTES, page, write_page
from megatron_cp.report.draw.svg import Markup
from megatron_cp.report.dry_run.study import corpus_of_lengths, plan_corpus, write_dry_run_report
from megatron_cp.report.run.page import pack_drawn, run_page, write_run_report
from megatron_cp.report.run.record import read_run
from tests.report.runs import LENGTHS, write_run

HOSTILE = "</title></style><script>alert(1)</script>\"'&<img src=x onerror=alert(2)>"


class Reader(HTMLParser):
    """Elements, attributes and visible text of a page; fails on tags that do not match."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.tables, self.words = [], [], [], []
        self._open = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, name, attributes):
        self.tags.append(name)
        self.attributes += attributes
        if name != "meta":
            self._open.append(name)
        if name == "pre":
            self.tables.append("")

    def handle_endtag(self, name):
        assert self._open.pop() == name

    def handle_data(self, data):
        self.words.append(data)
        if self._open and self._open[-1] == "pre":
            self.tables[-1] += data

    def table(self, *columns):
        for text in self.tables:
            rows = list(csv.DictReader(io.StringIO(text)))
            if rows and set(columns) <= set(rows[0]):
                return rows
        raise AssertionError(f"no table with {columns}")


@pytest.fixture
def run_dir(tmp_path):
    write_run(tmp_path / "run", cp_size=4)
    return tmp_path / "run"


@pytest.fixture
def dry_page(tmp_path):
    corpus = corpus_of_lengths(LENGTHS, seq_length=512, mask="documents", num_packs=2)
    run = plan_corpus(
        corpus, 3, CPConfig(num_heads=6, num_kv_heads=3, head_dim=16, planner="zigzag")
    )
    written = write_dry_run_report(run, tmp_path / "new" / "dry.html", HOSTILE)
    return run, Reader(written.read_text())


def test_table_of_the_heat_map_sums_to_the_area_of_the_mask(run_dir):
    run = read_run(run_dir)
    rows = Reader(run_page(run)).table("rank", "first token", "pairs")
    for planner in {row["planner"] for row in rows}:
        pairs = sum(int(row["pairs"]) for row in rows if row["planner"] == planner)
        assert pairs == pack_drawn(run).mask.area()


def test_cells_drawn_carry_the_pairs_that_the_table_lists(run_dir):
    html = run_page(read_run(run_dir))
    drawn = re.findall(r'class="h[1-8]"><title>rank (\d+), tokens (\d+)–\d+: (\S+) pairs', html)
    listed = Reader(html).table("rank", "first token", "pairs")
    assert sorted((int(r), int(t)) for r, t, _ in drawn) == sorted(
        (int(row["rank"]), int(row["first token"])) for row in listed
    )


def test_matrix_of_traffic_lists_the_bytes_of_the_record(run_dir):
    rows = Reader(run_page(read_run(run_dir))).table("from", "to", "bytes sent", "bytes needed")
    record = json.loads((run_dir / "plan.json").read_text())["samples"][0]["plans"]
    for plan in record.values():
        sent = np.zeros((4, 4), dtype=int)
        for row in rows:
            if row["planner"] == plan["planner"]:
                sent[int(row["from"]), int(row["to"])] = int(row["bytes sent"])
        assert np.array_equal(sent, plan["comm_bytes"]["forward"])


def test_shares_of_lengths_sum_to_one_in_the_table(run_dir):
    rows = Reader(run_page(read_run(run_dir))).table("from", "documents", "tokens", "area")
    for share in ("documents", "tokens", "area"):
        assert sum(float(row[share]) for row in rows) == pytest.approx(1.0, abs=1e-5)


def test_lengths_of_the_corpus_come_from_the_run_record(run_dir):
    record = json.loads((run_dir / "run.json").read_text())
    record["data"]["train"] = {
        "length_edges": [1, 2, 4, 8],
        "documents_by_length": [1, 0, 3],
        "tokens_by_length": [1, 0, 15],
        "area_by_length": [1, 0, 45],
    }
    (run_dir / "run.json").write_text(json.dumps(record))
    rows = Reader(run_page(read_run(run_dir))).table("from", "documents", "tokens", "area")
    assert [float(row["documents"]) for row in rows] == [0.25, 0, 0.75]
    assert [float(row["area"]) for row in rows] == pytest.approx([1 / 46, 0, 45 / 46], abs=1e-6)


def test_loss_table_lists_training_and_held_out_losses(run_dir):
    rows = Reader(run_page(read_run(run_dir))).table("iteration", "lm loss", "lm loss validation")
    assert [float(row["lm loss"]) for row in rows] == pytest.approx(
        [9 - 0.1 * step for step in range(1, 21)]
    )
    held_out = [row["lm loss validation"] for row in rows if row["lm loss validation"]]
    assert [float(value) for value in held_out] == pytest.approx([8.5, 7.5])


def test_second_run_is_compared_step_by_step(run_dir, tmp_path):
    write_run(tmp_path / "other", name="other", cp_size=1, steps=12)
    html = run_page(read_run(run_dir), read_run(tmp_path / "other"))
    gaps = Reader(html).table("iteration", "difference")
    assert [int(row["iteration"]) for row in gaps] == list(range(1, 13))
    assert all(float(row["difference"]) == 0 for row in gaps)


def test_hostile_names_stay_text(run_dir, tmp_path):
    write_run(tmp_path / "bad", name=HOSTILE, cp_size=2)
    record = json.loads((tmp_path / "bad" / "plan.json").read_text())
    record["samples"][0]["plans"]["ours"]["planner"] = HOSTILE
    record["samples"][0]["document_kinds"] = [HOSTILE] * len(LENGTHS)
    (tmp_path / "bad" / "plan.json").write_text(json.dumps(record))
    bad = read_run(tmp_path / "bad")
    plain = Reader(run_page(read_run(run_dir), read_run(run_dir)))
    for reader in (Reader(run_page(bad, bad)), Reader(run_page(read_run(run_dir), bad))):
        assert set(reader.tags) == set(plain.tags)
        assert not any(name.startswith("on") for name, _ in reader.attributes)
        assert HOSTILE in "".join(reader.words)


def test_pages_load_nothing_and_run_nothing(run_dir, dry_page):
    for reader in (Reader(run_page(read_run(run_dir))), dry_page[1]):
        assert not {"script", "link", "img", "iframe", "object", "form"} & set(reader.tags)
        assert not {"src", "href", "xlink:href"} & {name for name, _ in reader.attributes}
        text = " ".join([*reader.words, *(str(value) for _, value in reader.attributes)])
        assert not re.search(r"https?:|//[a-z]|url\(|@import", text)


def test_dry_run_labels_what_is_predicted_and_lists_every_planner(dry_page):
    run, reader = dry_page
    assert reader.words.count("predicted") >= 4  # two tiles, the table, the foot
    assert {row.planner for row in run.planners} <= set(reader.words)
    assert HOSTILE in reader.words


def test_measured_pages_carry_no_predicted_label(run_dir):
    assert "predicted" not in Reader(run_page(read_run(run_dir))).words


def test_large_run_stays_below_the_size_limit(tmp_path):
    rng = np.random.default_rng(0)
    lengths = tuple(np.exp(rng.normal(3.2, 1.0, 2000)).astype(int).clip(1, 500).tolist())
    write_run(tmp_path / "run", cp_size=64, steps=6000, lengths=lengths, planner="zigzag")
    written = write_run_report(tmp_path / "run")
    assert written == tmp_path / "run" / "report.html"
    assert 100_000 < written.stat().st_size < MAX_PAGE_BYTES


def test_page_above_the_limit_is_refused_and_not_written(tmp_path):
    content = page("t", "s", [Markup("x" * MAX_PAGE_BYTES)], {})
    with pytest.raises(ValueError, match="allowed 3,000,000"):
        write_page(tmp_path / "page.html", content)
    assert not (tmp_path / "page.html").exists()


def test_run_on_one_rank_has_a_page(tmp_path):
    write_run(tmp_path / "run", cp_size=1, steps=1)
    reader = Reader(run_page(read_run(tmp_path / "run")))
    assert "one rank owns every token" in reader.words


def test_run_that_logged_nothing_and_kept_no_pack_has_a_page(tmp_path):
    write_run(tmp_path / "run", steps=0)
    (tmp_path / "run" / "plan.json").unlink()
    reader = Reader(run_page(read_run(tmp_path / "run")))
    assert reader.words.count("no values logged") == 3
    assert any("kept no packs" in words for words in reader.words)


def test_run_record_with_nothing_but_its_schema_has_a_page(tmp_path):
    write_run(tmp_path / "run", steps=3)
    (tmp_path / "run" / "run.json").write_text('{"schema": 1}')
    (tmp_path / "run" / "plan.json").unlink()
    assert "h1" in Reader(run_page(read_run(tmp_path / "run"))).tags
