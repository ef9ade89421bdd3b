"""`doctor`: what is installed, what works, can training run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from megatron_cp.command_line import Progress, add_json, prepare_outputs, show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument(
        "--megatron",
        type=Path,
        metavar="CHECKOUT",
        help="look at this Megatron-LM checkout instead: do our hooks fit it? nothing of it is run",
    )
    add_json(parser)


def run(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Prints the findings; returns 1 where training cannot run, or our hooks do not fit."""
    from megatron_cp import checkout, doctor

    prepare_outputs(args.json)
    if args.megatron is None:
        progress = Progress("doctor")
        progress("trying what is installed, some ten seconds")
        findings, program = doctor.examine(), "training"
        progress.clear()
        text = doctor.doctor_text(findings)
    else:
        findings, program = checkout.examine_checkout(args.megatron), "hooks"
        fits = "fit" if doctor.can_train(findings) else "do not fit"
        text = f"{doctor.findings_text(findings)}\nour hooks {fits} this checkout"
    fine = doctor.can_train(findings)
    show(text, {program: fine, "findings": [asdict(one) for one in findings]}, args.json)
    return 0 if fine else 1
