"""Parses, completes and checks the command line of `pretrain_gpt.py` before anything else happens.

`parse_arguments` needs no process group: the world size is read from the launcher's environment,
so every rank reaches the same verdict by itself, before the first collective, and a refusal is
one line for each reason on standard error, and exit code 2.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import partial

from megatron_cp.command_line import refuse
from megatron_cp.training.arguments.complete import complete_and_check
from megatron_cp.training.arguments.faults import discard, faults_of
from megatron_cp.training.arguments.flags import add_served_flags
from megatron_cp.training.arguments.from_checkpoint import SIZES, take_checkpoint_arguments
from megatron_cp.training.arguments.known_flags import NOTED, decided_by, refusal
from megatron_cp.training.arguments.machine import Machine, this_machine
from megatron_cp.training.arguments.without_effect import notes_without_effect
from megatron_cp.training.config import TrainConfig

PROGRAM = "pretrain_gpt.py"


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of every served flag, Megatron-LM's and ours."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        exit_on_error=False,
        description="Pretrain a GPT with context parallelism. Flags are those of Megatron-LM.",
        allow_abbrev=False,
    )
    add_served_flags(parser)
    _add_context_parallel_flags(parser)
    return parser


def _add_context_parallel_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the Megatron floor (planner, backend, chunk size)."""
    from megatron_cp.mcore.settings.arguments import add_context_parallel_arguments

    add_context_parallel_arguments(parser)


def parse_arguments(
    argv: Sequence[str] | None = None, environment: Mapping[str, str] | None = None
) -> TrainConfig:
    """Returns the complete, checked configuration of this rank.

    Leaves with code 2, and one line for each reason on standard error, on bad input.
    """
    draft, reasons = judge_arguments(
        sys.argv[1:] if argv is None else argv, os.environ if environment is None else environment
    )
    if reasons:
        refuse(PROGRAM, reasons)
    return TrainConfig.from_arguments(vars(draft), tuple(draft.notes))


_OF_LAUNCHER = ("rank", "world_size", "local_rank", "local_world_size")
# How srun and Open MPI's mpirun tell a program how many of it they started.
_TASKS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")


def judge_arguments(
    argv: Sequence[str], environment: Mapping[str, str], machine: Machine | None = None
) -> tuple[argparse.Namespace, list[str]]:
    """Returns a draft and every reason to refuse it, sorted; complete if there is none.

    Opens no file but the checkpoint of --use-checkpoint-args. A reason that only follows from another is left out.
    Judges for `machine`; by default for this one.
    """
    parser = build_parser()
    kept, notes, reasons, undecided = _sort_flags(parser, argv)
    args, found = _parse_kept(parser, kept)
    reasons += found
    discard(args, *undecided)
    args.notes, args.machine = notes, machine or this_machine()
    reasons += faults_of(partial(_launcher, environment), args, *_OF_LAUNCHER)
    flags = [word.partition("=")[0] for word in argv]
    if flags.count("--spec") > 1:
        reasons.append("--spec is given twice; give one module and one name")
    given = {action.dest for action in parser._actions if set(flags) & set(action.option_strings)}
    reasons += faults_of(partial(take_checkpoint_arguments, given), args, *SIZES)
    reasons += complete_and_check(args)
    if not reasons:
        notes += notes_without_effect(args, flags)
    return args, sorted({" ".join(reason.split()) for reason in reasons})


