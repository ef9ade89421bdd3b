"""Conversations: their text, what of it is learned, and the batches they become."""

import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_cp.data.batch import BatchConfig, build_batch
from megatron_cp.data.blend import open_blend
from megatron_cp.data.blend_sources import parse_blend
from megatron_cp.data.chat import PROMPT_FORMATS, Conversation, chat_format, format_identity
from megatron_cp.data.conversations import (
    conversations_in_folder,
    read_conversations,
    tokenize_conversation,
    write_conversations,
)
from megatron_cp.data.document_set import open_documents, split_documents
from megatron_cp.data.packing import Packer, PackingConfig
from megatron_cp.data.supervision import supervision_path, write_supervision
from megatron_cp.data.tokenizer import train_byte_level_bpe
from tests.data.chats import BYTES, TALK, TEMPLATE, write_lines, write_template
from tests.data.corpora import write_corpus


class AsSentencePiece:
    """Words as ids, and a blank before every text that has none, as SentencePiece and Metaspace put it."""

    vocab_size, eod, unique_identifiers = 1 << 16, 0, {}

    def tokenize(self, text):
        return [1 + ord(letter) for letter in "_" * bool(text) + text.replace(" ", "_")]


# Learned stretches in brackets, written from the formats' descriptions.
EXPECTED = {
    "nemotron-h-aligned": "<SPECIAL_10>System\nBe brief.\n<SPECIAL_11>User\n2 + 2? /think\n"
    "<SPECIAL_11>Assistant\n[4\n]<SPECIAL_11>User\nSure?\n<SPECIAL_11>Assistant\n[Yes.\n]",
    "nemotron-nano-v2": "<SPECIAL_10>System\nBe brief.\n<SPECIAL_11>User\n2 + 2?\n"
    "<SPECIAL_11>Assistant\n[4\n<SPECIAL_12>\n]<SPECIAL_11>User\nSure?\n"
    "<SPECIAL_11>Assistant\n[Yes.\n<SPECIAL_12>\n]",
    "identity": "[ Be brief. 2 + 2? /think4 Sure?Yes.]",
    "chatml": "<|im_start|>system\n Be brief. <|im_end|>\n<|im_start|>user\n2 + 2? /think<|im_end|>\n"
    "<|im_start|>assistant\n[4 <|im_end|>\n]<|im_start|>user\nSure?<|im_end|>\n"
    "<|im_start|>assistant\n[Yes.<|im_end|>\n]",
    "default": "[<b><system>Be brief.<user>2 + 2? /think<assistant>4</s><user>Sure?"
    "<assistant>Yes.</s>]",
    "chat-template": "<b><system>Be brief.<user>2 + 2? /think<assistant>[4</s>]<user>Sure?"
    "<assistant>[Yes.</s>]",
}


def shown(parts):
    return "".join(f"[{text}]" if learned else text for text, learned in parts)


@pytest.mark.parametrize("name", PROMPT_FORMATS)
def test_text_and_learned_stretches_of_each_format(tmp_path, name):
    render = chat_format(name, str(write_template(tmp_path) / "tokenizer.json"))
    assert shown(render(Conversation(TALK))) == EXPECTED[name]


def test_a_template_says_what_transformers_says(tmp_path):
    transformers = pytest.importorskip("transformers.utils.chat_template_utils")
    expected, _ = transformers.render_jinja_template(
        conversations=[TALK], chat_template=TEMPLATE, bos_token="<b>", eos_token="</s>"
    )
    (part,) = chat_format("default", str(write_template(tmp_path)))(Conversation(TALK))
    assert [part.text] == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "holds no chat template"),
        ("{{ raise_exception('no system') }}", r"refuses \(no system\)"),
        ("{{ messages | length }}", "changes earlier turns"),
        ("{% for", "cannot be read"),
        ("{{ ''.__class__.__mro__ }}", "refuses"),
    ],
)
def test_templates_that_cannot_serve_are_refused(tmp_path, template, message):
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(ValueError, match=message):
        chat_format("chat-template", str(tmp_path))(Conversation(TALK))
    with pytest.raises(ValueError, match="llama3 is not served; give one of nemotron-h-aligned"):
        chat_format("llama3")


