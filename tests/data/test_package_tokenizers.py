"""Tokenizers of sentencepiece and tiktoken: Megatron-Core's ids."""

import base64
import io
import json
import sys

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from megatron_cp.data.package_tokenizers import (
    SENTENCE_PIECE_TYPES,
    TIKTOKEN_PATTERNS,
    SentencePieceTokenizer,
    TikTokenizer,
)
from megatron_cp.data.tokenizer import TokenizerFiles, build_tokenizer
from tests.data import megatron_oracle

SENTENCES = ["attention is all you need", "def attention(q, k, v): return q", "Größe 尺寸"] * 20
TEXTS = [
    "",
    "attention",
    "  two  blanks \n\n tabs\t",
    "def Attention(Q1): return 12345",
    "Größe 尺寸 📐",
    "<s> a special</s> name <pad>",
]


@pytest.fixture(scope="module", params=[-1, 3])
def model(request, tmp_path_factory):
    content = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_writer=content,
        vocab_size=60,
        pad_id=request.param,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    path = tmp_path_factory.mktemp("sp") / "tokenizer.model"
    path.write_bytes(content.getvalue())
    return path


def write_ranks(path, extra):
    tokens = [bytes([i]) for i in range(256)] + [text.encode() for text in extra]
    entries = [
        {
            "rank": rank,
            "token_bytes": base64.b64encode(token).decode(),
            "token_str": token.decode(errors="replace"),
        }
        for rank, token in enumerate(tokens)
    ]
    path.write_text(json.dumps(entries))
    return path


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    words = ["at", "te", "atte", "io", "ion", "de", "ef", " a", " at", "  ", "12", "Gr"]
    return write_ranks(tmp_path_factory.mktemp("tik") / "vocab.json", words)


def test_sentencepiece_ids_are_megatron_s(model):
    eod, pad, vocab_size, ids = megatron_oracle.token_ids("sentencepiece", model, TEXTS)
    for tokenizer_type in SENTENCE_PIECE_TYPES:
        tokenizer = build_tokenizer(tokenizer_type, TokenizerFiles(tokenizer_model=str(model)))
        assert [tokenizer.tokenize(text) for text in TEXTS] == ids
        assert (tokenizer.eod, tokenizer.vocab_size) == (eod, vocab_size)
        assert tokenizer.pad == (pad if pad >= 0 else eod)
        assert tokenizer.detokenize(tokenizer.tokenize("attention is")) == "attention is"


def test_a_token_is_found_by_its_name(model, ranks):
    package = sentencepiece.SentencePieceProcessor(model_file=str(model))
    pieces = SentencePieceTokenizer(model)
    for number in range(package.get_piece_size()):
        assert pieces.token_id(package.id_to_piece(number)) == number
    words = TikTokenizer(ranks, vocab_size=276, num_special_tokens=8)
    assert [words.token_id(name) for name in ("</s>", "a", "ion")] == [2, 8 + ord("a"), 8 + 256 + 4]
    for tokenizer in (pieces, words):
        assert tokenizer.token_id("<fim_prefix>") is None


@pytest.mark.parametrize("pattern", ["v1", "v2"])
@pytest.mark.parametrize(
    "special", [None, ["<pad>", "<unk>", "<s>", "</s>", "<mask>", "<cls>", "<sep>", "<x>"]]
)
def test_tiktoken_ids_are_megatron_s(ranks, pattern, special):
    settings = {"pattern": pattern, "vocab_size": 280, "num_special_tokens": 20}
    tokenizer = TikTokenizer(ranks, special_tokens=special, **settings)
    eod, pad, vocab_size, ids = megatron_oracle.token_ids(
        "tiktoken", ranks, TEXTS, special_tokens=special, **settings
    )
    assert [tokenizer.tokenize(text) for text in TEXTS] == ids
    assert (tokenizer.eod, tokenizer.pad, tokenizer.vocab_size) == (eod, pad, vocab_size)


def test_patterns_are_megatron_s():
    assert megatron_oracle.tiktoken_patterns() == TIKTOKEN_PATTERNS


@given(st.text())
def test_tiktoken_round_trips_every_text(ranks, text):
    tokenizer = TikTokenizer(ranks, vocab_size=280, num_special_tokens=20)
    ids = tokenizer.tokenize(text)
    assert tokenizer.detokenize(ids) == text
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


def test_identities_tell_vocabularies_apart(ranks, model):
    settings = {"vocab_size": 280, "num_special_tokens": 20}
    tokenizers = [
        TikTokenizer(ranks, **settings),
        TikTokenizer(ranks, pattern="v1", **settings),
        TikTokenizer(ranks, vocab_size=280, num_special_tokens=24),
        SentencePieceTokenizer(model),
    ]
    assert len({json.dumps(t.unique_identifiers) for t in tokenizers}) == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pattern": "v3"}, "--tiktoken-pattern v3 must be one of v1, v2"),
        ({"special_tokens": ["<s>"]}, "must hold each of .*; add <unk>"),
        ({"num_special_tokens": 3}, "--tiktoken-num-special-tokens 3 must be at least the 7"),
        ({"num_special_tokens": 300}, "below --vocab-size 280"),
        ({"vocab_size": 500}, "holds 268 tokens, --vocab-size asks for 480 .* --vocab-size 288"),
    ],
)
def test_settings_of_tiktoken_without_meaning_are_refused(ranks, change, message):
    settings = {"vocab_size": 280, "num_special_tokens": 20, **change}
    with pytest.raises(ValueError, match=message):
        TikTokenizer(ranks, **settings)


@pytest.mark.parametrize("text", ["{", "{}", '[{"rank": 0}]', "[1]", '["a"]'])
def test_files_of_another_kind_are_refused(tmp_path, text):
    (tmp_path / "f").write_text(text)
    with pytest.raises(ValueError, match="is not a tiktoken vocabulary"):
        TikTokenizer(tmp_path / "f", vocab_size=30, num_special_tokens=20)
    with pytest.raises(ValueError, match="is not a sentencepiece model"):
        SentencePieceTokenizer(tmp_path / "f")
    for kind in ("TikTokenizer", "Llama2Tokenizer"):
        with pytest.raises(FileNotFoundError, match="does not exist"):
            build_tokenizer(kind, TokenizerFiles(tokenizer_model="/nowhere"))
        with pytest.raises(ValueError, match="pass --tokenizer-model"):
            build_tokenizer(kind)


def test_a_vocabulary_out_of_order_is_refused(tmp_path):
    path = write_ranks(tmp_path / "v", ["ab", "ab"])
    with pytest.raises(ValueError, match="each token once in order of its rank"):
        TikTokenizer(path, vocab_size=278, num_special_tokens=20)


@pytest.mark.parametrize("package", ["sentencepiece", "tiktoken"])
def test_a_missing_package_is_named_in_one_line(tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "f").write_text("[]")
    kind = "TikTokenizer" if package == "tiktoken" else "Llama2Tokenizer"
    with pytest.raises(ValueError, match=f"needs the package {package}.*; pip install {package}"):
        build_tokenizer(kind, TokenizerFiles(tokenizer_model=str(tmp_path / "f")))
