"""The one error of a conversion: every reason at once, each with name, value, what is allowed."""

from __future__ import annotations

from collections.abc import Iterable

_SHOWN = 20


class ConversionError(ValueError):
    """A conversion that cannot be done; `reasons` are lines for the person who asked for it."""

    def __init__(self, reasons: Iterable[str]) -> None:
        self.reasons = tuple(reasons)
        super().__init__(self.reasons)

    def __str__(self) -> str:
        return "\n".join(self.reasons)


def refuse(*reasons: str) -> ConversionError:
    """Returns the error with these reasons."""
    return ConversionError(reasons)


def listing(names: Iterable[str]) -> str:
    """Returns `a, b, c`: the first names, and how many more there are."""
    found = list(names)
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(found[:_SHOWN]) + more
