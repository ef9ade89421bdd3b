"""Fetches NVRTC of several CUDA versions into the user's cache, where the kernels' build and gate find them.

    python tools/fetch_toolkits.py                12.4 12.6 12.8 12.9 13.0, about 320 MB
    python tools/fetch_toolkits.py 12.4 12.8      113 MB

Wheels of NVIDIA's, by pip from the package index that it is set up for; nothing is installed, no torch comes along.
They lie under $XDG_CACHE_HOME/megatron_cp/toolkits/<version> (~/.cache without it). What is there is not fetched again.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from megatron_cp.kernels import cache, compilers

VERSIONS = ("12.4", "12.6", "12.8", "12.9", "13.0")


def package_name(version: str) -> str:
    """Returns the requirement that pip is asked for. Raises ValueError for what is no `major.minor` from 12.4 on."""
    numbers = re.fullmatch(r"(\d+)\.(\d+)", version)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < compilers.MIN_VERSION:
        raise ValueError(
            f"toolkit version {version!r} must be major.minor from 12.4 on, such as {', '.join(VERSIONS)}; give one of "
            "these"
        )
    suffix = "-cu12" if numbers[1] == "12" else ""
    return f"nvidia-cuda-nvrtc{suffix}=={version}.*"


def fetch(version: str) -> bool:
    """Puts a version's NVRTC into the cache; returns whether it had to be fetched.

    Raises: ValueError for a version that there is not; CalledProcessError in pip's words; PermissionError for a cache
    that others can write to.
    """
    requirement = package_name(version)
    folder = cache.user_folder("toolkits", "compiler")
    target = folder / version
    if target.is_dir():
        return False
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="fetch-") as room:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
        ]
        subprocess.run([*command, "--dest", room, requirement], check=True)
        (wheel,) = Path(room).glob("*.whl")
        with zipfile.ZipFile(wheel) as packed:
            # The `alt` libraries are second copies for old systems.
            names = [n for n in packed.namelist() if "/lib/" in n and ".alt." not in n]
            packed.extractall(Path(room, "unpacked"), names)
        shutil.move(Path(room, "unpacked"), target)
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("versions", nargs="*", default=VERSIONS, metavar="MAJOR.MINOR")
    versions = parser.parse_args(arguments).versions
    if not sys.platform.startswith("linux"):
        print(f"NVRTC is fetched on Linux only, this is {sys.platform}; nothing was done")
        return 0
    for version in versions:
        try:
            words = "fetched" if fetch(version) else "is there"
        except (ValueError, PermissionError, OSError, subprocess.CalledProcessError) as error:
            print(f"NVRTC {version}: {error}", file=sys.stderr)
            return 1
        print(f"NVRTC {version} {words}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
