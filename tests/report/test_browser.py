"""The page in a real browser. Never run with Debian's chromium yet: it was looked at in Qt's Chromium by hand."""

import pytest

from megatron_cp.report.run.page import write_run_report
from tests.report.runs import write_run
from tests.report.screenshots import WIDTHS, find_browser, screenshot

BROWSER = find_browser()


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no chromium is installed (apt install chromium)")
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
            pixels = opened.convert("L")
            assert pixels.width == width and len(set(pixels.getdata())) > 20
            shades[scheme] = sum(pixels.getdata()) / (pixels.width * pixels.height)
    assert shades["dark"] < 80 < 200 < shades["light"]
