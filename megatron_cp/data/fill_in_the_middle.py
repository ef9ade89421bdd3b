"""Documents rearranged so that a model learns to fill in their middle (FIM).

    a text                      prefix middle suffix     cut at two characters drawn at random
    prefix-suffix-middle, PSM   <prefix> prefix <suffix> suffix <middle> middle
    suffix-prefix-middle, SPM   <prefix> <suffix> suffix <middle> prefix middle

A pack is drawn first, its pieces are rearranged then: each run of tokens up to an end-of-document
token is one text, so nothing moves from one document to another. Three tokens are added to each text;
what no longer fits is cut off the end of the pack. Parts tokenized anew may be shorter, too; then the
pack ends in padding. Every draw is a hash of (seed, number of the pack, draws before it in the pack):
it is the same on every rank, in every worker and in a resumed run.

Source: Bavarian et al. 2022, arXiv 2207.14255 (SPM in its second variant); the settings are those of
Megatron-LM's GPTFIMDataset.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_cp.data.document_set import Documents, Texts, read_with_next
from megatron_cp.data.packing import Pack, Piece, splitmix64
from megatron_cp.data.tokenizer import Tokenizer

_Tokens = NDArray[np.int64]
_SALT = 0x46494D  # so that the draws of pack n are not the keys that shuffle epoch n
_DRAWN_AT_ONCE = 64


class FimTokens(NamedTuple):
    """Ids of the tokens that mark the parts of a text, that fill up a pack, and that end a text.

    `split` divides a text into fragments that are rearranged one by one; None for whole texts.
    """

    prefix: int
    middle: int
    suffix: int
    pad: int
    eod: int
    split: int | None = None


@dataclass(frozen=True, kw_only=True)
class FillInTheMiddle:
    """Which texts are rearranged and how; picklable, as loader workers do it.

    Args:
        tokens: the ids that `find_fim_tokens` returns.
        rate: share of the texts that are rearranged.
        spm_rate: share of those in the order suffix, prefix, middle.
        fragment_rate: of a text with `tokens.split`, the share of its fragments that are rearranged,
            if the text is drawn by `rate`.
        no_prefix: texts and fragments that begin so stay as they are.

    Raises:
        ValueError: a rate outside [0, 1], or fragments without their rate.
    """

    tokenizer: Tokenizer
    tokens: FimTokens
    seed: int
    rate: float = 0.5
    spm_rate: float = 0.5
    fragment_rate: float | None = None
    no_prefix: str | None = None

    def __post_init__(self) -> None:
        for name in ("rate", "spm_rate", "fragment_rate"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                flag = "--fim-" + name.replace("_", "-")
                raise ValueError(f"{name}={value} must lie in [0, 1]; change {flag}")
        if self.tokens.split is not None and self.fragment_rate is None:
            raise ValueError(
                f"fragment_rate=None with split={self.tokens.split}: fragments need their rate; "
                "give --fim-fragment-rate"
            )


def find_fim_tokens(tokenizer: Tokenizer, names: Mapping[str, str | None]) -> FimTokens:
    """Returns the ids of the named tokens: `names` has one for each field, `split` may be None.

    Raises:
        ValueError: a token is not in the vocabulary, or one token is to mark two things.
    """
    flags = {part: f"--fim-{part}-token" for part in FimTokens._fields}
    flags["split"] = "--fim-split-sample"
    ids = {part: tokenizer.token_id(name) for part, name in names.items() if name is not None}
    missing = [f"{flags[part]} {names[part]!r}" for part, token in ids.items() if token is None]
    if missing:
        raise ValueError(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not in the vocabulary of "
            f"{tokenizer.unique_identifiers['class']}, each must be one token of it; name others, "
            "or add them to the vocabulary"
        )
    found = FimTokens(**{part: token for part, token in ids.items() if token is not None})
    parts_of: dict[int, str] = {}
    for part in ("prefix", "middle", "suffix", "eod", "split"):  # padding may end texts, too
        token = getattr(found, part)
        if token is not None and parts_of.setdefault(token, part) != part:
            raise ValueError(
                f"{flags[parts_of[token]]} and {flags[part]} are both {names[part]!r}, they must "
                "differ; name another token"
            )
    return found


def check_rearrangeable(documents: Documents) -> None:
    """Raises ValueError for documents whose prefix or learned tokens would lose their place."""
    if documents.prefix_lengths.any():
        which = documents.name(int((documents.prefix_lengths != 0).argmax()))
        raise ValueError(
            f"{which} has prefix or bidirectional attention, which fill-in-the-middle would tear "
            "apart; leave out --fim-data, or the file of prefix lengths"
        )
    if documents.is_supervised:
        raise ValueError(
            f"{documents.name(0)} and its neighbours have learned tokens of their own, which "
            "fill-in-the-middle would tear apart; leave out --fim-data, or the file of learned "
            "tokens"
        )


@dataclass(frozen=True)
class _Rearranged:
    """The pieces of one pack as documents."""

    texts: list[_Tokens]
    names: list[str]
    lengths: NDArray[np.int64] = field(init=False)
    prefix_lengths: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        lengths = np.array([len(text) for text in self.texts], dtype=np.int64)
        object.__setattr__(self, "lengths", lengths)
        object.__setattr__(self, "prefix_lengths", np.zeros_like(lengths))

    def read(self, document: int, start: int, stop: int) -> _Tokens:
        return self.texts[document][start:stop]

    def name(self, document: int) -> str:
        return self.names[document]

    def supervised(self, document: int, start: int, stop: int) -> None:
        return None


def rearrange(
    documents: Documents, pack: Pack, fim: FillInTheMiddle, seq_length: int
) -> tuple[Texts, Pack]:
    """Returns the rearranged pieces of a pack as documents, and the pack of them, at most seq_length tokens.

    A piece that is cut takes the token behind it along, the label of its last one, as in Megatron-LM.

    Raises:
        ValueError: a token id is outside the vocabulary of the tokenizer (names the document).
    """
    draws, size = _draws(fim.seed, pack.number), fim.tokenizer.vocab_size
    texts = [
        _rearrange_piece(read_with_next(documents, piece, size), fim, draws)
        for piece in pack.pieces
    ]
    names = [documents.name(piece.document) for piece in pack.pieces]
    pieces, room = [], seq_length
    for number, text in enumerate(texts):
        pieces.append(Piece(number, 0, min(len(text), room)))
        room -= pieces[-1].length
    pieces = [piece for piece in pieces if piece.length]
    last = pack.pieces[-1]
    if pack.following is not None and last.stop == documents.lengths[last.document]:
        document, start = pack.following
        texts.append(read_with_next(documents, Piece(document, start, start + 1), size)[:1])
        names.append(documents.name(document))
    end = pieces[-1]
    behind = (end.document, end.stop)
    if end.stop == len(texts[end.document]):
        behind = (end.document + 1, 0)
    following = behind if behind[0] < len(texts) else None
    return _Rearranged(texts, names), Pack(tuple(pieces), following, pack.number)


def _draws(seed: int, pack: int) -> Iterator[float]:
    """Yields numbers in [0, 1): a hash of (seed, pack, how many came before)."""
    start = splitmix64(np.array([(seed ^ _SALT) % 2**64], dtype=np.uint64))
    start = splitmix64(start ^ np.uint64(pack))
    for first in itertools.count(step=_DRAWN_AT_ONCE):
        places = np.arange(first, first + _DRAWN_AT_ONCE, dtype=np.uint64)
        yield from ((splitmix64(start ^ places) >> np.uint64(11)) * 2.0**-53).tolist()


def _rearrange_piece(tokens: _Tokens, fim: FillInTheMiddle, draws: Iterator[float]) -> _Tokens:
    return _each_run(tokens, fim.tokens.eod, partial(_rearrange_text, fim=fim, draws=draws))


def _each_run(tokens: _Tokens, separator: int, change: Callable[[_Tokens], _Tokens]) -> _Tokens:
    """Returns the tokens with every run between separators changed; separators stay."""
    parts, start = [], 0
    for end in [*np.flatnonzero(tokens == separator).tolist(), len(tokens)]:
        if end > start:
            parts.append(change(tokens[start:end]))
        parts.append(tokens[end : end + 1])  # none behind the last run
        start = end + 1
    return np.concatenate(parts)


def _rearrange_text(tokens: _Tokens, fim: FillInTheMiddle, draws: Iterator[float]) -> _Tokens:
    split = fim.tokens.split
    if split is None or split not in tokens:
        return _permute(tokens, fim.rate, fim, draws)
    assert fim.fragment_rate is not None
    if next(draws) >= fim.rate:
        return tokens
    permute = partial(_permute, rate=fim.fragment_rate, fim=fim, draws=draws)
    return _each_run(tokens, split, permute)


def _permute(tokens: _Tokens, rate: float, fim: FillInTheMiddle, draws: Iterator[float]) -> _Tokens:
    """Returns the text with its middle last, or, at 1 - rate, as it is."""
    if next(draws) >= rate:
        return tokens
    text = fim.tokenizer.detokenize(tokens.tolist())
    if fim.no_prefix is not None and text.startswith(fim.no_prefix):
        return tokens
    first, second = sorted(int(next(draws) * (len(text) + 1)) for _ in range(2))
    parts = (text[:first], text[first:second], text[second:])
    prefix, middle, suffix = (fim.tokenizer.tokenize(part) for part in parts)
    ids = fim.tokens
    if next(draws) < fim.spm_rate:
        words = [ids.prefix, ids.suffix, *suffix, ids.middle, *prefix, *middle]
    else:
        words = [ids.prefix, *prefix, ids.suffix, *suffix, ids.middle, *middle]
    return np.array(words, dtype=np.int64)
