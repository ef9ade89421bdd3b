"""The strategies draw what they promise, and do reach the awkward cases."""

import numpy as np
import pytest
from hypothesis import find, given
from hypothesis import strategies as st

from tests import strategies


@given(strategies.masks())
def test_drawn_slices_lie_in_the_grid_and_are_disjoint(mask):
    num_queries, num_keys, parts = mask
    for q_start, q_end, k_start, k_end, lo, hi in parts:
        assert 0 <= q_start < q_end <= num_queries
        assert 0 <= k_start < k_end <= num_keys
        assert lo is None or hi is None or lo <= hi
    strategies.render(num_queries, num_keys, parts)  # refuses overlap


@given(strategies.attention_masks(max_queries=10, max_keys=10))
def test_attention_mask_is_drawn_with_its_dense_rendering(drawn):
    mask, dense = drawn
    assert np.array_equal(mask.to_dense(), dense)


@pytest.mark.parametrize(
    "is_wanted",
    [
        lambda lengths: 0 in lengths,
        lambda lengths: 1 in lengths and 31 in lengths,
        lambda lengths: len(lengths) == 6,
    ],
)
def test_awkward_document_lengths_are_reached(is_wanted):
    assert is_wanted(find(strategies.document_lengths(), is_wanted))


@given(strategies.document_lengths(max_documents=3, max_length=7, min_total=4))
def test_document_lengths_keep_their_limits(lengths):
    assert 1 <= len(lengths) <= 3
    assert max(lengths) <= 7
    assert sum(lengths) >= 4


@given(st.integers(0, 9).flatmap(lambda n: st.tuples(st.just(n), strategies.loss_masks(n))))
def test_loss_masks_are_zeros_and_ones_of_the_given_length(drawn):
    num_tokens, loss_mask = drawn
    assert loss_mask.shape == (num_tokens,)
    assert loss_mask.dtype == np.float32
    assert set(loss_mask.tolist()) <= {0.0, 1.0}
