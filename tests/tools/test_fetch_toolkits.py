"""Fetching compilers, with a fake pip: what is asked for, what is kept, what is found afterwards."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from megatron_cp.kernels import compilers
from tools import fetch_toolkits

FILES = (
    "nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
    "nvidia/cuda_nvrtc/lib/libnvrtc.alt.so.12",
    "x.dist-info/RECORD",
)


@pytest.fixture
def pip(tmp_path, monkeypatch):
    """Stands in for pip; remembers what it was asked for."""
    asked = []

    def download(command, check):
        assert check
        asked.append(command)
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "nvrtc.whl", "w") as wheel:
            for name in FILES:
                wheel.writestr(name, command[-1])

    monkeypatch.setattr(subprocess, "run", download)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return asked


def test_compiler_is_fetched_once_and_never_with_what_it_depends_on(pip, tmp_path, capsys):
    assert fetch_toolkits.main(["12.4", "13.0"]) == 0
    assert [command[-1] for command in pip] == [
        "nvidia-cuda-nvrtc-cu12==12.4.*", "nvidia-cuda-nvrtc==13.0.*"
    ]  # fmt: skip
    assert all("--no-deps" in command and "torch" not in " ".join(command) for command in pip)
    kept = tmp_path / "megatron_cp" / "toolkits"
    files = sorted(str(p.relative_to(kept)) for p in kept.rglob("*") if p.is_file())
    assert files == [f"{version}/{FILES[0]}" for version in ("12.4", "13.0")]
    assert fetch_toolkits.main(["12.4"]) == 0
    assert len(pip) == 2
    assert capsys.readouterr().out.splitlines()[-1] == "NVRTC 12.4 is there"


def test_fetched_compilers_are_where_the_build_looks(pip):
    fetch_toolkits.main(["12.4"])
    assert [folder.name for folder in compilers.fetched_toolkits()] == ["12.4"]
    assert any(path.endswith(f"toolkits/12.4/{FILES[0]}") for path in compilers._nvrtc_files())


def test_fetched_compilers_that_others_can_write_are_refused(pip, tmp_path):
    fetch_toolkits.main(["12.4"])
    (tmp_path / "megatron_cp" / "toolkits").chmod(0o777)
    with pytest.raises(PermissionError, match=r"compiler cache .* chmod 700 it"):
        compilers.fetched_toolkits()


@pytest.mark.parametrize("version", ["12", "11.8", "12.3", "torch", "12.4.*"])
def test_version_that_there_is_not_is_refused(pip, version, capsys):
    assert fetch_toolkits.main([version]) == 1
    assert (
        f"toolkit version {version!r} must be major.minor from 12.4 on" in capsys.readouterr().err
    )
    assert pip == []


def test_failed_download_leaves_nothing(pip, tmp_path, monkeypatch, capsys):
    def fail(command, check):
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(subprocess, "run", fail)
    assert fetch_toolkits.main(["12.4"]) == 1
    assert "NVRTC 12.4: Command" in capsys.readouterr().err
    assert compilers.fetched_toolkits() == []
    assert [path.name for path in (tmp_path / "megatron_cp").iterdir()] == ["toolkits"]


def test_elsewhere_nothing_is_fetched(pip, monkeypatch, capsys):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert fetch_toolkits.main(["12.4"]) == 0
    assert "on Linux only" in capsys.readouterr().out
    assert pip == []
