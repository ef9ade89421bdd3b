"""Kills runs at random points and counts how many go on to the very bits of a run that nobody killed.

python benchmarks/kill_at_random.py --kills 100 --output benchmarks/results/kills_<hardware>_<date>

Layouts, phases and what is compared: tests/faults/random_kills.py. On CPU ranks (gloo); about 10 s a kill on two
cores. A moment that lies behind the end of the run kills nothing; such draws have a column of their own.
"""

import sys
import tempfile
from pathlib import Path

from timing import Table, argument_parser, environment, publish

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.faults.random_kills import LAYOUTS, PHASES, Verdict, draw, run_trials


def rows_of(verdicts: list[Verdict]) -> list[list[str | int]]:
    """One row per layout and phase: drawn, died, and bitwise equal at the end."""
    rows: list[list[str | int]] = []
    for layout in LAYOUTS:
        for phase in PHASES:
            own = [v for v in verdicts if (v.trial.layout, v.trial.phase) == (layout, phase)]
            dead = [v for v in own if v.died]
            equal = [v for v in dead if v.difference is None]
            if own:
                rows.append([layout, phase, len(own), len(dead), len(equal)])
    return rows


def main() -> int:
    """Prints the table; returns 1 if any run did not end bitwise equal."""
    parser = argument_parser(__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        verdicts = run_trials(draw(arguments.kills, arguments.seed), Path(folder))
    different = [v for v in verdicts if v.difference is not None]
    for verdict in different:
        print(f"{verdict.trial}: {verdict.difference}", file=sys.stderr)
    columns = ["layout", "killed in", "drawn", "died", "bitwise equal after a restart"]
    table = Table("Runs killed at random points", columns, rows_of(verdicts))
    versions = environment(("numpy", "torch", "megatron-core"))
    publish("Kills", versions, [table], arguments.output)
    return 1 if different else 0


if __name__ == "__main__":
    raise SystemExit(main())
