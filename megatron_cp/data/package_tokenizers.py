"""Tokenizers of packages that are not always installed: sentencepiece and tiktoken.

Ids are those of Megatron-Core's tokenizers of the same `--tokenizer-type`.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SENTENCE_PIECE_TYPES = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
DEFAULT_TIKTOKEN_VOCAB_SIZE = 131072
_SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")

# A word of one case or of both, with the sign before it; digits one by one; signs; ends of lines; blanks.
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_BEFORE, _BLANKS = r"[^\r\n\p{L}\p{N}]?", r"\s+(?!\S)|\s+"
TIKTOKEN_PATTERNS = {
    "v1": rf"{_BEFORE}+\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]++[\r\n]*|\s*[\r\n]|{_BLANKS}",
    "v2": rf"{_BEFORE}[{_UPPER}]*[{_LOWER}]+|{_BEFORE}[{_UPPER}]+[{_LOWER}]*|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|{_BLANKS}",
}


def _require(package: str, tokenizer_type: str) -> Any:
    """Returns the package, which only one class needs."""
    try:
        return importlib.import_module(package)
    except ImportError:
        raise ValueError(
            f"--tokenizer-type {tokenizer_type} needs the package {package}, which is not "
            f"installed; pip install {package}"
        ) from None


def _existing(path: str | os.PathLike[str], kind: str) -> Path:
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"--tokenizer-model {os.fspath(path)!r} does not exist; give {kind} on this machine"
        )
    return Path(path)


class SentencePieceTokenizer:
    """A sentencepiece model. Its end-of-sentence token ends a document; no token is added to a text."""

    def __init__(
        self, path: str | os.PathLike[str], tokenizer_type: str = "SentencePieceTokenizer"
    ) -> None:
        self.path = _existing(path, "a sentencepiece .model")
        package = _require("sentencepiece", tokenizer_type)
        try:
            self._backend = package.SentencePieceProcessor(model_file=str(self.path))
        except (RuntimeError, OSError) as error:  # for a file of another kind
            raise ValueError(
                f"--tokenizer-model {str(self.path)!r} is not a sentencepiece model ({error}); "
                "give a .model file"
            ) from None
        self.eod: int = self._backend.eos_id()
        if self.eod < 0:
            raise ValueError(
                f"--tokenizer-model {str(self.path)!r} has no end-of-sentence token, which ends "
                "documents; train the model with one"
            )
        pad: int = self._backend.pad_id()
        self.pad = pad if pad >= 0 else self.eod
        self.vocab_size: int = self._backend.get_piece_size()

    @property
    def unique_identifiers(self) -> dict[str, str]:
        """Class and a checksum of the model."""
        return {"class": "SentencePieceTokenizer", "sha256": _sha256(self.path)}

    def token_id(self, name: str) -> int | None:
        """Returns the id of a piece; None if there is none of this name."""
        found: int = self._backend.piece_to_id(name)  # that of the unknown piece, if unknown
        return found if self._backend.id_to_piece(found) == name else None

    def tokenize(self, text: str) -> list[int]:
        """Returns the ids of the text."""
        return list(self._backend.encode(text))

    def detokenize(self, ids: Sequence[int]) -> str:
        """Returns the text of the ids; control tokens have none."""
        return str(self._backend.decode(list(ids)))


class TikTokenizer:
    """A byte-pair vocabulary for tiktoken: a JSON list of {"rank", "token_bytes", "token_str"}.

    The first ids are special tokens: the given ones, then fillers. `</s>` ends a document. As in
    Megatron-Core the name of a special token in a text is that token.

    Args:
        pattern: "v1" or "v2", how a text is cut into words.
        vocab_size: with the special tokens; later entries of the file are left out.
        special_tokens: names of the first ids; None for Megatron-Core's seven.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        pattern: str = "v2",
        vocab_size: int = DEFAULT_TIKTOKEN_VOCAB_SIZE,
        num_special_tokens: int = 1000,
        special_tokens: Sequence[str] | None = None,
    ) -> None:
        names = list(_SPECIAL_TOKENS if special_tokens is None else special_tokens)
        _check_special_tokens(names, num_special_tokens, vocab_size)
        if pattern not in TIKTOKEN_PATTERNS:
            raise ValueError(
                f"--tiktoken-pattern {pattern} must be one of {', '.join(TIKTOKEN_PATTERNS)}"
            )
        self.path = _existing(path, "a tiktoken vocabulary in JSON")
        package = _require("tiktoken", "TikTokenizer")
        names += [f"<SPECIAL_{number}>" for number in range(len(names), num_special_tokens)]
        ranks = _read_ranks(self.path, vocab_size - num_special_tokens, num_special_tokens)
        self._special = {name: number for number, name in enumerate(names)}
        self._pattern = pattern
        self._backend = package.Encoding(
            name=self.path.stem,
            pat_str=TIKTOKEN_PATTERNS[pattern],
            mergeable_ranks=ranks,
            special_tokens=self._special,
        )
        self.eod = self._special["</s>"]
        self.pad = self._special["<pad>"]
        self.vocab_size = vocab_size

    @property
    def unique_identifiers(self) -> dict[str, str]:
        """Class, pattern, special tokens and a checksum of the vocabulary."""
        special = hashlib.sha256("\n".join(self._special).encode()).hexdigest()
        return {
            "class": "TikTokenizer",
            "sha256": _sha256(self.path),
            "pattern": self._pattern,
            "special_tokens_sha256": special,
            "vocab_size": str(self.vocab_size),
        }

    def token_id(self, name: str) -> int | None:
        """Returns the id of a special token or of a whole entry; None if there is none of this name."""
        try:
            return int(self._backend.encode_single_token(name))
        except KeyError:
            return None

    def tokenize(self, text: str) -> list[int]:
        """Returns the ids of the text."""
        return list(self._backend.encode(text, allowed_special="all"))

    def detokenize(self, ids: Sequence[int]) -> str:
        """Returns the text of the ids; special tokens read as their names."""
        return str(self._backend.decode(list(ids)))


