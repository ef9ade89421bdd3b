"""Batches, against an oracle that walks token by token."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_cp.data.batch import (
    BatchConfig,
    PlanRequest,
    build_batch,
    join_batches,
    make_batch_plans,
    plan_batch,
    visible_prefix,
)
from megatron_cp.data.pack_cost import extent_of_lengths
from megatron_cp.data.packing import Packer, PackingConfig
from tests.data.corpora import write_corpus

EOD = 7


def oracle(documents, pack, config):
    """(tokens, labels or None, loss, positions, visible pairs), one position at a time."""
    size = config.seq_length
    places = []  # (piece number, document, index in document, index in piece)
    for number, piece in enumerate(pack.pieces):
        places += [
            (number, piece.document, i, i - piece.start) for i in range(piece.start, piece.stop)
        ]
    text = [documents.read(d, 0, int(documents.lengths[d])).tolist() for d in range(len(documents))]
    tokens = [text[d][i] for _, d, i, _ in places]
    labels, loss = [], []
    sees = np.zeros((size, size), dtype=bool)
    for row, (number, d, i, _) in enumerate(places):
        prefix = int(documents.prefix_lengths[d])
        for column, (other, _, j, _) in enumerate(places):
            if config.reset_attention_mask:
                both_ways = prefix == -1 or (i < prefix and j < prefix)
                sees[row, column] = other == number and (j <= i or both_ways)
            else:
                sees[row, column] = column <= row
        label = None
        if config.reset_attention_mask:
            label = text[d][i + 1] if i + 1 < len(text[d]) else None
            leaks = prefix == -1 or i + 1 < prefix
        else:
            leaks = False
        if config.labels_cross_documents or not config.reset_attention_mask:
            label = None
            if row + 1 < len(places):
                label = tokens[row + 1]
            elif pack.following is not None:
                label = text[pack.following[0]][pack.following[1]]
            elif i + 1 < len(text[d]):
                label = text[d][i + 1]
        labels.append(label)
        masked = config.eod_mask_loss and tokens[row] == config.eod_token
        loss.append(0.0 if label is None or leaks or masked else 1.0)
    positions = [p for *_, p in places] if config.reset_position_ids else list(range(len(places)))
    return tokens, labels, loss, positions, sees


@st.composite
def cases(draw):
    lengths = draw(st.lists(st.integers(0, 12), min_size=1, max_size=6).filter(any))
    reset = draw(st.booleans())
    prefixes = [draw(st.integers(-1, n)) if reset else 0 for n in lengths]
    size = draw(st.integers(1, 19))
    flags = st.booleans()
    config = BatchConfig(
        seq_length=size,
        reset_position_ids=draw(flags),
        reset_attention_mask=reset,
        eod_mask_loss=draw(flags),
        labels_cross_documents=draw(flags),
        eod_token=EOD,
    )
    policy = draw(st.sampled_from(["split", "keep"]))
    return lengths, prefixes, draw(flags), config, PackingConfig(seq_length=size, policy=policy)


@given(case=cases())
def test_a_pack_equals_the_walk_over_its_tokens(tmp_path_factory, case):
    lengths, prefixes, append_eod, config, packing = case
    prefix = tmp_path_factory.mktemp("corpus") / "c"
    documents = write_corpus(prefix, lengths, prefixes, eod=EOD if append_eod else None)
    packer = Packer(documents.lengths, packing)
    for _ in range(4):
        pack = next(packer)
        batch = build_batch(documents, [pack], config)
        tokens, labels, loss, positions, sees = oracle(documents, pack, config)
        used = len(tokens)
        assert batch.tokens[:used].tolist() == tokens
        assert batch.position_ids[:used].tolist() == positions
        assert batch.labels[:used].tolist() == [0 if label is None else label for label in labels]
        assert batch.loss_mask[:used].tolist() == loss
        for tail in (batch.tokens, batch.labels, batch.loss_mask):
            assert not tail[used:].any()
        query, key = np.nonzero(sees)  # RoPE rotates by what lies between the two
        assert (batch.rope_positions[query] - batch.rope_positions[key] == query - key).all()
        assert (batch.mask.to_dense() == sees).all()
        assert sees.sum() == batch.mask.area()
        if config.reset_attention_mask:
            lengths = [(piece.length, visible_prefix(documents, piece)) for piece in pack.pieces]
            assert extent_of_lengths(lengths).area == sees.sum()
        assert sum(batch.document_lengths) == used
        assert batch.position_ids.max() < config.seq_length


@given(case=cases())
def test_no_position_with_loss_sees_its_label(tmp_path_factory, case):
    lengths, prefixes, _, config, packing = case
    documents = write_corpus(tmp_path_factory.mktemp("corpus") / "c", lengths, prefixes)
    pack = next(Packer(documents.lengths, packing))
    batch = build_batch(documents, [pack], config)
    sees = batch.mask.to_dense()
    for row in np.flatnonzero(batch.loss_mask):
        seen = batch.tokens[sees[row]]  # every token of these corpora is unique
        repeated = config.seq_length >= sum(lengths)  # then a second epoch is in reach
        assert repeated or batch.labels[row] not in seen


def test_kinds_of_documents_mix_in_a_pack(tmp_path):
    documents = write_corpus(tmp_path / "c", [4, 3, 3], [2, 0, -1])
    packing = PackingConfig(seq_length=12, policy="keep", shuffle=False)
    config = BatchConfig(seq_length=12, reset_attention_mask=True, reset_position_ids=True)
    batch = build_batch(documents, [next(Packer(documents.lengths, packing))], config)
    assert batch.document_kinds == ("prefix", "causal", "bidirectional")
    assert batch.loss_mask.tolist() == [0, 1, 1, 0, 1, 1, 0, 0, 0, 0, 0, 0]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 0, 1]


def test_a_document_cut_in_its_prefix_keeps_what_is_left_of_it(tmp_path):
    documents = write_corpus(tmp_path / "c", [10], [6])
    packer = Packer(documents.lengths, PackingConfig(seq_length=4, policy="keep", shuffle=False))
    config = BatchConfig(seq_length=4, reset_attention_mask=True)
    batches = [build_batch(documents, [next(packer)], config) for _ in range(3)]
    assert [b.document_kinds for b in batches] == [("prefix",), ("prefix",), ("causal",)]
    # Token 5 is the last of the prefix, so position 5 predicts the first token behind it.
    assert [b.loss_mask.tolist() for b in batches] == [[0, 0, 0, 0], [0, 1, 1, 1], [1, 0, 0, 0]]


def test_several_packs_become_one_block_diagonal_batch(tmp_path):
    documents = write_corpus(tmp_path / "c", [5, 9, 3, 6])
    packer = Packer(documents.lengths, PackingConfig(seq_length=6))
    config = BatchConfig(seq_length=6)
    packs = [next(packer) for _ in range(3)]
    single = [build_batch(documents, [pack], config) for pack in packs]
    joined = build_batch(documents, packs, config)
    for name in ("tokens", "labels", "loss_mask", "position_ids"):
        whole = np.concatenate([getattr(b, name) for b in single])
        assert (getattr(joined, name) == whole).all()
    blocks = np.kron(np.eye(3, dtype=bool), np.ones((6, 6), dtype=bool))
    assert (joined.mask.to_dense() == (blocks & np.tri(18, dtype=bool))).all()
    assert join_batches(single).document_lengths == joined.document_lengths


def test_batches_of_megatron_and_ours_agree_on_a_stream(tmp_path):
    """Labels cross documents and packs as in GPTDataset: text[i : i + S + 1] for each pack."""
    lengths = [5, 9, 3, 6]
    documents = write_corpus(tmp_path / "c", lengths)
    stream = np.concatenate([documents.read(d, 0, n) for d, n in enumerate(lengths)])
    packer = Packer(documents.lengths, PackingConfig(seq_length=7, shuffle=False))
    for start in range(0, len(stream) - 7, 7):
        batch = build_batch(documents, [next(packer)], BatchConfig(seq_length=7))
        text = stream[start : start + 8]
        assert batch.tokens.tolist() == text[:-1].tolist()
        assert batch.labels.tolist() == text[1:].tolist()
        assert batch.loss_mask.all()


@pytest.mark.parametrize(("vocab_size", "bad"), [(2005, 2005), (1003, 1003)])
def test_a_token_outside_the_vocabulary_is_named(tmp_path, vocab_size, bad):
    documents = write_corpus(tmp_path / "c", [4, 6])
    packer = Packer(documents.lengths, PackingConfig(seq_length=10, shuffle=False))
    config = BatchConfig(seq_length=10, vocab_size=vocab_size)
    document = bad // 1000 - 1
    message = rf"token id .* of document {document} of .*c must be in \[0, {vocab_size}\)"
    with pytest.raises(ValueError, match=message):
        build_batch(documents, [next(packer)], config)


def test_a_prefix_is_never_silently_ignored(tmp_path):
    documents = write_corpus(tmp_path / "c", [4, 6], [2, 0])
    pack = next(Packer(documents.lengths, PackingConfig(seq_length=10)))
    with pytest.raises(ValueError, match="set --reset-attention-mask"):
        build_batch(documents, [pack], BatchConfig(seq_length=10))


def test_window_and_full_plans_share_their_placement(tmp_path):
    documents = write_corpus(tmp_path / "c", [40, 25, 30])
    pack = next(Packer(documents.lengths, PackingConfig(seq_length=90)))
    batch = build_batch(documents, [pack], BatchConfig(seq_length=90, reset_attention_mask=True))
    request = PlanRequest(cp_size=2, num_full_layers=1, num_window_layers=3, window=(7, 0))
    planned = plan_batch(batch, request)
    assert set(planned.plans) == {"full", "window"}
    full, window = planned.plans["full"], planned.plans["window"]
    assert (full.global_from_local == window.global_from_local).all()
    band = np.tri(90, dtype=bool) & ~np.tri(90, k=-8, dtype=bool)
    assert (window.mask.to_dense() == (batch.mask.to_dense() & band)).all()
    assert (full.mask.to_dense() == batch.mask.to_dense()).all()
    assert make_batch_plans(batch.mask, request) is make_batch_plans(batch.mask, request)


def test_a_model_whose_layers_all_slide_a_window_gets_both_plans(tmp_path):
    documents = write_corpus(tmp_path / "c", [40, 25, 30])
    pack = next(Packer(documents.lengths, PackingConfig(seq_length=90)))
    batch = build_batch(documents, [pack], BatchConfig(seq_length=90))
    request = PlanRequest(cp_size=2, num_full_layers=0, num_window_layers=2, window=(7, 0))
    plans = plan_batch(batch, request).plans
    band = np.tri(90, dtype=bool) & ~np.tri(90, k=-8, dtype=bool)
    assert (plans["window"].mask.to_dense() == band).all()
    assert (plans["full"].mask.to_dense() == np.tri(90, dtype=bool)).all()
    assert (plans["full"].global_from_local == plans["window"].global_from_local).all()


def test_wrong_requests_are_refused():
    with pytest.raises(ValueError, match="must be given together"):
        PlanRequest(window=(7, 0))
    with pytest.raises(ValueError, match="--eod-mask-loss needs"):
        BatchConfig(seq_length=4, eod_mask_loss=True)
