"""An index of samples that its documents could not have made is refused by the name of its file."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_cp.data import sample_files
from megatron_cp.data.sample_files import (
    SampleArrays,
    SampledDocuments,
    read_sample_files,
    write_sample_files,
)

LENGTHS = np.array([9, 3, 0, 7, 1, 4], dtype=np.int32)
MADE_OF = SampledDocuments(LENGTHS, 1, 6, seq_length=4, num_samples=7)  # 15 tokens, two epochs


def index_of(made_of: SampledDocuments, seed: int = 0) -> SampleArrays:
    """An index, token by token."""
    draw = np.random.default_rng(seed)
    tokens = int(made_of.lengths[made_of.first : made_of.last].sum())
    num_epochs = 1
    while made_of.num_samples and num_epochs * tokens <= made_of.num_samples * made_of.seq_length:
        num_epochs += 1
    documents = np.tile(np.arange(made_of.first, made_of.last, dtype=np.int32), num_epochs)
    draw.shuffle(documents)
    places = [
        (visit, offset)
        for visit, document in enumerate(documents)
        for offset in range(made_of.lengths[document])
    ]
    starts = np.array(places[:: made_of.seq_length], dtype=np.int32)
    order = np.arange(len(starts) - 1, dtype=np.uint32)
    draw.shuffle(order)
    return SampleArrays(documents, starts, order)


@pytest.fixture(params=[3, 1 << 20])
def _at_once(request, monkeypatch):
    monkeypatch.setattr(sample_files, "_AT_ONCE", request.param)


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    first=st.integers(0, 7),
    seq_length=st.integers(1, 12),
    num_samples=st.none() | st.integers(1, 20),
    at_once=st.sampled_from([1, 2, 5, 1000]),
)
def test_an_index_is_read_as_it_was_written(
    tmp_path_factory, lengths, first, seq_length, num_samples, at_once
):
    made_of = SampledDocuments(np.array(lengths), first, len(lengths), seq_length, num_samples)
    if sum(lengths[first:]) < (seq_length + 1 if num_samples is None else 1):
        return
    folder = tmp_path_factory.mktemp("cache")
    index = index_of(made_of)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample_files, "_AT_ONCE", at_once)
        assert read_sample_files(folder, "a", made_of) is None
        write_sample_files(folder, "a", "words", index)
        assert len(list(folder.iterdir())) == 4
        read = read_sample_files(folder, "a", made_of)
    for kept, array in zip(read, index, strict=True):
        np.testing.assert_array_equal(kept, array)
        assert kept.dtype == array.dtype


def changed(array, place, value):
    array = array.copy()
    array[place] = value
    return array


DAMAGE = {
    "a document that is not there": ("documents", lambda a: changed(a, 0, 5000), "holds 5000 at 0"),
    "a document of another split": ("documents", lambda a: changed(a, 3, 0), "holds 0 at 3"),
    "a negative document": ("documents", lambda a: changed(a, 3, -1), "holds -1 at 3"),
    "a document too often": ("documents", lambda a: np.sort(a)[[0, 0, 0, *range(3, 10)]], "document 1 3 times"),
    "fewer documents": ("documents", lambda a: a[:-1], r"\[9\], want integers \[10\]"),
    "documents as fractions": ("documents", lambda a: a.astype(float), "float64"),
    "documents in another order": ("documents", lambda a: np.sort(a)[::-1], "as sample"),
    "a start behind its document": ("starts", lambda a: changed(a, (2, 1), 7), "as sample 2"),
    "a start before its document": ("starts", lambda a: changed(a, (2, 1), -1), "as sample 2"),
    "a start at no document": ("starts", lambda a: changed(a, (6, 0), 10), "as sample 6"),
    "a start at a negative visit": ("starts", lambda a: changed(a, (2, 0), -9), "as sample 2"),
    "starts that fall": ("starts", lambda a: a[::-1], "as sample 0"),
    "fewer starts": ("starts", lambda a: a[:-1], r"want integers \[8, 2\]"),
    "starts in one row": ("starts", lambda a: a.reshape(-1), r"\[16\], want integers \[8, 2\]"),
    "a sample that is not there": ("order", lambda a: changed(a, 4, 7), "holds 7 at 4"),
    "a sample of 64 bits": ("order", lambda a: changed(a.astype(np.uint64), 4, 2**64 - 1), "holds -1 at 4"),
    "a sample twice": ("order", lambda a: changed(a, 4, a[5]), "holds no sample"),
    "fewer samples": ("order", lambda a: a[:-1], r"\[6\], want integers \[7\]"),
    "samples as truths": ("order", lambda a: a.astype(bool), "bool"),
}  # fmt: skip
FILES = {"documents": "document", "starts": "sample", "order": "shuffle"}


@pytest.mark.usefixtures("_at_once")
@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_index_is_refused_in_one_line_that_names_the_file(tmp_path, name: str):
    which, change, says = DAMAGE[name]
    index = index_of(MADE_OF)
    damaged = index._replace(**{which: change(getattr(index, which))})
    write_sample_files(tmp_path, "a", "words", damaged)
    # A wrong order of documents shows in where samples begin.
    file = "sample" if says == "as sample" else FILES[which]
    with pytest.raises(ValueError, match=rf"a-{file}_index\.npy .*{says}.*; delete it$"):
        read_sample_files(tmp_path, "a", MADE_OF)


@pytest.mark.parametrize("kind", ["document", "sample", "shuffle"])
@pytest.mark.parametrize("left", [0, 50, 127, -1])
def test_a_cut_file_is_refused(tmp_path, kind: str, left: int):
    write_sample_files(tmp_path, "a", "words", index_of(MADE_OF))
    path = tmp_path / f"a-{kind}_index.npy"
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(ValueError, match=rf"a-{kind}_index\.npy is not an"):
        read_sample_files(tmp_path, "a", MADE_OF)


def test_an_index_of_other_documents_is_refused(tmp_path):
    write_sample_files(tmp_path, "a", "words", index_of(MADE_OF))
    others = [
        replace(MADE_OF, seq_length=5),
        replace(MADE_OF, num_samples=8),
        replace(MADE_OF, first=0),
        replace(MADE_OF, lengths=LENGTHS[::-1]),
    ]
    for other in others:
        with pytest.raises(ValueError, match="delete it"):
            read_sample_files(tmp_path, "a", other)


@pytest.mark.parametrize("suffix", ["description.txt", "sample_index.npy"])
def test_an_index_that_lacks_a_file_is_none(tmp_path, suffix: str):
    write_sample_files(tmp_path, "a", "words", index_of(MADE_OF))
    (tmp_path / f"a-{suffix}").unlink()
    assert read_sample_files(tmp_path, "a", MADE_OF) is None
