"""How checks report every fault at once, and none that only follows from another.

A check is a generator that yields one line for each fault and goes on. A value that is wrong, or that could
not be completed, is discarded from the arguments: a check that needs it cannot be evaluated and is left out.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator

Check = Callable[[Namespace], Iterator[str]]


def discard(args: Namespace, *names: str) -> None:
    """Takes these values out of the arguments, given or not."""
    discarded: set[str] = vars(args).setdefault("discarded", set())
    for name in names:
        discarded.add(name)
        vars(args).pop(name, None)


def faults_of(check: Check, args: Namespace, *completes: str) -> list[str]:
    """Returns the faults that a check finds before it needs a discarded value.

    Args:
        check: looks at the arguments, and may complete some.
        args: what it looks at.
        completes: discarded where the check finds a fault or is left out.
    """
    faults: list[str] = []
    is_left_out = False
    try:
        faults.extend(check(args))
    except AttributeError as missing:
        is_left_out = missing.obj is args and missing.name in getattr(args, "discarded", ())
        if not is_left_out:
            raise
    if faults or is_left_out:
        discard(args, *completes)
    return faults


def require(args: Namespace, *names: str) -> Iterator[str]:
    """Yields a line for each of the named values that is missing or not positive."""
    for name in names:
        value = getattr(args, name, 1)  # what is discarded was reported before
        flag = "--" + name.replace("_", "-")
        if value is None:
            yield f"{flag} is missing; it has no default"
        elif value <= 0:
            yield f"{flag} {value} must be positive"
        else:
            continue
        discard(args, name)
