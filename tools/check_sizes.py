"""Fails when a file or a function has grown past the limits; run by `make sizes` and pre-commit.

Limits are gates because growth is never noticed on the day it happens. A function's docstring is
not counted: explaining must not cost. Formatting and complexity are ruff's business.
"""

import argparse
import ast
import os
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHECKED = (
    "benchmarks", "examples", "kernels", "megatron_cp", "models", "tests", "tools",
    "pretrain_gpt.py", "setup.py",
)  # fmt: skip
PYTHON_FILE_LINES = 400
PYTHON_FUNCTION_LINES = 60
CUDA_FILE_LINES = 500
CUDA_SUFFIXES = (".cpp", ".cu", ".cuh", ".h")


def source_files(root: Path) -> Iterator[Path]:
    """Yields every checked file once: links, caches and hidden folders are not entered."""
    for name in CHECKED:
        if (root / name).is_file():
            yield root / name
        for folder, children, files in os.walk(root / name):
            children[:] = sorted(c for c in children if not c.startswith((".", "__pycache__")))
            yield from (Path(folder, file) for file in sorted(files))


def function_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Returns the lines of a function from `def` to its end, without the docstring."""
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function, clean=False) is not None:
        docstring = function.body[0]
        lines -= docstring.end_lineno - docstring.lineno + 1
    return lines


def violations(path: Path) -> Iterator[str]:
    """Yields one line per limit that the file breaks."""
    if path.suffix not in (".py", *CUDA_SUFFIXES):
        return
    text = path.read_text(encoding="utf-8")
    name = os.path.relpath(path)
    num_lines = len(text.splitlines())
    limit = PYTHON_FILE_LINES if path.suffix == ".py" else CUDA_FILE_LINES
    if num_lines > limit:
        yield f"{name}: {num_lines} lines, allowed {limit}; split it by subject"
    if path.suffix != ".py":
        return
    for node in ast.walk(ast.parse(text, filename=str(path))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            num_lines = function_lines(node)
            if num_lines > PYTHON_FUNCTION_LINES:
                yield (
                    f"{name}:{node.lineno}: {node.name} has {num_lines} lines, "
                    f"allowed {PYTHON_FUNCTION_LINES}; name its parts"
                )


def main(root: Path) -> int:
    """Prints what is too long under `root`; returns the exit status."""
    found = [line for path in source_files(root) for line in violations(path)]
    print("\n".join(found) if found else "sizes: all files and functions within their limits")
    return 1 if found else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "root", nargs="?", type=Path, default=ROOT, help="a checkout; default: this"
    )
    sys.exit(main(parser.parse_args().root))
