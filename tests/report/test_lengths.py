import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_cp.report.figures.lengths import lengths_figure, shares_of_bins, shares_of_lengths


@given(st.lists(st.integers(1, 100_000), min_size=1, max_size=60))
def test_shares_equal_a_count_document_by_document_and_sum_to_one(lengths):
    shares = shares_of_lengths(np.array(lengths))
    total = len(lengths), sum(lengths), sum(n * (n + 1) // 2 for n in lengths)
    for index, (low, high) in enumerate(zip(shares.edges[:-1], shares.edges[1:], strict=True)):
        inside = [n for n in lengths if low <= n < high]
        assert shares.documents[index] == pytest.approx(len(inside) / total[0])
        assert shares.tokens[index] == pytest.approx(sum(inside) / total[1])
        area = sum(n * (n + 1) // 2 for n in inside)
        assert shares.area[index] == pytest.approx(area / total[2])
    for share in (shares.documents, shares.tokens, shares.area):
        assert share.sum() == pytest.approx(1.0)


def test_empty_documents_do_not_count():
    assert shares_of_lengths(np.array([0, 8, 0])).num_documents == 1


def test_no_token_at_all_is_refused():
    with pytest.raises(ValueError, match="no document has a token"):
        shares_of_lengths(np.array([0, 0]))


def test_bins_that_do_not_fit_their_edges_are_refused():
    with pytest.raises(ValueError, match="need 1 counts"):
        shares_of_bins(np.array([1, 2]), np.ones(2), np.ones(2), np.ones(2))


def test_caption_says_which_few_documents_hold_half_of_the_attention():
    lengths = np.array([10] * 99 + [10_000])
    figure = lengths_figure(shares_of_lengths(lengths), 4096)
    assert (
        "The 1.0% of documents with 8K tokens or more hold 100% of the attention" in figure.caption
    )
    assert figure.table.rows[0][2] == pytest.approx(0.99)
