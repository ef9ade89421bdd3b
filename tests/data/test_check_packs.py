"""A pack that would go through its documents again and again is refused before it is drawn."""

import numpy as np
import pytest

from megatron_cp.data.blend import BlendedDocuments, make_packer
from megatron_cp.data.packing import PackingConfig
from tests.data.corpora import write_corpus


def times_of(documents, size: int, limit: int) -> int:
    """How often one pack of this size takes the first document; counted up to the limit."""
    taken = times = 0
    while taken < size and times <= limit:
        taken, times = taken + int(documents.lengths.sum()), times + 1
    return times


@pytest.mark.parametrize("size", [1, 12, 11_999, 12_000])
def test_a_pack_of_a_thousand_epochs_is_drawn(tmp_path, size: int):
    documents = write_corpus(tmp_path / "a", [3, 0, 9])
    assert times_of(documents, size, 2000) <= 1000
    pack = next(make_packer(documents, PackingConfig(seq_length=size)))
    assert sum(stop - start for _, start, stop in pack.pieces) == size


@pytest.mark.parametrize("size", [12_001, 2**31, 999_999_999_999])
def test_a_longer_one_is_refused_with_what_is_allowed(tmp_path, size: int):
    documents = write_corpus(tmp_path / "a", [3, 0, 9])
    assert times_of(documents, size, 2000) > 1000
    with pytest.raises(
        ValueError, match=r"takes 12 tokens .* of 3 documents .* --seq-length 12000 at most"
    ):
        make_packer(documents, PackingConfig(seq_length=size))


def test_a_blend_is_refused_for_its_smallest_corpus(tmp_path):
    large, small = write_corpus(tmp_path / "a", [900] * 9), write_corpus(tmp_path / "b", [3])
    documents = BlendedDocuments((large, small), (0.99, 0.01))
    assert next(make_packer(documents, PackingConfig(seq_length=3000))).num_tokens == 3000
    with pytest.raises(
        ValueError, match=r"takes 3 tokens .* of 1 documents from document 0 of .*b on"
    ):
        make_packer(documents, PackingConfig(seq_length=3001))


def test_documents_kept_whole_never_fill_a_pack_by_repeating(tmp_path):
    documents = write_corpus(tmp_path / "a", [3, 0, 9])
    pack = next(make_packer(documents, PackingConfig(seq_length=2**31, policy="keep")))
    assert sorted(np.array(pack.pieces)[:, 0].tolist()) == [0, 2]
