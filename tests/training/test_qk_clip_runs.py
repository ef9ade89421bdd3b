"""Runs of pretrain_gpt.py with --qk-clip: the same at every context size, its logit logged, its faults one line."""

import pytest

from tests.training.commands import DATA, MODEL, STEPS, metrics, train
from tests.training.verdicts import refusal

CLIP = ["--qk-clip", "--qk-clip-threshold", "0.01"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--qk-clip-threshold", "0"], "--qk-clip-threshold 0.0 must be positive and finite"),
        (["--qk-clip-alpha", "1"], "--qk-clip-alpha 1.0 must lie in (0, 1)"),
        (["--use-distributed-optimizer"], "leave out --use-distributed-optimizer"),
    ],
)
def test_what_qk_clip_needs_is_one_line(capsys, flags, message):
    assert message in refusal(capsys, *MODEL, *STEPS, *DATA, "--qk-clip", *flags)


def test_clipped_runs_of_one_and_two_context_ranks_agree(tmp_path):
    rows = {}
    for name, ranks, flags in (
        ("plain", 1, ["--log-max-attention-logit"]),
        ("one", 1, CLIP),
        ("two", 2, [*CLIP, "--context-parallel-size", "2"]),
    ):
        save = tmp_path / name
        more = ["--eval-iters", "0", "--no-wandb", "--run-dir", str(save)]
        train(ranks, *MODEL, *STEPS, *DATA, *flags, *more)
        rows[name] = [
            list(metrics(save, key).values()) for key in ("lm loss", "max_attention_logit")
        ]
    (_, plain), (losses, logits), (losses_of_two, logits_of_two) = rows.values()
    assert logits[0] == plain[0] > 0.01
    assert max(logits[1:]) < max(plain[1:])
    assert losses_of_two == pytest.approx(losses, rel=1e-5)
    assert logits_of_two == pytest.approx(logits, rel=1e-3)
