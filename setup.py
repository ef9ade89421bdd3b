"""Decides what is packaged; metadata is in pyproject.toml.

The folders `models/` and `kernels/` stand at the top of the source tree, where readers look for
them, and are installed inside the package: no generic top-level name reaches site-packages. In the
tree, links of the same names in megatron_cp/ make them importable without an installation, and
visible to mypy and the import linter; packaging does not need the links. They have no `__init__.py`, so that
`import kernels` at the top of the tree finds somebody else's package of that name, where there is one.

Where NVRTC or nvcc is present, a wheel gets the kernels as cubins (some minutes; MEGATRON_CP_CUBINS=0 leaves them
out); of CUDA 12 where such a compiler is there (`make toolkits` fetches one), so that every driver from R525 on takes
them. Without cubins, and in an editable installation, kernels are compiled on first use.
"""

import os
import subprocess
import sys
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

MOVED_INSIDE = ("models", "kernels")


def packages_and_folders() -> tuple[list[str], dict[str, str]]:
    """Returns all packages' names, and the folders of those that are not where their name says."""
    inside = tuple(f"megatron_cp.{folder}" for folder in MOVED_INSIDE)
    packages = [
        name
        for name in find_packages(include=["megatron_cp", "megatron_cp.*"])
        if not name.startswith(inside)
    ]
    folders = {}
    for folder, name in zip(MOVED_INSIDE, inside, strict=True):
        if Path(folder).is_dir():
            packages += [name, *(f"{name}.{child}" for child in find_packages(folder))]
            folders[name] = folder
    return packages, folders


class BuildWithCubins(build_py):
    """Copies the package and adds the kernels' cubins; where there is no compiler it adds none."""

    def run(self) -> None:
        """Copies, then compiles into the copy. Cubins of an earlier build may stay: they name their sources."""
        wants_cubins = os.environ.get("MEGATRON_CP_CUBINS") != "0"
        if not self.editable_mode:
            for left in Path(self.build_lib, "megatron_cp").rglob("*"):
                if left.is_file() and not (wants_cubins and left.suffix == ".cubin"):
                    left.unlink()  # a module that is gone would be packaged
        super().run()
        if self.editable_mode or not wants_cubins:
            return
        if Path("kernels", "attn", "variants.json").is_file():
            folder = Path(self.build_lib, "megatron_cp", "kernels", "cubins")
            command = [sys.executable, str(Path("kernels", "build.py")), "--into", str(folder)]
            subprocess.run(command, check=True)


class SourceWithLinks(sdist):
    """Packs the tree as it is: the links of the package too, which packaging would follow."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        """Copies the files, then makes the links."""
        super().make_release_tree(base_dir, files)
        for folder in MOVED_INSIDE:
            Path(base_dir, "megatron_cp", folder).symlink_to(Path("..", folder))


packages, package_dir = packages_and_folders()
setup(
    cmdclass={"build_py": BuildWithCubins, "sdist": SourceWithLinks},
    packages=packages,
    package_dir=package_dir,
    package_data={
        "": ["py.typed", "*.css", "*.html", "*.js", "*.json"],
        "megatron_cp.kernels": ["**/*.cpp", "**/*.cu", "**/*.cuh", "**/*.h", "**/*.json"],
    },
)
