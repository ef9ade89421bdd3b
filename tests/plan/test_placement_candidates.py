"""Placements as runs, and documents placed whole, against tables of tokens and plain counting."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_cp import mask as masks
from megatron_cp.plan.placement.by_documents import Ranks, group_sizes, whole_documents
from megatron_cp.plan.placement.candidates import PlacementCandidates
from megatron_cp.plan.placement.placement import Placement, zigzag
from megatron_cp.plan.search.budget import BUDGET
from tests.plan.cases import config
from tests.strategies import document_lengths

RANKS = (1, 2, 3, 4, 6, 12, 24)


@given(order=st.permutations(range(24)), size=st.integers(1, 3), data=st.data())
def test_runs_hold_the_tokens_of_the_table_on_any_number_of_ranks(order, size, data):
    ranks, others = (data.draw(st.sampled_from(RANKS)) for _ in range(2))
    table = (np.array(order)[:, None] * size + np.arange(size)).reshape(ranks, -1)
    placement = Placement.of_chunks(np.array(order).reshape(ranks, -1), size)
    assert np.array_equal(placement.tokens, table)
    assert np.array_equal(placement.regrouped(others).tokens, table.reshape(others, -1))
    assert np.array_equal(placement.in_order().tokens, np.sort(table, axis=1))
    assert placement.own_rows == table.shape[1]
    touching = (placement.ids[1:, 0] == placement.ids[:-1, 1]) & (np.diff(placement.rank) == 0)
    assert not touching.any()


def alike(count, *whole):
    """Ranks of equal speed in nodes (racks, ...) of so many."""
    return Ranks(np.ones(count), whole)


@given(
    lengths=document_lengths(max_documents=40, max_length=30),
    ranks=st.sampled_from([1, 2, 3, 4, 6, 8]),
    slack=st.integers(0, 5),
    most_load=st.sampled_from([1.0, 1.25]),
)
@settings(max_examples=150)
def test_documents_and_padding_are_placed_once_in_equal_numbers(lengths, ranks, slack, most_load):
    bounds = np.cumsum([0, *lengths])
    areas = np.array(lengths, dtype=np.float64) ** 2
    rows = -(-sum(lengths) // ranks) + slack
    placed, _ = whole_documents(bounds, areas[:, None], alike(ranks, ranks), rows, most_load)
    assert placed.tokens.shape == (ranks, rows)
    assert np.array_equal(np.sort(placed.tokens.reshape(-1)), np.arange(ranks * rows))


def ranks_of_documents(tokens, bounds):
    owner = np.empty(tokens.size, dtype=np.int64)
    owner[tokens] = np.arange(len(tokens))[:, None]
    return [set(owner[a:b].tolist()) for a, b in itertools.pairwise(bounds)]


def test_documents_that_fit_stay_whole_and_a_large_one_takes_neighbours():
    lengths = [64, 16, 8, 8, 16, 16]  # 128 tokens on 8 ranks of 16; the first is half of them
    bounds = np.cumsum([0, *lengths])
    areas = np.array(lengths, dtype=np.float64)
    placed, _ = whole_documents(bounds, areas[:, None], alike(8, 4), 16, 1.25)
    found = ranks_of_documents(placed.tokens, bounds)
    assert found[0] in ({0, 1, 2, 3}, {4, 5, 6, 7})
    assert all(len(ranks) == 1 for ranks in found[1:])


def test_each_of_several_loads_is_kept_within_the_limit():
    """Half of the documents are heavy under one mask, half under the other; their sums are all alike."""
    rng = np.random.default_rng(5)
    bounds = np.arange(17) * 128
    heavy = rng.permutation(np.repeat([[9.0, 1.0], [1.0, 9.0]], 8, axis=0))
    placed, _ = whole_documents(bounds, heavy, alike(8, 8), 256, 1.08)
    document = placed.tokens // 128
    loads = heavy[document].sum(axis=1)  # of each rank, for both masks
    assert (loads <= 1.08 * loads.mean(axis=0)).all()
    assert all(len(ranks) == 1 for ranks in ranks_of_documents(placed.tokens, bounds))


@given(
    lengths=st.lists(st.integers(1, 60), min_size=8, max_size=24),
    ranks=st.sampled_from([2, 4, 8]),
    slack=st.integers(0, 20),
    limits=st.permutations([0.9, 1.0, 1.08, 1.5, 2.5]),
)
@example(lengths=[15] * 30, ranks=32, slack=0, limits=[1.5, 1.08])  # halves that do not divide
@example(lengths=[13] * 45, ranks=32, slack=0, limits=[1.0, 0.9])  # no group has room
@settings(max_examples=150)
def test_limits_that_are_said_to_place_documents_alike_do(lengths, ranks, slack, limits):
    bounds = np.cumsum([0, *lengths])
    areas = np.array(lengths, dtype=np.float64) ** 2
    rows = -(-sum(lengths) // ranks) + slack
    (placed, (least, most)), (other, _) = (
        whole_documents(bounds, areas[:, None], alike(ranks, min(8, ranks), ranks), rows, limit)
        for limit in limits[:2]
    )
    if least <= limits[1] <= most:
        assert np.array_equal(placed.tokens, other.tokens)


def test_of_many_small_documents_one_per_rank_is_cut():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 9, size=400)
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    rows = -(-int(bounds[-1]) // 4)
    placed, _ = whole_documents(bounds, lengths[:, None] ** 2.0, alike(4, 4), rows, 1.25)
    cut = sum(len(ranks) > 1 for ranks in ranks_of_documents(placed.tokens, bounds))
    assert cut <= 3


@pytest.mark.parametrize("most_load", [1.0, 1.08])
def test_documents_that_leave_no_room_are_cut_among_few_ranks(most_load):
    """Two thirds of a rank each, all ranks full: every third document has to be cut."""
    ranks, length = 64, 96
    bounds = np.arange(97) * length
    placed, _ = whole_documents(
        bounds, np.full((96, 1), length**2.0), alike(ranks, 8), 144, most_load
    )
    found = ranks_of_documents(placed.tokens, bounds)
    assert max(map(len, found)) <= 8
    assert sum(len(each) for each in found) <= 2 * len(found)


@pytest.mark.parametrize("cp_size", [2, 4, 8])
def test_one_document_over_all_ranks_is_zigzag(cp_size):
    bounds, rows = np.array([0, 32 * cp_size]), 32
    placed, _ = whole_documents(bounds, np.ones((1, 1)), alike(cp_size, cp_size), rows, 1.0)
    assert np.array_equal(placed.tokens, zigzag(32 * cp_size, cp_size, config()).tokens)


@pytest.mark.parametrize(
    ("ranks", "node", "sizes"),
    [
        (1, 1, [1]),
        (8, 8, [1, 2, 4, 8]),
        (24, 8, [1, 2, 4, 8, 24]),
        (6, 1, [1, 2, 6]),
        (9, 3, [1, 3, 9]),
    ],
)
def test_group_sizes_fill_nodes_first(ranks, node, sizes):
    assert group_sizes(ranks, node) == sizes


def test_documents_of_a_family_begin_where_those_of_all_masks_do():
    family = {"a": (masks.documents([16, 16, 16, 16]), 1.0), "b": (masks.documents([32, 32]), 2.0)}
    options = config(num_heads=4, num_kv_heads=4)
    placement = PlacementCandidates(family, 2, options, 1, BUDGET.placements).by_documents(1, 1.25)
    assert placement is not None
    assert placement.tokens.tolist() == [list(range(32)), list(range(32, 64))]


@given(
    lengths=document_lengths(max_documents=30, max_length=90),
    ranks=st.sampled_from([2, 4, 8]),
    chunk=st.sampled_from([2, 5, 16]),
)
@settings(max_examples=100)
def test_with_a_chosen_chunk_size_documents_lie_in_whole_chunks(lengths, ranks, chunk):
    family = {"a": (masks.documents(lengths), 1.0)}
    options = config(chunk_size=chunk)
    candidates = PlacementCandidates(family, ranks, options, 1, BUDGET.placements)
    placed = candidates.by_documents(1, 1.08)
    assert (placed is None) == (len([one for one in lengths if one]) < 2)
    if placed is not None:
        tokens = placed.tokens
        assert np.array_equal(np.sort(tokens.reshape(-1)), np.arange(ranks * candidates.rows))
        starts = tokens[:, ::chunk]
        assert not (starts % chunk).any()
        assert np.array_equal((starts[:, :, None] + np.arange(chunk)).reshape(ranks, -1), tokens)


def test_chunks_near_document_bounds_keep_documents_on_one_rank():
    lengths = [15, 17, 16, 17, 15, 15, 17, 16]  # the nearest chunks of 16 begin at 16, 32, 48 ...
    family = {"a": (masks.documents(lengths), 1.0)}
    options = config(chunk_size=16)
    placed = PlacementCandidates(family, 4, options, 1, BUDGET.placements).by_documents(1, 1.25)
    sizes = [len(set(row)) for row in (placed.tokens // 16).tolist()]
    assert sizes == [2] * 4
    assert (np.diff(placed.tokens[:, :16]) == 1).all()
