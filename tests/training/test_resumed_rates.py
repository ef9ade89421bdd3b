"""Which learning rates a resumed run has: those of the flags, of the checkpoint, or a refusal."""

import pytest

from tests.training.commands import SMALL_RUN, metrics, stopped, train

pytestmark = pytest.mark.timeout(400)
RUN = [*SMALL_RUN, "--lr-decay-style", "constant"]
FLAGS_WIN, CHECKPOINT_WINS = (
    "--override-opt-param-scheduler",
    "--use-checkpoint-opt-param-scheduler",
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two steps at 2e-2, the embedding's at 1e-3."""
    folder = tmp_path_factory.mktemp("saved")
    rates = ["--lr", "2e-2", "--decoupled-lr", "1e-3", "--untie-embeddings-and-output-weights"]
    save = [
        "--save",
        str(folder / "ckpt"),
        "--save-interval",
        "2",
        "--run-dir",
        str(folder / "run"),
    ]
    train(1, *RUN, *rates, *save, "--train-iters", "4", "--exit-interval", "2")
    return folder / "ckpt"


def resumed(saved, tmp_path, *flags):
    load = ["--load", str(saved), "--run-dir", str(tmp_path), "--train-iters", "4"]
    train(1, *RUN, "--untie-embeddings-and-output-weights", *load, *flags)
    losses = metrics(tmp_path)
    return set(metrics(tmp_path, "learning-rate").values()), [
        losses[step] for step in sorted(losses)
    ]


def test_the_rate_is_that_of_whom_the_user_lets_win(saved, tmp_path):
    rates = ["--lr", "1e-4", "--decoupled-lr", "1e-3"]
    assert resumed(saved, tmp_path / "a", *rates, FLAGS_WIN)[0] == {1e-4}
    assert resumed(saved, tmp_path / "b", *rates, CHECKPOINT_WINS)[0] == {2e-2}


def test_the_rate_of_the_embedding_is_no_other_without_a_word(saved, tmp_path):
    same = ["--lr", "2e-2", "--decoupled-lr", "1e-3"]
    other = ["--lr", "2e-2", "--decoupled-lr", "1e-1"]
    _, losses = resumed(saved, tmp_path / "same", *same)
    _, changed = resumed(saved, tmp_path / "changed", *other, FLAGS_WIN)
    assert losses[0] == changed[0] and losses[1] != changed[1]
    load = ["--load", str(saved), "--run-dir", str(tmp_path / "refused"), "--train-iters", "4"]
    line = stopped(1, *RUN, "--untie-embeddings-and-output-weights", *load, *other)
    assert "max_lr of a group of parameters was 0.001, and is 0.1 now; give its values" in line


def test_other_groups_of_parameters_are_no_damage(saved, tmp_path):
    load = ["--load", str(saved), "--run-dir", str(tmp_path), "--train-iters", "4"]
    one_rate = ["--untie-embeddings-and-output-weights", "--lr", "2e-2", FLAGS_WIN]
    line = stopped(1, *RUN, *load, *one_rate)
    assert "another optimizer: it has 3 groups of parameters and this run 2" in line


def test_settings_that_the_checkpoint_keeps_are_told(saved, tmp_path):
    load = ["--load", str(saved), "--run-dir", str(tmp_path), "--train-iters", "4"]
    rates = ["--lr", "2e-2", "--decoupled-lr", "1e-3", "--untie-embeddings-and-output-weights"]
    told = train(1, *RUN, *load, *rates, "--adam-beta2", "0.9")
    assert f"--adam-beta1, --adam-beta2 stays (0.9, 0.999), as {saved}/" in told
    assert "note: --adam-eps" not in told