def test_learned_spans_are_the_ids_of_the_learned_stretches():
    ids, spans = tokenize_conversation(Conversation(TALK), BYTES, chat_format("chatml"))
    assert ids[-1] == BYTES.eod
    text = [bytes(ids[a:b]) if b < len(ids) else bytes(ids[a : b - 1]) for a, b in spans]
    learned = re.findall(r"\[(.*?)\]", EXPECTED["chatml"], flags=re.DOTALL)
    assert text == [stretch.encode() for stretch in learned]
    assert spans[-1][1] == len(ids)  # the end follows an answer


def test_a_line_may_hold_several_conversations(tmp_path):
    path = write_lines(
        tmp_path / "c.jsonl", {"messages": [*TALK, *TALK[:3]]}, {"messages": TALK[1:3]}
    )
    assert [len(talk.messages) for _, talk in read_conversations(path)] == [5, 3, 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 2 is not JSON"),
        ("[]", 'line 2 must be {"messages"'),
        ('{"messages": []}', "at least one message"),
        ('{"messages": [{"role": "dog", "content": "wuff"}]}', "message 0 has role 'dog'"),
        ('{"messages": [{"role": "user"}]}', "content of type NoneType"),
        ('{"messages": [{"role": "assistant", "content": " "}]}', "is an empty answer"),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "lone surrogate"),
        # As bytes, which json.loads takes for text.
        ('{"messages": [{"role": "user", "content": "\ud800"}]}', "line 2 is not JSON ('utf-8'"),
        ('{"messages": [], "messages": []}', "the key 'messages' stands twice"),
        ('{"messages": [{"role": "user", "role": "tool", "content": ""}]}', "the key 'role'"),
    ],
)
def test_a_line_of_something_else_is_named(tmp_path, text, message):
    path = tmp_path / "c.jsonl"
    lines = json.dumps({"messages": TALK}) + "\n" + text + "\n"
    path.write_bytes(lines.encode(errors="surrogatepass"))
    with pytest.raises(ValueError, match=re.escape(message)):
        list(read_conversations(path))
    with pytest.raises(FileNotFoundError, match="does not exist"):
        list(read_conversations(tmp_path / "no"))


def test_a_file_without_answers_is_refused(tmp_path):
    path = write_lines(tmp_path / "c.jsonl", {"messages": TALK[:2]})
    with pytest.raises(ValueError, match="no answer to learn within 100 tokens"):
        write_conversations(path, tmp_path / "c", BYTES, chat_format("chatml"), max_tokens=100)
    assert list(tmp_path.iterdir()) == [path]


words = st.text("ab ", min_size=1, max_size=12).filter(str.strip)
talks = st.lists(
    st.tuples(words, words).map(
        lambda pair: [
            {"role": "user", "content": pair[0]},
            {"role": "assistant", "content": pair[1]},
        ]
    ),
    min_size=1,
    max_size=3,
).map(lambda turns: [message for turn in turns for message in turn])


@given(talks=st.lists(talks, min_size=1, max_size=6), size=st.sampled_from([90, 120, 250]))
def test_a_batch_learns_answers_and_nothing_else(tmp_path_factory, talks, size):
    folder = tmp_path_factory.mktemp("chat")
    path = write_lines(folder / "c.jsonl", *({"messages": talk} for talk in talks))
    render = chat_format("chatml")
    write_conversations(path, folder / "c", BYTES, render, max_tokens=size)
    documents = open_documents(folder / "c")
    texts, answers = [], []
    for talk in talks:
        ids, flags = [], []
        for text, learned in render(Conversation(talk)):
            ids += list(text.encode())
            flags += [learned] * len(text)
        texts.append([*ids, BYTES.eod][:size])
        answers.append([*flags, True][:size])
    assert len(documents) == len(talks)
    num_learned = sum(map(sum, answers))
    assert np.diff(documents.supervision.spans).sum() == num_learned
    cut = sum(len(render_ids(render, talk)) > size for talk in talks)
    assert documents.dataset.facts["truncated"] == cut
    packer = Packer(documents.lengths, PackingConfig(seq_length=size, policy="keep"))
    config = BatchConfig(seq_length=size, reset_attention_mask=True, reset_position_ids=True)
    learned = 0
    for _ in range(len(talks)):
        pack = next(packer)
        if packer.epoch:
            break
        batch, place = build_batch(documents, [pack], config), 0
        sees = batch.mask.to_dense()
        for document, start, stop in pack.pieces:
            assert (start, stop) == (0, len(texts[document]))
            rows = slice(place, place + stop)
            assert batch.tokens[rows].tolist() == texts[document]
            assert batch.labels[rows].tolist() == [*texts[document][1:], 0]
            assert batch.loss_mask[rows].tolist() == [*map(float, answers[document][1:]), 0.0]
            assert batch.position_ids[rows].tolist() == list(range(stop))
            assert not sees[rows, :place].any() and not sees[rows, place + stop :].any()
            place += stop
        assert not batch.loss_mask[place:].any()
        learned += batch.loss_mask.sum()
    assert learned <= num_learned


