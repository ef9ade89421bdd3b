"""Packs of every token once, in whole batches."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_cp.data.batch import BatchConfig, PlanRequest
from megatron_cp.data.document_set import open_documents
from megatron_cp.data.loader import LoaderConfig, PackedLoader
from megatron_cp.data.one_epoch import OneEpoch, packs_of_all_tokens
from megatron_cp.data.packing import Pack, PackingConfig, Piece
from tests.faults.bad_files import write_corpus


class Lengths:
    """As much of a corpus as a packer asks for."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = np.array(lengths)

    def __len__(self) -> int:
        return len(self.lengths)


lengths_of_documents = st.lists(st.integers(0, 40), min_size=1, max_size=20).filter(any)


@given(lengths_of_documents, st.integers(1, 17), st.sampled_from(["split", "keep"]))
def test_every_token_is_in_one_pack(lengths, size, policy):
    config = PackingConfig(seq_length=size, policy=policy, shuffle=False)
    packs = packs_of_all_tokens(Lengths(lengths), config)
    tokens = [
        (p.document, t) for pack in packs for p in pack.pieces for t in range(p.start, p.stop)
    ]
    assert sorted(tokens) == [(d, t) for d, length in enumerate(lengths) for t in range(length)]
    assert all(0 < pack.num_tokens <= size for pack in packs)
    if policy == "split":
        assert tokens == sorted(tokens)
        assert {pack.num_tokens for pack in packs[:-1]} <= {size}
        firsts = [(pack.pieces[0].document, pack.pieces[0].start) for pack in packs]
        assert [pack.following for pack in packs] == [*firsts[1:], None]


@given(st.integers(1, 9), st.integers(1, 5))
def test_the_last_batch_is_filled_up_with_what_does_not_count(num_packs, batch_size):
    packs = [Pack((Piece(i, 0, 1),)) for i in range(num_packs)]
    epoch = OneEpoch(packs, batch_size, {})
    drawn = list(epoch)
    assert [pack for pack in drawn if pack.counts] == packs
    assert len(drawn) == len(epoch) == -(-num_packs // batch_size) * batch_size
    epoch.restore(json.loads('{"position": 0}'))
    assert list(epoch) == drawn


@pytest.mark.parametrize("dp_size", [1, 2])
@pytest.mark.parametrize("policy", ["split", "keep"])
def test_labels_of_all_ranks_are_those_of_the_documents(tmp_path, policy, dp_size):
    """Each label that a document has, once: the successor of every token but the last."""
    texts = [[10 * d + i for i in range(length)] for d, length in enumerate((9, 3, 1, 7, 5, 8))]
    documents = open_documents(write_corpus(tmp_path / "c", texts))
    packing = PackingConfig(seq_length=8, policy=policy, shuffle=False)
    packs = packs_of_all_tokens(documents, packing)
    assert len(packs) % 4  # so that some fill up
    config = LoaderConfig(
        packing=packing,
        batch=BatchConfig(seq_length=8, reset_position_ids=True, reset_attention_mask=True),
        global_batch_size=4,
        micro_batch_size=2,
    )
    labels = []
    for rank in range(dp_size):
        packer = OneEpoch(packs, 4, {})
        loader = PackedLoader(
            documents, config, PlanRequest(), packer=packer, dp_rank=rank, dp_size=dp_size
        )
        assert loader.num_batches == -(-len(packs) // 4)
        for planned in itertools.islice(loader, loader.num_batches * loader.num_microbatches):
            labels += planned.batch.labels[planned.batch.loss_mask > 0].tolist()
        with pytest.raises(ValueError, match="the samples end"):
            next(loader)
    assert sorted(labels) == sorted(token for text in texts for token in text[1:])
