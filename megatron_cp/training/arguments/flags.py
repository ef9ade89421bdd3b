"""The served command line: Megatron-LM's argument names, types, defaults and meanings.

A shell script written for Megatron-LM's `pretrain_gpt.py` runs unchanged as far as its flags stand
in the table (`flag_table.py`); a flag of Megatron-LM that does not is refused by name
(`known_flags.py`).
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from typing import Any

from megatron_cp.training.arguments.flag_table import TABLE

_ROW = re.compile(r"(?P<names>--\S+) (?P<kind>\S+) (?P<default>\S+) \| (?P<help>.+)")


def add_served_flags(parser: argparse.ArgumentParser) -> None:
    """Adds every flag of the table, in its groups."""
    group = parser.add_argument_group("")
    for line in filter(None, map(str.strip, TABLE.splitlines())):
        if line.startswith("["):
            group = parser.add_argument_group(line.strip("[]"))
            continue
        row = _ROW.fullmatch(line)
        assert row is not None, line
        group.add_argument(*row["names"].split("/"), help=row["help"], **_options(row))


def _options(row: re.Match[str]) -> dict[str, Any]:
    """Returns the keywords of `add_argument` for one row."""
    kind, _, detail = row["kind"].partition(":")
    if kind in ("on", "off", "maybe"):
        options: dict[str, Any] = {"action": "store_false" if kind == "off" else "store_true"}
        if kind == "maybe":
            options["default"] = None
        return {**options, "dest": detail} if detail else options
    if kind in _LISTS:
        item = _CONVERTERS[_LISTS[kind]]
        default = None if row["default"] == "-" else item(row["default"])
        return {"nargs": "*", "type": item, "default": default}
    if kind == "names":
        return {"nargs": "+", "default": None}
    if kind == "numbers":
        default = [] if row["default"] == "-" else [int(row["default"])]
        return {"nargs": "+", "type": int, "default": default}
    convert = _CONVERTERS[kind]
    default = None if row["default"] == "-" else convert(row["default"])
    extra: dict[str, Any] = {}
    if detail:
        choices, _, dest = detail.partition(":") if "one-of" in kind else ("", "", detail)
        extra = {"choices": [convert(word) for word in choices.split(",")]} if choices else {}
        extra.update({"dest": dest} if dest else {})
    return {"type": convert, "default": default, **extra}


def _window(text: str) -> tuple[int, int]:
    """Returns the pair of `--window-size 127,0` (left, right); -1 is an open side."""
    left, _, right = text.strip("()").partition(",")
    return int(left), int(right)


def layers_of(text: str) -> int | list[int]:
    """Returns the value of `--window-attn-skip-freq`.

    N, or a list such as `[1,1,0]` or `([1]*3+[0])*2`.
    """
    return int(text) if text.isdigit() else _list_expression(text.replace(" ", ""))


def _list_expression(text: str) -> list[int]:
    """Returns the list that a sum of `[..]*n` terms describes, without evaluating Python; ValueError."""
    result: list[int] = []
    for term in _terms(text):
        body, star, times = term.rpartition("*") if term[-1:].isdigit() else (term, "", "1")
        if not star:
            body = term
        if body.startswith("(") and body.endswith(")"):
            part = _list_expression(body[1:-1])
        elif body.startswith("[") and body.endswith("]"):
            part = [int(item) for item in body[1:-1].split(",") if item]
        else:
            raise ValueError(text)
        result += part * int(times)
    return result


def _terms(text: str) -> list[str]:
    """Returns the summands of `text` that stand outside every bracket."""
    terms: list[str] = []
    depth = start = 0
    for place, char in enumerate(text + "+"):
        depth += (char in "([") - (char in ")]")
        if char == "+" and depth == 0:
            terms.append(text[start:place])
            start = place + 1
    return terms


_LISTS = {"words": "str", "ints": "int", "floats": "float"}
_CONVERTERS: dict[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "str": str,
    "one-of": str,
    "one-of-int": int,
    "window": _window,
    "layers": layers_of,
}


def flags_of(arguments: Mapping[str, Any]) -> list[str]:
    """Returns the words of a command line that has these arguments; nothing for a default.

    Raises ValueError for a name that no flag sets.
    """
    actions = actions_by_name()
    words: list[str] = []
    for name, value in arguments.items():
        if name not in actions:
            raise ValueError(f"{name} is no argument of pretrain_gpt.py; leave it out")
        if value is not None and value != actions[name][0].default:
            words += words_of(actions[name], value)
    return words


def defaults_of_flags() -> dict[str, Any]:
    """Returns what each argument is where no flag sets it."""
    return {name: actions[0].default for name, actions in actions_by_name().items()}


def actions_by_name() -> dict[str, list[argparse.Action]]:
    """Returns the flags that set each argument."""
    parser = argparse.ArgumentParser(add_help=False)
    add_served_flags(parser)
    actions: dict[str, list[argparse.Action]] = {}
    for action in parser._actions:
        actions.setdefault(action.dest, []).append(action)
    return actions


def words_of(actions: list[argparse.Action], value: Any) -> list[str]:
    """Returns the words with which one of these flags sets this value; none where no flag does."""
    for action in actions:
        flag = action.option_strings[0]
        if action.nargs == 0:
            if action.const is value:
                return [flag]
        elif action.nargs is not None:
            return [flag, *map(str, value if isinstance(value, list) else [value])]
        elif isinstance(value, tuple):
            return [f"{flag}={','.join(map(str, value))}"]
        else:
            return [f"{flag}={str(value).replace(' ', '')}"]
    return []
