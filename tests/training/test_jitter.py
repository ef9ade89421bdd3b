"""Noise on what routers see is training's alone: an evaluation routes as the weights say, and draws nothing."""

from tests.training.commands import SMALL_RUN, metrics, train

RUN = [
    *SMALL_RUN,
    "--num-experts",
    "4",
    "--moe-ffn-hidden-size",
    "48",
    "--moe-input-jitter-eps",
    "0.3",
]


def test_an_evaluation_changes_no_step_and_is_the_same_every_time(tmp_path):
    """With weights that stay as they are, all evaluations are one number."""
    for name, flags in {
        "plain": ["--eval-interval", "100"],
        "evaluated": ["--eval-interval", "1"],
        "still": ["--eval-interval", "1", "--lr", "0", "--min-lr", "0"],
    }.items():
        train(1, *RUN, *flags, "--run-dir", str(tmp_path / name))
    assert metrics(tmp_path / "evaluated") == metrics(tmp_path / "plain")
    assert len(set(metrics(tmp_path / "plain").values())) == 4
    (loss,) = set(metrics(tmp_path / "still", "lm loss validation").values())
    assert loss > 0
