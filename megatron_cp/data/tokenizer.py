"""Text to token ids: a local `tokenizers` file, GPT-2's two files, or plain bytes. Never opens a connection.

All tokenizers carry what Megatron's datasets ask of one: `eod`, `pad`, `vocab_size`, `tokenize`,
`detokenize`, `unique_identifiers`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megatron_cp.data.package_tokenizers import (
    DEFAULT_TIKTOKEN_VOCAB_SIZE,
    SENTENCE_PIECE_TYPES,
    SentencePieceTokenizer,
    TikTokenizer,
)
from megatron_cp.data.special_tokens import (
    read_special_tokens,
    register_special_tokens,
    special_token_id,
)

TOKENIZER_TYPES = (
    "HuggingFaceTokenizer",
    "SFTTokenizer",
    "GPT2BPETokenizer",
    *SENTENCE_PIECE_TYPES,
    "TikTokenizer",
    "ByteLevel",
)
_MODEL_FILES = {
    "HuggingFaceTokenizer": "a tokenizer.json",
    "SFTTokenizer": "a tokenizer.json",
    "TikTokenizer": "a vocabulary in JSON",
    **dict.fromkeys(SENTENCE_PIECE_TYPES, "a sentencepiece .model"),
}
_EOD_NAMES = ("<|endoftext|>", "<|end_of_text|>", "<|eod|>", "<eod>", "</s>", "<eos>", "[EOS]")
_PAD_NAMES = ("<|pad|>", "<pad>", "[PAD]", "<|padding|>", "<|finetune_right_pad_id|>")

# Vocabularies leave some ids free, for tokens to come; a file may not ask for an embedding of any size by one id.
_MOST_IDS_PER_TOKEN, _MOST_FREE_IDS = 4, 1 << 16


class Tokenizer(Protocol):
    """What preprocessing, loader and training need of a tokenizer."""

    @property
    def eod(self) -> int:
        """Id of the token that ends a document."""

    @property
    def pad(self) -> int:
        """Id of the padding token (`eod` where the vocabulary has none)."""

    @property
    def vocab_size(self) -> int:
        """Largest id + 1."""

    @property
    def unique_identifiers(self) -> dict[str, str]:
        """What tells this tokenizer from another, for manifests and Megatron's dataset caches."""

    def token_id(self, name: str) -> int | None:
        """Returns the id of a token of the vocabulary; None if it has no such token."""

    def tokenize(self, text: str) -> list[int]:
        """Returns the ids of `text`, without any special token added."""

    def detokenize(self, ids: Sequence[int]) -> str:
        """Returns the text of `ids`; the inverse of `tokenize` for byte-level vocabularies."""


class ByteLevelTokenizer:
    """UTF-8 bytes as tokens 0..255, then `eod` = 256 and `pad` = 257: exact for every text."""

    eod = 256
    pad = 257
    vocab_size = 258

    @property
    def unique_identifiers(self) -> dict[str, str]:
        """The class alone: there is nothing to configure."""
        return {"class": "ByteLevel"}

    def token_id(self, name: str) -> int | None:
        """Returns None: bytes, end and padding have no names."""
        return None

    def tokenize(self, text: str) -> list[int]:
        """Returns one id per byte of the text's UTF-8 form."""
        return list(text.encode("utf-8"))

    def detokenize(self, ids: Sequence[int]) -> str:
        """Returns the text without `eod` and `pad`; bytes that are not UTF-8 become U+FFFD."""
        outside = [i for i in ids if not 0 <= i < self.vocab_size]
        if outside:
            raise ValueError(
                f"token id {outside[0]} must be in [0, {self.vocab_size}); this text was made by "
                "another tokenizer"
            )
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


