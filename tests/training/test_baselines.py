"""Figures of baselines in closed form: against the plans that those schemes really make."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_cp import CPConfig, make_plan
from megatron_cp import mask as masks
from megatron_cp.mask.linked import document_bounds
from megatron_cp.plan import PLANNERS
from megatron_cp.plan.stats import sent_bytes
from megatron_cp.training.logging.baselines import (
    PASSES,
    pack_figures,
    per_document_imbalance,
    ring_bytes,
)
from megatron_cp.training.logging.split_documents import pairs_of_split_documents
from tests.strategies import attention_masks

LENGTHS = (137, 2, 301, 1, 64, 519)
SHAPES = [{"num_heads": 4, "num_kv_heads": 4, "head_dim": 8}, {"num_heads": 8, "num_kv_heads": 2}]


def milliseconds(plan):
    return sum(plan.stats(name)["makespan_ms"] for name in PASSES)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("cp_size", [1, 2, 3, 8])
@pytest.mark.parametrize("element_bytes", [2, 4])
def test_figures_of_the_rings_are_those_of_their_plans(shape, cp_size, element_bytes):
    config = CPConfig(**shape, element_bytes=element_bytes)
    mask = masks.documents(list(LENGTHS))
    figures = pack_figures(make_plan(mask, cp_size, config))
    zigzag, per_document = (
        make_plan(mask, cp_size, replace(config, planner=name))
        for name in ("zigzag", "per_document_zigzag")
    )
    assert figures.zigzag_imbalance == pytest.approx(zigzag.stats("forward")["imbalance"])
    sent = sum(sent_bytes(zigzag, name).sum() for name in PASSES)
    assert figures.ring_bytes == pytest.approx(sent)
    assert figures.bound_ms <= figures.predicted_ms * (1 + 1e-9)
    if cp_size > 1:  # prices from below
        assert figures.zigzag_ms <= milliseconds(zigzag) * (1 + 1e-9)
        assert figures.per_document_ms <= milliseconds(per_document) * (1 + 1e-9)


def pairs_by_token(dense, lengths, cp_size):
    """Pairs of each rank, token by token: documents filled up, cut in 2P pieces, rank r has r and 2P - 1 - r."""
    pairs, start = np.zeros(cp_size), 0
    for length in lengths:
        size = -(-length // (2 * cp_size))
        for token in range(length):
            piece = token // size
            pairs[min(piece, 2 * cp_size - 1 - piece)] += dense[start + token].sum()
        start += length
    return pairs


@pytest.mark.parametrize("cp_size", [2, 3, 4, 8])
@pytest.mark.parametrize("lengths", [LENGTHS, (1024,), (5, 5, 5, 5), (7, 300, 90)])
@pytest.mark.parametrize("within", ["causal", "full"])
def test_balance_of_split_documents_equals_a_count_token_by_token(cp_size, lengths, within):
    mask = masks.documents(list(lengths), within=within)
    pairs = pairs_by_token(mask.to_dense(), lengths, cp_size)
    config = CPConfig(**SHAPES[0], planner="contiguous")
    plan = make_plan(mask, cp_size, config)
    assert per_document_imbalance(plan) == pytest.approx(pairs.max() / pairs.mean())


@pytest.mark.parametrize("cp_size", [2, 4])
def test_balance_of_split_documents_is_that_of_the_plan_where_nothing_is_to_fill_up(cp_size):
    config = CPConfig(**SHAPES[0], planner="per_document_zigzag")
    plan = make_plan(masks.documents([16, 64, 8, 512]), cp_size, config)
    balance = plan.stats("forward")["imbalance"]
    assert per_document_imbalance(plan) == pytest.approx(balance)


@given(attention_masks(square=True), st.integers(1, 5))
def test_pairs_of_split_documents_equal_a_count_token_by_token(drawn, cp_size):
    """Any mask, also with several slices to a row and tokens that see nothing."""
    mask, dense = drawn
    lengths = np.diff(document_bounds(mask))
    pairs = pairs_of_split_documents(mask, cp_size)
    assert pairs.tolist() == pairs_by_token(dense, lengths, cp_size).tolist()


def test_balance_of_many_documents_on_many_ranks_is_counted_and_in_closed_form():
    """4,096 documents of 256 tokens on 128 ranks, a million pieces of one token: every rank has the same pairs."""
    mask = masks.documents([256] * 4096)
    pairs = pairs_of_split_documents(mask, 128)
    assert pairs.tolist() == [4096 * 257] * 128


def test_figures_of_a_pack_hold_the_bytes_of_both_passes():
    plan = make_plan(masks.documents(list(LENGTHS)), 4, CPConfig(**SHAPES[1]))
    forward, backward = (sent_bytes(plan, name).sum() for name in PASSES)
    assert pack_figures(plan).sent_bytes == forward + backward
    assert forward > 0 and backward > 0


@pytest.mark.parametrize("planner", sorted(PLANNERS))
def test_bytes_sent_equal_a_count_over_every_message(planner):
    """Rows that are named in messages, times what a row of their side weighs, by hand."""
    heads, groups, dim = 4, 2, 16
    config = CPConfig(planner=planner, num_heads=heads, num_kv_heads=groups, head_dim=dim)
    plan = make_plan(masks.documents(list(LENGTHS)), 4, config)
    there = {("k", "forward"): 2 * groups * dim * 2, ("k", "backward"): 2 * groups * dim * 2,
             ("q", "forward"): heads * dim * 2, ("q", "backward"): heads * (2 * dim * 2 + 2 * 4)}  # fmt: skip
    back = {("k", "forward"): 0, ("k", "backward"): 2 * groups * dim * 4,
            ("q", "forward"): heads * (dim + 1) * 4, ("q", "backward"): heads * dim * 4}  # fmt: skip
    for name in PASSES:
        one_pass = plan.get_pass(name)
        if one_pass.head_split is not None:
            continue
        expected = np.zeros((4, 4))
        for side, transfer in one_pass.transfers():
            for hop in transfer.hops:
                for src, dst, start, stop in hop.messages[:, :4].tolist():
                    expected[src, dst] += (stop - start) * there[side, name]
                    expected[dst, src] += (stop - start) * back[side, name]
        assert np.array_equal(sent_bytes(plan, name), expected)


def test_a_head_split_sends_what_every_rank_gives_away():
    """Ulysses on four ranks, four heads: each rank keeps a quarter of q, k, v and out, and sends the rest."""
    config = CPConfig(planner="ulysses", num_heads=4, num_kv_heads=4, head_dim=16)
    plan = make_plan(masks.causal(64), 4, config)
    per_token = 4 * 4 * 16 * 2 + 4 * 4  # q, k, v there, out back in bf16, lse back in fp32
    sent = sent_bytes(plan, "forward")
    assert sent.sum(axis=1) == pytest.approx([16 * per_token * 3 / 4] * 4)
    assert np.diag(sent) == pytest.approx(0.0)


def test_one_rank_sends_nothing():
    assert ring_bytes(masks.causal(64), 1, CPConfig()) == 0


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_a_plan_over_replicas_is_compared_with_a_pack_on_each_of_them(cp_size):
    """Three replicas: the slowest of them is what fixed groups take, and each has a ring of its own."""
    config = CPConfig(**SHAPES[0])
    packs = [masks.documents(lengths) for lengths in ([512], [64] * 8, [200, 100, 212])]
    whole = make_plan(masks.concat(packs), 3 * cp_size, config)
    figures = pack_figures(whole, 3)
    if cp_size == 1:
        slowest = make_plan(packs[0], 1, config)
        assert figures.ring_bytes == 0
        assert figures.zigzag_ms == pytest.approx(milliseconds(slowest))
    else:
        alone = [pack_figures(make_plan(pack, cp_size, config)) for pack in packs]
        assert figures.ring_bytes == sum(one.ring_bytes for one in alone)
        assert figures.zigzag_ms == max(one.zigzag_ms for one in alone)
        assert figures.per_document_ms == max(one.per_document_ms for one in alone)
    area = sum(pack.area() for pack in packs) / (3 * cp_size)
    assert figures.zigzag_imbalance == pytest.approx(packs[0].area() / cp_size / area, rel=1e-3)
    assert figures.predicted_ms == pytest.approx(milliseconds(whole))
    split = [
        pairs_by_token(pack.to_dense(), lengths, cp_size).max()
        for pack, lengths in zip(packs, ([512], [64] * 8, [200, 100, 212]), strict=True)
    ]
    assert per_document_imbalance(whole, 3) == pytest.approx(max(split) / area)
