"""Bytes of text in a token: against texts whose bytes are counted by hand."""

import numpy as np
import pytest

from megatron_cp.data import ByteLevelTokenizer, IndexedWriter, open_documents
from megatron_cp.training.logging.loggable import loggable
from megatron_cp.training.logging.text_size import bytes_per_token

TEXTS = ("plain", "zwölf Größen", "")


@pytest.fixture
def documents(tmp_path):
    tokenizer = ByteLevelTokenizer()
    with IndexedWriter(tmp_path / "corpus", dtype=np.dtype(np.uint16)) as writer:
        for text in TEXTS:
            writer.add_document(np.array([*tokenizer.tokenize(text), tokenizer.eod]))
        writer.finish()
    return open_documents(str(tmp_path / "corpus"))


def test_ends_of_documents_are_tokens_without_bytes(documents):
    size = sum(len(text.encode()) for text in TEXTS)
    assert bytes_per_token(documents, ByteLevelTokenizer()) == pytest.approx(size / (size + 3))


def test_without_a_tokenizer_nothing_is_known(documents):
    assert bytes_per_token(documents, None) is None


def test_files_of_another_vocabulary_say_nothing(documents, monkeypatch):
    tokenizer = ByteLevelTokenizer()
    monkeypatch.setattr(type(tokenizer), "vocab_size", property(lambda self: 100))
    assert bytes_per_token(documents, tokenizer) is None


def test_the_figure_survives_the_removal_of_secrets():
    assert loggable({"data": {"valid": {"bytes_over_tokens": 2.5}}})["data"]["valid"] == {
        "bytes_over_tokens": 2.5
    }
