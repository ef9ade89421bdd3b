"""Screenshots of a page as a reader sees it: wide and narrow, light and dark, by a Chromium that is installed.

    python -m tests.report.screenshots runs/python-docs/cp2/report.html pictures/

Debian: `apt install chromium`. Without a browser it says so and leaves with code 2.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WIDTHS = (1440, 400)
SCHEMES = {"light": 1, "dark": 0}  # of Blink's preferredColorScheme
HEIGHT = 6000
SECONDS = 120


def find_browser() -> str | None:
    """Returns the path of a Chromium, None where there is none."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def screenshot(browser: str, page: Path, picture: Path, *, width: int, scheme: str) -> None:
    """Writes what the browser shows of `page` as a PNG, `width` pixels wide."""
    with tempfile.TemporaryDirectory() as profile:
        command = [
            browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            f"--user-data-dir={profile}", f"--window-size={width},{HEIGHT}",
            f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}",
            f"--screenshot={picture.resolve()}", page.resolve().as_uri(),
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True, timeout=SECONDS)


def main(words: list[str]) -> int:
    """Writes four pictures of a page into a folder."""
    browser = find_browser()
    if browser is None or len(words) != 2:
        sys.stderr.write(f"needs PAGE FOLDER and one of {', '.join(BROWSERS)} installed\n")
        return 2
    page, folder = Path(words[0]), Path(words[1])
    folder.mkdir(parents=True, exist_ok=True)
    for width in WIDTHS:
        for scheme in SCHEMES:
            picture = folder / f"{page.stem}-{width}-{scheme}.png"
            screenshot(browser, page, picture, width=width, scheme=scheme)
            sys.stdout.write(f"wrote {picture}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
