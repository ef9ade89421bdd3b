"""The table of planted bugs applies as it stands, and the tool tells caught from survived; no bug of it is run here."""

import ast
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tools import plant_bugs

ROOT = Path(__file__).resolve().parents[2]
BUGS = plant_bugs.read_table()
FLOORS = {
    "mask", "plan", "comm", "runtime", "attn", "kernels", "data", "training", "mcore", "models", "report",
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_every_bug_of_the_table_applies_exactly_once(bug):
    text = plant_bugs.planted(bug)
    assert text != (ROOT / bug.file).read_text(encoding="utf-8")
    if bug.file.endswith(".py"):
        ast.parse(text)


def test_every_floor_has_bugs_and_there_are_at_least_sixty():
    assert {bug.floor for bug in BUGS} == FLOORS and len(BUGS) >= 60


@pytest.fixture
def checkout(tmp_path):
    """A checkout with one function and a test that knows half of it."""
    root = tmp_path / "checkout"
    (root / "tests").mkdir(parents=True)
    (root / "f.py").write_text("def f(x):\n    return x + 1 if x else 7\n")
    (root / "tests" / "test_f.py").write_text(
        "from f import f\n\n\ndef test_f():\n    assert f(1) == 2\n"
    )
    (root / ".gitignore").write_text("ignored\n")
    (root / "ignored").write_text("not for the copy")
    subprocess.run(["git", "init", "--quiet", str(root)], check=True)
    return root


BUG = plant_bugs.Bug("a bug", "f", "f.py", "x + 1", "x + 2", ("tests/test_f.py",))


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        ({}, "caught"),
        ({"old": "7", "new": "8"}, "survived"),
        ({"old": "def f(x):\n    return", "new": "def f(x)\n    return"}, "no verdict"),
        ({"tests": ("tests/test_f.py::test_g",)}, "no verdict"),
    ],
)
def test_a_bug_is_caught_where_a_test_fails_and_the_checkout_stays(checkout, change, outcome):
    before = {path: path.read_bytes() for path in checkout.rglob("*") if path.is_file()}
    verdict = plant_bugs.try_bug(replace(BUG, **change), checkout)
    assert verdict.outcome == outcome, verdict.by
    if outcome == "caught":
        assert verdict.by == "tests/test_f.py::test_f"
    assert before == {path: path.read_bytes() for path in checkout.rglob("*") if path.is_file()}


def test_tests_that_fail_without_a_bug_prove_nothing(checkout):
    assert plant_bugs.check_without_bugs([BUG], checkout) is None
    (checkout / "f.py").write_text("def f(x):\n    return x\n")
    assert "assert 1 == 2" in plant_bugs.check_without_bugs([BUG], checkout)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"old": "y"}, "stands 0 times in f.py"),
        ({"old": "x"}, "stands 3 times in f.py"),
        ({"new": "x + 1"}, "differ from the new one"),
        ({"tests": ("tests/test_g.py",)}, "there is no tests/test_g.py"),
    ],
)
def test_an_entry_that_cannot_be_planted_is_named(checkout, change, words):
    with pytest.raises(plant_bugs.TableError, match="bug 'a bug': ") as error:
        plant_bugs.planted(replace(BUG, **change), checkout)
    assert words in str(error.value)


def test_an_entry_without_a_field_or_with_a_name_that_stands_twice_is_named(tmp_path):
    table = tmp_path / "bugs.toml"
    entry = '[[bug]]\nname = "a"\nfloor = "f"\nfile = "f"\nold = "a"\nnew = "b"\ntests = []\n'
    table.write_text(entry + entry)
    with pytest.raises(plant_bugs.TableError, match=r"bug 2 \('a'\) stands twice"):
        plant_bugs.read_table(table)
    table.write_text('[[bug]]\nname = "a"\n')
    with pytest.raises(plant_bugs.TableError, match=r"bug 1 \('a'\) has the fields \['name'\]"):
        plant_bugs.read_table(table)
