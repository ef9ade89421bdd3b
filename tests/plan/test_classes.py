"""Tokens reordered class by class, against dense masks with their rows and columns exchanged."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_cp import mask as masks
from megatron_cp.plan import make_plan
from megatron_cp.plan.placement.classes import classes_together
from megatron_cp.plan.placement.placement import Placement
from megatron_cp.plan.transfer.pass_builder import PlacedMask
from tests.plan.cases import config
from tests.plan.test_laws import check_laws
from tests.strategies import attention_masks


@st.composite
def masks_in_classes(draw):
    """Dilated windows, strided blocks, and slices anywhere; the last may or may not fall apart."""
    size = draw(st.integers(2, 60))
    kind = draw(st.sampled_from(["dilated", "strided", "any"]))
    if kind == "dilated":
        left, right = draw(st.integers(-1, size)), draw(st.integers(0, 9))
        return masks.dilated(size, left, right, dilation=draw(st.integers(2, 9)))
    if kind == "strided":
        blocks, stride = draw(st.integers(2, min(size, 12))), draw(st.integers(1, 5))
        return masks.strided(size, blocks, stride, reach=draw(st.integers(1, 4)))
    return draw(attention_masks(max_queries=29, square=True))[0]


@given(mask=masks_in_classes())
@settings(max_examples=200)
def test_the_reordered_mask_allows_the_same_pairs_of_tokens(mask):
    found = classes_together([mask])
    if found is not None:
        order = found.order
        assert np.array_equal(np.sort(order), np.arange(mask.num_queries))
        assert np.array_equal(found.masks[0].to_dense(), mask.to_dense()[np.ix_(order, order)])
        places = np.arange(mask.num_queries + 3)
        assert np.array_equal(found.tokens_of(places)[: mask.num_queries], order)
        assert np.array_equal(found.tokens_of(places)[-3:], places[-3:])


@given(mask=masks_in_classes(), ranks=st.sampled_from([1, 2, 3, 4, 8]))
@settings(max_examples=60)
def test_plans_of_masks_in_classes_compute_every_pair_once(mask, ranks):
    check_laws(make_plan(mask, ranks, config(num_heads=8, num_kv_heads=2)), mask.to_dense())


@pytest.mark.parametrize("dilation", [16, 64])
def test_a_dilated_window_on_as_many_ranks_as_divide_it_moves_nothing_and_is_balanced(dilation):
    mask = masks.dilated(4096, 1024, dilation=dilation)
    plan = make_plan(mask, 16, config(num_heads=32, num_kv_heads=32))
    back = np.subtract.outer(np.arange(4096), np.arange(4096))
    allowed = (back >= 0) & (back <= 1024) & (back % dilation == 0)
    pairs = [allowed[np.ix_(ids, ids)].sum() for ids in plan.global_from_local]
    assert sum(pairs) == allowed.sum()  # every token meets tokens of its rank only
    assert max(pairs) <= 1.01 * np.mean(pairs)
    stats = plan.stats("forward")
    assert stats["volume_max"] == 0.0


def test_a_strided_mask_gets_the_plan_of_its_blocks_put_together():
    options = config(num_heads=8, num_kv_heads=8)
    apart, together = (
        make_plan(masks.strided(4096, 64, 8, 3, remapped=remapped), 8, options)
        for remapped in (False, True)
    )
    assert apart.stats("forward")["makespan_ms"] == together.stats("forward")["makespan_ms"]


def test_families_share_the_classes_or_have_none():
    dilated, causal = masks.dilated(64, 32, dilation=4), masks.causal(64)
    assert classes_together([dilated, masks.dilated(64, 24, dilation=6)]) is not None
    assert classes_together([dilated, causal]) is None
    assert classes_together([causal]) is None
    assert classes_together([masks.documents([16, 16, 32])]) is None


def test_a_dilated_window_in_chosen_chunks_is_planned_in_memory_for_its_slices():
    """2,049 diagonals, which chunks keep apart: rows of overlapping slices were once counted pair by pair."""
    mask = masks.dilated(1 << 15, 4096, dilation=2)
    tracemalloc.start()
    plan = make_plan(mask, 32, config(chunk_size=128, num_heads=32, num_kv_heads=8))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert plan.global_from_local.shape == (32, 1024)
    assert peak < 1 << 30, peak


def test_slices_that_fill_memory_once_they_are_cut_are_refused_at_once():
    mask = masks.dilated(1 << 19, 104_858, dilation=2)
    with pytest.raises(ValueError, match=r"52430 slices .* 32 ranks.*leave out chunk_size"):
        make_plan(mask, 32, config(chunk_size=512, num_heads=1, num_kv_heads=1))
    assert make_plan(mask, 32, config()).cp_size == 32


@pytest.mark.parametrize("degree", [1, 2])
def test_a_mask_is_cut_into_as_many_parts_as_are_counted(degree):
    placement = Placement.of_chunks(np.array([[0, 7], [1, 6], [2, 5], [3, 4]]), 8)
    placed = PlacedMask(masks.dilated(64, 16, dilation=2), placement.regrouped(4 // degree))
    count = len(placed.parts)
    assert placed.has_parts(count) and not placed.has_parts(count - 1)
