"""The box at the end of a run."""

from megatron_cp.training.logging.closing import Summary, closing_box, next_lines

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
    summary.held_out.append((20, 7.5))
    lines = next_lines("runs/my run", "runs/my run", "runs/my run/wandb/offline-run-1")
    box = closing_box(summary, 20, lines, now=190.0)
    assert "done: 20 steps, 10,240 tokens, 0:01:30" in box
    assert "8.9500 -> 7.1500, mean of the first and last 2 steps" in box
    assert "7.5000 at step 20" in box
    others = "zigzag 1.295, Transformer Engine (THD) 1.010"
    assert f"1.000 max / mean area, {others} (mean of 20 steps)" in box
    assert "3 MB a step, 75.0% of what zigzag or Transformer Engine (THD) sends (mean" in box
    assert "python -m megatron_cp report 'runs/my run', then open 'runs/my run/report.html'" in box
    assert "wandb sync 'runs/my run/wandb/offline-run-1'" in box and "--load 'runs/my run'" in box


def test_a_resumed_run_counts_its_own_steps_and_leaves_out_losses_that_are_no_numbers():
    summary = Summary(started=0.0)
    for loss in (3.0, float("nan"), 2.0):
        summary.step(loss, 100)
    box = closing_box(summary, 10, [], now=1.0)
    assert "done: 3 steps (the run has 10), 300 tokens, 0:00:01" in box
    assert "3.0000 -> 2.0000, mean of the first and last 1 steps" in box


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
