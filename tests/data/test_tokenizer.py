"""Tokenizers: exact for every text, local only, clear when something is missing."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_cp.data.tokenizer import (
    ByteLevelTokenizer,
    GPT2BPETokenizer,
    HuggingFaceTokenizer,
    TokenizerFiles,
    build_tokenizer,
    train_byte_level_bpe,
)


def model(path):
    return TokenizerFiles(tokenizer_model=str(path))


TEXTS = ["def attention(q, k, v):\n    return softmax(q @ k.T) @ v\n" * 3, "Größe 尺寸 📐\x00"] * 4


@pytest.fixture(scope="module")
def bpe_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    train_byte_level_bpe(TEXTS, vocab_size=300, path=path)
    return path


@given(st.text())
def test_bytes_round_trip(text):
    tokenizer = ByteLevelTokenizer()
    ids = tokenizer.tokenize(text)
    assert ids == list(text.encode())
    assert tokenizer.detokenize([*ids, tokenizer.eod, tokenizer.pad]) == text
    assert max([*ids, tokenizer.eod, tokenizer.pad]) < tokenizer.vocab_size


# The name of a special token in a text is that token in a tokenizers file.
PLAIN_TEXT = st.text().filter(lambda text: "<|" not in text)


@given(text=PLAIN_TEXT)
def test_a_trained_byte_level_bpe_round_trips_every_text(bpe_file, text):
    tokenizer = HuggingFaceTokenizer(bpe_file)
    ids = tokenizer.tokenize(text)
    assert tokenizer.detokenize(ids) == text
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    assert tokenizer.eod not in ids


def test_a_tokenizer_may_be_named_by_its_directory(bpe_file):
    by_file = build_tokenizer("HuggingFaceTokenizer", model(bpe_file))
    by_folder = build_tokenizer("HuggingFaceTokenizer", model(bpe_file.parent))
    assert by_file.unique_identifiers == by_folder.unique_identifiers
    assert by_file.tokenize("attention") == by_folder.tokenize("attention")
    assert (by_file.eod, by_file.pad) == (0, 1)
    assert len(by_file.tokenize("attention")) < len("attention")


@pytest.mark.parametrize("eos", ["<|pad|>", {"content": "<|pad|>"}])
def test_the_end_token_of_the_configuration_wins(bpe_file, tmp_path, eos):
    (tmp_path / "tokenizer.json").write_bytes(bpe_file.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    assert HuggingFaceTokenizer(tmp_path).eod == 1


@pytest.mark.parametrize("config", [None, {}, {"eos_token": None}])
def test_the_end_token_may_stand_in_the_map_of_special_tokens(bpe_file, tmp_path, config):
    (tmp_path / "tokenizer.json").write_bytes(bpe_file.read_bytes())
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|pad|>"}))
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert HuggingFaceTokenizer(tmp_path).eod == 1


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize(
    ("config", "message"),
    [
        (["<|pad|>"], "is no JSON object"),
        (None, "is no JSON object"),
        ({"eos_token": ["<|pad|>"]}, r"has eos_token=\['<\|pad\|>'\], it must be a string"),
        ({"eos_token": 1}, "has eos_token=1, it must be a string"),
        ({"eos_token": {"content": 1}}, "has eos_token={'content': 1}, it must be a string"),
        ({"pad_token": True}, "has pad_token=True, it must be a string"),
        ({"eos_token": "<\ud800>"}, "holds a lone surrogate"),
        ({"chat_template": "\udfff"}, "holds a lone surrogate"),
    ],
)
def test_a_configuration_of_other_types_is_refused(bpe_file, tmp_path, name, config, message):
    """Else `<|endoftext|>` would end documents without a word."""
    (tmp_path / "tokenizer.json").write_bytes(bpe_file.read_bytes())
    (tmp_path / name).write_text(json.dumps(config))
    with pytest.raises(ValueError, match=rf"{name} {message}.*repair"):
        HuggingFaceTokenizer(tmp_path)


def test_tokens_that_only_the_configuration_adds_are_refused(bpe_file, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(bpe_file.read_bytes())
    added = {"0": {"content": "<|endoftext|>"}, "900": {"content": "<|turn|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    with pytest.raises(
        ValueError, match=r"lacks tokens that tokenizer_config.json or .* adds: <\|turn\|>;"
    ):
        HuggingFaceTokenizer(tmp_path)
    added.pop("900")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    assert HuggingFaceTokenizer(tmp_path).eod == 0


SPECIAL_ELSEWHERE = {
    "as end": {"eos_token": "<|turn|>"},
    "as padding, with flags": {
        "pad_token": {"__type": "AddedToken", "content": "<|turn|>", "lstrip": True}
    },
    "by a list": {"additional_special_tokens": ["<|turn|>"]},
    "by a list of transformers 5": {"extra_special_tokens": ["<|turn|>", "<|endoftext|>"]},
    "by name": {"extra_special_tokens": {"turn_token": "<|turn|>"}},
    "by a name of the model": {"turn_token": "<|turn|>"},
    "by number": {"added_tokens_decoder": {"300": {"content": "<|turn|>", "special": True}}},
    "as a word": {"added_tokens_decoder": {"300": {"content": "<|turn|>", "special": False}}},
    "with other flags": {
        "added_tokens_decoder": {
            "0": {"content": "<|endoftext|>", "special": True, "normalized": False, "lstrip": True}
        }
    },
}


@pytest.mark.parametrize(
    ("kind", "place"),
    [(kind, "tokenizer_config.json") for kind in SPECIAL_ELSEWHERE]
    + [
        ("as end", "special_tokens_map.json"),
        ("by a list of transformers 5", "special_tokens_map.json"),
    ],
)
def test_special_tokens_of_the_configuration_are_cut_out_of_texts_as_by_transformers(
    bpe_file, tmp_path, kind, place
):
    transformers = pytest.importorskip("transformers")
    content = json.loads(bpe_file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["<|turn|>"] = max(vocabulary.values()) + 1
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    plain = HuggingFaceTokenizer(tmp_path)
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if place == "tokenizer_config.json":
        config |= SPECIAL_ELSEWHERE[kind]
    else:
        (tmp_path / place).write_text(json.dumps(SPECIAL_ELSEWHERE[kind]))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = HuggingFaceTokenizer(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in ("def f(q):<|turn|>\nreturn <|turn|> q", "q <|endoftext|> v", "softmax"):
        assert ours.tokenize(text) == theirs(text, add_special_tokens=False)["input_ids"], text
    assert ours.unique_identifiers != plain.unique_identifiers
    assert ours.vocab_size == plain.vocab_size == len(theirs)


@pytest.mark.parametrize(
    "named", [{"eos_token": "<|turn|>"}, {"extra_special_tokens": ["<|turn|>"]}]
)
def test_a_special_token_without_an_id_is_refused(bpe_file, tmp_path, named):
    (tmp_path / "tokenizer.json").write_bytes(bpe_file.read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    with pytest.raises(ValueError, match=r"adds: <\|turn\|>; .* save the tokenizer anew"):
        HuggingFaceTokenizer(tmp_path)


def test_a_vocabulary_without_end_token_is_refused(bpe_file, tmp_path):
    content = bpe_file.read_text().replace("<|endoftext|>", "<|nothing|>")
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match="no end-of-document token"):
        HuggingFaceTokenizer(tmp_path)


def test_names_on_a_hub_and_broken_files_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="not downloaded"):
        build_tokenizer("HuggingFaceTokenizer", model("openai-community/gpt2"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a tokenizers file"):
        HuggingFaceTokenizer(tmp_path)
    with pytest.raises(ValueError, match="--tokenizer-model"):
        build_tokenizer("HuggingFaceTokenizer")
    with pytest.raises(ValueError, match="tokenizer_type='BertWordPieceCase' must be one"):
        build_tokenizer("BertWordPieceCase")


def test_ids_of_another_tokenizer_are_refused():
    with pytest.raises(ValueError, match="token id 300"):
        ByteLevelTokenizer().detokenize([65, 300])


@pytest.fixture(scope="module")
def gpt2_files(bpe_file, tmp_path_factory):
    """The vocabulary and merges of a trained BPE, in the two files that GPT-2 came in."""
    folder = tmp_path_factory.mktemp("gpt2")
    model = json.loads(bpe_file.read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *pairs]) + "\n")
    return str(folder / "vocab.json"), str(folder / "merges.txt")


@given(text=PLAIN_TEXT)
def test_gpt_2s_two_files_give_the_ids_of_the_same_tokenizer_in_one_file(
    bpe_file, gpt2_files, text
):
    two = build_tokenizer(
        "GPT2BPETokenizer", TokenizerFiles(vocab_file=gpt2_files[0], merge_file=gpt2_files[1])
    )
    one = HuggingFaceTokenizer(bpe_file)
    assert two.tokenize(text) == one.tokenize(text)
    assert two.detokenize(two.tokenize(text)) == text
    assert (two.eod, two.vocab_size) == (one.eod, one.vocab_size)


def test_the_end_of_a_document_is_text_inside_of_a_text_of_gpt_2s_two_files(gpt2_files):
    """Megatron-LM's --legacy-tokenizer reads it so, transformers and Megatron-Core take it for the token."""
    two, text = GPT2BPETokenizer(*gpt2_files), "def q:<|endoftext|>\nreturn"
    assert two.eod not in two.tokenize(text)
    assert two.detokenize(two.tokenize(text)) == text


