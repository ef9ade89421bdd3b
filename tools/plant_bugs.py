"""Puts small bugs into copies of this checkout, one at a time, and names those that no test notices.

    tools/planted_bugs.toml   file, old text, new text, nearest tests
            └──> a copy of the checkout with the change ──> pytest -x -q of these tests
                     a test fails: caught          all pass: survived, the suite has a gap

First the tests run without a bug: what fails then proves nothing. The working tree is never changed, and the
copies go. One bug takes about as long as its tests and the imports: the whole table half an hour on two cores.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, where pytest brings the same as tomli
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tools" / "planted_bugs.toml"
TIMEOUT_S = 900.0
_FIELDS = {"name", "floor", "file", "old", "new", "tests"}


class TableError(ValueError):
    """An entry of the table that cannot be planted; the message names it."""


@dataclass(frozen=True)
class Bug:
    """One change: `old`, which stands exactly once in `file`, becomes `new`; `tests` are pytest's words."""

    name: str
    floor: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Verdict:
    """What became of a bug: "caught", "survived", or why nothing can be said."""

    bug: Bug
    outcome: str
    by: str
    """The first test that failed, or the end of the output where there is no verdict."""
    seconds: float


def read_table(path: Path = TABLE) -> list[Bug]:
    """Returns the entries. Raises TableError for one with other fields, or a name that stands twice."""
    bugs: list[Bug] = []
    for number, entry in enumerate(tomllib.loads(path.read_text(encoding="utf-8"))["bug"], 1):
        label = f"bug {number} ({entry.get('name', 'without a name')!r})"
        if entry.keys() != _FIELDS:
            raise TableError(f"{label} has the fields {sorted(entry)}; give {sorted(_FIELDS)}")
        if any(entry["name"] == bug.name for bug in bugs):
            raise TableError(f"{label} stands twice in {path.name}; give it a name of its own")
        bugs.append(Bug(**{**entry, "tests": tuple(entry["tests"])}))
    return bugs


def planted(bug: Bug, root: Path = ROOT) -> str:
    """Returns the file's text with the bug. Raises TableError if `old` does not stand there exactly once."""
    path = root / bug.file
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    count = text.count(bug.old)
    if count != 1 or bug.old == bug.new:
        raise TableError(
            f"bug {bug.name!r}: its old text stands {count} times in {bug.file}, it must stand there once and differ "
            "from the new one; say it in the file's words of today"
        )
    for test in bug.tests:
        if not (root / test.partition("::")[0]).exists():
            raise TableError(f"bug {bug.name!r}: there is no {test}; name tests that exist")
    return text.replace(bug.old, bug.new)


def copy_checkout(root: Path, target: Path) -> None:
    """Copies what git tracks or would track; links stay links."""
    listing = subprocess.run(
        ["git", "-c", f"safe.directory={root}", "ls-files", "-z", "-co", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listing.stdout.decode().split("\0")):
        source, place = root / name, target / name
        if source.is_symlink() or source.is_file():
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, place, follow_symlinks=False)


def run_tests(checkout: Path, tests: tuple[str, ...], folder: Path) -> tuple[int | None, str]:
    """Returns pytest's exit code (None: it took too long) and output; caches and files stay in `folder`."""
    cache = folder / "cache"
    if not cache.exists():
        _link_emulator(cache)
    environment = {
        **os.environ,
        "PYTHONPATH": str(checkout),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "XDG_CACHE_HOME": str(cache),
    }
    words = ["-x", "-q", "-p", "no:cacheprovider", f"--basetemp={folder / 'pytest'}"]
    if (checkout / "tests" / "conftest.py").is_file():
        words.append("--hypothesis-profile=no_shrinking")
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *words, *tests],
        cwd=checkout,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
        errors="replace",
    )
    try:
        said, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
        return None, said
    return process.returncode, said


def _link_emulator(cache: Path) -> None:
    """Gives the copies the emulated kernels that are compiled already; those with a bug go with the copies."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    target = cache / "megatron_cp" / "emulator"
    target.mkdir(parents=True, mode=0o700)
    for path in (base / "megatron_cp" / "emulator").glob("*.*o"):
        try:
            os.link(path, target / path.name)
        except OSError:  # another file system
            shutil.copy2(path, target / path.name)


def try_bug(bug: Bug, root: Path = ROOT) -> Verdict:
    """Returns whether a test notices the bug, in a copy that goes afterwards."""
    began = time.monotonic()
    text = planted(bug, root)
    with tempfile.TemporaryDirectory(prefix="bug-", ignore_cleanup_errors=True) as name:
        folder, checkout = Path(name), Path(name) / "megatron_cp"
        copy_checkout(root, checkout)
        (checkout / bug.file).write_text(text, encoding="utf-8")
        code, said = run_tests(checkout, bug.tests, folder)
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", said, flags=re.MULTILINE)
    if code == 1 and failed:
        outcome, by = "caught", failed[1]
    elif code == 0:
        outcome, by = "survived", " ".join(bug.tests)
    else:
        outcome = "no verdict"
        by = f"pytest {'took too long' if code is None else f'ended with {code}'}: {said[-1500:]}"
    return Verdict(bug, outcome, by, time.monotonic() - began)


def check_without_bugs(bugs: list[Bug], root: Path = ROOT) -> str | None:
    """Returns None if all tests of these bugs pass without a bug, else what failed."""
    tests = tuple(sorted({test for bug in bugs for test in bug.tests}))
    with tempfile.TemporaryDirectory(prefix="no-bug-", ignore_cleanup_errors=True) as name:
        folder, checkout = Path(name), Path(name) / "megatron_cp"
        copy_checkout(root, checkout)
        code, said = run_tests(checkout, tests, folder)
    return None if code == 0 else said[-4000:]


def main(words: list[str] | None = None) -> int:
    """Returns 0 if every chosen bug was caught."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="bugs with this text in floor, name or file")
    parser.add_argument("--jobs", type=int, default=2, choices=(1, 2), help="at a time (2)")
    parser.add_argument("--list", action="store_true", help="print the table and run nothing")
    parser.add_argument(
        "--trust-tests", action="store_true", help="do not run them without a bug first"
    )
    chosen = parser.parse_args(words)
    bugs = [b for b in read_table() if chosen.only in f"{b.floor} {b.name} {b.file}"]
    if not bugs:
        parser.error(f"--only {chosen.only!r} is in no floor, name or file; --list shows them")
    for bug in bugs:
        planted(bug)
    if chosen.list:
        print("\n".join(f"{bug.floor:8} {bug.name} ({bug.file})" for bug in bugs))
        return 0
    if not chosen.trust_tests and (wrong := check_without_bugs(bugs)) is not None:
        print(
            f"without a bug these tests fail, so they can prove nothing:\n{wrong}", file=sys.stderr
        )
        return 1
    missed = []
    with ThreadPoolExecutor(chosen.jobs) as pool:
        for number, verdict in enumerate(pool.map(try_bug, bugs), 1):
            bug, by = verdict.bug, verdict.by.splitlines()[0][:110]
            print(
                f"{number:3}/{len(bugs)} {verdict.outcome:10} {bug.floor:8} {bug.name} "
                f"({verdict.seconds:.0f} s) {by}",
                flush=True,
            )
            if verdict.outcome != "caught":
                missed.append(verdict)
    print(f"{len(bugs) - len(missed)} of {len(bugs)} caught")
    for verdict in missed:
        print(f"\n{verdict.outcome}: {verdict.bug.name} ({verdict.bug.file})\n{verdict.by}")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
