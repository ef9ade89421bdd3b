"""Work lists against dense masks: what a kernel that follows the arrays to the letter would compute."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_cp import mask as masks
from megatron_cp.attn.hopper.worklist import (
    WorkList,
    backward_work,
    forward_work,
)
from tests.strategies import attention_masks

TILES = st.tuples(st.sampled_from([1, 2, 3, 4, 8, 16]), st.sampled_from([1, 2, 3, 4, 8]))


def _scores_taken(work: WorkList, num_rows: int, num_keys: int, rows_read: int) -> np.ndarray:
    """Returns how often a kernel adds up each (row, key), by the definition of the arrays.

    `rows_read` rows of a tile take part in a sum over rows: `tile.rows` of them in the forward pass (0 here),
    whole tiles in the backward pass, also those that the tensor does not have.
    """
    taken = np.zeros((num_rows + rows_read, num_keys + work.step), dtype=np.int64)
    for row0, rows, seg0, num_segs in work.tiles.tolist():
        for k0, k1, lo, hi, q0, q1, full_begin, full_end in work.segs[
            seg0 : seg0 + num_segs
        ].tolist():
            for j, k in enumerate(range(k0, k1, work.step)):
                for r in range(row0, row0 + (rows_read or rows)):
                    if full_begin <= j < full_end:
                        taken[r, k : k + work.step] += 1
                    elif q0 <= r < q1:
                        first, stop = max(k0, r + lo, k), min(k1, r + hi + 1, k + work.step)
                        taken[r, first : max(first, stop)] += 1
    return taken


def _padded(dense: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    result = np.zeros(shape, dtype=np.int64)
    result[: dense.shape[0], : dense.shape[1]] = dense
    return result


def _assert_rows_are_partitioned(work: WorkList, num_rows: int) -> None:
    row0, rows = work.tiles[:, 0], work.tiles[:, 1]
    assert (rows >= 1).all() and (rows <= work.tile_rows).all()
    assert np.array_equal(np.concatenate([[0], row0 + rows]), np.concatenate([row0, [num_rows]]))
    assert np.array_equal(np.sort(work.order), np.arange(len(work.tiles)))
    seg0, num_segs = work.tiles[:, 2], work.tiles[:, 3]
    assert np.array_equal(
        np.concatenate([[0], seg0 + num_segs]), np.concatenate([seg0, [len(work.segs)]])
    )
    assert {array.dtype for array in (work.tiles, work.segs, work.order)} == {np.dtype(np.int32)}


@settings(max_examples=150, deadline=None)
@given(attention_masks(), TILES)
@example((masks.full(0, 3), np.zeros((0, 3), dtype=bool)), (4, 4))
@example((masks.full(3, 0), np.zeros((3, 0), dtype=bool)), (4, 4))
def test_forward_takes_every_pair_of_the_mask_once_and_no_other(case, tiles):
    mask, dense = case
    work = forward_work(mask, *tiles)
    _assert_rows_are_partitioned(work, mask.num_queries)
    taken = _scores_taken(work, *dense.shape, rows_read=0)
    assert np.array_equal(taken, _padded(dense, taken.shape))


@settings(max_examples=150, deadline=None)
@given(attention_masks(), TILES)
@example((masks.full(0, 3), np.zeros((0, 3), dtype=bool)), (4, 4))
def test_backward_takes_no_key_of_the_next_tile_into_dq(case, tiles):
    mask, dense = case
    work = backward_work(mask, *tiles)
    _assert_rows_are_partitioned(work, mask.num_keys)
    taken = _scores_taken(work, *dense.T.shape, rows_read=work.tile_rows)
    assert np.array_equal(taken, _padded(dense.T, taken.shape))


@pytest.mark.parametrize("within", ["causal", "full", ("window", 5)])
@pytest.mark.parametrize("build", [forward_work, backward_work])
def test_long_tiles_come_first(within, build):
    work = build(masks.documents([40, 3, 70, 1, 1, 200, 16], within), 16, 16)
    k0, k1, begin, end = work.segs[:, [0, 1, 6, 7]].T
    visits = -(-(k1 - k0) // 16)
    full = end - begin
    seg_costs = full + 1.25 * (visits - full)
    tile_costs = [seg_costs[a : a + n].sum() for a, n in work.tiles[work.order, 2:].tolist()]
    assert all(longer >= shorter for longer, shorter in pairwise(tile_costs))
    assert tile_costs[0] > tile_costs[-1]


def test_dense_and_causal_masks_compute_next_to_nothing_in_vain():
    rows, step, size = 128, 64, 8192
    full = forward_work(masks.full(size), rows, step)
    assert full.num_visits == full.num_full == (size // rows) * (size // step)
    causal = forward_work(masks.causal(size), rows, step)
    diagonal_blocks = size // rows
    below = diagonal_blocks * (diagonal_blocks - 1) // 2 * (rows // step)
    assert causal.num_full == below
    assert causal.num_visits == below + diagonal_blocks * (rows // step)


def test_thousands_of_tiny_documents_share_tiles():
    lengths = np.random.default_rng(0).integers(1, 20, 5000)
    for build in (forward_work, backward_work):
        work = build(masks.documents(lengths), 128, 128)
        assert len(work.tiles) <= 2 * (lengths.sum() // 128 + 1)
        assert len(work.segs) <= len(lengths) + len(work.tiles)


def test_short_answers_to_one_long_question_visit_it_together():
    question, answers = 128 * 40, [20] * 600
    work = forward_work(masks.shared_question([question, *answers]), 128, 128)
    shared = work.segs[(work.segs[:, 5] > question) & (work.segs[:, 1] == question)]
    assert len(shared) <= sum(answers) // 128 * 2
    assert (shared[:, 7] - shared[:, 6] == 40).all()  # every visit of the question is a full one


def test_short_intervals_with_many_keys_of_their_own_stay_apart():
    # Two groups of 8 rows see different halves of the keys: in one tile no visit would be full.
    rows = [(8 * i, 8 * i + 8, 640 * (i % 2), 640 * (i % 2) + 640, None, None) for i in range(4)]
    work = forward_work(masks.from_slices(32, 1280, rows), 16, 64)
    assert work.num_visits == work.num_full == 4 * 10


def test_neighbouring_key_ranges_become_one_segment():
    slices = [(0, 8, 0, 5, None, None), (0, 8, 5, 11, None, None), (0, 8, 11, 16, None, 11)]
    work = forward_work(masks.from_slices(8, 16, slices), 8, 4)
    assert work.segs[:, :2].tolist() == [[0, 16]]


def test_arrays_grow_with_tiles_and_segments_only():
    size = 1 << 20
    for build in (forward_work, backward_work):
        work = build(masks.causal(size), 128, 128)
        assert work.nbytes == (size // 128) * (16 + 32 + 4)


def test_mask_beyond_what_the_device_counts_is_refused():
    with pytest.raises(ValueError, match=r"536870912 x 4 must stay below 536870912 .* crop"):
        forward_work(masks.full(1 << 29, 4), 128, 128)
    with pytest.raises(ValueError, match=r"4 x 536870912 must stay below 536870912 .* crop"):
        backward_work(masks.full(4, 1 << 29), 128, 128)
