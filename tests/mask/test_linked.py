"""Documents that a mask links, and those in which a state may flow, against the dense mask."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_cp import mask as masks
from megatron_cp.mask import interval
from megatron_cp.mask.linked import causal_document_lengths, document_bounds


def bounds_by_pairs(dense):
    """Returns where no pair reaches over: one document may not be cut, tokens without pairs lie together."""
    size = len(dense)
    linked = dense | dense.T
    sees = linked.any(axis=1)
    cuts = [0]
    for place in range(1, size):
        is_crossed = linked[:place, place:].any()
        both_blind = not sees[place - 1] and not sees[place]
        if not is_crossed and not both_blind:
            cuts.append(place)
    return [*cuts, size]


def states_may_flow(dense, bounds):
    """Returns whether every token that sees anything sees all before it in its document."""
    for start, stop in itertools.pairwise(bounds):
        document = dense[start:stop, start:stop]
        if document.any() and not document[np.tril_indices(stop - start)].all():
            return False
    return True


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=6))
def test_ranges_that_touch_are_joined_in_normalised_sets_and_stay_apart_as_islands(pairs):
    ranges = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    covered = {place for start, stop in pairs for place in range(start, stop)}
    for unite, is_joined in (
        (interval.normalise, lambda place: place in covered and place + 1 in covered),
        (interval.islands, lambda place: any(a <= place and place + 1 < b for a, b in pairs)),
    ):
        firsts = [place for place in sorted(covered) if not is_joined(place - 1)]
        lasts = [place for place in sorted(covered) if not is_joined(place)]
        assert unite(ranges).tolist() == [[a, b + 1] for a, b in zip(firsts, lasts, strict=True)]


@st.composite
def square_masks(draw):
    size = draw(st.integers(1, 14))
    cuts = sorted(draw(st.sets(st.integers(0, size), max_size=4)) | {0, size})
    slices = []
    for start, stop in itertools.pairwise(cuts):
        kind = draw(
            st.sampled_from(["causal", "full", "prefix", "window", "after", "alone", "nothing"])
        )
        if kind == "nothing" or start == stop:
            continue
        low = -draw(st.integers(1, 4)) if kind == "window" else None
        slices.append((start, stop, start, stop, low, None if kind == "full" else 0))
        if kind == "alone":
            slices[-1] = (start, stop, start, stop, 0, 0)
        if kind == "after":
            slices[-1] = (start, stop, start, stop, 1, None)
        if kind == "prefix":
            middle = draw(st.integers(start, stop))
            slices[-1] = (middle, stop, start, stop, None, 0)
            slices.append((start, middle, start, middle, None, None))
    return masks.from_slices(size, size, [s for s in slices if s[0] < s[1]])


@given(square_masks())
def test_documents_are_what_no_pair_links(mask):
    dense = mask.to_dense()
    bounds = bounds_by_pairs(dense)
    of_one_slice = {
        place
        for start, stop, _, _, lo, hi in mask.array.tolist()
        for place in range(start + 1, stop)
        if lo == hi == 0
    }
    found = set(document_bounds(mask).tolist())
    assert set(bounds) - of_one_slice == found - of_one_slice and found <= set(bounds)
    if states_may_flow(dense, bounds):
        assert causal_document_lengths(mask) == tuple(np.diff(bounds).tolist())
    else:
        with pytest.raises(ValueError, match="does not see all before it"):
            causal_document_lengths(mask)


@pytest.mark.parametrize(
    ("mask", "lengths"),
    [
        (masks.documents([5, 0, 1, 7]), (5, 1, 7)),
        (masks.causal(6), (6,)),
        (masks.full(4), (4,)),
        (masks.prefix_lm(6, 3), (6,)),
        (masks.from_slices(9, 9, [(2, 5, 2, 5, None, 0)]), (2, 3, 4)),
        (masks.sliding_window(3, 5), (3,)),
        (masks.documents([3, 1, 1, 2]).merged(), (3, 1, 1, 2)),
    ],
)
def test_lengths_by_hand(mask, lengths):
    assert causal_document_lengths(mask) == lengths


@pytest.mark.parametrize(
    "mask",
    [
        masks.shared_question([4, 2, 2]),
        masks.from_slices(8, 8, [(0, 8, 0, 8, 1, None)]),
        masks.sliding_window(9, 3),
        masks.chunked_causal(9, 4) | masks.from_slices(9, 9, [(8, 9, 0, 1, None, None)]),
    ],
)
def test_a_hidden_token_is_named(mask):
    with pytest.raises(ValueError, match=r"tokens 0 to [78]"):
        causal_document_lengths(mask)
