"""Chat templates: the Jinja file beside a tokenizer, ready to render conversations in a sandbox.

    read_template(folder)  ->  render(messages, tools, add_generation_prompt)  ->  text

Source: the names and filters that transformers 5 gives to templates, and its sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from megatron_cp.data.special_tokens import named_special_tokens, read_special_tokens

Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Any] | None, bool], str]
"""(messages, tools, whether the head of an answer follows) -> text. Raises ValueError where the template refuses."""

_FILE = "chat_template.jinja"
TEMPLATE_FILES = ("tokenizer_config.json", _FILE, "special_tokens_map.json")
"""What a rendered text depends on beside the conversation, in the tokenizer's folder."""


def read_template(folder: Path) -> Render:
    """Returns the chat template in a tokenizer's folder, ready to render. Raises ValueError without one."""
    from jinja2 import TemplateError

    config, own = read_special_tokens(folder), folder / _FILE
    text = own.read_text(encoding="utf-8") if own.is_file() else config.get("chat_template")
    if isinstance(text, list):  # several by name
        text = next((t["template"] for t in text if t.get("name") == "default"), None)
    if not isinstance(text, str):
        raise ValueError(
            f"{folder} holds no chat template (chat_template.jinja, or chat_template in "
            "tokenizer_config.json); give another --sft-tokenizer-prompt-format"
        )

    names = named_special_tokens(config)
    try:
        template = _environment().from_string(text)
    except TemplateError as error:
        raise ValueError(f"the chat template of {folder} cannot be read ({error})") from None

    def render(
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        add_generation_prompt: bool,
    ) -> str:
        try:
            return str(
                template.render(
                    messages=list(messages),
                    tools=tools and list(tools),
                    documents=None,
                    add_generation_prompt=add_generation_prompt,
                    **names,
                )
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
