"""How long until every rank of a run has ended after one of them got another token than those that share its batch?

python benchmarks/batch_mismatch.py --trials 10 --output benchmarks/results/batch_mismatch_<hardware>_<date>

Real runs on CPU ranks (gloo). One token of one micro-batch of one random rank is changed in a random step, as it is
handed to the loop; counted is the time from there to the end of the last rank. Exit code 1 if a rank ended otherwise
than with the one line of the difference, or if a trial took five seconds.
"""

import random
import statistics
import sys
import tempfile
from pathlib import Path

from timing import Cell, Table, argument_parser, environment, publish

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.faults.program import Launch, run_program
from tests.faults.random_kills import LAYOUTS, RUN

LIMIT_S = 5.0


def seconds_until_all_ended(layout: str, dice: random.Random, folder: Path) -> float:
    """Returns the seconds from the change to the last rank's end.

    Raises AssertionError if a rank says anything else.
    """
    world_size, flags = LAYOUTS[layout]
    odd, step = dice.randrange(world_size), 1 + dice.randrange(5)
    changed = {"CHANGED": f"{odd} {step} {folder}"}
    plant = "tests.faults.plants.another_token"
    where = ("--run-dir", str(folder))
    run = Launch((*RUN, *flags, *where), world_size, environment=changed, plant=plant)
    (ranks,) = run_program([run])
    for rank in ranks:
        (line,) = [text for text in rank.stderr.splitlines() if "error: " in text]
        assert rank.code == 1 and "tokens of micro-batch 1" in line, rank.stderr
        assert f"of step {step} are not the same" in line, line
    ended = [float((folder / f"ended_{rank}").read_text()) for rank in range(world_size)]
    return max(ended) - float((folder / f"changed_{odd}").read_text())


def main() -> int:
    """Prints the table; returns 1 if a trial took too long."""
    parser = argument_parser(__doc__)
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    dice, rows, slowest = random.Random(arguments.seed), list[list[Cell]](), 0.0
    for layout, (world_size, _) in LAYOUTS.items():
        if "async" in layout:
            continue
        times = []
        for _ in range(arguments.trials):
            with tempfile.TemporaryDirectory() as folder:
                times.append(seconds_until_all_ended(layout, dice, Path(folder)))
        slowest = max(slowest, *times)
        rows.append([layout, world_size, len(times), statistics.median(times), max(times)])
    columns = ["layout", "ranks", "trials, all named", "median, s", "longest, s"]
    table = Table("From one other token to the end of every rank", columns, rows)
    versions = environment(("numpy", "torch", "megatron-core"))
    publish("Batches that differ", versions, [table], arguments.output)
    return 1 if slowest >= LIMIT_S else 0


if __name__ == "__main__":
    raise SystemExit(main())