def render_ids(render, talk):
    return tokenize_conversation(Conversation(talk), BYTES, render)[0]


def test_what_is_learned_follows_documents_into_splits_and_blends(tmp_path):
    corpora = []
    for name in "ab":
        write_corpus(tmp_path / name, [5, 4, 6])
        write_supervision(tmp_path / name, [(0, 1, 3), (2, 0, 1), (2, 4, 6)])
        corpora.append(open_documents(tmp_path / name))
    plain = write_corpus(tmp_path / "c", [5, 4, 6])
    assert plain.supervised(0, 0, 5) is None
    assert corpora[0].digest() != plain.digest()
    flags = [
        [False, True, True, False, False],
        [False] * 4,
        [True, False, False, False, True, True],
    ]
    _, late, _ = split_documents(corpora[0], "34,66,0")
    both = open_blend(parse_blend([str(tmp_path / "a"), str(tmp_path / "b")]))
    for subject, first in ((corpora[1], 0), (late, 1), (both, 0)):
        for number in range(len(subject)):
            expected = flags[(first + number) % 3]
            for start in range(len(expected)):
                found = subject.supervised(number, start, len(expected) + 1)
                assert found.tolist() == [*expected[start:], False]


@pytest.mark.parametrize(
    "spans",
    [
        [(0, 0, 6)],
        [(3, 0, 1)],
        [(0, 2, 2)],
        [(0, -1, 2)],
        [(1, 0, 1), (0, 0, 1)],
        [(0, 0, 2), (0, 1, 3)],
    ],
)
def test_spans_that_are_not_of_the_corpus_are_refused(tmp_path, spans):
    write_corpus(tmp_path / "c", [5, 4, 6])
    with pytest.raises(ValueError, match="must be a document of"):
        write_supervision(tmp_path / "c", spans)
    np.save(supervision_path(tmp_path / "c"), np.array(spans, dtype=np.int64))
    with pytest.raises(ValueError, match="must be a document of"):
        open_documents(tmp_path / "c")
    supervision_path(tmp_path / "c").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"is not an \.npy file"):
        open_documents(tmp_path / "c")


def test_a_corpus_of_chats_is_made_once_for_all_that_it_depends_on(tmp_path):
    path = write_lines(tmp_path / "c.jsonl", {"messages": TALK})

    def prefix_of(name, size):
        return conversations_in_folder(
            *(path, tmp_path / "cache", BYTES, chat_format(name, str(tmp_path))),
            format_identity=format_identity(name, str(tmp_path)),
            max_tokens=size,
        )

    first = prefix_of("chatml", 300)
    times = [p.stat().st_mtime_ns for p in sorted((tmp_path / "cache").rglob("*"))]
    assert prefix_of("chatml", 300) == first
    assert [p.stat().st_mtime_ns for p in sorted((tmp_path / "cache").rglob("*"))] == times
    others = {prefix_of("identity", 300), prefix_of("chatml", 290)}
    write_lines(path, {"messages": TALK[:3]})
    others.add(prefix_of("chatml", 300))
    for turn in "<{{m.content}}>", "[{{m.content}}]":
        template = "{% for m in messages %}" + turn + "{% endfor %}"
        (tmp_path / "chat_template.jinja").write_text(template)
        others.add(prefix_of("default", 300))
    assert len(others | {first}) == 6
    assert len(list((tmp_path / "cache").iterdir())) == 6  # no temporary folder is left


