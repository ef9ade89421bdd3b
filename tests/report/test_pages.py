import base64
import csv
import hashlib
import io
import itertools
import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from megatron_cp import CPConfig
from megatron_cp.plan import PLANNERS
from megatron_cp.report.draw.html import MAX_PAGE_BYTES, Section, page, write_page
from megatron_cp.report.draw.svg import Markup
from megatron_cp.report.dry_run.page import dry_run_page
from megatron_cp.report.dry_run.study import corpus_of_source, plan_corpus
from megatron_cp.report.run.kept_packs import plan_again
from megatron_cp.report.run.page import run_page, write_run_report
from megatron_cp.report.run.record import read_run
from megatron_cp.report.sources import MaskChoice, quiet, source_of_lengths
from tests.report.runs import LENGTHS, write_run

HOSTILE = "</title></style><script>alert(1)</script>\"'&<img src=x onerror=alert(2)>"


class Reader(HTMLParser):
    """Elements, attributes and visible text of a page; fails on tags that do not match."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.tables, self.words = [], [], [], []
        self._open, self.script = [], ""
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
        if self._open and self._open[-1] == "script":
            self.script += data
        if self._open and self._open[-1] == "pre":
            self.tables[-1] += data

    def table(self, *columns):
        for text in self.tables:
            rows = list(csv.DictReader(io.StringIO(text)))
            if rows and set(columns) <= set(rows[0]):
                return rows
        raise AssertionError(f"no table with {columns}")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A run's folder, which tests leave as it is."""
    folder = tmp_path_factory.mktemp("written") / "run"
    write_run(folder, cp_size=4)
    return folder


@pytest.fixture(scope="module")
def html(written):
    """The page of that run."""
    return run_page(read_run(written))


@pytest.fixture(scope="module")
def html_beside_itself(written):
    """The page of that run beside the same."""
    return run_page(read_run(written), read_run(written))


@pytest.fixture
def run_dir(written, tmp_path):
    """A copy of the folder, which a test may change."""
    return shutil.copytree(written, tmp_path / "run")


@pytest.fixture(scope="module")
def dry_page():
    source = source_of_lengths(LENGTHS)
    corpus = corpus_of_source(source, MaskChoice(), seq_length=512, num_packs=2, seed=0)
    config = CPConfig(num_heads=6, num_kv_heads=3, head_dim=16, planner="zigzag")
    run = plan_corpus(
        corpus, 3, config, ["zigzag", *(name for name in PLANNERS if name != "zigzag")]
    )
    return run, Reader(dry_run_page(run, HOSTILE))


def test_table_of_the_heat_map_sums_to_the_area_of_the_mask(written, html):
    run = read_run(written)
    rows = Reader(html).table("rank", "first token", "pairs")
    for planner in {row["planner"] for row in rows}:
        pairs = sum(int(row["pairs"]) for row in rows if row["planner"] == planner)
        assert pairs == pytest.approx(run.packs[0].mask.area(), abs=len(rows))  # cells are rounded


def test_cells_drawn_carry_the_pairs_that_the_table_lists(html):
    drawn = re.findall(r'class="h[1-8]"><title>rank (\d+), tokens (\d+)–\d+: (\S+) pairs', html)
    listed = Reader(html).table("rank", "first token", "pairs")
    assert sorted((int(r), int(t)) for r, t, _ in drawn) == sorted(
        (int(row["rank"]), int(row["first token"])) for row in listed
    )


def test_matrix_of_traffic_lists_the_bytes_of_the_record(written, html):
    rows = Reader(html).table("from", "to", "bytes sent", "bytes needed")
    record = json.loads((written / "plan.json").read_text())["samples"][0]["plans"]["ours"]
    sent = np.zeros((4, 4), dtype=int)
    for row in rows:
        if row["planner"] == record["planner"]:
            sent[int(row["from"]), int(row["to"])] = int(row["bytes sent"])
    assert np.array_equal(sent, record["comm_bytes"]["forward"])


def test_sent_stands_beside_needed_only_where_pairs_are_computed_at_their_queries(tmp_path):
    write_run(tmp_path / "run", cp_size=4, planner="ulysses")
    rows = Reader(run_page(read_run(tmp_path / "run"))).table(
        "from", "to", "bytes sent", "bytes needed"
    )
    by_planner = {row["planner"]: row["bytes needed"] for row in rows if row["bytes sent"] != "0"}
    assert by_planner["ulysses"] == "" and by_planner["per_document_zigzag"] != ""


def test_shares_of_lengths_sum_to_one_in_the_table(html):
    rows = Reader(html).table("from", "documents", "tokens", "area")
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


