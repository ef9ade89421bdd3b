"""Megatron-LM's lines, word for word."""

import re
import sys
from datetime import datetime

import pytest

from megatron_cp.training.arguments import parse_arguments
from megatron_cp.training.logging.lines import (
    ProgressBar,
    StepReport,
    arguments_block,
    evaluation_lines,
    print_rank_last,
    training_line,
)
from tests.training.commands import SMALL_RUN

# Captured from Megatron-LM core_v0.19.2.
MEGATRONS_LINE = (
    " [2026-11-20 18:52:28.793548] iteration        5/       5 | consumed samples:           20 | "
    "elapsed time per iteration (ms): 112.1 | throughput per GPU (TFLOP/s/GPU): 0.0 | "
    "learning rate: 0.000000E+00 | global batch size:     4 | lm loss: 5.199499E+00 | "
    "loss scale: 1.0 | grad norm: 1.688 | num zeros: 0.0 | params norm: 18.816 | "
    "number of skipped iterations:   0 | number of nan iterations:   0 |"
)
MEGATRONS_EVALUATION = (
    " validation loss at iteration 5 on validation set | lm loss value: 5.106568E+00 | "
    "lm loss PPL: 1.651027E+02 | "
)


def report(**changes) -> StepReport:
    fields = {
        "iteration": 5,
        "train_iters": 5,
        "consumed_samples": 20,
        "elapsed_ms": 112.1,
        "learning_rate": 0.0,
        "global_batch_size": 4,
        "losses": {"lm loss": 5.199499},
        "grad_norm": 1.688,
        "tflops": 0.0,
        "num_zeros": 0.0,
        "params_norm": 18.816,
    }
    return StepReport(**(fields | changes))


def test_a_step_is_printed_as_megatron_prints_it():
    now = datetime(2026, 11, 20, 18, 52, 28, 793548)
    assert training_line(report(), now) == MEGATRONS_LINE


def test_parts_that_were_not_asked_for_are_left_out():
    now = datetime(2026, 11, 20, 18, 52, 28, 793548)
    line = training_line(report(tflops=None, num_zeros=None, params_norm=None), now)
    cut = re.sub(r" (throughput per GPU|num zeros|params norm)[^|]*\|", "", MEGATRONS_LINE)
    assert line == cut


@pytest.mark.parametrize(
    ("tflops", "said"),
    [(412.34, "412.3"), (1.0, "1.0"), (0.1234, "0.123"), (0.0227, "0.0227"), (3e-6, "0.00000300")],
)
def test_the_throughput_of_a_small_model_has_digits_that_count(tflops, said):
    assert f" throughput per GPU (TFLOP/s/GPU): {said} |" in training_line(report(tflops=tflops))


def test_an_evaluation_is_printed_as_megatron_prints_it():
    loss, perplexity = {"lm loss": 5.106568}, {"lm loss": 165.1027}
    rule, line, end = evaluation_lines("iteration 5", "validation", loss, perplexity).split("\n")
    assert line == MEGATRONS_EVALUATION
    assert rule == end == "-" * (len(line) + 1)


def test_arguments_at_their_defaults_are_counted():
    arguments = {"lr": 0.1, "adam_eps": 1e-8, "rank": 0, "save": None, "hidden_size": 64}
    defaults = {"lr": None, "adam_eps": 1e-8, "save": None}
    assert arguments_block(arguments, defaults, "runs/x/run.json").splitlines() == [
        "------------------------ arguments ------------------------",
        "  hidden_size ..................................... 64",
        "  lr .............................................. 0.1",
        "  rank ............................................ 0",
        "-------------------- end of arguments ---------------------",
        "2 others are at their defaults: runs/x/run.json",
    ]


def test_the_bar_of_a_terminal_says_tokens_per_second(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    bar = ProgressBar(total=2, done=0)
    bar.step(12345.6)
    bar.step(23456.7)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    print_rank_last("a line")
    bar.close()
    print_rank_last("another")
    printed = capsys.readouterr()
    assert "23,457 tokens/s" in printed.err.split("\r")[-1]
    assert printed.out == "\r\x1b[Ka line\nanother\n", "the first takes the place of the bar"


@pytest.mark.parametrize(
    ("flags", "is_there", "said"),
    [
        ([], False, "pretrain_gpt.py --help names them; --run-dir keeps all in run.json"),
        (["--run-dir", "RUN"], False, "RUN/run.json"),
        (["--run-dir", "RUN"], True, "RUN/run.json"),
        (["--run-dir", "RUN", "--skip-train"], False, "RUN/run.json"),
        (
            ["--run-dir", "RUN", "--skip-train"],
            True,
            "pretrain_gpt.py --help names them; RUN/run.json stays that of the training",
        ),
    ],
)
def test_where_all_arguments_stand_is_said_of_the_run_that_they_are_of(
    tmp_path, flags, is_there, said
):
    from megatron_cp.training.pretrain import _all_arguments

    if is_there:
        (tmp_path / "run.json").write_text("{}")
    config = parse_arguments(
        [*SMALL_RUN, *(word.replace("RUN", str(tmp_path)) for word in flags)], {}
    )
    assert _all_arguments(config) == said.replace("RUN", str(tmp_path))
