"""Blends: their words, their documents, and whose turn it is."""

import json
import os
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_cp.data.blend import (
    BlendedDocuments,
    BlendedPacker,
    make_packer,
    open_blend,
    open_split_blend,
)
from megatron_cp.data.blend_sources import (
    BlendSource,
    parse_blend,
    read_blend_file,
    read_per_split_file,
)
from megatron_cp.data.document_set import open_documents, split_documents
from megatron_cp.data.indexed_writer import IndexedWriter
from megatron_cp.data.packing import Packer, PackingConfig
from tests.data import megatron_oracle
from tests.data.corpora import write_corpus
from tests.data.test_packing import configs, lengths_of_documents, take

words_of_prefixes = st.text("abc/", min_size=1, max_size=4)
weights = st.lists(st.floats(0, 1e6), min_size=1, max_size=6).filter(lambda w: sum(w) > 0)


class Lengths:
    """As much of a corpus as a packer reads."""

    def __init__(self, lengths):
        self.lengths = np.array(lengths)
        self.num_tokens = sum(lengths)

    def name(self, document):
        return f"document {document}"

    def __len__(self):
        return len(self.lengths)


def blended(corpora, shares):
    return BlendedDocuments(tuple(map(Lengths, corpora)), tuple(shares))


@given(
    weights=weights, prefixes=st.lists(words_of_prefixes, min_size=6, unique_by=os.path.realpath)
)
def test_words_with_weights_are_read_as_megatron_reads_them(weights, prefixes):
    words = [word for pair in zip(map(str, weights), prefixes, strict=False) for word in pair]
    names, numbers = megatron_oracle.blend_of_words(words)
    expected = tuple(BlendSource(w, p) for w, p in zip(numbers, names, strict=True))
    assert parse_blend(words) == expected


@given(prefixes=st.lists(words_of_prefixes, min_size=1, max_size=6, unique_by=os.path.realpath))
def test_words_without_weights_are_read_as_megatron_reads_them(prefixes):
    names, numbers = megatron_oracle.blend_of_words(prefixes)
    assert numbers is None
    assert parse_blend(prefixes) == tuple(BlendSource(None, name) for name in names)


def test_one_word_is_a_prefix_whatever_it_reads():
    assert parse_blend(["2024"]) == (BlendSource(None, "2024"),)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--data-path names no corpus"),
        (["0.5", "a", "b"], "word 3, 'b', stands where a weight is expected"),
        (["a", "0.5", "b", "0.5"], "word 1, 'a', stands where a weight is expected"),
        (["0.5", "0.5", "a"], "word 2, '0.5', is a weight where a prefix is expected"),
        (["0.5", "a", "0.5"], "the weight 0.5 at the end has no prefix"),
        (["0.5", "a", "0.5", "0.2", "c", "d"], "word 4, '0.2', is a weight where a prefix"),
        (["-1", "a", "2", "b"], "weight -1.0 of 'a' must be finite and at least 0"),
        (["nan", "a", "2", "b"], "weight nan of 'a' must be finite"),
        (["1", "a", "inf", "b"], "weight inf of 'b' must be finite"),
        (["0", "a", "0", "b"], "the weights add to 0"),
        (["1e308", "a", "1e308", "b"], "the weights add to inf"),
        (["1", "a", "2", "a"], "names 'a' twice"),
        (["a", "b", "a"], "names 'a' twice"),
        (["1", "a", "2", "./b/../a"], "names './b/../a' twice"),
    ],
)
def test_words_without_meaning_are_refused_in_one_line(words, message):
    with pytest.raises(ValueError, match=message) as refusal:
        parse_blend(words)
    assert "\n" not in str(refusal.value)


