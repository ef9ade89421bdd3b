"""A conversation, a template, and files of both, for tests of chats."""

import json

from megatron_cp.data.tokenizer import ByteLevelTokenizer

BYTES = ByteLevelTokenizer()
TALK = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "2 + 2? /think"},
    {"role": "assistant", "content": "4 "},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes."},
]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] | trim }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_template(tmp_path):
    """Writes a tokenizer's folder with a template, and returns it."""
    config = {"chat_template": TEMPLATE, "bos_token": "<b>", "eos_token": {"content": "</s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def write_lines(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path
