#!/usr/bin/env python
"""Compares the loss curves of two runs: a table, the largest difference, and an exit code.

    python tools/loss_compare.py runs/cp2 runs/cp1 --tolerance 1e-3
    python tools/loss_compare.py megatron.log runs/cp2 --assert-equal

A run is a folder with metrics.jsonl, such a file, or a log with Megatron-LM's lines, of its program or of ours. A line
has the mean of the steps since the line before: it is compared with the mean of the same steps. Exit code 0: all that
both runs have is within the tolerance; 1: something is not; 2: there is nothing to compare.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from megatron_cp.command_line import answering

Steps = tuple[int, int]
"""First and last of the steps whose mean loss a number is."""

_LINE = re.compile(r"iteration\s+(\d+)/\s*\d+ \|(?:.*? lm loss: (\S+))?")
_BEGINS = re.compile(r"before the start of training step|loaded checkpoint .*at iteration (\d+)")
_KEY = "lm loss"


def read_losses(path: Path) -> dict[Steps, float]:
    """Mean loss of each run of steps that ``path`` has one of; the last value wins where a run wrote steps twice.

    Raises ValueError for a file without any loss, OSError for one that cannot be read.
    """
    file = path / "metrics.jsonl" if path.is_dir() else path
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    losses = dict(_of_rows(lines)) or _of_log(lines)
    if not losses:
        raise ValueError(f"{file} holds no loss; give a run folder, a metrics.jsonl or a log")
    return losses


def _of_rows(lines: Iterable[str]) -> Iterator[tuple[Steps, float]]:
    """The loss of each step that has a row and was not skipped: Megatron-LM's means leave skipped ones out."""
    for line in lines:
        if not line.startswith("{"):
            continue
        try:
            row = json.loads(line)
        except ValueError:
            continue  # the last line of a run that was killed while it wrote
        if (
            isinstance(row, dict)
            and _KEY in row
            and "iteration" in row
            and not row.get("grad/skipped")
        ):
            value = math.nan if row[_KEY] is None else float(row[_KEY])
            yield (int(row["iteration"]),) * 2, value


def _of_log(lines: Iterable[str]) -> dict[Steps, float]:
    """The mean of each line of a log whose steps are known; a job that goes on from step N replaces later ones.

    Megatron-LM prints a job's first step at once, and counts it again in its next line. A job whose beginning the log
    does not have is known from the line on that says where the next one begins.
    """
    losses: dict[Steps, float] = {}
    begins_at, is_first_line = 0, True
    first: int | None = None
    for line in lines:
        if begin := _BEGINS.search(line):
            begins_at = int(begin[1]) if begin[1] else begins_at
            if begin[1] is None:
                losses = {steps: loss for steps, loss in losses.items() if steps[1] <= begins_at}
                first, is_first_line, begins_at = begins_at + 1, True, 0
        elif match := _LINE.search(line):
            last, is_megatrons = int(match[1]), "tokens per second" not in line
            if last == 1 or (first is not None and last < first):
                first, is_first_line = (1 if last == 1 else None), True
                losses = {steps: loss for steps, loss in losses.items() if steps[1] < last}
            if first is not None and match[2]:
                losses[first, last] = float(match[2])
            if not (is_first_line and is_megatrons and first in (last, None)):
                first = last + 1
            is_first_line = False
    return losses


def in_common(
    one: dict[Steps, float], other: dict[Steps, float]
) -> dict[Steps, tuple[float, float]]:
    """Both means of all steps of which both runs have one, or every loss that makes it."""
    every = sorted(one.keys() | other.keys(), key=lambda steps: steps[::-1])
    both = {steps: (_mean(one, steps), _mean(other, steps)) for steps in every}
    return {s: (a, b) for s, (a, b) in both.items() if a is not None and b is not None}


def _mean(losses: dict[Steps, float], steps: Steps) -> float | None:
    """The mean loss of these steps; None where some of them are missing."""
    if steps in losses:
        return losses[steps]
    single = [losses.get((step, step)) for step in range(steps[0], steps[1] + 1)]
    known = [loss for loss in single if loss is not None]
    return sum(known) / len(known) if len(known) == len(single) else None


def difference(a: float, b: float) -> float:
    """|a - b|; 0 for equal values, NaN included; infinite where one of them alone is NaN."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    return math.inf if math.isnan(a) or math.isnan(b) else abs(a - b)


def table(common: dict[Steps, tuple[float, float]], *, max_rows: int) -> str:
    """Both curves side by side, thinned out to ``max_rows`` (the worst row is always shown)."""
    every = list(common)
    gaps = {steps: difference(*values) for steps, values in common.items()}
    worst = max(every, key=gaps.__getitem__)
    shown = {*every[:: max(1, -(-len(every) // max_rows))], every[-1], worst}
    lines = [f"{'iteration':>15} {'first':>14} {'second':>14} {'difference':>12}"]
    for steps in (steps for steps in every if steps in shown):
        mark = "  <- largest" if steps == worst and gaps[steps] else ""
        name = str(steps[1]) if steps[0] == steps[1] else f"{steps[0]} to {steps[1]}"
        first, second = common[steps]
        lines.append(f"{name:>15} {first:>14.6E} {second:>14.6E} {gaps[steps]:>12.3E}{mark}")
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
    common = in_common(first, second)
    if not common:
        raise ValueError(f"{args.first} and {args.second} share no iteration")
    tolerance = 0.0 if args.assert_equal else args.tolerance
    largest = max(difference(*values) for values in common.values())
    print(table(common, max_rows=max(2, args.max_rows)))
    print(f"\n{len(common)} losses in common, of {len(first)} and {len(second)}")
    verdict = "within" if largest <= tolerance else "NOT within"
    print(f"largest difference {largest:.3E}, {verdict} the tolerance of {tolerance:g}")
    return 0 if largest <= tolerance else 1


if __name__ == "__main__":
    sys.exit(main())