def test_files_hold_the_words_of_the_flags(tmp_path):
    (tmp_path / "words").write_text("30 a\n 70\tb\n")
    assert read_blend_file(tmp_path / "words") == ["30", "a", "70", "b"]
    per_split = {"train": "1 a 2 b", "valid": [3, "c"], "test": None}
    (tmp_path / "splits.json").write_text(json.dumps(per_split))
    words = read_per_split_file(tmp_path / "splits.json")
    assert words == {"train": ["1", "a", "2", "b"], "valid": ["3", "c"], "test": None}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "holds list"),
        ('{"train": "a"}', r"holds \['train'\]"),
        ('{"train": "a", "valid": 3, "test": null}', "valid: 3 must be words"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path, text, message):
    (tmp_path / "splits.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_per_split_file(tmp_path / "splits.json")
    with pytest.raises(FileNotFoundError, match=r"--data-args-path .* does not exist"):
        read_blend_file(tmp_path / "missing")


@given(weights=weights.filter(min), count=st.integers(1, 300))
def test_turns_are_those_of_megatron_and_near_the_weights(weights, count):
    shares = [weight / sum(weights) for weight in weights]
    packer = make_packer(
        blended([[1]] * len(weights), shares), PackingConfig(seq_length=1, shuffle=False)
    )
    turns = [pack.pieces[0].document for pack in take(packer, count)]
    assert turns == megatron_oracle.blending_order(shares, count)
    for corpus, share in enumerate(shares):
        assert abs(turns.count(corpus) - share * count) < len(shares) + 1


@given(
    corpora=st.lists(lengths_of_documents, min_size=2, max_size=4), config=configs, data=st.data()
)
def test_a_corpus_gives_the_packs_that_it_gives_alone(corpora, config, data):
    shares = data.draw(st.lists(st.floats(0.1, 1), min_size=len(corpora), max_size=len(corpora)))
    documents = blended(corpora, [share / sum(shares) for share in shares])
    first = documents.first_documents
    packs = take(BlendedPacker(documents, config), 30)
    for corpus, lengths in enumerate(corpora):
        mine = [p for p in packs if first[corpus] <= p.pieces[0].document < first[corpus + 1]]
        alone = take(Packer(np.array(lengths), config), len(mine))
        assert mine == [pack.shifted(int(first[corpus])) for pack in alone]


@given(
    corpora=st.lists(lengths_of_documents, min_size=2, max_size=4),
    config=configs,
    steps=st.integers(0, 25),
)
def test_a_restored_blend_continues_the_same_stream(corpora, config, steps):
    documents = blended(corpora, [1 / len(corpora)] * len(corpora))
    packer = BlendedPacker(documents, config)
    take(packer, steps)
    state = json.loads(json.dumps(packer.state()))
    expected = take(packer, 15)
    other = BlendedPacker(documents, config)
    take(other, 3)
    other.restore(state)
    assert other.state() == state
    assert take(other, 15) == expected


def test_a_state_of_another_blend_is_refused():
    config = PackingConfig(seq_length=4)
    state = BlendedPacker(blended([[3], [4]], [0.5, 0.5]), config).state()
    packer = BlendedPacker(blended([[3], [4], [5]], [0.2, 0.3, 0.5]), config)
    with pytest.raises(ValueError, match="one number from 0 for each of the 3"):
        packer.restore(state)


@pytest.fixture
def prefixes(tmp_path):
    write_corpus(tmp_path / "a", [3, 0, 5, 4], [0, 0, 2, -1])
    write_corpus(tmp_path / "b", [7, 1])
    return [str(tmp_path / "a"), str(tmp_path / "b")]


def test_documents_of_a_blend_are_those_of_its_corpora_in_order(prefixes):
    documents = open_blend(parse_blend(["1", prefixes[0], "3", prefixes[1]]))
    parts = [open_blend(parse_blend([prefix])) for prefix in prefixes]
    assert documents.weights == (0.25, 0.75)
    assert documents.lengths.tolist() == [3, 0, 5, 4, 7, 1]
    assert documents.prefix_lengths.tolist() == [0, 0, 2, -1, 0, 0]
    assert (len(documents), documents.num_tokens) == (6, 20)
    places = [(part, number) for part in parts for number in range(len(part))]
    there = pickle.loads(pickle.dumps(documents))
    for document, (part, number) in enumerate(places):
        length = int(part.lengths[number])
        for subject in (documents, there):
            expected = part.read(number, 0, length)
            np.testing.assert_array_equal(subject.read(document, 0, length), expected)
        assert documents.name(document) == part.name(number)
    assert there.digest() == documents.digest()


def test_the_digest_covers_corpora_order_and_weights(prefixes):
    a, b = prefixes
    blends = [["1", a, "3", b], ["3", a, "1", b], ["1", b, "3", a], ["3", b, "1", a], [a, b], [a]]
    digests = [open_blend(parse_blend(words)).digest() for words in blends]
    assert len(set(digests)) == len(blends)
    again = open_blend(parse_blend(["10", a, "30", b])).digest()  # weights count as shares
    assert again == digests[0]


def test_without_weights_corpora_share_by_their_tokens(prefixes):
    assert open_blend(parse_blend(prefixes)).weights == (12 / 20, 8 / 20)


def test_a_blend_of_one_corpus_is_that_corpus(prefixes):
    alone = open_blend(parse_blend(prefixes[:1]))
    for words in (["5", prefixes[0]], ["5", prefixes[0], "0", prefixes[1]]):
        documents = open_blend(parse_blend(words))
        assert documents.digest() == alone.digest()
        packer = make_packer(documents, PackingConfig(seq_length=4))
        assert set(packer.state()) == {"epoch", "cursor", "carry"}


def test_a_split_applies_to_each_corpus(tmp_path):
    words = []
    for name, count in (("a", 10), ("b", 20)):
        write_corpus(tmp_path / name, range(1, count + 1))
        words += ["0.5", str(tmp_path / name)]
    splits = open_split_blend(parse_blend(words), "70,30")
    for split, part in enumerate(splits[:2]):
        alone = [
            split_documents(open_blend(parse_blend([prefix])), "70,30")[split]
            for prefix in words[1::2]
        ]
        assert part.lengths.tolist() == [n for corpus in alone for n in corpus.lengths]
        assert part.weights == (0.5, 0.5)
    assert splits[2] is None


def test_a_corpus_with_nothing_to_train_on_is_refused(tmp_path):
    for name, lengths in (("a", [1] * 10), ("b", [5])):
        write_corpus(tmp_path / name, lengths)
    sources = parse_blend(["1", str(tmp_path / "a"), "1", str(tmp_path / "b")])
    with pytest.raises(
        ValueError, match=r"b has no token in the training share of --split '40,60'"
    ):
        open_split_blend(sources, "40,60")
    _, valid, _ = open_split_blend(sources, "60,40")
    assert valid.dataset.prefix == str(tmp_path / "a")  # b gives nothing to validation


def test_a_corpus_without_a_token_is_refused_where_it_is_named_for_a_split(prefixes, tmp_path):
    with IndexedWriter(tmp_path / "z", dtype=np.int32) as writer:
        writer.add_document(np.zeros(0, np.int64))
        writer.finish()
    for words in ([".001", prefixes[0], ".999", str(tmp_path / "z")], ["1", str(tmp_path / "z")]):
        with pytest.raises(ValueError, match="z has no token; give it documents or leave it out"):
            open_blend(parse_blend(words, "--train-data-path"))
    shared = open_blend(parse_blend([prefixes[0], str(tmp_path / "z")], "--train-data-path"))
    assert shared.num_tokens == open_documents(prefixes[0]).num_tokens  # no weight: by its tokens
    left_out = ["1", prefixes[0], "0", str(tmp_path / "z")]
    assert open_blend(parse_blend(left_out, "--train-data-path")) is not None
