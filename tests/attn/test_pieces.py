"""Pieces and tiles against dense rendering, and their cost against the mask's area."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_cp import mask as masks
from megatron_cp.attn.cpu.pieces import pieces_of, tiles_of
from tests.strategies import attention_masks


def _paint(piece, dense):
    rows, keys = np.arange(piece.q_start, piece.q_end), np.arange(piece.k_start, piece.k_end)
    distance = keys - rows[:, None]
    lo = -np.inf if piece.lo is None else piece.lo
    hi = np.inf if piece.hi is None else piece.hi
    allowed = (lo <= distance) & (distance <= hi)
    assert allowed.any(axis=0).all(), f"a key that no row of {piece} sees"
    assert allowed.any(axis=1).all(), f"a row without keys in {piece}"
    assert allowed.all() == (piece.lo is None and piece.hi is None)
    dense[piece.q_start : piece.q_end, piece.k_start : piece.k_end] += allowed


def _rendered(pieces, shape):
    dense = np.zeros(shape, dtype=np.int64)
    for piece in pieces:
        _paint(piece, dense)
    return dense


@given(attention_masks(max_queries=90, max_keys=90))
def test_pieces_cover_every_pair_of_the_mask_once(case):
    mask, dense = case
    assert np.array_equal(_rendered(pieces_of(mask), dense.shape), dense)


@given(attention_masks(max_queries=40, max_keys=40), st.integers(1, 9), st.integers(1, 9))
def test_tiles_cover_every_pair_of_a_piece_once(case, max_rows, max_keys):
    mask, dense = case
    for piece in pieces_of(mask):
        tiles = list(tiles_of(piece, max_rows, max_keys))
        assert all(t.q_end - t.q_start <= max_rows for t in tiles)
        assert all(t.k_end - t.k_start <= max_keys for t in tiles)
        assert np.array_equal(_rendered(tiles, dense.shape), _rendered([piece], dense.shape))


SIZES = [(1030, 1030), (2500, 1100), (300, 8800), (4700, 300), (1025, 2300)]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(
    "band",
    [(None, 0), (None, 700), (-90, 0), (-2600, 10), (5, None), (5, 2600), (None, None)],
)
def test_pieces_of_large_slices_cover_every_pair_once(size, band):
    num_queries, num_keys = size
    mask = masks.from_slices(num_queries, num_keys, [(0, num_queries, 0, num_keys, *band)])
    assert np.array_equal(_rendered(pieces_of(mask), size), mask.to_dense())


@pytest.mark.parametrize(
    ("mask", "most"),
    [
        (masks.causal(4096), 1.03),
        (masks.documents([512] * 8), 1.13),
        (masks.documents([513, 700, 1100, 2000]), 1.1),
        (masks.sliding_window(4096, 1023), 1.08),
        (masks.sliding_window(4096, 127), 1.5),
        (masks.full(3000), 1.0),
    ],
    ids=["causal", "documents of 512", "documents", "window 1024", "window 128", "full"],
)
def test_work_follows_the_area_of_the_mask(mask, most):
    work = sum((p.q_end - p.q_start) * (p.k_end - p.k_start) for p in pieces_of(mask))
    assert mask.area() <= work <= most * mask.area()


def test_the_number_of_operations_grows_with_rows_not_pairs():
    assert len(list(pieces_of(masks.full(4096, 8192)))) == 1
    assert len(list(pieces_of(masks.full(100_000)))) == 25 * 13
    assert len(list(pieces_of(masks.causal(32_768)))) <= 32_768 // 64 + 96
