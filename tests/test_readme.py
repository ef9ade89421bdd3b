"""What README promises: its lines run as they stand, and its links, like those of all pages, lead somewhere."""

import re
from pathlib import Path

from megatron_cp.plan import PLANNERS
from tests.programs import run_by_hand

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s]+)\)")
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md")])


def _anchors(page):
    """Returns the names of a page's headings, as GitHub and mkdocs make them."""
    titles = re.findall(r"^#+ +(.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", title.lower()) for title in titles]
    return {re.sub(r" ", "-", title.strip()) for title in plain} | {
        re.sub(r"[-\s]+", "-", title.strip()) for title in plain
    }


def test_twelve_lines_run_as_they_stand(tmp_path):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (lines,) = re.findall(r"## Twelve lines\n\n```python\n(.*?)```", text, flags=re.DOTALL)
    program = tmp_path / "twelve_lines.py"
    program.write_text(lines)
    run = run_by_hand(program, tmp_path, 4)
    assert run.returncode == 0, run.stderr
    assert "predicted" in run.stdout  # the plan, told by rank 0
    assert all(f"rank {rank} held positions" in run.stdout for rank in (1, 2, 3))


def test_links_of_pages_lead_to_files_and_headings():
    broken = []
    for page in PAGES:
        for link in LINK.findall(page.read_text(encoding="utf-8")):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            found = target.exists()
            if found and anchor and target.suffix == ".md":
                found = anchor in _anchors(target)
            if not found:
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert len(PAGES) > 20 and broken == []


def test_the_quickstart_counts_the_schemes_that_a_dry_run_shows():
    text = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    assert "Transformer Engine's\nsplit, zigzag, a ring and twelve others" in text
    named = {"auto", "per_document_zigzag", "zigzag", "ring"}
    assert named < PLANNERS.keys() and len(PLANNERS) - len(named) == 12


def sentences(text):
    """Returns the sentences of a page's prose: no code, tables, headings or pictures; what stands in ` ` is a word."""
    text = re.sub(r"(?:^|(?<=\n))(?: {4}.*\n)+", "\n", text)
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`]*`", "X", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text))
    blocks = re.split(r"\n\s*\n|\n(?=[-*|#!] ?|\d+\. )", text)
    prose = [" ".join(block.split()) for block in blocks if block.strip()[:1] not in "|#!<"]
    ends = re.compile(r"(?<=[.?!])[*)]*\s+(?=[A-Z*(\d])")
    return [
        one for block in prose for one in ends.split(re.sub(r"^[-*] |^\d+\. ", "", block)) if one
    ]


def test_nine_of_ten_sentences_of_readme_have_at_most_thirty_words_and_none_has_more_than_35():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    counts = sorted(len(re.findall(r"\S*\w\S*", one)) for one in sentences(text))
    assert len(counts) > 60
    assert counts[int(0.9 * len(counts))] <= 30 and counts[-1] <= 35


def test_nine_of_ten_sentences_of_every_page_of_docs_have_at_most_thirty_two_words():
    long = {}
    for page in ROOT.glob("docs/*.md"):
        found = sentences(page.read_text(encoding="utf-8"))
        counts = sorted(len(re.findall(r"\S*\w\S*", one)) for one in found)
        if counts and counts[int(0.9 * len(counts))] > 32:
            long[page.name] = counts[-1]
    assert long == {}


def test_sentences_are_told_apart():
    text = "# Title\n\nOne `a. b` two. Three:\n\n- four 1.5 times. *Five* six\n\n| a | b |\n\n```\nCode. Code.\n```\n"
    assert sentences(text) == ["One X two.", "Three:", "four 1.5 times.", "*Five* six"]