def test_a_token_is_found_by_its_name(bpe_file, gpt2_files):
    one = HuggingFaceTokenizer(bpe_file)
    two = GPT2BPETokenizer(*gpt2_files)
    for name, number in json.loads(bpe_file.read_text())["model"]["vocab"].items():
        assert one.token_id(name) == two.token_id(name) == number
    for tokenizer in (one, two, ByteLevelTokenizer()):
        assert tokenizer.token_id("<fim_prefix>") is None
    assert ByteLevelTokenizer().token_id("a") is None


def test_a_vocabulary_too_small_for_its_special_tokens_is_refused(tmp_path):
    with pytest.raises(ValueError, match="vocab_size=258 must be at least 259"):
        train_byte_level_bpe(
            TEXTS, vocab_size=258, path=tmp_path / "t.json", special_tokens=["<fim_prefix>"]
        )


def test_files_that_are_not_gpt_2s_are_refused(gpt2_files, tmp_path):
    vocab, merges = gpt2_files
    with pytest.raises(ValueError, match="--vocab-file PATH and --merge-file PATH"):
        build_tokenizer("GPT2BPETokenizer", TokenizerFiles(vocab_file=vocab))
    with pytest.raises(FileNotFoundError, match=r"--merge-file .* does not exist"):
        build_tokenizer("GPT2BPETokenizer", TokenizerFiles(vocab_file=vocab, merge_file="/nowhere"))
    with pytest.raises(ValueError, match=r"are not GPT-2's vocab\.json"):
        build_tokenizer("GPT2BPETokenizer", TokenizerFiles(vocab_file=merges, merge_file=merges))
    (tmp_path / "v.json").write_text('{"a": 0}')
    (tmp_path / "m.txt").write_text("#version: 0.2\n")
    with pytest.raises(ValueError, match=r"has no <.endoftext.>"):
        GPT2BPETokenizer(tmp_path / "v.json", tmp_path / "m.txt")
    (tmp_path / "v.json").write_text('{"<|endoftext|>": 0, "a": 4000000000}')
    with pytest.raises(ValueError, match=r"v\.json: token id 4000000000 with 2 tokens"):
        GPT2BPETokenizer(tmp_path / "v.json", tmp_path / "m.txt")


@pytest.mark.parametrize(
    "kept",
    [
        {"truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}},
        {
            "padding": {
                "strategy": {"Fixed": 640}, "direction": "Right", "pad_to_multiple_of": None,
                "pad_id": 0, "pad_type_id": 0, "pad_token": "!",
            }
        },
    ],
    ids=["truncation", "padding"],
)  # fmt: skip
def test_what_a_file_says_of_lengths_neither_cuts_nor_fills_a_document(bpe_file, tmp_path, kept):
    text = "some text that is longer than four tokens " * 3
    expected = HuggingFaceTokenizer(bpe_file).tokenize(text)
    assert 4 < len(expected) < 640
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(json.loads(Path(bpe_file).read_text()) | kept))
    assert list(HuggingFaceTokenizer(file).tokenize(text)) == list(expected)