TEMPLATES = {
    "JSON": "{% for m in messages %}{{ m.content | tojson }}{{ m | tojson(indent=1) }}{% endfor %}",
    "tools": "{% if tools is not none %}TOOLS{% endif %}{% if documents is none %}-{% endif %}",
    "tokens": "{{ bos_token is defined }} {{ pad_token is defined }} {{ unk_token }} {{ additional_special_tokens }}",
    "loops": "{% for m in messages %}{% if loop.index == 3 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "generation": "{% for m in messages %}\n{% generation %}\n {{ m.content }}{% endgeneration %}\n{% endfor %}x",
    "dates": "{{ strftime_now('%Y') }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_say_what_transformers_tokenizer_says(tmp_path, name):
    transformers = pytest.importorskip("transformers")
    talk = [
        {"role": "user", "content": "it's <b> & \u00e9"},
        {"role": "assistant", "content": "that's"},
    ] * 2
    tokens = {
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "additional_special_tokens": ["<a>", "<c>"],
    }
    train_byte_level_bpe(["hello world " * 20], vocab_size=300, path=tmp_path / "tokenizer.json")
    config = {
        "chat_template": TEMPLATES[name],
        "tokenizer_class": "PreTrainedTokenizerFast",
    } | tokens
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(talk, tokenize=False)
    (part,) = chat_format("default", str(tmp_path))(Conversation(talk))
    assert part.text == expected


@pytest.mark.parametrize("kind", ["extra_special_tokens", "model_specific_special_tokens", None])
def test_templates_know_the_tokens_of_a_model_as_by_transformers(tmp_path, kind):
    transformers = pytest.importorskip("transformers")
    train_byte_level_bpe(["hello world " * 20], vocab_size=300, path=tmp_path / "tokenizer.json")
    own = {"turn_token": "<|turn|>"}
    config = {
        "chat_template": "{{ turn_token }}{{ messages[0].content }}{{ eos_token }}",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        **(own if kind is None else {kind: own}),
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    talk = [{"role": "user", "content": "hello"}]
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(talk, tokenize=False)
    (part,) = chat_format("default", str(tmp_path))(Conversation(talk))
    assert part.text == expected


@pytest.mark.parametrize("name", PROMPT_FORMATS)
def test_no_blank_is_put_between_a_prompt_and_its_answer(tmp_path, name):
    """The ids are those of the whole text, to which such a tokenizer adds one blank in front."""
    tokenizer, render = AsSentencePiece(), chat_format(name, str(write_template(tmp_path)))
    ids, spans = tokenize_conversation(Conversation(TALK), tokenizer, render)
    parts = render(Conversation(TALK))
    text = "".join(part.text for part in parts)
    assert ids == [*tokenizer.tokenize(text), 0]
    learned = "".join("_" + part.text for part in parts if part.is_learned)
    told = "".join("_" + text[max(0, a - 1) : b - 1] for a, b in spans)
    assert told.rstrip("\0") == learned


@pytest.mark.parametrize("place", [2, 4])
def test_an_answer_of_characters_that_the_tokenizer_drops_is_refused(tmp_path, place):
    """The end of a last one was taken for learned from the answer before it on, the question between included."""

    class DropsSome(AsSentencePiece):
        def tokenize(self, text):
            return super().tokenize(re.sub("[\u200b\n]", "", text))

    render = chat_format("nemotron-h-aligned")
    talk = [*TALK[:place], {"role": "assistant", "content": "\u200b"}]
    path = write_lines(tmp_path / "c.jsonl", {"messages": TALK}, {"messages": talk})
    with pytest.raises(ValueError, match=r"c\.jsonl, line 2: .* no token for an answer"):
        write_conversations(path, tmp_path / "c", DropsSome(), render, max_tokens=1000)
    talk[-1] = {"role": "assistant", "content": "\u200b", "weight": 0}
    ids, spans = tokenize_conversation(Conversation(talk), DropsSome(), render)
    told = ["".join(chr(i - 1) for i in ids[a:b]) for a, b in spans]
    assert told == (["4"] if place == 4 else [])
