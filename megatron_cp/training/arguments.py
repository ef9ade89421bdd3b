"""The command line of ``pretrain_gpt.py``.

Parsed, completed and checked before anything else happens.

``parse_arguments`` needs no process group: the world size is read from the launcher's environment,
so every rank reaches the same verdict by itself, before the first collective, and a refusal is one
line on standard error and exit code 2.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import NoReturn

from megatron_cp.training.flags import add_served_flags
from megatron_cp.training.known_flags import NOTED, refusal
from megatron_cp.training.validate import complete_and_check

Arguments = argparse.Namespace


class OneLineParser(argparse.ArgumentParser):
    """An ArgumentParser that refuses in one line, without printing its usage."""

    def error(self, message: str) -> NoReturn:
        """Prints ``error: message`` on standard error and leaves with code 2."""
        # One write: lines of several ranks must not run into each other.
        sys.stderr.write(f"{self.prog}: error: {' '.join(message.split())}\n")
        raise SystemExit(2)


def build_parser() -> OneLineParser:
    """The parser of every served flag, Megatron-LM's and ours."""
    parser = OneLineParser(
        prog="pretrain_gpt.py",
        description="Pretrain a GPT with context parallelism. Arguments are those of Megatron-LM.",
        allow_abbrev=False,
    )
    add_served_flags(parser)
    _add_context_parallel_flags(parser)
    return parser


def _add_context_parallel_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the Megatron floor (planner, backend, chunk size)."""
    from megatron_cp.mcore.arguments import add_context_parallel_arguments

    add_context_parallel_arguments(parser)


def parse_arguments(
    argv: Sequence[str] | None = None, environment: Mapping[str, str] | None = None
) -> Arguments:
    """The complete, checked arguments of this rank.

    Leaves with code 2 and one line on bad input.

    Adds to what was given: ``rank``, ``world_size``, ``local_rank``, ``data_parallel_size``,
    ``notes`` (lines to print once) and every default that follows from other flags.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    environment = os.environ if environment is None else environment
    parser = build_parser()
    served, notes = _take_noted(parser, argv)
    args, unknown = parser.parse_known_args(served)
    if unknown:
        parser.error(_unknown_message(parser, unknown[0]))
    args.notes = notes
    try:
        args.rank, args.world_size, args.local_rank = _launcher(args, environment)
        complete_and_check(args)
    except (ValueError, NotImplementedError) as problem:
        parser.error(str(problem))
    return args


def _take_noted(parser: OneLineParser, argv: list[str]) -> tuple[list[str], list[str]]:
    """The arguments without those that change nothing, and one note for each of these."""
    kept: list[str] = []
    notes: list[str] = []
    place = 0
    while place < len(argv):
        flag = argv[place].split("=")[0]
        place += 1
        if flag not in NOTED:
            kept.append(argv[place - 1])
            continue
        num_values, reason = NOTED[flag]
        if "=" not in argv[place - 1]:
            if place + num_values > len(argv):
                parser.error(f"{flag} expects {num_values} value(s)")
            place += num_values
        notes.append(f"{flag} changes nothing here: {reason}")
    return kept, notes


def _unknown_message(parser: OneLineParser, word: str) -> str:
    """What to say about a word that no served flag took."""
    flag = word.split("=")[0]
    if not flag.startswith("--"):
        return f"{word!r} follows no flag that takes it; every argument is a --flag, see --help"
    known = refusal(flag)
    if known is not None:
        return known
    served = [name for action in parser._actions for name in action.option_strings]
    near = get_close_matches(flag, served, n=1)
    hint = f"did you mean {near[0]}?" if near else "see --help for the served flags"
    return f"{flag} is unknown to Megatron-LM and to megatron_cp; {hint}"


def _launcher(args: Arguments, environment: Mapping[str, str]) -> tuple[int, int, int]:
    """(rank, world size, local rank) as torchrun or SLURM's wrapper exported them.

    (0, 1, 0) without a launcher.
    """
    values = []
    for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", args.local_rank or 0)):
        text = environment.get(name, str(default))
        if not text.isdigit():
            raise ValueError(
                f"environment {name}={text!r} must be a whole number; start with torchrun"
            )
        values.append(int(text))
    rank, world_size, local_rank = values
    if not 0 <= rank < world_size:
        raise ValueError(
            f"environment RANK={rank} must lie in [0, WORLD_SIZE={world_size}); start with torchrun"
        )
    return rank, world_size, local_rank
