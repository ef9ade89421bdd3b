"""Which steps are taken, and when and in which batches a model is evaluated: Megatron-LM's flags."""

import pytest

from tests.training.commands import SMALL_RUN, metrics, train
from tests.training.verdicts import parse, refusal

STILL = [*SMALL_RUN, "--lr", "0", "--eval-interval", "1", "--eval-global-batch-size", "4"]


def test_skipped_steps_and_late_evaluations_leave_the_others_what_they_were(tmp_path):
    """With a learning rate of 0 a loss says which packs it is of."""
    every, some = tmp_path / "every", tmp_path / "some"
    train(1, *STILL, "--run-dir", str(every))
    flags = ["--iterations-to-skip", "2", "9", "--start-eval-at-iter", "3"]
    output = train(2, *STILL, *flags, "--eval-micro-batch-size", "2",
                   "--context-parallel-size", "2", "--run-dir", str(some))  # fmt: skip
    assert "iteration 2 is left out (--iterations-to-skip): 2 packs are consumed" in output
    assert "consumed samples:            8" in output
    wanted, losses = metrics(every), metrics(some)
    assert len(set(wanted.values())) == len(wanted) == 4
    assert losses == pytest.approx({n: wanted[n] for n in (1, 3, 4)}, rel=2e-6)
    wanted, losses = (metrics(run, "lm loss validation") for run in (every, some))
    assert set(wanted) == {1, 2, 3, 4}
    assert losses == pytest.approx({n: wanted[n] for n in (3, 4)}, rel=2e-6)


def test_a_resumed_run_leaves_out_the_same_step(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run = [*SMALL_RUN, "--eval-iters", "0", "--iterations-to-skip", "3"]
    train(1, *run, "--run-dir", str(whole))
    save = ["--save", str(broken), "--load", str(broken)]
    train(1, *run, *save, "--exit-interval", "2")
    train(1, *run, *save)
    assert set(metrics(whole)) == {1, 2, 4}
    assert metrics(whole) == metrics(broken)
    rates = metrics(whole, "learning-rate")
    assert rates[4] == pytest.approx(rates[2] - (rates[1] - rates[2]))  # no step, no decay


def test_batches_of_an_evaluation_are_dealt_by_their_own_sizes(capsys):
    run = [*SMALL_RUN, "--global-batch-size", "4"]
    args = parse(*run, "--eval-micro-batch-size", "2", world_size=2)
    assert (args.eval_global_batch_size, args.eval_micro_batch_size) == (4, 2)
    assert parse(*run).eval_micro_batch_size == 1
    line = refusal(capsys, *run, "--eval-micro-batch-size", "3")
    assert line == (
        "--eval-global-batch-size 4 must be a multiple of eval micro-batch size x data-parallel size = 3 x 1 = 3"
    )
    for flag in ("--eval-micro-batch-size", "--iterations-to-skip"):
        assert refusal(capsys, *SMALL_RUN, flag, "0").startswith(f"{flag} 0 must be positive")
