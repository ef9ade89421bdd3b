"""`report`: one offline HTML file of a training run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron_cp.command_line import Progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument(
        "run_dir", type=Path, metavar="RUN_DIR",
        help="what --run-dir (or --save) named when training",
    )  # fmt: skip
    parser.add_argument(
        "--output", type=Path, metavar="FILE",
        help="the page; default: report.html in the run's folder",
    )  # fmt: skip
    parser.add_argument(
        "--compare", type=Path, metavar="RUN_DIR",
        help="another run beside it: losses and step times, of one rank best of all",
    )  # fmt: skip


def run(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Writes the page and says where."""
    from megatron_cp.report.run.page import write_run_report

    progress = Progress("report")
    written = write_run_report(args.run_dir, args.output, args.compare, tell=progress)
    progress.clear()
    print(f"wrote {written} ({written.stat().st_size / 1e3:,.0f} kB); open it in any browser")
    return 0
