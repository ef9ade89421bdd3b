# PYTHON_ARGCOMPLETE_OK
"""What there is, on paper, emulated, in pictures: the commands of megatron_cp.

Bad input is one line on standard error and exit code 2; Ctrl-C is one line and exit code 130.
"""

from __future__ import annotations

import sys

try:
    import difflib
    import os
    from collections.abc import Sequence
    from importlib import import_module
    from pathlib import Path

    from megatron_cp import __version__
    from megatron_cp.command_line import HelpWithDefaults, OneLineParser, answering, refuse
except KeyboardInterrupt:  # `answering` is not there yet
    sys.stderr.write("megatron_cp: interrupted\n")
    raise SystemExit(130) from None

LAUNCHER = "torchrun --nproc-per-node 8 -m megatron_cp"
COMMANDS = {
    "doctor": ("what is installed, what works, can training run", "doctor --json"),
    "plan": (
        "a dry run on your data, without a GPU",
        "plan --data-path corpus_text_document --seq-length 128K --html plan.html",
    ),
    "simulate": (
        "every planner on 8 to 4096 ranks, on paper",
        "simulate --workload W3 --context-parallel-size 64,512 --cp-planner auto,usp,magi",
    ),
    "measure": (
        "the profile of your machines, for plans that know them; started by torchrun",
        f"{LAUNCHER} measure cluster.json",
    ),
    "emulate": (
        "one case of the Hopper kernels on this CPU",
        "emulate --mask documents --seq-length 300 --backward",
    ),
    "report": ("one offline HTML file of a training run", "report runs/python-docs/cp2"),
}
"""Name of each command: what it is for, and an example; the program stands before those that no launcher starts."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code."""
    if "_ARGCOMPLETE" in os.environ:
        _complete()
    words = list(sys.argv[1:] if argv is None else argv)
    name = " ".join([_program(), *words[:1]])
    return answering(name)(_run)(name, words)


def _run(name: str, words: list[str]) -> int:
    try:
        args, stray = build_parser(_command_of(words)).parse_known_args(words)
        if args.command is None:
            refuse(name, [f"a command is missing; give one of {', '.join(COMMANDS)}, or --help"])
        if stray:
            refuse(
                name, [f"unrecognized arguments: {' '.join(stray)}; {_nearest(stray, args.flags)}"]
            )
        return int(args.run(args, words))
    except ModuleNotFoundError as problem:
        missing = (problem.name or "").split(".")[0]
        if missing in ("", "megatron_cp"):  # a fault of ours
            raise
        refuse(name, [f"{missing} is not installed; {_program()} doctor says what is missing"])
    except MemoryError as problem:
        refuse(name, [f"out of memory ({problem}); plan fewer tokens, documents or ranks"])


def _command_of(words: Sequence[str]) -> str:
    """Returns the first word that is a command's name, as argparse takes it; flags may stand before. Else ""."""
    return next((word for word in words if word in COMMANDS), "")


def _nearest(stray: Sequence[str], flags: Sequence[str]) -> str:
    """Returns the flag that was meant, or where all flags stand."""
    unknown = [word.split("=", 1)[0] for word in stray if word.startswith("-")]
    if unknown and unknown[0] in flags:
        return f"{unknown[0]} stands behind the command"
    near = difflib.get_close_matches(unknown[0], flags, n=1, cutoff=0.7) if unknown else []
    return f"nearest: {near[0]}" if near else "see --help"


def build_parser(asked: str) -> OneLineParser:
    """Returns the parser of all commands; only that of command `asked` knows its arguments."""
    program = _program()
    parser = OneLineParser(
        prog=program, description=__doc__, allow_abbrev=False, formatter_class=HelpWithDefaults,
        epilog=f"example: {program} plan --lengths 137,2041,89 --context-parallel-size 4",
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"megatron_cp {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (words, example) in COMMANDS.items():
        line = example if example.startswith(LAUNCHER) else f"{program} {example}"
        command = commands.add_parser(
            name, help=words, description=words, allow_abbrev=False,
            formatter_class=HelpWithDefaults, epilog=f"example: {line}",
        )  # fmt: skip
        if name == asked:
            module = import_module(f"megatron_cp.commands.{name}")
            module.add_arguments(command)
            command.set_defaults(run=module.run, flags=[*command._option_string_actions])
    return parser


def _complete() -> None:
    """Tells the shell how the line may go on, and ends; nothing without the package argcomplete."""
    try:
        import argcomplete
    except ImportError:
        return
    written = os.environ.get("COMP_LINE", "").split()[1:]
    argcomplete.autocomplete(build_parser(written[0] if written else ""))


def _program() -> str:
    """Returns how the user called us: the console script, or Python's -m."""
    started = Path(sys.argv[0]).name
    return started if started == "megatron-cp" else "python -m megatron_cp"


if __name__ == "__main__":
    sys.exit(main())
