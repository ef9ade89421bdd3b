"""How every command line of ours refuses, helps and reports progress; nothing beyond the standard library.

Bad input is one line for each reason on standard error and exit code 2.
"""

from __future__ import annotations

import argparse
import errno
import functools
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, ParamSpec

from megatron_cp.loggable_text import without_secrets

Parameters = ParamSpec("Parameters")

STDOUT = Path("-")
INTERRUPTED, NOT_READ = 130, 141  # 128 + SIGINT, 128 + SIGPIPE, as shells count


def refuse(program: str, reasons: Sequence[str]) -> NoReturn:
    """Prints one line for each reason on standard error and leaves with code 2; no password of a URL is in them."""
    lines = (without_secrets(" ".join(reason.split())) for reason in reasons)
    # One write: lines of several ranks must not run into each other.
    sys.stderr.write("".join(f"{program}: error: {line}\n" for line in lines))
    raise SystemExit(2)


def answering(
    program: str,
) -> Callable[[Callable[Parameters, int]], Callable[Parameters, int]]:
    """Returns a decorator for the main of a program: what it was refused is one line and code 2.

    Ctrl-C is code 130, an output that nobody reads any more code 141. Refusals are ValueError, NotImplementedError
    and OSError.
    """

    def decorate(main: Callable[Parameters, int]) -> Callable[Parameters, int]:
        @functools.wraps(main)
        def answered(*args: Parameters.args, **kwargs: Parameters.kwargs) -> int:
            if sys.stdout is None:  # closed by the shell, `>&-`
                refuse(program, ["standard output is closed; open it, or send it to /dev/null"])
            try:
                return main(*args, **kwargs)
            except BrokenPipeError:  # `... | head` has seen enough; what remained was not done
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                return NOT_READ
            except KeyboardInterrupt:
                begin = "\n" if sys.stderr.isatty() else ""
                sys.stderr.write(f"{begin}{program}: interrupted\n")
                return INTERRUPTED
            except OSError as problem:
                refuse(program, [_words_of(problem)])
            except (ValueError, NotImplementedError) as problem:
                refuse(program, [str(problem)])

        return answered

    return decorate


def _words_of(problem: OSError) -> str:
    """Returns what the system said, without its number."""
    if problem.filename is None or problem.strerror is None:
        return str(problem)
    return f"{problem.filename}: {problem.strerror}"


class HelpWithDefaults(argparse.RawDescriptionHelpFormatter):
    """Help that ends every line with the default, unless the line names it itself."""

    def _get_help_string(self, action: argparse.Action) -> str:
        words = action.help or ""
        is_said = "default" in words or action.default in (None, argparse.SUPPRESS)
        is_said = is_said or isinstance(action.default, bool)
        return words if is_said else f"{words}; default: %(default)s"


class OneLineParser(argparse.ArgumentParser):
    """A parser that refuses in one line, without printing its usage."""

    hint = ""
    """What every refusal ends with."""

    def error(self, message: str) -> NoReturn:
        """Prints the message and leaves with code 2."""
        refuse(self.prog, [message + self.hint])


class ToolParser(OneLineParser):
    """The parser of a script in tools/, which points to its own help."""

    hint = "; see --help"


class Progress:
    """Tells on standard error what is being worked on: one line rewritten on a terminal, else a line each."""

    def __init__(self, program: str) -> None:
        self._program, self._width = program, 0

    def __call__(self, words: str) -> None:
        """Shows what begins now."""
        line = f"{self._program}: {words}"
        if sys.stderr.isatty():
            sys.stderr.write("\r" + line.ljust(self._width))
            self._width = len(line)
        else:
            sys.stderr.write(line + "\n")
        sys.stderr.flush()

    def clear(self) -> None:
        """Removes the rewritten line, so that what follows begins at the margin."""
        if self._width:
            sys.stderr.write("\r" + " " * self._width + "\r")
            self._width = 0


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds `--json [FILE]`."""
    parser.add_argument(
        "--json", type=Path, nargs="?", const=STDOUT, metavar="FILE",
        help="write the figures as JSON; without FILE on standard output, instead of the text",
    )  # fmt: skip


def prepare_outputs(*paths: Path | None) -> None:
    """Makes the folders of files that will be written. Raises OSError now, not after the work, where one cannot be."""
    for path in paths:
        if path is None or path == STDOUT:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def show(text: str, values: Any, json_path: Path | None) -> None:
    """Prints the text, or the values as JSON in its place, or both where the JSON goes to a file."""
    written = json.dumps(values, indent=1, allow_nan=False) + "\n"
    sys.stdout.write(written if json_path == STDOUT else text + "\n")
    if json_path is not None and json_path != STDOUT:
        prepare_outputs(json_path)
        json_path.write_text(written, encoding="utf-8")
        say_written(json_path)


def say_written(path: Path, words: str = "") -> None:
    """Says on standard error that a file is there; `words` say what to do with it."""
    sys.stderr.write(f"wrote {path}{words}\n")
