"""An epoch has every document, the last of its order too, by counting five of them."""

import numpy as np
import pytest

from megatron_cp.data.packing import Packer, PackingConfig, document_order, packs_of_one_epoch

LENGTHS = np.array([8, 8, 8, 8, 8])


@pytest.mark.parametrize("policy", ["split", "keep"])
@pytest.mark.parametrize("seed", [1, 2])
def test_an_epoch_ends_with_the_last_document_of_its_order(policy, seed):
    config = PackingConfig(seq_length=8, policy=policy, seed=seed)
    packs = packs_of_one_epoch(LENGTHS, config)
    seen = [piece.document for pack in packs for piece in pack.pieces]
    assert seen == document_order(5, seed=seed, epoch=0).tolist()
    assert all((piece.start, piece.stop) == (0, 8) for pack in packs for piece in pack.pieces)


def test_the_next_epoch_begins_behind_it():
    packer = Packer(LENGTHS, PackingConfig(seq_length=8))
    seen = [next(packer).pieces[0].document for _ in range(10)]
    assert seen == [*document_order(5, seed=1234, epoch=0), *document_order(5, seed=1234, epoch=1)]
