"""The documentation as a site: it builds without a warning, asks nobody for anything, and its pictures are there."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="pip install megatron_cp[docs]")

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
