"""The source distribution is the repository, and every Python that it promises is tried."""

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
GENERATED = {"PKG-INFO", "setup.cfg"}


def tracked(*more: str) -> set[str]:
    """The names that git lists; none outside a checkout."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", *more]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return set()
    return {name for name in done.stdout.split("\0") if name and Path(ROOT, name).exists()}


@pytest.mark.skipif(not tracked(), reason="no git checkout")
def test_a_source_distribution_holds_every_file_of_the_repository_and_no_other(tmp_path):
    pytest.importorskip("setuptools", minversion="77", reason="reads pyproject.toml's license")
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    command += ["sdist", "--dist-dir", str(tmp_path / "dist")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (made,) = (tmp_path / "dist").glob("*.tar.gz")
    with tarfile.open(made) as archive:
        names = {one.name.partition("/")[2] for one in archive.getmembers() if not one.isdir()}
    assert tracked() - names == set()
    assert names - tracked() - tracked("--others") - GENERATED == set()


def test_a_wheel_holds_nothing_of_an_earlier_build(tmp_path):
    pytest.importorskip("setuptools", minversion="77", reason="reads pyproject.toml's license")
    stale = tmp_path / "lib" / "megatron_cp" / "gone.py"
    stale.parent.mkdir(parents=True)
    stale.touch()
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    command += ["build_py", "--build-lib", str(tmp_path / "lib")]
    environment = {**os.environ, "MEGATRON_CP_CUBINS": "0"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    built = {str(one.relative_to(stale.parent)) for one in stale.parent.rglob("*.py")}
    assert "gone.py" not in built
    assert {"__init__.py", "plan/schema.py", "kernels/build.py", "models/gpt.py"} <= built


def test_every_python_of_the_classifiers_runs_tests_in_ci():
    """The workflow as text: no YAML reader is needed here."""
    metadata = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    promised = set(re.findall(r"Programming Language :: Python :: (3\.\d+)", metadata))
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    jobs = dict(
        re.findall(r"^  ([\w-]+):\n(.*?)(?=^  [\w-]+:\n|\Z)", workflow, re.MULTILINE | re.DOTALL)
    )
    tried = {
        version
        for job in jobs.values()
        if ".ci/run" in job or "make test" in job
        for version in re.findall(r'"(3\.\d+)"', job)
    }
    assert promised == tried and len(promised) > 3
