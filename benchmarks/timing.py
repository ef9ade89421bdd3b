"""The protocol that every benchmark shares: how it measures, what it says about the machine, what it writes.

Measured functions are interleaved: every round runs each once, in the same order, after warm-up rounds that
are not counted, so that a busy moment hits all alike. Reported are medians on the clock and of the processor
time of all threads; the latter is what other work on the machine disturbs least, on one thread.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

Cell = str | int | float


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one function over all counted rounds."""

    wall_ms: float
    best_ms: float
    cpu_ms: float


@dataclass(frozen=True)
class Table:
    """One table of a result page; floats are printed with two digits."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""


def interleaved(
    functions: Mapping[str, Callable[[], object]], rounds: int = 9, warmup: int = 2
) -> dict[str, Timing]:
    """Returns the times of each function: median and best on the clock, median of processor time."""
    wall: dict[str, list[float]] = {name: [] for name in functions}
    cpu: dict[str, list[float]] = {name: [] for name in functions}
    for current in range(warmup + rounds):
        for name, function in functions.items():
            started = time.perf_counter(), time.process_time()
            function()
            elapsed = time.perf_counter() - started[0], time.process_time() - started[1]
            if current >= warmup:
                wall[name].append(elapsed[0] * 1e3)
                cpu[name].append(elapsed[1] * 1e3)
    return {
        name: Timing(statistics.median(wall[name]), min(wall[name]), statistics.median(cpu[name]))
        for name in functions
    }


def argument_parser(doc: str) -> argparse.ArgumentParser:
    """Returns the parser of a benchmark with this docstring: where to write, and what else it adds."""
    parser = argparse.ArgumentParser(description=doc.split("\n")[0])
    parser.add_argument("--output", type=Path, help="path of the result without suffix")
    return parser


def environment(packages: Sequence[str] = ("numpy",)) -> dict[str, str]:
    """Returns what a reader must know about machine and software to judge a figure."""
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in packages)
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "hardware": f"{_processor()}, {os.cpu_count()} cores",
        "software": f"Python {platform.python_version()}, {versions}",
        "load of the machine at the start": f"{os.getloadavg()[0]:.1f}",
    }


def publish(
    title: str,
    facts: Mapping[str, str],
    tables: Sequence[Table],
    output: Path | None,
    details: object = None,
) -> None:
    """Prints the result page and writes `<output>.md` and `<output>.json` (no suffix given) if asked to.

    `details`: what only the JSON file holds.
    """
    parts = [f"# {title}", "\n".join(f"- {name}: {value}" for name, value in facts.items())]
    parts += [_markdown(table) for table in tables]
    page = "\n\n".join(parts) + "\n"
    print(page)
    if output is None:
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    output.with_name(output.name + ".md").write_text(page)
    values = {"title": title, "facts": dict(facts), "tables": [asdict(t) for t in tables]}
    if details is not None:
        values["details"] = details
    output.with_name(output.name + ".json").write_text(json.dumps(values, indent=1) + "\n")


def _markdown(table: Table) -> str:
    lines = [f"## {table.title}", ""]
    if table.note:
        lines += [table.note, ""]
    lines.append("| " + " | ".join(table.columns) + " |")
    lines.append("|---|" + "---:|" * (len(table.columns) - 1))
    lines += ["| " + " | ".join(_text(cell) for cell in row) + " |" for row in table.rows]
    return "\n".join(lines)


def _text(cell: Cell) -> str:
    return f"{cell:.2f}" if isinstance(cell, float) else str(cell)


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
