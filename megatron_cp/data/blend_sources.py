"""What the command line says of corpora: prefixes and weights, from flags and from files."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_cp.loggable_text import is_url, without_secrets

_SPLITS = ("train", "valid", "test")


class BlendSource(NamedTuple):
    """A corpus of a blend and its weight; None where the blend names no weights."""

    weight: float | None
    prefix: str


def parse_blend(words: Sequence[str], flag: str = "--data-path") -> tuple[BlendSource, ...]:
    """Returns the corpora that `flag` names: prefixes, or a weight before each prefix.

    Weights need not add to 1. One word alone is a prefix, even if it reads as a number.

    Raises:
        ValueError: weights and prefixes do not alternate, a corpus comes twice or is a URL, or the
            weights are negative, not finite or add to 0.
    """
    if not words:
        raise ValueError(f"{flag} names no corpus; give at least one prefix")
    for word in filter(is_url, words):
        raise ValueError(
            f"{flag} names {without_secrets(word)!r}, a URL; only files of this machine are read: copy it, and give "
            "the prefix of the copy"
        )
    numbers = [_number(word) for word in words]
    if len(words) == 1 or all(number is None for number in numbers):
        sources = [BlendSource(None, word.strip()) for word in words]
    else:
        _check_alternation(words, numbers, flag)
        sources = [
            BlendSource(weight, prefix.strip())
            for weight, prefix in zip(numbers[::2], words[1::2], strict=True)
        ]
        _check_weights(sources, flag)
    seen: set[str] = set()
    for _, prefix in sources:
        # "a" and "./a" would give the same packs in the same order.
        place = os.path.realpath(prefix)
        if place in seen:
            raise ValueError(
                f"{flag} names {prefix!r} twice; name it once, with the sum of its weights"
            )
        seen.add(place)
    return tuple(sources)


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _check_alternation(words: Sequence[str], numbers: Sequence[float | None], flag: str) -> None:
    for place, (word, number) in enumerate(zip(words, numbers, strict=True)):
        if place % 2 == 0 and number is None:
            raise ValueError(
                f"{flag}: word {place + 1}, {word!r}, stands where a weight is expected; give a "
                "weight before every prefix, or no weight at all"
            )
        if place % 2 == 1 and number is not None:
            raise ValueError(
                f"{flag}: word {place + 1}, {word!r}, is a weight where a prefix is expected; give "
                "one prefix behind every weight"
            )
    if len(words) % 2:
        raise ValueError(
            f"{flag}: the weight {words[-1]} at the end has no prefix; give one behind it"
        )


def _check_weights(sources: Sequence[BlendSource], flag: str) -> None:
    for weight, prefix in sources:
        if weight is None or not (math.isfinite(weight) and weight >= 0):
            raise ValueError(
                f"{flag}: weight {weight} of {prefix!r} must be finite and at least 0; change it"
            )
    total = sum(weight or 0.0 for weight, _ in sources)
    if not 0 < total < math.inf:
        raise ValueError(
            f"{flag}: the weights add to {total:g}, they must add to a positive finite number; "
            "give at least one corpus a weight above 0"
        )


def read_blend_file(path: str | os.PathLike[str]) -> list[str]:
    """Returns the words of a `--data-args-path` file: what `--data-path` would take."""
    return _read_text(path, "--data-args-path").split()


def read_per_split_file(path: str | os.PathLike[str]) -> dict[str, list[str] | None]:
    """Returns the words for "train", "valid" and "test" of a `--per-split-data-args-path` file.

    The file is a JSON object; each value is a string of words, a list of words, or null.

    Raises:
        ValueError: it is something else, or a split is missing.
    """
    flag = "--per-split-data-args-path"
    try:
        splits = json.loads(_read_text(path, flag))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{flag} {os.fspath(path)!r} is not JSON ({error}); repair it") from None
    if not isinstance(splits, dict) or set(splits) != set(_SPLITS):
        have = sorted(splits) if isinstance(splits, dict) else type(splits).__name__
        raise ValueError(
            f"{flag} {os.fspath(path)!r} holds {have}, it must hold an object with train, valid "
            "and test; write null for a split without data"
        )
    return {name: _words(splits[name], f"{flag} {os.fspath(path)!r}, {name}") for name in _SPLITS}


def _read_text(path: str | os.PathLike[str], flag: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{flag} {os.fspath(path)!r} does not exist; give a file on this machine"
        ) from None


def _words(value: object, name: str) -> list[str] | None:
    if value is None:
        return None
    if isinstance(value, str):
        return value.split()
    if isinstance(value, list) and all(isinstance(word, (str, int, float)) for word in value):
        return [str(word) for word in value]
    raise ValueError(f"{name}: {value!r} must be words, a list of words or null; change it")
