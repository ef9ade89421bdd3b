"""A corpus and the tokenizer of a run that reads it: the same, other files of the same numbers, another one."""

import json

import pytest

from megatron_cp.data.indexed import IndexedDataset
from megatron_cp.data.manifest import manifest_path, note_of_another_tokenizer
from megatron_cp.data.tokenizer import ByteLevelTokenizer
from tools import preprocess_data


@pytest.fixture
def corpus(tmp_path) -> IndexedDataset:
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "to be or not"}) + "\n")
    flags = ["--tokenizer-type", "ByteLevel", "--append-eod"]
    files = ["--input", str(tmp_path / "text.jsonl"), "--output-prefix", str(tmp_path / "own")]
    assert preprocess_data.main([*files, *flags]) == 0
    return IndexedDataset(tmp_path / "own_text_document")


def note(corpus: IndexedDataset, **changes: object) -> str | None:
    facts = json.loads(json.dumps(corpus.facts))
    for name, value in changes.items():
        (facts if name == "eod" else facts["tokenizer"])[name] = value
    return note_of_another_tokenizer(corpus.prefix, facts, ByteLevelTokenizer())


def test_the_tokenizer_that_made_a_corpus_reads_it_without_a_word(corpus):
    assert note(corpus) is None


def test_other_files_with_equal_numbers_are_told(corpus):
    told = note(corpus, sha256="of other files")
    assert told is not None
    assert "made by other tokenizer files" in told


def test_a_corpus_of_a_tokenizer_that_the_runs_extends_is_told(corpus):
    assert "made by other tokenizer files" in note(corpus, vocab_size=200)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [("vocab_size", 50257, "vocab_size 50257, more than"), ("eod", 0, "end of document 0, not")],
)
def test_another_vocabulary_is_refused_with_what_differs(corpus, name, value, said):
    with pytest.raises(ValueError, match=f"made by another tokenizer .*: {said}"):
        note(corpus, sha256="of other files", **{name: value})


def rewritten(corpus: IndexedDataset, tokenizer: dict[str, object]) -> IndexedDataset:
    path = manifest_path(corpus.prefix)
    path.write_text(json.dumps({**corpus.facts, "tokenizer": tokenizer}))
    return IndexedDataset(corpus.prefix)


def test_a_size_that_an_older_manifest_has_as_text_is_a_number(corpus):
    made = corpus.facts["tokenizer"]
    assert note(rewritten(corpus, {**made, "vocab_size": str(made["vocab_size"])})) is None


def test_a_manifest_with_half_a_tokenizer_is_none(corpus):
    with pytest.raises(ValueError, match="is not a corpus manifest"):
        rewritten(corpus, {"class": "ByteLevel"})


def test_a_corpus_that_says_nothing_is_read_by_any(corpus):
    manifest_path(corpus.prefix).unlink()
    again = IndexedDataset(corpus.prefix)
    assert not again.facts and again.recorded_sha256 is None
    assert note_of_another_tokenizer(again.prefix, again.facts, ByteLevelTokenizer()) is None
