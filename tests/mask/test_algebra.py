"""The algebra of masks against dense matrices: every operation commutes with rendering."""

import itertools
from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_cp.mask import AttentionMask, concat, from_dense, from_slices
from megatron_cp.mask.slice import area_above, tighten
from tests.strategies import attention_masks, bounds, masks, render, slices


def assert_is(mask: AttentionMask, dense: np.ndarray) -> None:
    """Checks values, closed-form area, and the promises about `array`."""
    np.testing.assert_array_equal(mask.to_dense(), dense)
    assert (mask.num_queries, mask.num_keys) == dense.shape
    assert mask.area() == dense.sum()
    assert np.array_equal(tighten(mask.array), mask.array), "rows are tight"
    assert len(mask.array) == len({tuple(row) for row in mask.array.tolist()})
    parts = [astuple(one) for one in mask.slices]
    np.testing.assert_array_equal(render(*dense.shape, parts), dense)  # refuses a pair given twice
    order = [(row[0], row[2]) for row in mask.array.tolist()]
    assert order == sorted(order)


@st.composite
def disjoint_ranges(draw, size):
    cuts = sorted(draw(st.lists(st.integers(0, size), max_size=8, unique=True)))
    ranges = [pair for pair in itertools.pairwise(cuts) if draw(st.booleans())]
    ranges += [(cut, cut) for cut in cuts[:1]]  # an empty range changes nothing
    return np.array(draw(st.permutations(ranges)), dtype=np.int64).reshape(-1, 2)


def indices(ranges: np.ndarray) -> list[int]:
    return [i for a, b in ranges.tolist() for i in range(a, b)]


@given(masks())
def test_from_slices_renders_as_its_definition(drawn):
    num_queries, num_keys, parts = drawn
    assert_is(from_slices(num_queries, num_keys, parts), render(num_queries, num_keys, parts))


@given(attention_masks())
def test_slices_array_and_dense_all_rebuild_the_mask(drawn):
    mask, dense = drawn
    shape = mask.num_queries, mask.num_keys
    assert from_slices(*shape, mask.slices) == mask
    assert from_slices(*shape, mask.array) == mask
    assert_is(from_dense(dense), dense)


@given(attention_masks(), st.data())
def test_crop_is_the_cut_out_of_the_dense_matrix(drawn, data):
    mask, dense = drawn
    a, b = data.draw(bounds(mask.num_queries, allow_empty=True))
    c, d = data.draw(bounds(mask.num_keys, allow_empty=True))
    assert_is(mask.crop(q=(a, b), k=(c, d)), dense[a:b, c:d])
    assert_is(mask.crop(q=(a, b)), dense[a:b])
    assert_is(mask.crop(k=(c, d)), dense[:, c:d])


@given(attention_masks(), st.data())
def test_gather_is_fancy_indexing_of_the_dense_matrix(drawn, data):
    mask, dense = drawn
    rows = data.draw(disjoint_ranges(mask.num_queries))
    keys = data.draw(disjoint_ranges(mask.num_keys))
    assert_is(mask.gather(rows, keys), dense[indices(rows)][:, indices(keys)])


@given(attention_masks(), st.integers(0, 5), st.integers(0, 5))
def test_shift_pads_the_dense_matrix_in_front(drawn, q, k):
    mask, dense = drawn
    assert_is(mask.shift(q, k), np.pad(dense, ((q, 0), (k, 0))))
    assert mask.shift(q, k).shift(-q, -k) == mask


@given(attention_masks())
def test_transpose_is_the_transposed_matrix(drawn):
    mask, dense = drawn
    assert_is(mask.transpose(), dense.T)
    assert mask.transpose().transpose() == mask


@st.composite
def pairs_on_one_grid(draw):
    num_queries, num_keys, parts = draw(masks())
    first = from_slices(num_queries, num_keys, parts)
    others = draw(st.lists(slices(num_queries, num_keys), max_size=4))
    second = from_slices(num_queries, num_keys, [])
    dense = np.zeros((num_queries, num_keys), dtype=bool)
    for other in others:
        second |= from_slices(num_queries, num_keys, [other])
        dense |= render(num_queries, num_keys, [other])
    return (first, render(num_queries, num_keys, parts)), (second, dense)


@given(pairs_on_one_grid())
def test_and_or_minus_are_those_of_the_dense_matrices(drawn):
    (a, dense_a), (b, dense_b) = drawn
    assert_is(b, dense_b)
    assert_is(a & b, dense_a & dense_b)
    assert_is(a | b, dense_a | dense_b)
    assert_is(a - b, dense_a & ~dense_b)
    assert_is(b - a, dense_b & ~dense_a)
    assert (a - a).num_slices == 0


