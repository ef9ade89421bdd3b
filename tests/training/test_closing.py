"""The box at the end of a run."""

import re
import shlex

import pytest

from megatron_cp.training.arguments import parse_arguments
from megatron_cp.training.logging.closing import Summary, closing_box, flag_of_more, next_lines
from tests.training.commands import SMALL_RUN, metrics, train

ROW = {
    "cp/area_max_over_mean": 1.0,
    "cp/zigzag_area_max_over_mean": 1.2,
    "cp/per_document_area_max_over_mean": 1.01,
    "cp/comm_bytes_sent": 3e6,
    "cp/ring_bytes_sent": 4e6,
}


def test_the_box_says_means_over_all_steps_and_what_to_run_next():
    summary = Summary(started=100.0)
    for step in range(20):
        summary.step(9.0 - 0.1 * step, 512)
        summary.row(ROW | {"cp/zigzag_area_max_over_mean": 1.2 + 0.01 * step})
    summary.evaluated("validation", 20, 7.5)
    lines = next_lines(
        "runs/my run", "runs/my run", "runs/my run/wandb/offline-run-1", None, "ab12"
    )
    box = closing_box(summary, 20, lines, now=190.0)
    assert "done: 20 steps, 10,240 tokens, 0:01:30" in box
    assert "8.9500 -> 7.1500, mean of the first and last 2 steps" in box
    assert "7.5000 at step 20" in box
    others = "zigzag 1.295, Transformer Engine (THD) 1.010"
    assert f"1.000 max / mean area, {others} (mean of 20 steps)" in box
    assert "3 MB a step, 75.0% of what zigzag or Transformer Engine (THD) sends (mean" in box
    assert "python -m megatron_cp report 'runs/my run', then open 'runs/my run/report.html'" in box
    assert "wandb sync 'runs/my run/wandb/offline-run-1'" in box and "--load 'runs/my run'" in box
    assert "ab12; --wandb-run-id ab12 goes on with it" in box


def test_a_resumed_run_counts_its_own_steps_and_says_where_its_loss_ended():
    summary = Summary(started=0.0)
    for loss in (3.0, float("nan"), None, 2.0):
        summary.step(loss, 100)
    box = closing_box(summary, 10, [], now=1.0)
    assert "done: 4 steps (the run has 10), 400 tokens, 0:00:01" in box
    assert "3.0000 -> 2.0000, first and last step" in box
    summary.step(float("nan"), 100)
    assert "3.0000 -> nan, first" in closing_box(summary, 10, [], now=1.0)


def test_a_balance_that_some_steps_did_not_count_is_left_out():
    """A mean over other steps would stand beside ours as if it were of the same."""
    summary = Summary()
    summary.row(ROW)
    summary.row({key: v for key, v in ROW.items() if "per_document" not in key})
    (words,) = [words for name, words in summary.facts() if name == "balance"]
    assert words == "1.000 max / mean area, zigzag 1.200 (mean of 2 steps)"


def test_one_rank_sends_nothing_and_says_nothing_of_it():
    summary = Summary()
    summary.step(5.0, 8)
    summary.row(
        {"cp/area_max_over_mean": 1.0, "cp/comm_bytes_sent": 0.0, "cp/ring_bytes_sent": 0.0}
    )
    assert [name for name, _ in summary.facts()] == ["training loss"]


def test_a_run_without_folders_has_nothing_to_open():
    assert next_lines(None, None, None) == []


def test_what_a_run_that_left_early_says_of_going_on_leads_to_the_losses_of_a_whole_one(tmp_path):
    """Other learning rates, as a longer run has, would be other losses."""
    flags = [*SMALL_RUN, "--save"]
    whole = train(1, *flags, str(tmp_path / "whole"))
    said = train(1, *flags, str(tmp_path / "left"), "--exit-interval", "2")
    assert "validation loss at iteration 4" in whole and "validation loss" not in said
    advice = re.search(r"go on +the same command with (.+)", said)[1]
    train(1, *flags, str(tmp_path / "left"), *shlex.split(advice))
    assert metrics(tmp_path / "left") == metrics(tmp_path / "whole")


@pytest.mark.parametrize(("flag", "length"), [("--train-iters", "4"), ("--train-samples", "8")])
def test_a_run_that_came_to_its_end_names_the_flag_that_makes_it_longer(flag, length):
    place = SMALL_RUN.index("--train-iters")
    config = parse_arguments([*SMALL_RUN[:place], flag, length, *SMALL_RUN[place + 2 :]], {})
    ((_, words),) = next_lines(None, "runs/a", None, flag_of_more(config, 4))
    assert words.endswith(f"--load runs/a, more {flag} and --override-opt-param-scheduler")
    assert flag_of_more(config, 3) is None
