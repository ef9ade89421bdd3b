import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_cp import CPConfig, make_plan
from megatron_cp.mask import documents, full, sliding_window
from megatron_cp.plan import PLANNERS
from megatron_cp.report.figures.view import (
    MAX_CHUNKS_SHOWN,
    area_by_chunk,
    chunk_bounds,
    kv_bytes,
    needed_bytes,
    view_of_plan,
)
from megatron_cp.report.run.record import read_run
from tests.report.runs import write_run

OWNERS_COMPUTE = ("contiguous", "ring", "zigzag", "allgather")
HEADS = {"num_heads": 8, "num_kv_heads": 8, "head_dim": 8}


def dense_heat(mask, tokens, bounds):
    """Pairs by owner and chunk, counted one row at a time."""
    per_row = mask.to_dense().sum(axis=1)
    heat = np.zeros((len(tokens), len(bounds) - 1))
    for rank, ids in enumerate(tokens):
        for token in ids:
            if token < mask.num_queries:
                chunk = max(c for c in range(len(bounds) - 1) if bounds[c] <= token)
                heat[rank, chunk] += per_row[token]
    return heat


@pytest.mark.parametrize("planner", OWNERS_COMPUTE)
@pytest.mark.parametrize("cp_size", [1, 2, 3, 8])
def test_cells_of_the_heat_map_equal_a_count_over_the_dense_mask(planner, cp_size):
    mask = documents([37, 0, 5, 101, 1, 60])
    view = view_of_plan(make_plan(mask, cp_size, CPConfig(planner=planner, **HEADS)))
    bounds = chunk_bounds([view])
    heat = area_by_chunk(view, mask, bounds)
    assert np.array_equal(heat, dense_heat(mask, view.tokens, bounds))


@pytest.mark.parametrize("planner", sorted(PLANNERS))
def test_cells_of_the_heat_map_sum_to_the_area_of_the_mask_and_rows_to_that_of_the_ranks(planner):
    mask = documents([400, 90, 6, 528]) & sliding_window(1024, 100)
    plan = make_plan(mask, 4, CPConfig(planner=planner, **HEADS))
    view = view_of_plan(plan)
    heat = area_by_chunk(view, mask, chunk_bounds([view]))
    assert heat.sum() == pytest.approx(mask.area())
    assert heat.sum(axis=1) == pytest.approx(view.area)


@settings(max_examples=25)
@given(
    st.lists(st.integers(0, 90), min_size=1, max_size=8).filter(lambda n: sum(n) > 0),
    st.integers(1, 5),
    st.sampled_from(OWNERS_COMPUTE),
)
def test_needed_bytes_equal_a_count_over_the_dense_mask(lengths, cp_size, planner):
    mask = documents(lengths)
    view = view_of_plan(make_plan(mask, cp_size, CPConfig(planner=planner, **HEADS)))
    dense, n = mask.to_dense(), mask.num_queries
    rows = [ids[ids < n] for ids in view.tokens]
    expected = [
        [
            0 if src == dst else dense[np.ix_(rows[dst], rows[src])].any(axis=0).sum()
            for dst in range(cp_size)
        ]
        for src in range(cp_size)
    ]
    assert np.array_equal(needed_bytes(view, mask, 10), 10 * np.array(expected))


def test_contiguous_plan_sends_exactly_what_is_needed_and_the_ring_sends_more():
    mask = documents([300, 20, 704])
    config = CPConfig(planner="contiguous", **HEADS)
    lean = view_of_plan(make_plan(mask, 4, config))
    ring = view_of_plan(make_plan(mask, 4, CPConfig(planner="ring", **HEADS)))
    needed = needed_bytes(lean, mask, kv_bytes(config))
    assert lean.sent_bytes == pytest.approx(needed)
    assert ring.sent_bytes.sum() > 1.5 * needed.sum()


def test_view_of_a_run_shows_what_the_plan_says(tmp_path):
    plan = write_run(tmp_path / "run", cp_size=3, planner="zigzag")
    pack = read_run(tmp_path / "run").packs[0]
    expected = view_of_plan(plan)
    assert np.array_equal(pack.ours.tokens, expected.tokens)
    assert np.array_equal(pack.ours.area, expected.area)
    assert pack.ours.sent_bytes == pytest.approx(expected.sent_bytes, abs=1)
    assert pack.ours.all_bytes == pytest.approx(expected.all_bytes, abs=20)
    assert pack.digest == plan.digest()
    bounds = chunk_bounds(pack.plans)
    recorded = area_by_chunk(pack.ours, pack.mask, bounds)
    assert np.array_equal(recorded, area_by_chunk(expected, plan.mask, bounds))


@given(st.integers(1, 5000), st.sampled_from([1, 2, 7, 16]))
def test_columns_of_the_heat_map_cover_the_pack_and_are_few(num_tokens, cp_size):
    mask = full(num_tokens)
    view = view_of_plan(make_plan(mask, cp_size, CPConfig(planner="zigzag", **HEADS)))
    bounds = chunk_bounds([view])
    assert bounds[0] == 0 and bounds[-1] == view.tokens.size
    assert (np.diff(bounds) > 0).all() and len(bounds) - 1 <= MAX_CHUNKS_SHOWN
