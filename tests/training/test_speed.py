"""Rows tell of the steps since the row before, log lines of those since the last line."""

import json

import pytest

from megatron_cp.training.logging import speed
from tests.training.commands import SMALL_RUN, train


def test_a_clock_counts_time_and_work_from_its_start(monkeypatch):
    now = iter([12.0, 16.0, 21.0])
    monkeypatch.setattr(speed.time, "perf_counter", lambda: next(now))
    clock = speed.Clock(started=10.0)
    clock.step(100, 8e12, 0.5)
    assert (clock.seconds, clock.tokens_per_s(), clock.tflops(2)) == (2.0, 50.0, 2.0)
    clock.step(200, 4e12, 0.0)
    assert (clock.seconds, clock.tokens_per_s(), clock.tflops(2)) == (3.0, 50.0, 1.0)
    assert clock.waited_s == 0.5
    clock = speed.Clock(started=20.0)
    clock.step(7, 0.0, 0.0)
    assert (clock.steps, clock.seconds, clock.tokens_per_s()) == (1, 1.0, 7.0)


@pytest.mark.parametrize("interval", [1, 3])
def test_the_time_and_speed_of_a_row_are_of_its_own_steps(tmp_path, interval):
    """Packs of whole documents hold other numbers of tokens at each step; the box counts them all."""
    flags = (
        f"--train-iters 6 --log-interval 100 --packing keep --tensorboard-log-interval {interval}"
    )
    told = train(
        1, *SMALL_RUN, *flags.split(), "--eval-interval", "100", "--run-dir", str(tmp_path)
    )
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "iteration-time" in row]
    assert [row["iteration"] for row in rows] == list(range(interval, 7, interval))
    tokens = [row["tokens-per-second"] * row["iteration-time"] * interval for row in rows]
    assert f"done: 6 steps, {round(sum(tokens)):,} tokens" in told
    assert all(count == pytest.approx(round(count), abs=1e-6) for count in tokens)
    assert interval > 1 or len({round(count) for count in tokens}) > 1
