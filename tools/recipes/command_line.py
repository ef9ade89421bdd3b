"""A launch command as flags with values, which notes every change that is made to it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction


@dataclass
class CommandLine:
    """The flags of a recipe in their order, and one line for each change."""

    values: dict[str, list[str]]
    changes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, argv: Iterable[str]) -> CommandLine:
        """Returns the flags of these words; a flag that is given twice keeps its last values."""
        values: dict[str, list[str]] = {}
        flag = ""
        for word in argv:
            if word.startswith("--"):
                flag, equals, value = word.partition("=")
                values.pop(flag, None)
                values[flag] = [value] if equals else []
            else:
                values.setdefault(flag, []).append(word)
        return cls(values)

    @property
    def argv(self) -> list[str]:
        """The words of the command line."""
        return [word for flag, values in self.values.items() for word in (flag, *values)]

    def has(self, *flags: str) -> bool:
        """Returns whether one of the flags is given."""
        return any(flag in self.values for flag in flags)

    def text(self, flag: str, default: str = "") -> str:
        """Returns the values of a flag as one text."""
        return " ".join(self.values[flag]) if flag in self.values else default

    def number(self, flag: str, default: int) -> int:
        """Returns the value of a flag that takes a whole number. Raises ValueError."""
        text = self.text(flag, str(default))
        if not text.lstrip("-").isdigit():
            raise ValueError(f"{flag} {text} must be a whole number")
        return int(text)

    def fraction(self, flag: str, default: str) -> Fraction:
        """Returns the value of a flag that takes a number, exactly. Raises ValueError."""
        text = self.text(flag, default)
        try:
            return Fraction(text)
        except ValueError:
            raise ValueError(f"{flag} {text} must be a number") from None

    def set(self, flag: str, *values: object, why: str = "") -> None:
        """Gives a flag these values, and says so if they are others than before."""
        words = [str(value) for value in values]
        before = self.values.get(flag)
        if before == words:
            return
        self.values[flag] = words
        told = " ".join([flag, *words])
        was = "was not given" if before is None else f"was {' '.join(before)}".rstrip()
        self.changes.append(f"{told}: {was}{_because(why)}")

    def lower(self, flag: str, most: int, why: str = "") -> None:
        """Cuts the number of a flag that is given to `most`."""
        if self.has(flag) and self.number(flag, 0) > most:
            self.set(flag, most, why=why)

    def drop(self, flags: Sequence[str], why: str) -> None:
        """Takes flags out, with one line for those that were there."""
        given = [flag for flag in flags if flag in self.values]
        for flag in given:
            del self.values[flag]
        if given:
            self.changes.append(f"without {', '.join(given)}: {why}")


def _because(why: str) -> str:
    return f"; {why}" if why else ""