def test_loss_table_lists_training_and_held_out_losses(html):
    rows = Reader(html).table("iteration", "lm loss", "lm loss validation")
    assert [float(row["lm loss"]) for row in rows] == pytest.approx(
        [9 - 0.1 * step for step in range(1, 21)]
    )
    held_out = [row["lm loss validation"] for row in rows if row["lm loss validation"]]
    assert [float(value) for value in held_out] == pytest.approx([8.5, 7.5])


def test_second_run_is_compared_step_by_step(written, tmp_path):
    write_run(tmp_path / "other", name="other", cp_size=1, steps=12)
    html = run_page(read_run(written), read_run(tmp_path / "other"))
    gaps = Reader(html).table("iteration", "difference")
    assert [int(row["iteration"]) for row in gaps] == list(range(1, 13))
    assert all(float(row["difference"]) == 0 for row in gaps)


def test_other_steps_and_losses_that_are_no_numbers_are_said_where_runs_are_compared(
    written, html_beside_itself, tmp_path
):
    write_run(tmp_path / "other", name="other", cp_size=1, steps=12)
    run, other = read_run(written), read_run(tmp_path / "other")
    assert "these are other steps" not in html_beside_itself
    rows = [{**row, "lm loss": None} if row["iteration"] > 9 else row for row in other.rows]
    described = json.loads(json.dumps(other.description))
    described["arguments"] |= {"global_batch_size": 3, "seq_length": 77}
    html = run_page(run, replace(other, description=described, rows=tuple(rows)))
    sizes = "{global_batch_size} packs of {seq_length} tokens".format(**run.section("arguments"))
    assert f"these are other steps: {sizes} here, 3 packs of 77 tokens there" in html
    assert "at 9 common steps; the largest is 0; at 3 more a loss is not finite. Rounding" in html


def test_hostile_names_stay_text(written, html_beside_itself, tmp_path):
    write_run(tmp_path / "bad", cp_size=2)
    run = json.loads((tmp_path / "bad" / "run.json").read_text())
    (tmp_path / "bad" / "run.json").write_text(json.dumps({**run, "name": HOSTILE}))
    record = json.loads((tmp_path / "bad" / "plan.json").read_text())
    record["samples"][0]["plans"]["ours"]["planner"] = HOSTILE
    record["samples"][0]["document_kinds"] = [HOSTILE] * len(LENGTHS)
    (tmp_path / "bad" / "plan.json").write_text(json.dumps(record))
    bad = read_run(tmp_path / "bad")
    plain = Reader(html_beside_itself)
    for reader in (Reader(run_page(bad, bad)), Reader(run_page(read_run(written), bad))):
        assert set(reader.tags) == set(plain.tags)
        assert not any(name.startswith("on") for name, _ in reader.attributes)
        assert HOSTILE in "".join(reader.words)


def test_pages_load_nothing_and_run_only_the_script_that_their_policy_names(html, dry_page):
    for reader in (Reader(html), dry_page[1]):
        assert not {"link", "img", "iframe", "object", "form"} & set(reader.tags)
        assert reader.tags.count("script") == 1
        digest = hashlib.sha256(reader.script.encode()).digest()
        (policy,) = [v for n, v in reader.attributes if n == "content" and "default-src" in v]
        assert f"script-src 'sha256-{base64.b64encode(digest).decode()}'" in policy
        assert "default-src 'none'" in policy and "unsafe-eval" not in policy
        assert not {"src", "xlink:href"} & {name for name, _ in reader.attributes}
        assert all(value.startswith("#") for name, value in reader.attributes if name == "href")
        text = " ".join([*reader.words, *(str(value) for _, value in reader.attributes)])
        text = text.replace(policy, "")  # a hash may hold anything
        assert not re.search(r"https?:|//[a-z]|url\(|@import", text)


def test_links_of_a_page_lead_to_its_sections_and_headings_do_not_skip_a_level(
    html_beside_itself, dry_page
):
    for reader in (Reader(html_beside_itself), dry_page[1]):
        targets = {value for name, value in reader.attributes if name == "id"}
        links = [value[1:] for name, value in reader.attributes if name == "href"]
        assert len(links) > 4 and set(links) <= targets
        levels = [int(name[1]) for name in reader.tags if re.fullmatch("h[1-6]", name)]
        assert levels[0] == 1 and levels.count(1) == 1
        assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_every_frame_that_scrolls_can_be_reached_and_has_a_name_of_its_own(html):
    frames = re.findall(r'<div class="(?:plot|scroll)[^"]*"([^>]*)>', html)
    assert len(frames) > 8
    assert all('tabindex="0"' in one and 'role="region"' in one for one in frames)
    names = [re.search(r'aria-label="([^"]+)"', one)[1] for one in frames]
    assert len(set(names)) == len(names)


