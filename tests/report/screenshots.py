"""Screenshots of a page as a reader sees it: wide and narrow, light and dark, by a Chromium that is installed.

    python -m tests.report.screenshots runs/python-docs/cp2/report.html pictures/

Debian: `apt install chromium`. CHROMIUM names another one, by its path or name. Without a browser it says so and leaves
with code 2.
"""

import html
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WIDTHS = (1440, 400)
SCHEMES = {"light": 1, "dark": 0}  # of Blink's preferredColorScheme
HEIGHT = 6000
SECONDS = 120


def find_browser(environment: Mapping[str, str] = os.environ) -> str | None:
    """Returns the path of a Chromium, None where there is none; what CHROMIUM names must exist."""
    named = environment.get("CHROMIUM")
    search = environment.get("PATH")
    if named:
        found = shutil.which(named, path=search)
        if found is None:
            raise FileNotFoundError(
                f"CHROMIUM={named!r} must name a program; give its path, or unset it"
            )
        return found
    return next(filter(None, (shutil.which(name, path=search) for name in BROWSERS)), None)


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
    if not picture.is_file():  # some leave with code 0 though they could not
        raise FileNotFoundError(f"{browser} wrote no {picture}; run it by hand: {command}")


def says_in_browser(browser: str, page: Path, script: str, *, width: int, scheme: str) -> str:
    """Returns what `script` puts into the page's title: its policy is taken out first, since it lets no script run."""
    text = re.sub(r"<meta[^>]*Content-Security-Policy[^>]*>", "", page.read_text(encoding="utf-8"))
    closed = script.replace("</script>", "<\\/script>")
    with tempfile.TemporaryDirectory() as folder:
        open_page = Path(folder, "page.html")
        open_page.write_text(
            text.replace("</body>", f"<script>{closed}</script></body>"), encoding="utf-8"
        )
        command = [
            browser, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/profile",
            f"--window-size={width},2000", f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}",
            "--virtual-time-budget=60000", "--dump-dom", open_page.as_uri(),
        ]  # fmt: skip
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS)
    found = re.search(r"<title>(.*?)</title>", done.stdout, re.DOTALL)
    return html.unescape(found[1]) if found else ""


def main(words: list[str]) -> int:
    """Writes four pictures of a page into a folder."""
    browser = find_browser()
    if browser is None or len(words) != 2:
        sys.stderr.write(f"needs PAGE FOLDER, and CHROMIUM or one of {', '.join(BROWSERS)}\n")
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
