"""The documentation as a site: it builds without a warning, asks nobody for anything, and its pictures are there."""

import inspect
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pytest

pytest.importorskip("mkdocs", reason="pip install megatron_cp[docs]")

from megatron_cp.plan import make_plan
from megatron_cp.plan.hardware.simulate import simulate_pass
from tests.report.screenshots import find_browser
from tools import docs_site

ROOT = Path(__file__).resolve().parent.parent
# What a browser would fetch by itself; links that a reader clicks are no requests.
FETCHED = re.compile(r"""<(?:script|img|iframe|source|link)\b[^>]*(?:src|href)=["']?(https?:)?//""")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Strict mode: a broken link, a lost anchor or an unknown name of the API is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_of_docs_is_a_page_that_fetches_nothing_from_elsewhere(site):
    for source in sorted((ROOT / "docs").glob("*.md")):
        text = (site / f"{source.stem}.html").read_text(encoding="utf-8")
        canonical = re.sub(r'<link rel="canonical"[^>]*>', "", text)
        assert not FETCHED.search(canonical), source.name
        assert "<!-- picture:" not in text


def test_pictures_are_drawn_from_plans(site):
    text = (site / "how-it-works.html").read_text(encoding="utf-8")
    for words in (
        "attention mask of 32768 tokens with 7 documents",
        "who computes which pair, auto",
        "who computes which pair, per_document_zigzag",
        "simulated timeline of ranks",
    ):
        assert f'aria-label="{words}"' in text, words
    plan = (site / "plan.html").read_text(encoding="utf-8")
    for name in ("contiguous", "zigzag", "auto"):
        assert f'aria-label="who computes which pair, {name}"' in plan, name
    assert 'aria-label="simulated timeline of ranks"' in plan
    gallery = (site / "gallery.html").read_text(encoding="utf-8")
    names = [make.__name__ for make in docs_site.mask_gallery.GALLERY]
    assert [name for name in names if f'id="{name}"' not in gallery] == []
    assert gallery.count("attention mask of") == len(names)


def test_every_builder_of_the_table_of_masks_has_a_picture():
    """`full` alone has none: documents that look both ways show it."""
    table = (ROOT / "docs" / "mask.md").read_text(encoding="utf-8").split("| builder |")[1]
    rows = [
        line.split("|")[1] for line in table.split("\n\n")[0].splitlines() if line.startswith("| `")
    ]
    builders = {name for row in rows for name in re.findall(r"`(\w+)", row)} - {"full"}
    drawn = "".join(inspect.getsource(make) for make in docs_site.mask_gallery.GALLERY)
    assert len(builders) > 15
    assert {name for name in builders if f"masks.{name}(" not in drawn} == set()


def test_pictures_have_the_colours_of_the_scheme_that_the_reader_chose(site):
    """Material keeps the choice in the page, not in the system: no rule may ask the system."""
    style = (site / "assets" / "pictures.css").read_text(encoding="utf-8")
    assert "prefers-color-scheme" not in style
    rules = {
        scheme: dict(
            re.findall(
                r"(--[\w-]+):([^;]+);",
                style.split(f'[data-md-color-scheme="{scheme}"]{{')[1].split("}")[0],
            )
        )
        for scheme in ("default", "slate")
    }
    names = set(re.findall(r"var\((--[\w-]+)\)", style))
    assert names and all(names <= set(one) for one in rules.values())
    assert {name for name in names if rules["default"][name] == rules["slate"][name]} == set()


@pytest.mark.skipif(find_browser() is None, reason="no chromium on PATH, no CHROMIUM")
def test_search_answers_on_a_page_that_was_opened_as_a_file(site, tmp_path):
    command = [
        find_browser(), "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}",
        "--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=30000", "--dump-dom",
        f"{(site / 'index.html').as_uri()}?q=dropout",
    ]  # fmt: skip
    text = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    found = re.findall(r'<a href="([^"?#]+)[^>]*class="md-search-result__link"', text)
    pages = {Path(url2pathname(urlsplit(one).path)) for one in found}
    assert len(pages) > 4
    assert all("dropout" in page.read_text(encoding="utf-8").lower() for page in pages)


def test_files_of_the_repository_that_pages_link_to_are_pages(site):
    page = (site / "gallery.html").read_text(encoding="utf-8")
    assert 'href="repository/examples/mask_gallery_py.html"' in page
    shown = (site / "repository" / "examples" / "mask_gallery_py.html").read_text(encoding="utf-8")
    assert "packed_documents" in shown


def test_search_finds_words_of_every_kind_of_page(site):
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    found = {entry["location"].split("#")[0] for entry in index["docs"]}
    assert {"faq.html", "api.html", "flags.html", "how-it-works.html", "results.html"} <= found
    names = {entry["title"] for entry in index["docs"] if entry["location"].startswith("api.html#")}
    assert any("cp_attention" in name for name in names)


def test_the_words_around_the_first_picture_of_a_plan_are_those_of_its_plans():
    text = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    words = " ".join(
        text.split("<!-- picture: slow_workers -->")[1].split("<!-- picture")[0].split()
    )
    in_order, zigzag, ours = plans = docs_site._slow_plans()
    predicted = [plan.stats("forward")["makespan_ms"] for plan in plans]
    played = [1e3 * simulate_pass(plan, "forward").seconds for plan in plans]
    for times in (predicted, played):
        assert "{:.2f}, {:.2f} and {:.2f} ms".format(*times) in words
    assert f"**auto** receives {ours.stats()['volume_mean']:.1f} times that volume" in words
    assert f"has {ours.stats()['imbalance']:.2f} times the mean work" in words
    assert f"receives {zigzag.stats()['volume_mean']:.1f} times the volume" in words
    assert f"(contiguous: {in_order.stats()['volume_mean']:.1f})" in words
    names = {"MagiAttention takes": "magi", "DCP": "dcp", "UltraAttn": "ultraattn"}
    for said, planner in names.items():
        other = make_plan(in_order.mask, 8, replace(docs_site.SLOW_CONFIG, planner=planner))
        assert f"{said} {other.stats()['makespan_ms']:.2f}" in words
