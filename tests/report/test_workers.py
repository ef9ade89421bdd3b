"""Who computes which pair: cells against the dense mask, rank by rank."""

import numpy as np
import pytest

from megatron_cp import CPConfig, make_plan
from megatron_cp import mask as masks
from megatron_cp.mask import documents, sliding_window
from megatron_cp.plan import PLANNERS
from megatron_cp.report.figures.view import view_of_plan
from megatron_cp.report.figures.workers import pairs_by_rank, workers_figure
from megatron_cp.report.one_plan import plan_page
from megatron_cp.report.run.kept_packs import plan_again
from megatron_cp.report.run.record import read_run
from tests.report.runs import write_run

HEADS = {"num_heads": 8, "num_kv_heads": 8, "head_dim": 8}


def cells_of(dense, bounds):
    """Pairs of a dense mask in each cell of a grid."""
    rows = np.add.reduceat(dense.astype(float), bounds[:-1], axis=0)
    return np.add.reduceat(rows, bounds[:-1], axis=1)


@pytest.mark.parametrize("planner", sorted(PLANNERS))
def test_cells_of_all_ranks_sum_to_those_of_the_mask_and_each_rank_has_its_area(planner):
    mask = documents([400, 90, 6, 528]) & sliding_window(1024, 300)
    plan = make_plan(mask, 4, CPConfig(planner=planner, **HEADS))
    bounds = np.array([0, 100, 101, 512, 1000, 1024])
    pairs = pairs_by_rank(plan, bounds, bounds)
    assert np.array_equal(pairs.sum(axis=0), cells_of(mask.to_dense(), bounds))
    assert pairs.sum(axis=(1, 2)) == pytest.approx(view_of_plan(plan).area)


def test_cross_attention_has_cells_of_both_sides_and_bands_of_both_owners():
    mask = masks.from_cu_seqlens([0, 400, 490, 1018], "full", [0, 7, 20, 64])
    plan = make_plan(mask, 4, CPConfig(**HEADS))
    q_bounds, k_bounds = np.array([0, 100, 101, 512, 1000, 1018]), np.array([0, 7, 30, 64])
    pairs = pairs_by_rank(plan, q_bounds, k_bounds)
    rows = np.add.reduceat(mask.to_dense().astype(float), q_bounds[:-1], axis=0)
    assert np.array_equal(pairs.sum(axis=0), np.add.reduceat(rows, k_bounds[:-1], axis=1))
    page = plan_page(plan).content
    assert "1,018 queries and 64 keys on 4 ranks" in page
    for tokens, count in ((plan.global_from_local, 1018), (plan.key_tokens, 64)):
        for rank, ids in enumerate(tokens):
            assert f"rank {rank} owns {(ids < count).sum()} tokens" in page


@pytest.mark.parametrize(
    "planner", ["contiguous", "ring", "zigzag", "allgather", "per_document_zigzag"]
)
def test_where_owners_compute_each_rank_has_the_rows_that_it_owns(planner):
    mask = documents([37, 5, 101, 60])
    plan = make_plan(mask, 3, CPConfig(planner=planner, **HEADS))
    bounds = np.arange(0, mask.num_queries + 1, 7)
    bounds[-1] = mask.num_queries
    dense, pairs = mask.to_dense(), pairs_by_rank(plan, bounds, bounds)
    for rank, ids in enumerate(plan.global_from_local):
        owned = np.zeros_like(dense)
        owned[ids[ids < mask.num_queries]] = dense[ids[ids < mask.num_queries]]
        assert np.array_equal(pairs[rank], cells_of(owned, bounds))


def test_the_figure_stands_beside_the_usual_plan_and_nowhere_without_a_plan(tmp_path):
    write_run(tmp_path / "run", cp_size=4)
    run = read_run(tmp_path / "run")
    figure = workers_figure(plan_again(run, lambda words: None).drawn)
    assert {row[0] for row in figure.table.rows} >= {"auto", "per_document_zigzag"}
    assert workers_figure(run.packs[0]) is None  # the record alone does not say who computes
