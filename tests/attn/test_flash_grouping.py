"""Calls say the mask, pair by pair, and are few."""

import numpy as np
import pytest
from hypothesis import example, given

from megatron_cp import mask as masks
from megatron_cp.attn.flash import grouping
from megatron_cp.attn.flash.grouping import group_calls
from megatron_cp.mask import from_slices
from megatron_cp.plan import make_plan
from tests.plan.cases import config, packed
from tests.strategies import attention_masks


def times_computed(mask):
    """Returns how often the calls compute each pair, by the definition of a window; checks each call's arrays."""
    times = np.zeros((mask.num_queries, mask.num_keys), dtype=int)
    for call in group_calls(mask):
        q_rows, k_rows = (_flat(rows) for rows in (call.q_rows, call.k_rows))
        assert len(set(q_rows)) == len(q_rows) == call.cu_seqlens_q[-1], "a row twice"
        assert len(set(k_rows)) == len(k_rows) == call.cu_seqlens_k[-1], "a key twice"
        assert (np.diff(call.cu_seqlens_q) > 0).all() and (np.diff(call.cu_seqlens_k) > 0).all()
        assert call.max_q >= max(2, np.diff(call.cu_seqlens_q).max())
        assert call.max_k >= max(call.right + 1, np.diff(call.cu_seqlens_k).max())
        for i in range(len(call.cu_seqlens_q) - 1):
            q = q_rows[call.cu_seqlens_q[i] : call.cu_seqlens_q[i + 1]]
            k = k_rows[call.cu_seqlens_k[i] : call.cu_seqlens_k[i + 1]]
            for a, row in enumerate(q):
                for b, key in enumerate(k):
                    from_corner = (b - a) - (len(k) - len(q))
                    left = call.left < 0 or -call.left <= from_corner
                    right = call.right < 0 or from_corner <= call.right
                    times[row, key] += left and right
    return times


def _flat(rows):
    return [i for start, end in rows.tolist() for i in range(start, end)]


@given(case=attention_masks())
@example(
    case=(from_slices(9, 4, [(0, 9, 0, 4, -6, -1)]), None)
)  # more queries than keys, both sides cut
@example(case=(from_slices(9, 3, [(0, 9, 0, 3, -6, None)]), None))
@example(case=(from_slices(1, 1, [(0, 1, 0, 1, None, None)]), None))
def test_calls_compute_every_pair_of_the_mask_once_and_no_other(case):
    mask, dense = case
    dense = mask.to_dense() if dense is None else dense
    np.testing.assert_array_equal(times_computed(mask), dense.astype(int))


@given(case=attention_masks(max_queries=40, max_keys=12))
def test_masks_of_more_queries_than_keys_are_said_exactly(case):
    mask, dense = case
    np.testing.assert_array_equal(times_computed(mask), dense.astype(int))


LENGTHS = [5, 1, 40, 3, 1, 17]
NUM_CALLS = {
    "causal": (masks.causal(97), 1),
    "causal, keys in front": (masks.causal(40, 97), 1),
    "full": (masks.full(40, 97), 1),
    "causal documents": (masks.documents(LENGTHS, "causal"), 1),
    "full documents": (masks.documents(LENGTHS, "full"), 1),
    "documents of both kinds": (masks.documents([9, 8, 7], ["causal", "full", "causal"]), 2),
    "sliding window": (masks.sliding_window(97, 7), 1),
    "sliding window over documents, some shorter": (masks.documents(LENGTHS, ("window", 6)), 1),
    "window to both sides over documents": (masks.documents(LENGTHS, ("window", 6, 3)), 1),
    "chunked causal": (masks.chunked_causal(97, 8), 1),
    "prefix-LM": (masks.prefix_lm(40, 9), 2),
    "prefix-LM documents": (masks.prefix_lm_documents([10, 20, 5, 30], 4), 2),
    "one question, answers": (masks.shared_question([10, 5, 7, 3, 8]), 2),
    "blocks of a video": (masks.block_causal_documents([64, 64], 4), 5),
    "two bends, different": (
        from_slices(20, 20, [(0, 9, 0, 5, None, 1), (9, 20, 5, 9, None, -6)]),
        2,
    ),
}


@pytest.mark.parametrize("case", NUM_CALLS)
def test_masks_that_people_use_take_few_calls(case):
    mask, num_calls = NUM_CALLS[case]
    np.testing.assert_array_equal(times_computed(mask), mask.to_dense().astype(int))
    assert len(group_calls(mask)) <= num_calls


MANY_SLICES = {
    "260 blocks that see all before": (masks.block_causal(520, 2), 10),
    "block diffusion": (masks.block_diffusion(256, 2), 10),
    "video of 300 blocks": (masks.block_causal_documents([300, 300], 2), 9),
}


@pytest.mark.parametrize("name", MANY_SLICES)
def test_masks_of_many_slices_take_few_calls_too(name):
    """As many as their logarithm: each call would otherwise read its keys again."""
    mask, num_calls = MANY_SLICES[name]
    assert mask.num_slices > 256
    np.testing.assert_array_equal(times_computed(mask), mask.to_dense().astype(int))
    assert len(group_calls(mask)) <= num_calls


def test_a_pack_of_a_thousand_documents_is_two_calls_in_the_order_of_memory():
    mask = packed("log-normal", 1 << 16, 1000)
    calls = group_calls(mask)
    assert all(call.is_causal for call in calls)
    assert sorted(len(call.cu_seqlens_q) - 1 for call in calls) == [488, 512]
    for side in ("q_rows", "k_rows"):
        (a,), (b,) = sorted(getattr(call, side).tolist() for call in calls)
        assert (a[0], a[1], b[1]) == (0, b[0], 1 << 16)


def test_more_sequences_than_a_call_holds_are_two_calls(monkeypatch):
    monkeypatch.setattr(grouping, "MAX_SEQUENCES", 3)
    mask = masks.documents([4] * 6, "causal")
    assert [len(call.cu_seqlens_q) - 1 for call in group_calls(mask)] == [3, 3]
    np.testing.assert_array_equal(times_computed(mask), mask.to_dense().astype(int))


STAGE_MASKS = {
    "causal documents": packed("log-normal", 1024, 12),
    "causal": masks.causal(1024),
    "sliding window": masks.sliding_window(1024, 127),
    "full": masks.full(1024),
}
# Most calls of any stage of any rank in either pass.
STAGE_CALLS = {
    "auto": 2,
    "zigzag": 2,
    "ring": 1,
    "contiguous": 1,
    "ulysses": 1,
    "allgather": 3,
    "magi": 8,
}


@pytest.mark.parametrize("planner", STAGE_CALLS)
@pytest.mark.parametrize("name", STAGE_MASKS)
def test_stages_of_real_plans_take_few_calls(planner, name):
    plan = make_plan(STAGE_MASKS[name], 4, config(planner))
    works = [
        work
        for pass_name in ("forward", "backward")
        for stage in plan.get_pass(pass_name).stages
        for work in stage.work
    ]
    assert max(len(group_calls(work)) for work in works) <= STAGE_CALLS[planner]
    for work in works[:4]:
        np.testing.assert_array_equal(times_computed(work), work.to_dense().astype(int))
