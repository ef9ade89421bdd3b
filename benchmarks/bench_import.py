"""Times of an import in a fresh interpreter: what every command and every loader worker pays before it begins.

python benchmarks/bench_import.py --output benchmarks/results/import_<hardware>_<date>

Goal: `megatron_cp.mask` and `megatron_cp.plan` below .3 s, NumPy included; neither imports torch.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from timing import Table, argument_parser, environment, interleaved, publish

ROOT = Path(__file__).resolve().parent.parent
MODULES = ("numpy", "megatron_cp.mask", "megatron_cp.plan", "megatron_cp.data", "megatron_cp")


def fresh_import(module: str) -> Callable[[], object]:
    """Returns a function that imports the module in an interpreter of its own."""
    search = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", f"import {module}" if module else ""]
    return lambda: subprocess.run(command, check=True, cwd=ROOT, env=search)


def main() -> None:
    """Prints one row per module, and the interpreter alone."""
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    functions = {"the interpreter alone": fresh_import("")}
    functions |= {module: fresh_import(module) for module in MODULES}
    times = interleaved(functions, rounds=arguments.rounds)
    rows = [[name, time.wall_ms, time.best_ms] for name, time in times.items()]
    table = Table("Import in a fresh interpreter", ["module", "median ms", "best ms"], rows)
    publish("Imports", environment(("numpy",)), [table], arguments.output)


if __name__ == "__main__":
    main()
