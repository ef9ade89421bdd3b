"""The page in a real browser: one on PATH, or that of CHROMIUM; its accessibility where AXE names axe.min.js."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from megatron_cp.report.run.page import write_run_report
from tests.report.runs import write_run
from tests.report.screenshots import SCHEMES, WIDTHS, find_browser, says_in_browser, screenshot

BROWSER = find_browser()
AXE = os.environ.get("AXE", "")
in_browser = pytest.mark.skipif(
    BROWSER is None, reason="no chromium on PATH, no CHROMIUM (apt install chromium)"
)
# Which frames are wider inside than outside, and the width of the page, in the page's title.
OVERFLOW = """
document.documentElement.style.width = "WIDTHpx";  // a window is never less than 500 wide
const wide = [...document.querySelectorAll('.plot')].filter((one) => one.scrollWidth > one.clientWidth + 1);
document.title = JSON.stringify([document.body.scrollWidth, wide.map((one) => one.ariaLabel)]);
"""
VIOLATIONS = """
axe.run(document, {resultTypes: ['violations']}).then((found) => {
  document.title = JSON.stringify(found.violations.map((one) => [one.id, one.nodes[0].html]));
});
"""


@pytest.mark.slow
@in_browser
@pytest.mark.parametrize("width", [400, 700, 1440])
def test_every_picture_is_shown_whole_at_any_width(tmp_path, width):
    """Charts, maps, bars and timelines: none scrolls sideways, and the page is as wide as its window."""
    write_run(tmp_path / "run", cp_size=8)
    page = write_run_report(tmp_path / "run")
    said = says_in_browser(
        BROWSER, page, OVERFLOW.replace("WIDTH", str(width)), width=width, scheme="light"
    )
    inside, wide = json.loads(said)
    assert wide == [] and inside == width


@pytest.mark.slow
@in_browser
@pytest.mark.skipif(not AXE, reason="AXE names no axe.min.js (npm pack axe-core)")
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_axe_finds_no_violation(tmp_path, scheme, width):
    write_run(tmp_path / "run", cp_size=8)
    page = write_run_report(tmp_path / "run")
    script = Path(AXE).read_text(encoding="utf-8") + VIOLATIONS
    assert json.loads(says_in_browser(BROWSER, page, script, width=width, scheme=scheme)) == []


@pytest.mark.slow
@in_browser
@pytest.mark.parametrize("width", WIDTHS)
def test_a_page_follows_the_reader_s_scheme_at_both_widths(tmp_path, width):
    image = pytest.importorskip("PIL.Image", reason="Pillow reads the pictures (extra `dev`)")
    write_run(tmp_path / "run")
    page = write_run_report(tmp_path / "run")
    shades = {}
    for scheme in ("light", "dark"):
        picture = tmp_path / f"{scheme}.png"
        screenshot(BROWSER, page, picture, width=width, scheme=scheme)
        with image.open(picture) as opened:
            pixels = np.asarray(opened.convert("L"))
            assert pixels.shape[1] == width and len(np.unique(pixels)) > 20
            shades[scheme] = pixels.mean()
    assert shades["dark"] < 80 < 200 < shades["light"]


def test_the_browser_is_that_of_the_variable_else_the_first_on_path(tmp_path):
    for name in ("google-chrome", "chromium-browser", "mine"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    path = {"PATH": str(tmp_path)}
    assert find_browser(path) == str(tmp_path / "chromium-browser")
    assert find_browser({**path, "CHROMIUM": "mine"}) == str(tmp_path / "mine")
    assert find_browser({"PATH": "", "CHROMIUM": str(tmp_path / "mine")}) == str(tmp_path / "mine")
    assert find_browser({"PATH": str(tmp_path / "none")}) is None
    with pytest.raises(FileNotFoundError, match="CHROMIUM='gone' must name a program"):
        find_browser({**path, "CHROMIUM": "gone"})
