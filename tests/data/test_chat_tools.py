"""Tools, calls of them and weights in chats: rendered, learned, or refused with their line."""

import json

import pytest

from megatron_cp.data.chat import PROMPT_FORMATS, Conversation, chat_format
from megatron_cp.data.conversations import read_conversations, write_conversations
from tests.data.chats import BYTES, TALK, write_lines, write_template

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": [1, "\u00e9"]}}}
TOOL_TALK = [
    {"role": "user", "content": "1 + 2?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "name": "add", "content": "3"},
    {"role": "assistant", "content": "3."},
]
TOOL_TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool | tojson }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{% for call in m.tool_calls or [] %}"
    "!{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}"
    "{% if m.role == 'assistant' %};{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def read_tool_talk(tmp_path, **changes):
    path = write_lines(tmp_path / "c.jsonl", {"messages": TOOL_TALK, "tools": TOOLS, **changes})
    ((_, conversation),) = read_conversations(path)
    return conversation


@pytest.mark.parametrize("arguments", [dict, json.dumps])
def test_tools_and_calls_of_them_are_rendered_as_transformers_renders_objects(tmp_path, arguments):
    transformers = pytest.importorskip("transformers.utils.chat_template_utils")
    (expected,), _ = transformers.render_jinja_template(
        conversations=[TOOL_TALK], chat_template=TOOL_TEMPLATE, tools=TOOLS
    )
    call = {"function": {"name": "add", "arguments": arguments(CALL["function"]["arguments"])}}
    messages = [TOOL_TALK[0], TOOL_TALK[1] | {"tool_calls": [call]}, *TOOL_TALK[2:]]
    conversation = read_tool_talk(tmp_path, messages=messages)
    (tmp_path / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    (part,) = chat_format("default", str(tmp_path))(conversation)
    assert part.text == expected
    parts = chat_format("chat-template", str(tmp_path))(conversation)
    assert "".join(text for text, _ in parts) == expected
    learned = [text for text, is_learned in parts if is_learned]
    assert learned == ['!add{"a": [1, "\u00e9"]};', "3.;"]


SILENT = "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{% endfor %}"
CALLS_ALONE = TOOL_TEMPLATE.replace("tools or []", "[]")
TOOLS_ALONE = TOOL_TEMPLATE.replace("m.tool_calls or []", "[]")


@pytest.mark.parametrize(
    ("name", "template", "changes", "message"),
    [
        ("chatml", "", {}, "it has tools and tool_calls, which chatml leaves out"),
        ("identity", "", {"tools": []}, "it has tool_calls, which identity leaves out"),
        ("default", SILENT, {}, "it has tools, which the chat template leaves out"),
        ("default", CALLS_ALONE, {}, "it has tools, which the chat template leaves out"),
        ("chat-template", TOOLS_ALONE, {}, "it has tool_calls, which the chat template leaves out"),
        (
            "nemotron-nano-v2",
            "",
            {"messages": [{**TALK[2], "reasoning_content": "hm"}], "tools": None},
            "it has reasoning_content, which nemotron-nano-v2 leaves out",
        ),
        (
            "chatml",
            "",
            {"messages": [{**TALK[2], "thinking": "hm", "function_call": CALL}], "tools": None},
            "it has function_call and thinking, which chatml leaves out",
        ),
        (
            "chat-template",
            SILENT,
            {"messages": [TALK[1], {**TALK[2], "reasoning": "hm"}, *TALK[3:]], "tools": None},
            "it has reasoning, which the chat template leaves out",
        ),
    ],
)
def test_what_would_be_left_out_is_refused_with_its_line(
    tmp_path, name, template, changes, message
):
    line = {"messages": TOOL_TALK, "tools": TOOLS, **changes}
    path = write_lines(tmp_path / "c.jsonl", {"messages": TALK}, line)
    (tmp_path / "chat_template.jinja").write_text(template)
    render = chat_format(name, str(tmp_path))
    with pytest.raises(ValueError, match=rf"c\.jsonl, line 2: {message}"):
        write_conversations(path, tmp_path / "c", BYTES, render, max_tokens=300)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["c.jsonl", "chat_template.jinja"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tools": {"name": "add"}}, "line 1 has tools that are no list of JSON schemas"),
        ({"tools": ["add"]}, "line 1 has tools that are no list of JSON schemas"),
        ({"tools": [{"name": "\ud800"}]}, "line 1 holds a lone surrogate"),
    ],
)
def test_tools_that_are_none_are_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        read_tool_talk(tmp_path, **changes)


def test_reasoning_that_a_template_leaves_out_of_earlier_turns_is_rendered(tmp_path):
    template = (
        "{% for m in messages %}<{{ m.role }}>"
        "{% if loop.last and m.thinking %}({{ m.thinking }}){% endif %}{{ m.content }}{% endfor %}"
    )
    (tmp_path / "chat_template.jinja").write_text(template)
    first, last = ({**m, "thinking": f"of {m['content']}"} for m in (TALK[2], TALK[4]))
    conversation = read_tool_talk(tmp_path, messages=[TALK[1], first, TALK[3], last], tools=None)
    (part,) = chat_format("default", str(tmp_path))(conversation)
    assert f"(of {TALK[4]['content']})" in part.text
    assert f"(of {TALK[2]['content']})" not in part.text


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        ("add", "no list of objects"),
        ([1], "no list of objects"),
        ([{"function": "add"}], "a function that is no object"),
        ([{"function": {"arguments": {}}}], "a call without a name"),
        ([{"name": "add", "arguments": "[1]"}], "arguments that are no object"),
        ([{"name": "add", "arguments": "{"}], "Expecting property name"),
        ([{"name": "add", "arguments": '{"a": 1, "a": 2}'}], "the key 'a' stands twice"),
        ([{"name": "add", "arguments": '{"a": "\\ud800"}'}], "arguments with a lone surrogate"),
    ],
)
def test_calls_that_cannot_be_read_are_refused(tmp_path, calls, reason):
    messages = [{"role": "assistant", "content": "", "tool_calls": calls}]
    match = rf"line 1, message 0 has tool_calls that cannot be read \({reason}"
    with pytest.raises(ValueError, match=match):
        read_tool_talk(tmp_path, messages=messages)


@pytest.mark.parametrize(("key", "no", "yes"), [("weight", 0, 1), ("train", False, True)])
@pytest.mark.parametrize("name", PROMPT_FORMATS)
def test_an_answer_may_be_read_and_not_learned(tmp_path, name, key, no, yes):
    render = chat_format(name, str(write_template(tmp_path)))
    weighed = [*TALK[:2], {**TALK[2], key: no}, TALK[3], {**TALK[4], key: yes}]
    if name in ("identity", "default"):
        with pytest.raises(ValueError, match=f'"train": false, and {name} learns everything'):
            render(Conversation(weighed))
        return
    plain = render(Conversation(TALK))
    parts = render(Conversation(weighed))
    assert [text for text, _ in parts] == [text for text, _ in plain]
    assert [learned for _, learned in parts].count(True) == 1
    assert parts[-1].is_learned


def test_other_weights_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"message 0 has weight 0\.5, it must be 0 or 1"):
        read_tool_talk(tmp_path, messages=[{**TALK[2], "weight": 0.5}])


@pytest.mark.parametrize("said", [{"train": 0}, {"train": "no"}, {"train_detail": []}])
def test_what_says_otherwise_how_an_answer_is_learned_is_refused(tmp_path, said):
    with pytest.raises(ValueError, match=r'line 1, message 0 must say "train": true or false, and'):
        read_tool_talk(tmp_path, messages=[{**TALK[2], **said}])
