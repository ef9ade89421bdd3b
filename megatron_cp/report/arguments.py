"""Numbers on the command lines of plan and simulate, each with the largest that is accepted."""

from __future__ import annotations

from argparse import ArgumentTypeError, Namespace
from functools import partial

from megatron_cp.plan.study.workloads import MAX_TOKENS

MAX_RANKS = 1 << 16
NO_NUMBER = -1
SPLIT = "969,30,1"


def count(text: str, most: int = MAX_TOKENS) -> int:
    """Returns a whole number from 1 to `most`; ArgumentTypeError for any other text."""
    number = _number(text)
    if not 1 <= number <= most:
        raise ArgumentTypeError(
            f"{_shown(text)} must be a whole number of at least 1 and at most {most}"
        )
    return number


rank_count = partial(count, most=MAX_RANKS)


def tokens(text: str) -> int:
    """Returns a number of tokens: 131072, 128K or 16M."""
    factor = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:].upper(), 1)
    number = _number(text if factor == 1 else text[:-1]) * factor
    if not 1 <= number <= MAX_TOKENS:
        raise ArgumentTypeError(
            f"{_shown(text)} must be a whole number of at least 1 and at most {MAX_TOKENS} tokens, "
            "written as 131072, 128K or 1M"
        )
    return number


def ranks(text: str) -> list[int]:
    """Returns numbers of ranks: 8 or 8,64,512."""
    return [rank_count(word) for word in text.split(",")]


def lengths(text: str) -> list[int]:
    """Returns document lengths, 137,2041,89, of at most MAX_TOKENS tokens in all."""
    found = _numbers(text, "137,2041,89")
    if sum(found) > MAX_TOKENS:
        raise ArgumentTypeError(
            f"{_shown(text)} must be at most {MAX_TOKENS} tokens in all; give fewer documents"
        )
    return found


def window(text: str) -> tuple[int, int]:
    """Returns the two sides of a sliding window, 1024,0."""
    sides = _numbers(text, "1024,0")
    if len(sides) != 2:
        raise ArgumentTypeError(f"{_shown(text)} must be two counts, before,after, as in 1024,0")
    return sides[0], sides[1]


def refuse_unused(args: Namespace, *names: str, source: str = "--data-path") -> None:
    """Raises ValueError for a flag that was given and says nothing without `source`, another flag."""
    for name in names:
        if getattr(args, name) is not None:
            raise ValueError(
                f"--{name} {getattr(args, name)} is for {source}, which is not given; leave it out"
            )


def _numbers(text: str, example: str) -> list[int]:
    numbers = [_number(word.strip()) for word in text.split(",")]
    if not all(0 <= number <= MAX_TOKENS for number in numbers):
        raise ArgumentTypeError(
            f"{_shown(text)} must be whole numbers from 0 to {MAX_TOKENS} separated by commas, "
            f"as in {example}"
        )
    return numbers


def _number(text: str) -> int:
    """Returns what the digits say; NO_NUMBER for other texts, and for more digits than `int` reads."""
    if not text.isascii() or not text.isdigit():
        return NO_NUMBER
    return int(text) if len(text) < 100 else NO_NUMBER


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