@given(attention_masks())
def test_merged_keeps_the_pairs_and_never_adds_slices(drawn):
    mask, dense = drawn
    merged = mask.merged()
    assert_is(merged, dense)
    assert merged.num_slices <= mask.num_slices
    assert merged.merged() == merged


@given(st.lists(attention_masks(max_queries=8, max_keys=8), max_size=4))
def test_concat_is_block_diagonal(drawn):
    queries = sum(dense.shape[0] for _, dense in drawn)
    keys = sum(dense.shape[1] for _, dense in drawn)
    expected = np.zeros((queries, keys), dtype=bool)
    q = k = 0
    for _, dense in drawn:
        expected[q : q + dense.shape[0], k : k + dense.shape[1]] = dense
        q, k = q + dense.shape[0], k + dense.shape[1]
    assert_is(concat([mask for mask, _ in drawn]), expected)


@given(attention_masks(), st.data())
def test_area_above_a_row_of_each_slice_counts_its_pairs(drawn, data):
    mask, dense = drawn
    cuts = [data.draw(st.integers(row[0], row[1])) for row in mask.array.tolist()]
    alone = [from_slices(*dense.shape, [one]).to_dense() for one in mask.slices]
    counted = [one[:cut].sum() for one, cut in zip(alone, cuts, strict=True)]
    np.testing.assert_array_equal(area_above(mask.array, np.array(cuts, dtype=np.int64)), counted)


@given(attention_masks(), st.data())
def test_area_of_rows_counts_each_run_of_rows(drawn, data):
    mask, dense = drawn
    cuts = st.lists(st.integers(0, mask.num_queries), min_size=1, max_size=9)
    runs = np.array(sorted(data.draw(cuts)))
    expected = [dense[a:b].sum() for a, b in itertools.pairwise(runs)]
    np.testing.assert_array_equal(mask.area_of_rows(runs), expected)


@given(attention_masks(), st.data())
@example((from_slices(2, 2, []), np.zeros((2, 2), bool)), None)
def test_needed_keys_are_the_keys_that_any_of_the_rows_sees(drawn, data):
    mask, dense = drawn
    ranges = np.array([[0, 2], [1, 2]])  # rows may be named twice
    if data is not None:
        one = bounds(mask.num_queries, allow_empty=True)
        ranges = np.array(data.draw(st.lists(one, max_size=4)), dtype=np.int64).reshape(-1, 2)
    needed = mask.needed_keys(ranges)
    expected = np.flatnonzero(dense[indices(ranges)].any(axis=0))
    assert indices(needed) == expected.tolist()
    assert (needed[1:, 0] > needed[:-1, 1]).all(), "joined where they touch"


@given(attention_masks(), st.randoms())
def test_digest_and_equality_do_not_depend_on_the_order_of_slices(drawn, random):
    mask, _ = drawn
    shuffled = list(mask.slices)
    random.shuffle(shuffled)
    again = from_slices(mask.num_queries, mask.num_keys, shuffled)
    assert again == mask and hash(again) == hash(mask) and again.digest() == mask.digest()
    wider = mask.shift(num_keys=mask.num_keys + 1)
    assert wider != mask and wider.digest() != mask.digest()


def test_digest_is_fixed_for_all_time():
    mask = from_slices(5, 7, [(0, 5, 0, 7, -1, 1)])
    assert mask.digest() == "0060f5b0fb7df9d61c66f8e30fbdf941b642bc732db424a77e0ef010dd63a4be"


def test_a_mask_cannot_be_changed():
    mask = from_slices(4, 4, [(0, 4, 0, 4, None, 0)])
    with pytest.raises(ValueError, match="read-only"):
        mask.array[0, 0] = 1


def test_subtracting_documents_from_everything_leaves_few_slices():
    size, count = 1 << 16, 1000
    starts = np.arange(count) * (size // count)
    parts = np.stack([starts, starts + size // count] * 2, axis=1)
    documents = from_slices(size, size, [(*row, None, None) for row in parts.tolist()])
    rest = from_slices(size, size, [(0, size, 0, size)]) - documents
    assert rest.area() == size * size - documents.area()
    assert rest.num_slices <= 4 * count
    assert (rest & documents).num_slices == 0
    assert (rest | documents).area() == size * size