def _check_special_tokens(names: list[str], num_special_tokens: int, vocab_size: int) -> None:
    missing = [name for name in _SPECIAL_TOKENS if name not in names]
    if missing or len(set(names)) < len(names):
        raise ValueError(
            f"--tiktoken-special-tokens {' '.join(names)} must hold each of "
            f"{' '.join(_SPECIAL_TOKENS)} and none twice; "
            + (f"add {' '.join(missing)}" if missing else "drop the repeated ones")
        )
    if not len(names) <= num_special_tokens < vocab_size:
        raise ValueError(
            f"--tiktoken-num-special-tokens {num_special_tokens} must be at least the "
            f"{len(names)} named ones and below --vocab-size {vocab_size}; change it"
        )


def _read_ranks(path: Path, count: int, first_id: int) -> dict[bytes, int]:
    """Returns the first `count` entries of a vocabulary: bytes to id, from `first_id` on."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        tokens = [
            base64.b64decode(entry["token_bytes"], validate=True) for entry in entries[:count]
        ]
        in_order = all(entry["rank"] == rank for rank, entry in enumerate(entries[:count]))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(
            f"--tokenizer-model {str(path)!r} is not a tiktoken vocabulary ({error!r}); give a "
            "JSON list of objects with rank, token_bytes and token_str"
        ) from None
    if len(tokens) < count:
        raise ValueError(
            f"--tokenizer-model {str(path)!r} holds {len(tokens)} tokens, --vocab-size asks for "
            f"{count} beside the special ones; give --vocab-size {len(tokens) + first_id}"
        )
    single = all(token == bytes([rank]) for rank, token in enumerate(tokens[:256]))
    if not in_order or not single or len(set(tokens)) < count:
        raise ValueError(
            f"--tokenizer-model {str(path)!r} must list each token once in order of its rank, the "
            "256 bytes first; write it again"
        )
    return {token: first_id + rank for rank, token in enumerate(tokens)}


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
