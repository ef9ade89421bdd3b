"""How every command line of ours refuses: one line for each reason on standard error, exit code 2."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn


def refuse(program: str, reasons: Sequence[str]) -> NoReturn:
    """Prints one line for each reason on standard error and leaves with code 2."""
    lines = (" ".join(reason.split()) for reason in reasons)
    # One write: lines of several ranks must not run into each other.
    sys.stderr.write("".join(f"{program}: error: {line}\n" for line in lines))
    raise SystemExit(2)


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