class HuggingFaceTokenizer:
    """A `tokenizers` file (`tokenizer.json`) from a local path, or a directory that holds one.

    The end-of-document token is the `eos_token` of a `tokenizer_config.json` beside it, else the
    first known name in the vocabulary.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
        if not file.is_file():
            raise FileNotFoundError(
                f"--tokenizer-model {os.fspath(path)!r}: {file} does not exist; give a tokenizer.json or its "
                "directory on this machine (names on a hub are not downloaded)"
            )
        from tokenizers import Tokenizer as Backend  # the package is needed by this class alone

        try:
            self._backend = Backend.from_file(str(file))
        except BaseException as error:  # for bad files: bare exceptions, and panics of Rust
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            raise ValueError(
                f"{file} is not a tokenizers file ({error}); give a tokenizer.json"
            ) from None
        # A file keeps what its last user asked for; documents are neither cut nor filled up.
        self._backend.no_truncation()
        self._backend.no_padding()
        config = read_special_tokens(file.parent)
        self._registered = register_special_tokens(self._backend, config, file)
        vocabulary: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        eod = special_token_id(vocabulary, config.get("eos_token"), _EOD_NAMES)
        if eod is None:
            raise ValueError(
                f"{file} has no end-of-document token: none of {_EOD_NAMES} is in its vocabulary; "
                "name it as eos_token in tokenizer_config.json"
            )
        pad = special_token_id(vocabulary, config.get("pad_token"), _PAD_NAMES)
        self.path = file
        self.eod: int = eod
        self.pad: int = eod if pad is None else pad
        self.vocab_size: int = _vocab_size(vocabulary, file)

    @property
    def unique_identifiers(self) -> dict[str, str]:
        """Class and a checksum of the vocabulary file; of special tokens that only its configuration has, one more."""
        import hashlib

        own = {
            "class": "HuggingFaceTokenizer",
            "sha256": hashlib.sha256(self.path.read_bytes()).hexdigest(),
        }
        if self._registered:
            text = "\n".join(self._registered)
            own["special_tokens_sha256"] = hashlib.sha256(text.encode()).hexdigest()
        return own

    def token_id(self, name: str) -> int | None:
        """Returns the id of a token, special or not; None if there is none of this name."""
        found: int | None = self._backend.token_to_id(name)
        return found

    def tokenize(self, text: str) -> list[int]:
        """Returns the ids of the text alone; no beginning or end token is added."""
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def around_text(self) -> tuple[list[int], list[int]]:
        """Returns the special tokens that the file's template puts before a text, and those behind it.

        `transformers` puts them by default, and so does Megatron-Core since 0.19.
        """
        text = next((one for one in ("a", "e", "0", ".") if self.tokenize(one)), None)
        if text is None:
            raise ValueError(
                f"{self.path} has no token for letters, figures or points, so what its template puts around them is "
                "not known; give a tokenizer that reads text"
            )
        found = self._backend.encode(text, add_special_tokens=True)
        first = found.special_tokens_mask.index(0)
        last = first + found.special_tokens_mask.count(0)
        return found.ids[:first], found.ids[last:]

    def detokenize(self, ids: Sequence[int]) -> str:
        """Returns the text of the ids without special tokens."""
        return str(self._backend.decode(list(ids), skip_special_tokens=True))


def _vocab_size(vocabulary: Mapping[str, int], file: Path) -> int:
    """Returns one more than the largest id, as ids may have holes. Raises ValueError for holes that are too many."""
    size = max(vocabulary.values()) + 1
    if size > _MOST_IDS_PER_TOKEN * len(vocabulary) + _MOST_FREE_IDS:
        raise ValueError(
            f"{file}: token id {size - 1} with {len(vocabulary)} tokens; an embedding would have a row for every "
            "id below it: number the tokens without such holes"
        )
    return size


class GPT2BPETokenizer:
    """GPT-2's byte-level BPE from its `vocab.json` and `merges.txt`, as Megatron-LM builds it.

    `<|endoftext|>` ends a document, and pads.
    """

    def __init__(
        self, vocab_file: str | os.PathLike[str], merge_file: str | os.PathLike[str]
    ) -> None:
        for flag, path in (("--vocab-file", vocab_file), ("--merge-file", merge_file)):
            if not Path(path).is_file():
                raise FileNotFoundError(
                    f"{flag} {os.fspath(path)!r} does not exist; give GPT-2's vocab.json and "
                    "merges.txt on this machine"
                )
        from tokenizers import Tokenizer as Backend  # the package is needed by this class alone
        from tokenizers import decoders, models, pre_tokenizers

        try:
            model = models.BPE.from_file(os.fspath(vocab_file), os.fspath(merge_file))
        except Exception as error:  # the library raises bare Exception for every kind of bad file
            raise ValueError(
                f"--vocab-file {os.fspath(vocab_file)!r} and --merge-file "
                f"{os.fspath(merge_file)!r} are not GPT-2's vocab.json and merges.txt ({error})"
            ) from None
        self._backend = Backend(model)
        self._backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._backend.decoder = decoders.ByteLevel()
        vocabulary: dict[str, int] = self._backend.get_vocab()
        if _EOD_NAMES[0] not in vocabulary:
            raise ValueError(
                f"--vocab-file {os.fspath(vocab_file)!r} has no {_EOD_NAMES[0]}; give GPT-2's "
                "vocab.json"
            )
        self.paths = (Path(vocab_file), Path(merge_file))
        self.eod: int = vocabulary[_EOD_NAMES[0]]
        self.pad: int = self.eod
        self.vocab_size: int = _vocab_size(vocabulary, self.paths[0])

    @property
    def unique_identifiers(self) -> dict[str, str]:
        """Class and checksums of both files."""
        import hashlib

        sums = [hashlib.sha256(path.read_bytes()).hexdigest() for path in self.paths]
        return {"class": "GPT2BPETokenizer", "vocab_sha256": sums[0], "merges_sha256": sums[1]}

    def token_id(self, name: str) -> int | None:
        """Returns the id of an entry of vocab.json; None if there is none of this name."""
        found: int | None = self._backend.token_to_id(name)
        return found

    def tokenize(self, text: str) -> list[int]:
        """Returns the ids of the text; a special token's name in it is ordinary text."""
        return list(self._backend.encode(text).ids)

    def detokenize(self, ids: Sequence[int]) -> str:
        """Returns the text of the ids."""
        return str(self._backend.decode(list(ids), skip_special_tokens=False))


@dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """What `--tokenizer-type` reads, under Megatron-LM's names."""

    tokenizer_model: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    vocab_size: int | None = None
    tiktoken_pattern: str | None = None
    tiktoken_num_special_tokens: int = 1000
    tokenizer_special_tokens: Sequence[str] | None = None


def build_tokenizer(tokenizer_type: str, files: TokenizerFiles | None = None) -> Tokenizer:
    """Returns the tokenizer of Megatron's `--tokenizer-type` and the files that it reads.

    Raises:
        ValueError: an unknown type, a file too few or of another kind, or a package too few.
        FileNotFoundError: a file does not exist.
    """
    files = files or TokenizerFiles()
    if tokenizer_type == "GPT2BPETokenizer":
        if files.vocab_file is None or files.merge_file is None:
            raise ValueError(
                f"vocab_file={files.vocab_file}, merge_file={files.merge_file}: GPT2BPETokenizer "
                "needs both; pass --vocab-file PATH and --merge-file PATH"
            )
        return GPT2BPETokenizer(files.vocab_file, files.merge_file)
    if tokenizer_type == "ByteLevel":
        return ByteLevelTokenizer()
    if tokenizer_type not in TOKENIZER_TYPES:
        raise ValueError(
            f"tokenizer_type={tokenizer_type!r} must be one of {TOKENIZER_TYPES}; set "
            "--tokenizer-type"
        )
    if files.tokenizer_model is None:
        raise ValueError(
            f"tokenizer_model=None: {tokenizer_type} needs {_MODEL_FILES[tokenizer_type]}; pass "
            "--tokenizer-model PATH"
        )
    if tokenizer_type in ("HuggingFaceTokenizer", "SFTTokenizer"):
        return HuggingFaceTokenizer(files.tokenizer_model)
    if tokenizer_type == "TikTokenizer":
        return TikTokenizer(
            files.tokenizer_model,
            pattern=files.tiktoken_pattern or "v2",
            vocab_size=files.vocab_size or DEFAULT_TIKTOKEN_VOCAB_SIZE,
            num_special_tokens=files.tiktoken_num_special_tokens,
            special_tokens=files.tokenizer_special_tokens,
        )
    return SentencePieceTokenizer(files.tokenizer_model, tokenizer_type)


def train_byte_level_bpe(
    texts: Iterable[str],
    *,
    vocab_size: int,
    path: str | os.PathLike[str],
    special_tokens: Sequence[str] = (),
) -> HuggingFaceTokenizer:
    """Returns a byte-level BPE learned from `texts` and written to `path`, a file or a folder for one.

    `<|endoftext|>` is id 0, `<|pad|>` id 1, then come the special tokens. Two cores read about 0.5 MB
    of text a second at a vocabulary of 32K.
    """
    special = list(dict.fromkeys(["<|endoftext|>", "<|pad|>", *special_tokens]))
    if vocab_size < 256 + len(special):
        raise ValueError(
            f"vocab_size={vocab_size} must be at least {256 + len(special)} (256 bytes, end, "
            "padding, special tokens); pass a larger --train-bpe"
        )
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()  # all 256 bytes: no text is unknown
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    # Not its own save(), whose errors are bare exceptions.
    file.write_text(backend.to_str(pretty=True), encoding="utf-8")
    return HuggingFaceTokenizer(file)