def _sort_flags(
    parser: argparse.ArgumentParser, argv: Sequence[str]
) -> tuple[list[str], list[str], list[str], list[str]]:
    """Returns the words that the parser takes, notes, refusals, and the values these leave open."""
    served = {name: action.dest for action in parser._actions for name in action.option_strings}
    kept: list[str] = []
    notes: list[str] = []
    reasons: list[str] = []
    undecided: list[str] = []
    for words in _flags_with_values(argv):
        flag, equals, _ = words[0].partition("=")
        if flag in NOTED:
            wanted, reason = NOTED[flag]
            num_values = wanted if wanted >= 0 else len(words) - 1
            if not equals and len(words) <= num_values:
                reasons.append(f"{flag} expects {num_values} value(s)")
            notes.append(f"{flag} changes nothing here: {reason}")
            kept += words[1 if equals else 1 + num_values :]
        elif flag in served and ("" in words or words[0].endswith("=")):
            reasons.append(
                f"{flag} is given an empty word, as a shell variable that is not set leaves it; give a value or drop "
                "the flag"
            )
            undecided.append(served[flag])
        elif flag in served or not _is_flag(flag):
            kept += words
        elif (known := refusal(flag)) is not None:
            reasons.append(known)
            undecided += decided_by(flag)
        else:
            near = get_close_matches(flag, served, n=1)
            hint = f"did you mean {near[0]}?" if near else "see --help for the served flags"
            reasons.append(
                f"{flag} is unknown to Megatron-LM (0.16 to 0.20) and to megatron_cp; {hint}"
            )
            undecided += [served[name] for name in near]
    return kept, notes, reasons, undecided


def _is_flag(word: str) -> bool:
    """Whether a word names a flag: -1 is a number."""
    return word.startswith("--") or (word[:1] == "-" and word[1:2].isalpha())


def _flags_with_values(argv: Sequence[str]) -> Iterator[list[str]]:
    """Yields each flag with the words that follow it."""
    group: list[str] = []
    for word in argv:
        if _is_flag(word) and group:
            yield group
            group = []
        group.append(word)
    if group:
        yield group


def _parse_kept(
    parser: argparse.ArgumentParser, words: list[str]
) -> tuple[argparse.Namespace, list[str]]:
    """Returns what the parser makes of the words, and why it refuses some of them.

    The parser stops at the first flag whose value is wrong. That flag is taken out, and the rest is
    parsed again.
    """
    reasons: list[str] = []
    wrong: list[str] = []
    while True:
        try:
            args, stray = parser.parse_known_args(words)
            break
        except argparse.ArgumentError as problem:
            reasons.append(str(problem))
            names = (problem.argument_name or "").split("/")
            wrong += [a.dest for a in parser._actions if set(names) & set(a.option_strings)]
            groups = list(_flags_with_values(words))
            left = [group for group in groups if group[0].partition("=")[0] not in names]
            assert len(left) < len(groups), problem
            words = [word for group in left for word in group]
    discard(args, *wrong)
    reasons += [
        f"{word!r} follows no flag that takes it; every argument is a --flag, see --help"
        for word in stray
    ]
    return args, reasons


def _launcher(environment: Mapping[str, str], args: argparse.Namespace) -> Iterator[str]:
    """Completes rank, world size and local rank as torchrun or SLURM's wrapper exported them.

    (0, 1, 0) without a launcher.
    """
    local_rank = getattr(args, "local_rank", None) or 0
    defaults = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": 1}
    for name, default in defaults.items():
        text = environment.get(name, str(default))
        if text.isdigit():
            setattr(args, name.lower(), int(text))
            continue
        yield f"environment {name}={text!r} must be a whole number; start with torchrun"
        discard(args, name.lower())
    args.local_world_size = max(args.local_world_size, args.local_rank + 1)
    if not 0 <= args.rank < args.world_size:
        yield (
            f"environment RANK={args.rank} must lie in [0, WORLD_SIZE={args.world_size}); start "
            "with torchrun"
        )
    for name in _TASKS if "WORLD_SIZE" not in environment else ():
        if (count := environment.get(name, "1")) != "1":
            yield (
                f"environment {name}={count} is set and WORLD_SIZE is not: each of these tasks would train alone, into "
                "the same folders; start torchrun on every node (examples/launch), or export RANK, WORLD_SIZE, "
                "LOCAL_RANK, MASTER_ADDR and MASTER_PORT"
            )
