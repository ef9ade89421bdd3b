"""Every tool starts as its page says, from any folder, without the repository on Python's path."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import HANG_SECONDS

TOOLS = Path(__file__).resolve().parents[2] / "tools"
# All but what another program imports (docs_site.py is mkdocs').
PROGRAMS = sorted(path.name for path in TOOLS.glob("*.py") if "__main__" in path.read_text())


def test_nearly_every_tool_is_a_program():
    assert {path.name for path in TOOLS.glob("*.py")} - set(PROGRAMS) == {"docs_site.py"}


@pytest.mark.parametrize("name", PROGRAMS)
def test_tool_starts_from_another_folder(name, tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    done = subprocess.run(
        [sys.executable, str(TOOLS / name), "--help"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert name in done.stdout
