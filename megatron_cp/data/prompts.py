"""Beginnings of documents that a model goes on writing: which ones, how a token is drawn, what is shown as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_cp.data.document_set import Documents
from megatron_cp.data.tokenizer import Tokenizer

PROMPT_TOKENS, NEW_TOKENS = 32, 48
"""A line or two of text each. Four texts cost about half a step of `make pretrain` (two CPU cores, 2026-11-22)."""

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Prompt:
    """The beginning of a document, and what the document itself goes on with."""

    document: int
    """Its number in the split."""
    ids: Ids
    follows: Ids


@dataclass(frozen=True)
class TextSample:
    """One text, a line of text_samples.jsonl: what the model was given, what it wrote, what the document says."""

    iteration: int
    split: str
    document: int
    prompt: str
    continuation: str
    original: str
    ended: bool
    """Whether the model ended the document itself."""

    def row(self) -> dict[str, Any]:
        """Returns its line of text_samples.jsonl."""
        return asdict(self)


def choose_prompts(documents: Documents, count: int, seq_length: int) -> list[Prompt]:
    """Returns at most `count` documents, evenly spaced among those that are long enough, else the longest."""
    window = min(PROMPT_TOKENS + NEW_TOKENS, seq_length)
    lengths = np.asarray(documents.lengths)
    found = np.flatnonzero(lengths >= window)
    if len(found) < count:
        longest = np.argsort(-lengths, kind="stable")[:count]
        found = np.sort(longest[lengths[longest] >= 2])
    places = np.linspace(0, len(found) - 1, min(count, len(found))).astype(np.int64)
    prompts = []
    for document in found[places].tolist():
        length = min(int(lengths[document]), window)
        cut = max(length - NEW_TOKENS, length // 2)
        ids = documents.read(document, 0, length)
        prompts.append(Prompt(document, ids[:cut], ids[cut:]))
    return prompts


def draw(logits_V: NDArray[np.float64], noise: np.random.Generator) -> int:
    """Returns a token with the probability that the softmax of the logits gives it.

    Source: the Gumbel-max trick (Gumbel 1954): argmax of logits plus Gumbel noise.
    """
    return int(np.argmax(logits_V + noise.gumbel(size=len(logits_V))))


def text_behind(tokenizer: Tokenizer, given: Sequence[int], ids: Sequence[int]) -> str:
    """Returns the text of `ids` behind `given`; U+FFFD stands for bytes that are not UTF-8."""
    given, ids = ([i for i in part if i != tokenizer.eod] for part in (given, ids))
    before, whole = tokenizer.detokenize(given), tokenizer.detokenize([*given, *ids])
    # A character may lie on both sides of the cut: then each side has a piece of it.
    return whole[len(before) :] if whole.startswith(before) else tokenizer.detokenize(ids)
