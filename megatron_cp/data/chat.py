r"""Conversations to text, and which parts of the text are learned.

    {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}
        ->  "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"   read
            "4<|im_end|>\n"                                              learned

The formats of Megatron-LM's `--sft-tokenizer-prompt-format` keep their meaning: `identity` and
`default` learn every token. `chatml` and `chat-template` are ours and learn what the assistant says.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from megatron_cp.data.tokenizer import read_special_tokens

Message = Mapping[str, str]
ROLES = ("system", "user", "tool", "assistant")


class Part(NamedTuple):
    """A stretch of a conversation's text, tokenized by itself."""

    text: str
    is_learned: bool


ChatFormat = Callable[[Sequence[Message]], list[Part]]


def _identity(messages: Sequence[Message]) -> list[Part]:
    return [Part("".join(message["content"] for message in messages), True)]


def _chatml(messages: Sequence[Message]) -> list[Part]:
    parts = []
    for message in messages:
        head, body = f"<|im_start|>{message['role']}\n", f"{message['content']}<|im_end|>\n"
        if message["role"] == "assistant":
            parts += [Part(head, False), Part(body, True)]
        else:
            parts.append(Part(head + body, False))
    return parts


def _nemotron_h_aligned(messages: Sequence[Message]) -> list[Part]:
    """A turn of the user ends with the head of the answer; turns of a tool have no text."""
    parts = []
    for message in messages:
        role, content = message["role"], message["content"].strip()
        if role == "assistant":
            parts.append(Part(f"{content}\n", True))
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
            parts.append(Part(f"{content.strip()}\n<SPECIAL_12>\n", True))
            continue
        content = content.replace("/think", "").replace("/no_think", "").strip()
        if role == "user":
            parts.append(Part(f"<SPECIAL_11>User\n{content}\n", False))
        elif role == "system":
            parts.append(Part(f"<SPECIAL_10>System\n{content}\n", False))
    return parts


_FORMATS: dict[str, ChatFormat] = {
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
        return _FORMATS[name]
    if name not in _TEMPLATE_FORMATS:
        raise ValueError(
            f"--sft-tokenizer-prompt-format {name} is not served; give one of "
            f"{', '.join(PROMPT_FORMATS)}"
        )
    render = _read_template(Path(tokenizer_model or "."))
    if name == "default":
        return lambda messages: [Part(render(messages, False), True)]
    return lambda messages: _answers_of_template(render, messages)


def format_identity(name: str, tokenizer_model: str | None = None) -> str:
    """Returns what the text of a format depends on beside the messages: its name, and its template's files."""
    if name not in _TEMPLATE_FORMATS:
        return name
    total = hashlib.sha256(f"{_VERSION} {name}".encode())
    files = _template_files(Path(tokenizer_model or "."))
    for file in (*files, files[0].with_name("special_tokens_map.json")):
        total.update(file.read_bytes() if file.is_file() else b"none")
    return total.hexdigest()


_VERSION = (
    2  # of how templates are rendered; of 1 were JSON escaped for HTML, and tools that nobody gave
)

_Render = Callable[[Sequence[Message], bool], str]


def _answers_of_template(render: _Render, messages: Sequence[Message]) -> list[Part]:
    """Returns prompts and answers: what a template adds for an assistant's turn is the answer."""
    parts, done = [], ""
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = render(messages[:place], True)
        whole = render(messages[: place + 1], False)
        if not (prompt.startswith(done) and whole.startswith(prompt)):
            raise ValueError(
                f"the chat template changes earlier turns when message {place} is added, so its "
                "answers cannot be told apart; give --sft-tokenizer-prompt-format default, which "
                "learns every token"
            )
        parts += [Part(prompt[len(done) :], False), Part(whole[len(prompt) :], True)]
        done = whole
    return parts


def _read_template(path: Path) -> _Render:
    """Returns the chat template beside a tokenizer file, or in its folder, ready to render.

    Source: the names and filters that transformers 5 gives to templates, rendered in a sandbox as there.
    """
    from jinja2 import TemplateError

    config_path, own_path = _template_files(path)
    folder = config_path.parent
    config: dict[str, Any] = {}
    if config_path.is_file():
        try:
            config = dict(json.loads(config_path.read_text(encoding="utf-8")))
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{config_path} is not a JSON object ({error}); repair it") from None
    text = (
        own_path.read_text(encoding="utf-8") if own_path.is_file() else config.get("chat_template")
    )
    if isinstance(text, list):  # several by name
        text = next((t["template"] for t in text if t.get("name") == "default"), None)
    if not isinstance(text, str):
        raise ValueError(
            f"{folder} holds no chat template (chat_template.jinja, or chat_template in "
            "tokenizer_config.json); give another --sft-tokenizer-prompt-format"
        )

    environment, names = _environment(), _special_tokens(read_special_tokens(folder))

    def render(messages: Sequence[Message], add_generation_prompt: bool) -> str:
        try:
            return environment.from_string(text).render(
                messages=list(messages),
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **names,
            )
        except TemplateError as error:
            raise ValueError(f"the chat template of {folder} refuses ({error})") from None

    return render


def _environment() -> Any:
    """Returns what templates are rendered in."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what an assistant says; its text is that of its body."""

        tags = {"generation"}  # noqa: RUF012  jinja2's way

        def parse(self, parser: Any) -> list[nodes.Node]:
            next(parser.stream)
            found: list[nodes.Node] = parser.parse_statements(
                ("name:endgeneration",), drop_needle=True
            )
            return found

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json  # jinja2's own is for HTML, and escapes apostrophes
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the special tokens that there are, by the names under which templates ask for them."""
    kinds = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
    names = {f"{kind}_token": _content(config.get(f"{kind}_token")) for kind in kinds}
    return {name: token for name, token in names.items() if token}


def _template_files(path: Path) -> tuple[Path, Path]:
    """Returns where a tokenizer's special tokens and a template may stand, and where its own template does."""
    folder = path if path.is_dir() else path.parent
    return folder / "tokenizer_config.json", folder / "chat_template.jinja"


def _content(token: Any) -> str:
    """Returns the text of a special token, which is a string or {"content": ...}."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")
