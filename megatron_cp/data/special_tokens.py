"""What lies beside a `tokenizer.json`: which special tokens there are, as transformers reads it.

    tokenizer.json             added_tokens     cut out of a text before anything else is
    tokenizer_config.json      eos_token, additional_special_tokens, added_tokens_decoder, ...
    special_tokens_map.json    the same names, in older folders

A token that the vocabulary has and only the configuration calls special is cut out of texts too; without that its name
would be read in pieces.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

SPECIAL_KINDS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def read_special_tokens(folder: Path) -> dict[str, Any]:
    """Returns tokenizer_config.json of a folder; special tokens that it does not name from special_tokens_map.json.

    Raises ValueError for a file that is not JSON.
    """
    named = _read_config(folder / "special_tokens_map.json")
    config = _read_config(folder / "tokenizer_config.json")
    return {**named, **{name: value for name, value in config.items() if value is not None}}


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}); repair or remove it") from None
    return config if isinstance(config, dict) else {}


def special_token_id(vocabulary: Mapping[str, int], value: Any, known: Iterable[str]) -> int | None:
    """Returns the id of the configured token (a string or {"content": ...}), else of a known name."""
    for name in [content_of(value), *known]:
        if name in vocabulary:
            return vocabulary[name]
    return None


def content_of(token: Any) -> str:
    """Returns the text of a special token, which is a string or {"content": ...}."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""


def register_special_tokens(backend: Any, config: Mapping[str, Any], file: Path) -> list[str]:
    """Cuts the special tokens of a configuration out of texts, too; returns those that `file` has not so.

    `backend` is the tokenizer of `file`. Raises ValueError for one that has no id there.

    Source: transformers 5, `TokenizersBackend.__init__`.
    """
    described = [_added_token(entry) for entry in _entries(config.get("added_tokens_decoder"))]
    in_file = {repr(token) for token in backend.get_added_tokens_decoder().values()}
    others = [token for token in described if repr(token) not in in_file]
    seen = {token.content for token in (*backend.get_added_tokens_decoder().values(), *others)}
    for entry in _named(config):
        if (token := _added_token(entry, special=True)).content not in seen:
            others.append(token)
            seen.add(token.content)
    if lacking := [token.content for token in others if backend.token_to_id(token.content) is None]:
        raise ValueError(
            f"{file} lacks tokens that tokenizer_config.json or special_tokens_map.json adds: "
            f"{', '.join(lacking[:5])}; "
            "texts with them would be cut otherwise: save the tokenizer anew with transformers"
        )
    backend.add_tokens(others)
    return [repr(token) for token in others]


def _entries(value: Any) -> Iterator[Any]:
    """Yields the tokens of a list, or of an object by name or number, without what is none."""
    found = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (entry for entry in found if content_of(entry))


def _named(config: Mapping[str, Any]) -> Iterator[Any]:
    yield from _entries([config.get(f"{kind}_token") for kind in SPECIAL_KINDS])
    for name in ("additional_special_tokens", "extra_special_tokens"):
        yield from _entries(config.get(name))


def _added_token(entry: Any, **flags: bool) -> Any:
    """Returns the token of a string or of {"content": ..., "lstrip": ...}."""
    from tokenizers import AddedToken

    said = entry if isinstance(entry, dict) else {}
    own = {name: said[name] for name in _FLAGS if isinstance(said.get(name), bool)}
    return AddedToken(content_of(entry), **{**own, **flags})
