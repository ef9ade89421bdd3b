"""Every tool starts as its page says, from any folder, without the repository on Python's path."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import HANG_SECONDS

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.mark.parametrize("name", sorted(path.name for path in TOOLS.glob("*.py")))
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
