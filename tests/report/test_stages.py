"""The stages on a run's page are those of its plan, simulated; both passes, ours beside the usual scheme."""

import re

from megatron_cp.plan.hardware.simulate import simulate_pass
from megatron_cp.report.figures.timeline import stages_figure
from megatron_cp.report.run.page import run_page
from megatron_cp.report.run.record import read_run
from tests.report.runs import write_run


def test_the_page_shows_the_stages_of_both_passes_and_says_that_they_are_predicted(tmp_path):
    write_run(tmp_path, cp_size=4)
    text = run_page(read_run(tmp_path))
    figure = text[text.index("<h3>Stages") :].split("</figure>")[0]
    assert "predicted" in figure.split("</h3>")[0] and "simulated from the plans" in figure
    titles = re.findall(r">([^<>]*, (?:forward|backward)): [\d.e-]+ ms<", figure)
    assert titles == [
        "auto, forward",
        "auto, backward",
        "per_document_zigzag (Transformer Engine, THD), forward",
        "per_document_zigzag (Transformer Engine, THD), backward",
    ]


def test_the_numbers_are_those_of_the_simulation(tmp_path):
    from megatron_cp.report.figures.view import view_of_pack

    plan = write_run(tmp_path, cp_size=2)
    figure = stages_figure(view_of_pack([plan]))
    for name in ("forward", "backward"):
        run = simulate_pass(plan, name, num_traced=2)
        rows = [row for row in figure.table.rows if row[0] == f"auto, {name}"]
        assert len(rows) == sum(map(len, run.timeline)) > 0
        assert max(row[5] for row in rows) <= run.seconds * 1e3 * (1 + 1e-9)


def test_one_rank_has_no_stages_to_show(tmp_path):
    write_run(tmp_path, cp_size=1)
    assert "<h3>Stages" not in run_page(read_run(tmp_path))
