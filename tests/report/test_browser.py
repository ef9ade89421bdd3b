"""The page in a real browser: one on PATH, or that of CHROMIUM. It has run with Qt's Chromium, never with Debian's."""

import numpy as np
import pytest

from megatron_cp.report.run.page import write_run_report
from tests.report.runs import write_run
from tests.report.screenshots import WIDTHS, find_browser, screenshot

BROWSER = find_browser()


@pytest.mark.slow
@pytest.mark.skipif(
    BROWSER is None, reason="no chromium on PATH, no CHROMIUM (apt install chromium)"
)
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
