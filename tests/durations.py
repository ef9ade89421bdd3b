"""How long tests took, so that `make test` begins with what is long and `make test-fast` leaves it out.

    make test PYTEST_ARGS=--write-durations        measures again, on a quiet machine of two cores

Those of files are of 2026-11-27: processor time, of a file's programs and ranks too, since other work went on beside;
of files that came later an estimate, on the scale of the others.
Nothing depends on them but order and choice: a test that is not known is short.
"""

import json
from collections import defaultdict
from pathlib import Path

import pytest

FILE = Path(__file__).with_suffix(".json")
SLOW_SECONDS = 0.4
"""Of one set of a test's parameters, on average."""


def known() -> dict[str, dict[str, float]]:
    """Returns `files`: seconds of those that took one; `slow`: seconds of tests that are not for `make test-fast`."""
    return json.loads(FILE.read_text())


def name_of(node_id: str) -> str:
    """Returns a test's name without its parameters."""
    return node_id.partition("[")[0]


class Recorder:
    """Adds up what a session's tests take, and writes it at the end; with workers, in the process that leads them."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Adds one of the three phases of a test."""
        self.seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        """Writes the file."""
        files: dict[str, float] = defaultdict(float)
        tests: dict[str, list[float]] = defaultdict(list)
        for node_id, seconds in self.seconds.items():
            files[node_id.partition("::")[0]] += seconds
            tests[name_of(node_id)].append(seconds)
        means = {name: sum(taken) / len(taken) for name, taken in tests.items()}
        found = {
            "files": {name: round(taken) for name, taken in files.items() if taken >= 1},
            "slow": {name: round(m, 1) for name, m in means.items() if m >= SLOW_SECONDS},
        }
        FILE.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
