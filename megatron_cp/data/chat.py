r"""Conversations to text, and which parts of the text are learned.

    {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}
        ->  "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"   read
            "4<|im_end|>\n"                                              learned

The formats of Megatron-LM's `--sft-tokenizer-prompt-format` keep their meaning: `identity` and
`default` learn every token. `chatml` and `chat-template` are ours and learn what the assistant says.
Nothing that a conversation holds is left out without a word: tools and calls of them need a template that
renders them.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_cp.data.chat_template import TEMPLATE_FILES, Render, read_template

Message = Mapping[str, Any]
ROLES = ("system", "user", "tool", "assistant")


class Part(NamedTuple):
    """A stretch of a conversation's text, tokenized by itself."""

    text: str
    is_learned: bool


class Conversation(NamedTuple):
    """Messages in their order, and the tools that the model is offered, as JSON schemas."""

    messages: Sequence[Message]
    tools: Sequence[Any] | None = None


ChatFormat = Callable[[Conversation], list[Part]]
"""Conversation -> parts. Raises ValueError for what the format cannot say."""


def _identity(messages: Sequence[Message]) -> list[Part]:
    return [Part("".join(message["content"] for message in messages), True)]


def _chatml(messages: Sequence[Message]) -> list[Part]:
    parts = []
    for message in messages:
        head, body = f"<|im_start|>{message['role']}\n", f"{message['content']}<|im_end|>\n"
        if message["role"] == "assistant":
            parts += [Part(head, False), Part(body, is_learned(message))]
        else:
            parts.append(Part(head + body, False))
    return parts


def _nemotron_h_aligned(messages: Sequence[Message]) -> list[Part]:
    """A turn of the user ends with the head of the answer; turns of a tool have no text."""
    parts = []
    for message in messages:
        role, content = message["role"], message["content"].strip()
        if role == "assistant":
            parts.append(Part(f"{content}\n", is_learned(message)))
        elif role == "user":
            head = "<SPECIAL_11>Assistant\n"
            parts.append(Part(f"<SPECIAL_11>User\n{content}\n{head}", False))
        elif role == "system":
            parts.append(Part(f"<SPECIAL_10>System\n{content}\n", False))
    return parts


def _nemotron_nano_v2(messages: Sequence[Message]) -> list[Part]:
    """The switches /think and /no_think are taken out of questions; turns of a tool have no text."""
    parts = []
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "assistant":
            parts.append(Part("<SPECIAL_11>Assistant\n", False))
            parts.append(Part(f"{content.strip()}\n<SPECIAL_12>\n", is_learned(message)))
            continue
        content = content.replace("/think", "").replace("/no_think", "").strip()
        if role == "user":
            parts.append(Part(f"<SPECIAL_11>User\n{content}\n", False))
        elif role == "system":
            parts.append(Part(f"<SPECIAL_10>System\n{content}\n", False))
    return parts


_FORMATS: dict[str, Callable[[Sequence[Message]], list[Part]]] = {
    "nemotron-h-aligned": _nemotron_h_aligned,
    "nemotron-nano-v2": _nemotron_nano_v2,
    "identity": _identity,
    "chatml": _chatml,
}
_TEMPLATE_FORMATS = ("default", "chat-template")
PROMPT_FORMATS = (*_FORMATS, *_TEMPLATE_FORMATS)


def chat_format(name: str, tokenizer_model: str | None = None) -> ChatFormat:
    """Returns the format of `--sft-tokenizer-prompt-format`.

    `default` and `chat-template` read the template beside the tokenizer.

    Raises:
        ValueError: an unknown format, or there is no template.
    """
    if name in _FORMATS:
        return functools.partial(_in_words, name)
    if name not in _TEMPLATE_FORMATS:
        raise ValueError(
            f"--sft-tokenizer-prompt-format {name} is not served; give one of "
            f"{', '.join(PROMPT_FORMATS)}"
        )
    render = read_template(_folder_of(tokenizer_model))
    parts_of = _whole_of_template if name == "default" else _answers_of_template

    def parts(conversation: Conversation) -> list[Part]:
        _refuse_what_is_not_rendered(render, conversation)
        return parts_of(render, conversation)

    return parts


