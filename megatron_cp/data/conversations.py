"""Chat files to a corpus whose learned tokens are known: one conversation, one document.

A line of the file is {"messages": [{"role": ..., "content": ...}, ...], "tools": [...]}. A system message
begins a new conversation, so that a line may hold several; each is offered the tools.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from megatron_cp.data.chat import ROLES, ChatFormat, Conversation, Message
from megatron_cp.data.indexed import token_dtype
from megatron_cp.data.indexed_writer import IndexedWriter
from megatron_cp.data.supervision import write_supervision
from megatron_cp.data.text_files import has_lone_surrogate, with_unique_keys
from megatron_cp.data.tokenizer import Tokenizer

Span = tuple[int, int]


def read_conversations(path: str | os.PathLike[str]) -> Iterator[tuple[str, Conversation]]:
    """Yields the conversations of a chat file, each with its file and line.

    Raises:
        ValueError: a line is something else (names file and line).
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"--sft: {os.fspath(path)!r} does not exist; give a .jsonl file")
    with Path(path).open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                where = f"{os.fspath(path)}, line {number}"
                yield from ((where, one) for one in _conversations_of_line(line, where))


def _conversations_of_line(line: bytes, where: str) -> Iterator[Conversation]:
    try:
        # As text: from bytes json would let a lone surrogate pass.
        record = json.loads(line.decode("utf-8-sig"), object_pairs_hook=with_unique_keys)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON ({error}); repair it") from None
    messages, tools = (
        (record.get("messages"), record.get("tools")) if isinstance(record, dict) else (None, None)
    )
    if not isinstance(messages, list) or not messages:
        raise ValueError(f'{where} must be {{"messages": [...]}} with at least one message')
    if tools is not None and not _are_objects(tools):
        raise ValueError(f"{where} has tools that are no list of JSON schemas; repair it")
    if b"\\u" in line and has_lone_surrogate(record):
        raise ValueError(f"{where} holds a lone surrogate, which is no text; repair it")
    current: list[Message] = []
    for place, message in enumerate(messages):
        checked = _checked(message, f"{where}, message {place}")
        if checked["role"] == "system" and current:
            yield Conversation(current, tools or None)
            current = []
        current.append(checked)
    yield Conversation(current, tools or None)


def _checked(message: Any, where: str) -> Message:
    role, content = (
        (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
    )
    role = role.lower() if isinstance(role, str) else role
    calls = message.get("tool_calls") if role == "assistant" else None
    if role not in ROLES or not (isinstance(content, str) or (content is None and calls)):
        raise ValueError(
            f"{where} has role {role!r} and content of type {type(content).__name__}, it must have "
            f"one of {', '.join(ROLES)} and a string; repair it"
        )
    if role == "assistant" and not calls and not (content or "").strip():
        raise ValueError(f"{where} is an empty answer, from which nothing is learned; take it out")
    if message.get("weight", 1) not in (0, 1):
        raise ValueError(f"{where} has weight {message['weight']!r}, it must be 0 or 1; repair it")
    if not isinstance(message.get("train", True), bool) or "train_detail" in message:
        raise ValueError(
            f'{where} must say "train": true or false, and no "train_detail": a message is learned whole or not; '
            "repair it"
        )
    checked = {**message, "role": role}
    return {**checked, "tool_calls": _checked_calls(calls, where)} if calls else checked


def _checked_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Returns calls of tools with their arguments as objects, which templates write as JSON; they may be JSON text."""
    try:
        if not _are_objects(calls):
            raise ValueError("no list of objects")
        return [_with_arguments_read(call) for call in calls]
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f'{where} has tool_calls that cannot be read ({error}); each must be {{"function": {{"name": ..., '
            '"arguments": {...}}}'
        ) from None


def _with_arguments_read(call: dict[str, Any]) -> dict[str, Any]:
    if "function" in call:
        if not isinstance(call["function"], dict):
            raise ValueError("a function that is no object")
        return {**call, "function": _with_arguments_read(call["function"])}
    if not isinstance(call.get("name"), str):
        raise ValueError("a call without a name")
    arguments = call.get("arguments", {})
    if isinstance(arguments, str):
        arguments = json.loads(arguments, object_pairs_hook=with_unique_keys)
    if not isinstance(arguments, dict):
        raise ValueError("arguments that are no object")
    if has_lone_surrogate(arguments):  # which their text could still hide
        raise ValueError("arguments with a lone surrogate, which is no text")
    return {**call, "arguments": arguments}


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) for one in value)


def tokenize_conversation(
    conversation: Conversation, tokenizer: Tokenizer, render: ChatFormat
) -> tuple[list[int], list[Span]]:
    """Returns the ids of a conversation, closed by the end-of-document token, and the learned spans.

    The end is learned where it follows an answer. Raises ValueError for an answer without a token.
    """
    ids: list[int] = []
    spans: list[Span] = []
    is_learned = False
    parts = render(conversation)
    for (_, is_learned), own in zip(
        parts, _ids_of_parts([text for text, _ in parts], tokenizer), strict=True
    ):
        start = len(ids)
        ids += own
        if is_learned and not own:
            raise ValueError(
                "the tokenizer has no token for an answer (of characters that it drops, perhaps), from which nothing "
                "is learned; take it out"
            )
        if is_learned:
            spans.append((start, len(ids)))
    if ids and ids[-1] != tokenizer.eod:
        ids.append(tokenizer.eod)
        if is_learned:
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
) -> None:
    """Writes the corpus of a chat file; conversations longer than `max_tokens` lose their end.

    Raises:
        ValueError: a line is no conversation, or no token of the file would be learned.
    """
    spans: list[tuple[int, int, int]] = []
    truncated = document = 0
    with IndexedWriter(prefix, dtype=token_dtype(tokenizer.vocab_size)) as writer:
        for where, conversation in read_conversations(source):
            try:
                ids, learned = tokenize_conversation(conversation, tokenizer, render)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
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
        writer.finish({"source": os.fspath(source), "truncated": truncated})
    write_supervision(prefix, spans)


# Of how chats become tokens. Of 1 one may have been cut by its tokenizer's file, of 2 there are blanks between parts,
# of 3 calls of tools may have been left out, and of 4 answers of "train": false are learned.
_VERSION = 5


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
