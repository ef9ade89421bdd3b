"""Segments of a placement against a loop over tokens."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from megatron_cp import mask as masks
from megatron_cp.config import CPConfig
from megatron_cp.plan import make_plan
from megatron_cp.plan.segments import (
    count_segments,
    find_segments,
    states_received,
    wanted_states,
    wanted_tokens,
)
from tests.runtime.handmade import random_plan


def counted_by_hand(plan, lengths):
    """Returns segments as (document, rank, row, length), and who wants which, token by token."""
    home = {
        token: (rank, row)
        for rank, ids in enumerate(plan.global_from_local.tolist())
        for row, token in enumerate(ids)
    }
    segments, start = [], 0
    for document, length in enumerate(lengths):
        for token in range(start, start + length):
            rank, row = home[token]
            if token > start and home[token - 1] == (rank, row - 1):
                segments[-1][3] += 1
            else:
                segments.append([document, rank, row, 1])
        start += length
    wanted = {
        (later[1], i)
        for i, earlier in enumerate(segments)
        for later in segments[i + 1 :]
        if later[0] == earlier[0]
    }
    return segments, wanted


def cases():
    lengths = st.lists(st.integers(0, 9), min_size=1, max_size=7).filter(sum)
    planners = st.sampled_from(["zigzag", "contiguous", "stripe", "random"])
    return hypothesis.given(lengths, st.integers(1, 5), planners)


def plan_of(lengths, cp_size, planner):
    mask = masks.documents(lengths, within="causal")
    if planner == "random":
        return random_plan(mask, cp_size, seed=len(lengths))
    return make_plan(mask, cp_size, CPConfig(planner=planner))


@cases()
@hypothesis.settings(max_examples=60)
def test_segments_and_their_readers_are_those_of_a_loop_over_tokens(lengths, cp_size, planner):
    plan = plan_of(lengths, cp_size, planner)
    expected, readers = counted_by_hand(plan, lengths)
    found = find_segments(plan, lengths)
    columns = (found.document, found.rank, found.row, found.length)
    assert np.array_equal(np.stack(columns, axis=1), expected)
    wanted = wanted_states(found)
    pairs = list(zip(wanted.reader.tolist(), wanted.item.tolist(), strict=True))
    assert pairs == sorted(readers)
    counts = count_segments(plan, lengths)
    pieces = [segment[0] for segment in expected]
    for rank in range(cp_size):
        own = [segment for segment in expected if segment[1] == rank]
        assert counts.owned[rank] == len(own)
        assert counts.cut[rank] == sum(pieces.count(segment[0]) > 1 for segment in own)
        assert counts.received[rank] == sum(
            reader == rank and expected[item][1] != rank for reader, item in readers
        )


@cases()
@hypothesis.settings(max_examples=60)
def test_tokens_seen_are_those_before_in_the_document(lengths, cp_size, planner):
    plan = plan_of(lengths, cp_size, planner)
    starts = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)
    owner = {t: r for r, ids in enumerate(plan.global_from_local.tolist()) for t in ids}
    wanted, seen = wanted_tokens(plan, lengths, 3)
    readers = set()
    for token, start in enumerate(starts.tolist()):
        for offset in range(4):
            source = token - offset
            assert seen[offset, token] == (source if source >= start else -1)
            if source >= start and owner[source] != owner[token]:
                readers.add((owner[token], source))
    pairs = list(zip(wanted.reader.tolist(), wanted.item.tolist(), strict=True))
    assert pairs == sorted(readers)


def test_planners_that_keep_tokens_together_have_few_segments():
    """One document on P ranks: what docs/linear_attention.md says."""
    mask, cp_size = masks.causal(256), 8
    received = {
        planner: count_segments(make_plan(mask, cp_size, CPConfig(planner=planner)), [256]).received
        for planner in ("contiguous", "zigzag", "stripe")
    }
    assert received["contiguous"].tolist() == list(range(8))
    # the two pieces of the last rank touch: 15 segments in all
    assert received["zigzag"].tolist() == [*(13 - rank for rank in range(7)), 7]
    assert received["stripe"].tolist() == [7 * 32 - 7 + rank for rank in range(8)]


def test_lengths_that_are_not_the_plans_are_refused():
    plan = make_plan(masks.causal(16), 2)
    with pytest.raises(ValueError, match="add up to 15 tokens, the plan has 16"):
        count_segments(plan, [15])
    with pytest.raises(TypeError, match="one list of integers"):
        count_segments(plan, [[16]])


@cases()
@hypothesis.settings(max_examples=30)
def test_states_of_a_placement_are_those_of_its_plan(lengths, cp_size, planner):
    plan, bounds = plan_of(lengths, cp_size, planner), np.cumsum([0, *lengths])
    expected = count_segments(plan, lengths).received
    assert np.array_equal(states_received(plan.global_from_local, bounds), expected)


def test_large_states_keep_documents_together():
    """One long document and short ones: balancing by area cuts it up, which costs states."""
    lengths = [20_000] + [500] * 40
    mask = masks.documents(lengths, within="causal")
    config = {"num_heads": 16, "num_kv_heads": 2, "topology": "h100"}
    received, seconds = [], []
    for size in (None, 1 << 20, 1 << 28):
        plan = make_plan(mask, 8, CPConfig(linear_state_bytes=size, **config))
        received.append(int(count_segments(plan, lengths).received.max()))
        seconds.append(sum(plan.stats(name)["makespan_ms"] for name in ("forward", "backward")))
    assert received[0] >= received[1] >= received[2]
    assert received[2] < received[0]
    assert seconds[0] <= 1.0025 * min(seconds)  # plans so near count as equal
