"""What of a run may be written down: a list of what is allowed, not of what is secret.

    arguments       those that this program serves, by name; no other
    command line    served flags and their values; what stands behind any other word is removed
    text            letters, digits and the signs of paths and lists; no query, no user name, no assignment,
                    and no part that is shaped like a key

No served flag takes a secret, so whatever else looks like text does not belong into a log.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from megatron_cp.loggable_text import REMOVED, is_key, loggable_text
from megatron_cp.training.arguments import build_parser
from megatron_cp.training.config import SECTIONS

_NUMBER = re.compile(r"-\.?\d.*")  # a value, though it begins as a flag does


def loggable(value: Any) -> Any:
    """Returns the value as plain JSON values; of texts only those that may be written down.

    Keys of mappings are texts too: an entry whose key is not allowed is left out. Other objects become text.
    """
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(key): loggable(item) for key, item in value.items() if _is_allowed(str(key))}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [loggable(item) for item in value]
    return loggable_text(str(value))


def loggable_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments that this program serves, by Megatron-LM's names."""
    return {name: loggable(arguments[name]) for name in sorted(arguments.keys() & _names())}


def loggable_command(words: Iterable[str]) -> list[str]:
    """Returns a command line: the program, served flags and as many values as they take. Other words are removed."""
    program, *rest = [*words] or [""]
    kept, values_left = [loggable_text(program)], 0.0
    for word in rest:
        flag, equals, value = word.partition("=")
        if word.startswith("--"):
            most = _flags().get(flag)
            said = REMOVED if most is None and not _is_flag(flag) else flag
            shown = loggable_text(value) if most else REMOVED
            kept.append(f"{said}={shown}" if equals else said)
            values_left = 0 if equals else most or 0
        elif word.startswith("-") and not _NUMBER.fullmatch(word):
            kept.append(REMOVED)
            values_left = 0
        else:
            kept.append(loggable_text(word) if values_left > 0 else REMOVED)
            values_left -= 1
    return kept


def _is_flag(word: str) -> bool:
    return re.fullmatch(r"--[a-z][a-z0-9_-]*", word) is not None and not is_key(word.strip("-"))


def _is_allowed(text: str) -> bool:
    return loggable_text(text) == text


@functools.cache
def _parser() -> argparse.ArgumentParser:
    return build_parser()


@functools.cache
def _flags() -> dict[str, float]:
    """Returns how many values each served flag takes at most."""
    most = {None: 1.0, "?": 1.0, "*": math.inf, "+": math.inf}
    return {
        name: most[action.nargs] if action.nargs in most else float(action.nargs or 0)
        for action in _parser()._actions
        for name in action.option_strings
    }


@functools.cache
def _names() -> frozenset[str]:
    ours = {field.name for section in SECTIONS.values() for field in dataclasses.fields(section)}
    return frozenset({*ours, *(action.dest for action in _parser()._actions)})
