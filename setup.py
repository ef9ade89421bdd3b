"""Decides what is packaged; metadata is in pyproject.toml.

The folders `models/` and `kernels/` stand at the top of the source tree, where readers look for
them, and are installed inside the package: no generic top-level name reaches site-packages. In the
tree, links of the same names in megatron_cp/ make them importable without an installation, and
visible to mypy and the import linter; packaging does not need the links.
"""

from pathlib import Path

from setuptools import find_packages, setup

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
        if Path(folder, "__init__.py").is_file():
            packages += [name, *(f"{name}.{child}" for child in find_packages(folder))]
            folders[name] = folder
    return packages, folders


packages, package_dir = packages_and_folders()
setup(
    packages=packages,
    package_dir=package_dir,
    package_data={
        "": ["py.typed", "*.css", "*.html", "*.js", "*.json"],
        "megatron_cp.kernels": ["**/*.cpp", "**/*.cu", "**/*.cuh", "**/*.h", "**/*.json"],
    },
)
