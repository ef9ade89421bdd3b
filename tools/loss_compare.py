#!/usr/bin/env python
"""Compares the loss curves of two runs: a table, the largest difference, and an exit code.

    python tools/loss_compare.py runs/cp2 runs/cp1 --tolerance 1e-3
    python tools/loss_compare.py a.log b.log --assert-equal

A run is a folder with metrics.jsonl, such a file, or a log with Megatron-LM's lines. Exit code 0: every
common step is within the tolerance; 1: some step is not; 2: there is nothing to compare.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_cp.command_line import answering

_LINE = re.compile(r"iteration\s+(\d+)/\s*\d+ \|.*? lm loss: (\S+)")
_KEY = "lm loss"


def read_losses(path: Path) -> dict[int, float]:
    """Loss per iteration; the last value wins where a resumed run wrote a step twice.

    Raises ValueError for a file without any loss, OSError for one that cannot be read.
    """
    file = path / "metrics.jsonl" if path.is_dir() else path
    losses: dict[int, float] = {}
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("{"):
            try:
                row = json.loads(line)
            except ValueError:
                continue  # the last line of a run that was killed while it wrote
            if isinstance(row, dict) and _KEY in row and "iteration" in row:
                value = row[_KEY]
                losses[int(row["iteration"])] = math.nan if value is None else float(value)
        elif match := _LINE.search(line):
            losses[int(match[1])] = float(match[2])
    if not losses:
        raise ValueError(f"{file} holds no loss; give a run folder, a metrics.jsonl or a log")
    return losses


def difference(a: float, b: float) -> float:
    """|a - b|; 0 for equal values, NaN included; infinite where one of them alone is NaN."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    return math.inf if math.isnan(a) or math.isnan(b) else abs(a - b)


def table(first: dict[int, float], second: dict[int, float], *, max_rows: int) -> str:
    """The common iterations side by side, thinned out to ``max_rows`` (the worst one is always shown)."""
    common = sorted(first.keys() & second.keys())
    step = max(1, -(-len(common) // max_rows))
    worst = max(common, key=lambda i: difference(first[i], second[i]))
    shown = sorted({*common[::step], common[-1], worst})
    lines = [f"{'iteration':>10} {'first':>14} {'second':>14} {'difference':>12}"]
    for i in shown:
        mark = "  <- largest" if i == worst and difference(first[i], second[i]) else ""
        gap = difference(first[i], second[i])
        lines.append(f"{i:>10} {first[i]:>14.6E} {second[i]:>14.6E} {gap:>12.3E}{mark}")
    return "\n".join(lines)


@answering("loss_compare.py")
def main(argv: Sequence[str] | None = None) -> int:
    """Prints the comparison; the exit code of the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("first", type=Path, help="run folder, metrics.jsonl or log")
    parser.add_argument("second", type=Path, help="the same")
    parser.add_argument("--tolerance", type=float, default=1e-2, help="largest difference allowed")
    parser.add_argument("--assert-equal", action="store_true", help="the same as --tolerance 0")
    parser.add_argument("--max-rows", type=int, default=20, help="rows of the table")
    args = parser.parse_args(argv)
    first, second = read_losses(args.first), read_losses(args.second)
    common = first.keys() & second.keys()
    if not common:
        raise ValueError(f"{args.first} and {args.second} share no iteration")
    tolerance = 0.0 if args.assert_equal else args.tolerance
    largest = max(difference(first[i], second[i]) for i in common)
    print(table(first, second, max_rows=max(2, args.max_rows)))
    alone = len(first.keys() ^ second.keys())
    print(f"\n{len(common)} common iterations, {alone} in one run alone")
    verdict = "within" if largest <= tolerance else "NOT within"
    print(f"largest difference {largest:.3E}, {verdict} the tolerance of {tolerance:g}")
    return 0 if largest <= tolerance else 1


if __name__ == "__main__":
    sys.exit(main())