def test_lines_carry_the_points_that_their_table_lists(html):
    found = re.search(r'data-name="held-out documents" data-points="([^"]+)"', html)
    points = [(x, y) for x, y, _ in json.loads(found[1])]
    assert points == [(10.0, pytest.approx(8.5)), (20.0, pytest.approx(7.5))]


def test_dry_run_labels_what_is_predicted_and_lists_every_planner(dry_page):
    run, reader = dry_page
    assert reader.words.count("predicted") >= 4  # tiles, the table, the foot
    listed = {word.split(" ")[0] for word in reader.words}
    assert {one.planner for one in run.outcomes} <= listed
    assert HOSTILE in reader.words


def test_what_context_parallelism_bought_is_a_mean_over_all_steps_and_says_so(html):
    reader = Reader(html)
    words = " ".join(reader.words)
    assert "50% of the 6 MB of a ring" in words and "mean of all 20 steps logged" in words
    assert "on the same packs: zigzag 1.250, Transformer Engine (THD) 1.062" in words
    assert (
        "≥ 1.25 ×" in words and "≥ 1.50 ×" in words
    )  # per document 50 ms, zigzag 60 ms, ours 40 ms
    assert "on the kept pack" in words and "1 kept packs" not in words


def test_a_held_out_loss_is_said_as_perplexity_bits_and_beside_guessing(html):
    words = " ".join(Reader(html).words)
    assert "perplexity 1.81k" in words  # exp(7.5) = 1808.04
    assert "5.41 bits per byte" in words  # 7.5 / ln 2 / 2 bytes a token
    assert "guessing evenly among 512 tokens: 6.24" in words  # ln 512


def test_baselines_are_drawn_beside_the_plan_that_the_run_made(written):
    kept = plan_again(read_run(written), quiet)
    assert kept.is_rebuilt and kept.ours.planner == "auto"
    assert [one.planner for one in kept.outcomes] == ["auto", *(n for n in PLANNERS if n != "auto")]
    assert kept.drawn.others[0].planner == "per_document_zigzag"


def test_a_plan_that_comes_out_otherwise_today_is_shown_as_it_was_recorded(run_dir):
    record = json.loads((run_dir / "plan.json").read_text())
    record["samples"][0]["plans"]["ours"]["digest"] = "another version's"
    (run_dir / "plan.json").write_text(json.dumps(record))
    run = read_run(run_dir)
    kept = plan_again(run, quiet)
    assert not kept.is_rebuilt and kept.drawn.ours is run.packs[0].ours
    assert "pictures show what the run recorded" in " ".join(Reader(run_page(run)).words)


def test_large_run_stays_below_the_size_limit(tmp_path):
    rng = np.random.default_rng(0)
    lengths = tuple(np.exp(rng.normal(3.2, 1.0, 1000)).astype(int).clip(1, 500).tolist())
    write_run(tmp_path / "run", cp_size=64, steps=6000, lengths=lengths, planner="zigzag")
    written = write_run_report(tmp_path / "run")
    assert written == tmp_path / "run" / "report.html"
    assert 100_000 < written.stat().st_size < MAX_PAGE_BYTES


def test_page_above_the_limit_is_refused_and_not_written(tmp_path):
    content = page("t", "s", [Section("a", "A", [Markup("x" * MAX_PAGE_BYTES)])], {})
    with pytest.raises(ValueError, match="allowed 3,000,000"):
        write_page(tmp_path / "page.html", content)
    assert not (tmp_path / "page.html").exists()


def test_run_on_one_rank_has_a_page(tmp_path):
    write_run(tmp_path / "run", cp_size=1, steps=1)
    reader = Reader(run_page(read_run(tmp_path / "run")))
    assert any("one rank owns every token" in words for words in reader.words)


def test_run_that_logged_nothing_and_kept_no_pack_has_a_page(tmp_path):
    write_run(tmp_path / "run", steps=0)
    (tmp_path / "run" / "plan.json").unlink()
    reader = Reader(run_page(read_run(tmp_path / "run")))
    assert reader.words.count("no values logged") == 4
    assert any("kept no packs" in words for words in reader.words)


def test_run_record_with_nothing_but_its_schema_has_a_page(tmp_path):
    write_run(tmp_path / "run", steps=3)
    (tmp_path / "run" / "run.json").write_text('{"schema": 1}')
    (tmp_path / "run" / "plan.json").unlink()
    assert "h1" in Reader(run_page(read_run(tmp_path / "run"))).tags
