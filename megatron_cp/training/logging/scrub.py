"""Removes secrets from what a run writes down: arguments, command lines, environment.

Anything whose name looks like a credential loses its value, and user names and passwords vanish
from URLs, before wandb, tensorboard or a file of ours sees them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from numbers import Number
from typing import Any

REMOVED = "<removed>"

_WORDS = ("token", "secret", "key", "password", "passwd", "credential", "credentials")
_SECRET_NAME = re.compile(rf"(^|[^a-z])({'|'.join(_WORDS)})s?($|[^a-z])")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_URL_USER = re.compile(r"(?P<scheme>[a-zA-Z][a-zA-Z0-9+.-]*://)[^/\s@]+@")
_URL_QUERY = re.compile(
    rf"(?P<name>[?&][^=&\s]*(?:{'|'.join(_WORDS)})[^=&\s]*=)[^&\s]+", re.IGNORECASE
)
# Names that only sound like secrets; their values are sizes and kinds.
_HARMLESS = frozenset({"reset_position_ids", "calculate_per_token_loss", "eod_token", "pad_token"})


_COUNT_NAME = re.compile(r"(^|_)tokens($|_)")  # numbers under such a name are counts


def is_secret_name(name: str) -> bool:
    """Whether a value under this name must not be written.

    `api_key`, `HF_TOKEN`, `dbPassword`, `--auth-token`.
    """
    words = _CAMEL.sub("_", name).lower().replace("-", "_")
    return words not in _HARMLESS and _SECRET_NAME.search(words) is not None


def scrubbed(value: Any, name: str = "") -> Any:
    """Returns the value without secrets, as plain JSON values.

    Mappings and sequences are copied, other objects become text.
    """
    is_count = _COUNT_NAME.search(name) is not None and not isinstance(value, str)
    if is_secret_name(name) and not is_count and value not in (None, "", False):
        return REMOVED
    if isinstance(value, Mapping):
        return {str(key): scrubbed(item, str(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return (
            scrubbed_words(value)
            if all(isinstance(v, str) for v in value)
            else [scrubbed(v) for v in value]
        )
    if value is None or isinstance(value, (bool, int, float)):
        return value
    text = _URL_USER.sub(lambda match: match["scheme"], str(value))
    return _URL_QUERY.sub(lambda match: match["name"] + REMOVED, text)


def _may_hold_text(value: Any) -> bool:
    """Whether something is there to hide: numbers are counts (`tokens_per_rank`), never secrets."""
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(_may_hold_text(item) for item in value)
    return value not in (None, "") and not isinstance(value, Number)


def scrubbed_words(words: Iterable[str]) -> list[str]:
    """Returns a command line without secrets: `--x-key VALUE` and `--x-key=VALUE` lose the value."""
    kept: list[str] = []
    hide_next = False
    for word in words:
        name, equals, _ = word.partition("=")
        if hide_next and not word.startswith("--"):
            kept.append(REMOVED)
        elif equals and is_secret_name(name.lstrip("-")):
            kept.append(name + "=" + REMOVED)
        else:
            kept.append(scrubbed(word))
        hide_next = word.startswith("--") and not equals and is_secret_name(name.lstrip("-"))
    return kept