def format_identity(name: str, tokenizer_model: str | None = None) -> str:
    """Returns what the text of a format depends on beside the messages: its name, and its template's files."""
    if name not in _TEMPLATE_FORMATS:
        return name
    total = hashlib.sha256(f"{_VERSION} {name}".encode())
    folder = _folder_of(tokenizer_model)
    for file in (folder / name for name in TEMPLATE_FILES):
        total.update(file.read_bytes() if file.is_file() else b"none")
    return total.hexdigest()


# Of how templates are rendered: 1 escaped JSON for HTML and gave tools that nobody had; 2 left a model's tokens out.
_VERSION = 3

# What a message of an assistant may hold beside its content that a model is to read or say.
_BESIDE_CONTENT = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")


def is_learned(message: Message) -> bool:
    """Returns whether an answer is learned: `"weight": 0` or `"train": false` says that it is read alone."""
    return bool(message.get("weight", 1)) and bool(message.get("train", True))


def _in_words(name: str, conversation: Conversation) -> list[Part]:
    """Returns the parts of a format that knows roles and contents alone."""
    held = ["tools"] if conversation.tools else []
    held += [key for key in _BESIDE_CONTENT if any(m.get(key) for m in conversation.messages)]
    if held:
        raise ValueError(
            f"it has {' and '.join(held)}, which {name} leaves out; give --sft-tokenizer-prompt-format chat-template, "
            "or write them into the content"
        )
    if name == "identity":
        _refuse_weights(name, conversation)
    return _FORMATS[name](conversation.messages)


def _refuse_weights(name: str, conversation: Conversation) -> None:
    if not all(map(is_learned, conversation.messages)):
        raise ValueError(
            f'it has an answer of "weight": 0 or "train": false, and {name} learns everything; give '
            "--sft-tokenizer-prompt-format chat-template, or take that out"
        )


def _refuse_what_is_not_rendered(render: Render, conversation: Conversation) -> None:
    """Raises ValueError where the text would be the same without tools, or without what a message has beside content.

    A message is looked at as the last one: a template may leave reasoning out of earlier turns.
    """
    without = {}
    if conversation.tools:
        without["tools"] = conversation, conversation._replace(tools=None)
    for key in _BESIDE_CONTENT:
        place = next((i for i, m in enumerate(conversation.messages) if m.get(key)), None)
        if place is not None:
            *before, last = conversation.messages[: place + 1]
            said, silent = [*before, last], [*before, {**last, key: None}]
            without[key] = (
                conversation._replace(messages=said),
                conversation._replace(messages=silent),
            )
    for name, (one, other) in without.items():
        if _text_or_refusal(render, one) == _text_or_refusal(render, other):
            raise ValueError(
                f"it has {name}, which the chat template leaves out: the model would never see them; give a template "
                "that renders them"
            )


def _text_or_refusal(render: Render, conversation: Conversation) -> str:
    try:
        return render(*conversation, False)
    except ValueError as refusal:  # a message without content, perhaps
        return f"refused: {refusal}"


def _whole_of_template(render: Render, conversation: Conversation) -> list[Part]:
    _refuse_weights("default", conversation)
    return [Part(render(*conversation, False), True)]


def _answers_of_template(render: Render, conversation: Conversation) -> list[Part]:
    """Returns prompts and answers: what a template adds for an assistant's turn is the answer."""
    messages = conversation.messages
    parts, done = [], ""
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = render(messages[:place], conversation.tools, True)
        whole = render(messages[: place + 1], conversation.tools, False)
        if not (prompt.startswith(done) and whole.startswith(prompt)):
            raise ValueError(
                f"the chat template changes earlier turns when message {place} is added, so its "
                "answers cannot be told apart; give --sft-tokenizer-prompt-format default, which "
                "learns every token"
            )
        parts += [Part(prompt[len(done) :], False), Part(whole[len(prompt) :], is_learned(message))]
        done = whole
    return parts


def _folder_of(tokenizer_model: str | None) -> Path:
    """Returns the folder of a tokenizer, which is given as it or as a file in it."""
    path = Path(tokenizer_model or ".")
    return path if path.is_dir() else path.parent
