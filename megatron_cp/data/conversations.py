"""Chat files to a corpus whose learned tokens are known: one conversation, one document.

A line of the file is {"messages": [{"role": ..., "content": ...}, ...]}. A system message begins a
new conversation, so that a line may hold several.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from megatron_cp.data.chat import ROLES, ChatFormat, Message
from megatron_cp.data.indexed import token_dtype
from megatron_cp.data.indexed_writer import IndexedWriter
from megatron_cp.data.supervision import write_supervision
from megatron_cp.data.tokenizer import Tokenizer

Span = tuple[int, int]


@dataclass(frozen=True)
class ConversationCounts:
    """What a chat file became: conversations, their tokens, those learned, and how many were cut."""

    conversations: int
    tokens: int
    learned_tokens: int
    truncated: int


def read_conversations(path: str | os.PathLike[str]) -> Iterator[list[Message]]:
    """Yields the conversations of a chat file.

    Raises:
        ValueError: a line is something else (names file and line).
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"--sft: {os.fspath(path)!r} does not exist; give a .jsonl file")
    with Path(path).open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield from _conversations_of_line(line, f"{os.fspath(path)}, line {number}")


def _conversations_of_line(line: bytes, where: str) -> Iterator[list[Message]]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON ({error}); repair it") from None
    messages = record.get("messages") if isinstance(record, dict) else None
    if isinstance(record, dict) and record.get("tools"):
        raise ValueError(
            f"{where} has tools, which would not be rendered: the model would never see them; write them into a system "
            "message as the template does, and take the key out"
        )
    if not isinstance(messages, list) or not messages:
        raise ValueError(f'{where} must be {{"messages": [...]}} with at least one message')
    current: list[Message] = []
    for place, message in enumerate(messages):
        checked = _checked(message, f"{where}, message {place}")
        if checked["role"] == "system" and current:
            yield current
            current = []
        current.append(checked)
    yield current


def _checked(message: Any, where: str) -> Message:
    role, content = (
        (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
    )
    role = role.lower() if isinstance(role, str) else role
    if role not in ROLES or not isinstance(content, str):
        raise ValueError(
            f"{where} has role {role!r} and content of type {type(content).__name__}, it must have "
            f"one of {', '.join(ROLES)} and a string; repair it"
        )
    if not content.isascii() and any("\ud800" <= letter <= "\udfff" for letter in content):
        raise ValueError(f"{where} holds a lone surrogate, which is no text; repair it")
    if role == "assistant" and not content.strip():
        raise ValueError(f"{where} is an empty answer, from which nothing is learned; take it out")
    return {**message, "role": role}


def tokenize_conversation(
    messages: Sequence[Message], tokenizer: Tokenizer, render: ChatFormat
) -> tuple[list[int], list[Span]]:
    """Returns the ids of a conversation, closed by the end-of-document token, and the learned spans.

    The end is learned where it follows an answer.
    """
    ids: list[int] = []
    spans: list[Span] = []
    is_learned = False
    parts = render(messages)
    for (_, is_learned), own in zip(
        parts, _ids_of_parts([text for text, _ in parts], tokenizer), strict=True
    ):
        start = len(ids)
        ids += own
        if is_learned and own:
            spans.append((start, len(ids)))
    if ids and ids[-1] != tokenizer.eod:
        ids.append(tokenizer.eod)
        if is_learned and spans:
            spans[-1] = (spans[-1][0], len(ids))
    return ids, spans


def _ids_of_parts(texts: list[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Returns the ids of each part, without the blank that tokenizers like SentencePiece put before a text.

    A part whose border lies inside a token of the whole is tokenized by itself, as a prompt is before its answer.
    """
    apart = [list(tokenizer.tokenize(text)) for text in texts]
    if list(chain.from_iterable(apart)) == list(tokenizer.tokenize("".join(texts))):
        return apart
    found: list[list[int]] = []
    before: list[int] = []
    for end, own in enumerate(apart, start=1):
        so_far = list(tokenizer.tokenize("".join(texts[:end])))
        found.append(so_far[len(before) :] if so_far[: len(before)] == before else own)
        before = so_far
    return found


def write_conversations(
    source: str | os.PathLike[str],
    prefix: str | os.PathLike[str],
    tokenizer: Tokenizer,
    render: ChatFormat,
    *,
    max_tokens: int,
) -> ConversationCounts:
    """Writes the corpus of a chat file; conversations longer than `max_tokens` lose their end.

    Raises:
        ValueError: a line is no conversation, or no token of the file would be learned.
    """
    spans: list[tuple[int, int, int]] = []
    truncated = document = 0
    with IndexedWriter(prefix, dtype=token_dtype(tokenizer.vocab_size)) as writer:
        for messages in read_conversations(source):
            ids, learned = tokenize_conversation(messages, tokenizer, render)
            truncated += len(ids) > max_tokens
            writer.add_document(ids[:max_tokens])
            cut = ((start, min(stop, max_tokens)) for start, stop in learned)
            spans += [(document, start, stop) for start, stop in cut if start < stop]
            document += 1
        if not spans:
            raise ValueError(
                f"{os.fspath(source)} has {document} conversations and no answer to learn within "
                f"{max_tokens} tokens; give one with assistant messages, or a longer --seq-length"
            )
        tokens = writer.num_tokens
        writer.finish({"source": os.fspath(source), "truncated": truncated})
    write_supervision(prefix, spans)
    return ConversationCounts(document, tokens, sum(b - a for _, a, b in spans), truncated)


# Of how chats become tokens: one of 1 may have been cut by its tokenizer's file, one of 2 has blanks between parts.
_VERSION = 3


def conversations_in_folder(
    source: str | os.PathLike[str],
    folder: Path,
    tokenizer: Tokenizer,
    render: ChatFormat,
    *,
    format_identity: str,
    max_tokens: int,
) -> str:
    """Returns the prefix of the corpus of a chat file in `folder`, written if it is not there yet.

    Its name is a checksum of all that it depends on; `format_identity` is that of `chat.py`.
    Several processes may ask at once: each writes its own, and the first to finish stays.
    """
    identity = json.dumps(
        [_VERSION, tokenizer.unique_identifiers, tokenizer.eod, format_identity, max_tokens]
    )
    total = hashlib.sha256(identity.encode())
    if Path(source).is_file():  # else reading it says what is wrong
        with Path(source).open("rb") as stream:
            while block := stream.read(1 << 24):
                total.update(block)
    target = folder / f"chat_{total.hexdigest()[:24]}"
    if not target.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        own = Path(tempfile.mkdtemp(prefix="chat_", dir=folder))
        try:
            write_conversations(source, own / "corpus", tokenizer, render, max_tokens=max_tokens)
            own.rename(target)
        except OSError:
            if not target.is_dir():
                raise
        finally:
            shutil.rmtree(own, ignore_errors=True)  # gone already where it was renamed
    return str(target / "corpus")
