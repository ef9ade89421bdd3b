"""Ranges of a corpus, and the kinds of its documents."""

import functools
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_cp.data.document_set import (
    open_documents,
    prefix_lengths_path,
    split_documents,
    write_prefix_lengths,
)
from tests.data import megatron_oracle
from tests.data.corpora import write_corpus


@functools.lru_cache
def corpus_of(folder, count):
    return write_corpus(folder / f"c{count}", [1] * count)


@given(
    count=st.integers(1, 40),
    weights=st.lists(st.integers(0, 100), min_size=1, max_size=3).filter(any),
)
def test_a_split_draws_the_documents_that_megatron_draws(tmp_path_factory, count, weights):
    documents = corpus_of(tmp_path_factory.getbasetemp(), count)
    parts = split_documents(documents, ",".join(map(str, weights)))
    bookends = megatron_oracle.split_matrix(",".join(map(str, weights)))
    for part, bookend in zip(parts, bookends, strict=True):
        ends = (0, 0) if bookend is None else tuple(round(b * count) for b in bookend)
        expected = [[1000 * (d + 1)] for d in range(*ends)]
        assert [part.read(d, 0, 1).tolist() for d in range(len(part))] == expected
    assert sum(len(part) for part in parts) == count


@pytest.mark.parametrize("split", ["", "a,b", "1,2,3,4", "-1,2", "0,0", "nan,1", "inf", [], [0]])
def test_a_split_without_meaning_is_refused(tmp_path, split):
    documents = write_corpus(tmp_path / "c", [1, 2])
    with pytest.raises(ValueError, match="--split"):
        split_documents(documents, split)


def test_parts_of_a_corpus_have_different_digests(tmp_path):
    documents = write_corpus(tmp_path / "c", [1, 2, 3, 4])
    train, valid, _ = split_documents(documents, "50,50")
    digests = {d.digest() for d in (documents, train, valid)}
    write_prefix_lengths(tmp_path / "c", np.array([0, 1, 0, 0]))
    digests.add(open_documents(tmp_path / "c").digest())
    assert len(digests) == 4


def test_documents_travel_to_another_process_and_notice_a_replaced_file(tmp_path):
    documents = write_corpus(tmp_path / "c", [3, 2], [0, 2])
    parcel = pickle.dumps(documents)
    there = pickle.loads(parcel)
    assert there.read(1, 0, 2).tolist() == [2000, 2001]
    assert there.prefix_lengths.tolist() == [0, 2]
    prefix_lengths_path(tmp_path / "c").unlink()
    write_corpus(tmp_path / "c", [3, 3])
    with pytest.raises(ValueError, match="was replaced while the run was reading it"):
        pickle.loads(parcel)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([0, 0], "shape"),
        ([0.0, 0, 0], "dtype float64"),
        ([0, -2, 0], r"\[1\]=-2 must be -1, or in \[0, 2\]"),
        ([0, 0, 5], r"\[2\]=5 must be"),
    ],
)
def test_kinds_that_cannot_be_are_refused_when_written_and_when_read(tmp_path, lengths, message):
    write_corpus(tmp_path / "c", [3, 2, 4])
    with pytest.raises(ValueError, match=message):
        write_prefix_lengths(tmp_path / "c", np.array(lengths))
    np.save(prefix_lengths_path(tmp_path / "c"), np.array(lengths))
    with pytest.raises(ValueError, match=message):
        open_documents(tmp_path / "c")


def test_a_file_of_kinds_that_is_no_array_is_refused(tmp_path):
    write_corpus(tmp_path / "c", [3])
    for content in (b"", b"abc", pickle.dumps([0])):
        prefix_lengths_path(tmp_path / "c").write_bytes(content)
        with pytest.raises(ValueError, match=r"is not an \.npy file"):
            open_documents(tmp_path / "c")
