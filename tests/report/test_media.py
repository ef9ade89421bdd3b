"""What a tracker is given of a run: the page, its pictures and tables, equal to what the page says."""

import numpy as np

from megatron_cp.plan import PLANNERS
from megatron_cp.report.run.media import run_media
from megatron_cp.report.run.page import run_page
from megatron_cp.report.run.record import read_run
from tests.report.runs import LENGTHS, write_run


def test_pages_tables_and_pictures_are_those_of_the_run(tmp_path):
    plan = write_run(tmp_path, cp_size=4)
    media = run_media(tmp_path)
    assert media.pages["report/page"] == run_page(read_run(tmp_path))
    for key in ("report/mask", "report/dispatch", "report/who_computes"):
        assert media.pages[key].count("<figure") == 1 and "<svg" in media.pages[key]
        assert "http" not in media.pages[key].replace("http-equiv", "")
    planners = media.tables["report/planners"]
    names = [row[0] for row in planners.rows]
    assert names[0] == "auto" and set(names) <= set(PLANNERS) and len(names) > 8
    seconds = plan.stats("forward")["makespan_ms"] + plan.stats("backward")["makespan_ms"]
    assert np.isclose(planners.rows[0][planners.columns.index("predicted ms")], seconds)


def test_the_table_of_lengths_counts_every_document(tmp_path):
    write_run(tmp_path)
    table = run_media(tmp_path).tables["report/document_lengths"]
    low, high = (np.array([row[i] for row in table.rows]) for i in (0, 1))
    found = np.array(
        [
            ((a <= np.array(LENGTHS)) & (np.array(LENGTHS) < b)).mean()
            for a, b in zip(low, high, strict=True)
        ]
    )
    assert np.allclose([row[2] for row in table.rows], found)


def test_one_rank_has_no_planners_to_compare(tmp_path):
    write_run(tmp_path, cp_size=1)
    media = run_media(tmp_path)
    assert "report/planners" not in media.tables and "report/mask" in media.pages
