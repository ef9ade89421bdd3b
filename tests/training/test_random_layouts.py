"""A sample of `benchmarks/layouts_at_random.py`: two layouts of a model, and the losses of one rank in both."""

import json
from pathlib import Path

import pytest

from tests.training.random_layouts import differences, draw, rows_of, run_trials

pytestmark = pytest.mark.timeout(1800)


def test_a_model_trains_in_random_layouts_as_on_one_rank(tmp_path: Path):
    trials = draw(2, seed=3051, folder=tmp_path, per_model=2)
    verdicts = list(run_trials(trials, tmp_path))
    assert [verdict.result for verdict in verdicts] == ["equal"] * 2, verdicts


def test_a_value_that_differs_or_that_one_run_lacks_is_a_difference(tmp_path: Path):
    plain = [{"iteration": 1, "lm loss": 6.0, "grad-norm": 2.0, "cp/plan_ms": 1.0, "time": 1.0}]
    other = [{"iteration": 1, "lm loss": 6.3, "z_loss": 0.1, "cp/plan_ms": 9.0, "time": 5.0}]
    plain[0]["indexer loss"], other[0]["indexer loss"] = 1.0e-5, 1.1e-5
    for name, rows in (("plain", plain), ("other", other)):
        (tmp_path / name).mkdir()
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / name / "metrics.jsonl").write_text(lines)
    found = differences(rows_of(tmp_path / "plain"), rows_of(tmp_path / "other"), first=1)
    infinite = float("inf")
    assert {name: difference for _, name, difference in found} == {
        "lm loss": pytest.approx(0.3 / 6.3),
        "indexer loss": pytest.approx(1e-3),
        "grad-norm": infinite,
        "z_loss": infinite,
    }
