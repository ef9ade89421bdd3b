"""Trains random models in random layouts, and counts in which they train as on one rank.

python benchmarks/layouts_at_random.py --trials 120 --output benchmarks/results/layouts_<hardware>_<date>

What is drawn and what is compared: tests/training/random_layouts.py. On CPU ranks (gloo), in float32; about 6 s of
processor time a trial.
"""

import sys
import tempfile
from pathlib import Path

from timing import Table, argument_parser, environment, publish

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.training.random_layouts import KINDS, LAYOUTS, Verdict, draw, run_trials


def rows_of(verdicts: list[Verdict]) -> list[list[str | int]]:
    """One row per layout: trials, how they went, and the largest difference at a first step."""
    rows: list[list[str | int]] = []
    for layout in LAYOUTS:
        own = [verdict for verdict in verdicts if verdict.trial.layout == layout]
        counts = [
            sum(verdict.result == result for verdict in own)
            for result in ("refused", "equal", "different", "broken")
        ]
        largest = max((verdict.largest for verdict in own), default=0.0)
        rows.append([layout, len(own), *counts, f"{largest:.0e}"])
    return rows


def main() -> int:
    """Prints the table; returns 1 if any run differs or broke."""
    parser = argument_parser(__doc__)
    parser.add_argument("--trials", type=int, default=120)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    arguments = parser.parse_args()
    verdicts = []
    with tempfile.TemporaryDirectory() as folder:
        trials = draw(arguments.trials, arguments.seed, Path(folder), kinds=arguments.kinds)
        for verdict in run_trials(trials, Path(folder)):
            verdicts.append(verdict)
            if verdict.result != "equal":
                flags = " ".join(verdict.trial.flags)
                print(f"{verdict.result}: {verdict.told}\n    {flags}", file=sys.stderr, flush=True)
    columns = ["layout", "trials", "refused", "equal", "different", "broken", "largest difference"]
    note = "Equal but for rounding; the difference is relative, at the first step compared."
    table = Table("Random models in random layouts", columns, rows_of(verdicts), note)
    versions = environment(("numpy", "torch", "megatron-core"))
    publish("Layouts", versions, [table], arguments.output)
    return int(any(verdict.result in ("different", "broken") for verdict in verdicts))


if __name__ == "__main__":
    raise SystemExit(main())
