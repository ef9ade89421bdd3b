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

from megatron_cp.data.text_files import has_lone_surrogate

_NAMES = tuple(f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_OF_A_MODEL = ("extra_special_tokens", "model_specific_special_tokens")  # objects by name
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def read_special_tokens(folder: Path) -> dict[str, Any]:
    """Returns tokenizer_config.json of a folder; special tokens that it does not name from special_tokens_map.json.

    Raises ValueError for a file that is no JSON object, or holds what is no text, or whose end or padding token is of
    another type.
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
    if not isinstance(config, dict):
        raise ValueError(f"{path} is no JSON object; repair or remove it")
    if has_lone_surrogate(config):
        raise ValueError(f"{path} holds a lone surrogate, which is no text; repair it")
    for name in ("eos_token", "pad_token"):  # another token would be taken in their place
        value = config.get(name)
        if value not in (None, "") and not content_of(value):
            raise ValueError(
                f'{path} has {name}={value!r}, it must be a string or {{"content": ...}}; repair it'
            )
    return config


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
    for name, entry in _entries_by_name(config):
        if name not in _NAMES and name in config and backend.token_to_id(content_of(entry)) is None:
            continue  # may be a password, as much as a token
        if (token := _added_token(entry, special=True)).content not in seen:
            others.append(token)
            seen.add(token.content)
    if lacking := [token.content for token in others if backend.token_to_id(token.content) is None]:
        raise ValueError(
            f"{file} lacks tokens that tokenizer_config.json or special_tokens_map.json adds: "
            f"{', '.join(lacking[:5])}; texts with them would be cut otherwise: save the tokenizer anew with "
            "transformers"
        )
    backend.add_tokens(others)
    return [repr(token) for token in others]


def _entries(value: Any) -> Iterator[Any]:
    """Yields the tokens of a list, or of an object by name or number, without what is none."""
    found = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (entry for entry in found if content_of(entry))


def _entries_by_name(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the tokens that a configuration names, and those of its lists, which have no name."""
    for name, value in config.items():
        if name.endswith("_token") and content_of(value):
            yield name, value
    for name in _OF_A_MODEL:
        if isinstance(own := config.get(name), dict):
            yield from ((key, value) for key, value in own.items() if content_of(value))
    for name in ("additional_special_tokens", "extra_special_tokens"):
        if isinstance(config.get(name), list):
            yield from (("", value) for value in _entries(config[name]))


def named_special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the special tokens that there are, by the names under which chat templates ask for them."""
    return {name: content_of(value) for name, value in _entries_by_name(config) if name}


def _added_token(entry: Any, **flags: bool) -> Any:
    """Returns the token of a string or of {"content": ..., "lstrip": ...}."""
    from tokenizers import AddedToken

    said = entry if isinstance(entry, dict) else {}
    own = {name: said[name] for name in _FLAGS if isinstance(said.get(name), bool)}
    return AddedToken(content_of(entry), **{**own, **flags})
