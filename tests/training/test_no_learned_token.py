"""Steps and evaluations in which no token counts in the loss have none: not a loss of zero."""

import pytest

from megatron_cp.data.document_set import BIDIRECTIONAL
from tests.data.corpora import write_corpus
from tests.training.commands import MODEL, metrics, stopped, train

RUN = (
    *MODEL, "--vocab-size", "40000", "--seq-length", "64", "--reset-attention-mask", "--reset-position-ids",
    "--num-workers", "0", "--micro-batch-size", "1", "--global-batch-size", "1", "--train-iters", "6", "--lr", "1e-3",
    "--log-interval", "3", "--eval-iters", "1", "--split", "75,25,0", "--no-wandb",
)  # fmt: skip


def test_a_step_without_a_learned_token_has_no_loss(tmp_path):
    """Bidirectional documents carry no loss; those for validation all are, and every second one for training."""
    kinds = [BIDIRECTIONAL if document % 2 or document >= 24 else 0 for document in range(32)]
    write_corpus(tmp_path / "text", [64] * 32, kinds)
    flags = ["--data-path", str(tmp_path / "text"), "--run-dir", str(tmp_path / "run")]
    out = train(1, *RUN, *flags)
    learned = metrics(tmp_path / "run", "loss/valid_tokens")
    losses = metrics(tmp_path / "run")
    assert sorted(set(learned.values())) == [0, 63]
    assert set(losses) == {step for step, count in learned.items() if count}
    assert all(loss > 1 for loss in losses.values())
    for last in (3, 6):
        window = [losses[step] for step in range(last - 2, last + 1) if step in losses]
        line = next(text for text in out.splitlines() if f"iteration {last:8d}/" in text)
        if window:
            printed = float(line.split("lm loss:")[1].split("|")[0])
            assert printed == pytest.approx(sum(window) / len(window), rel=1e-5)
        else:
            assert "lm loss:" not in line
    assert "no token of the evaluation counts in the loss" in out
    assert "validation loss at" not in out


@pytest.mark.parametrize(
    ("lengths", "kinds"),
    [([1] * 80, [0] * 80), ([9] * 8, [BIDIRECTIONAL] * 8), ([9, 1, 0] * 8, [9, 1, 0] * 8)],
    ids=["of one token", "bidirectional", "prefix as a whole"],
)
def test_a_run_that_could_learn_no_token_is_refused(tmp_path, lengths, kinds):
    write_corpus(tmp_path / "text", lengths, kinds)
    run = [*RUN, "--vocab-size", "100000", "--context-parallel-size", "2"]
    run += ["--data-path", str(tmp_path / "text")]
    assert "no token of the training split would be learned" in stopped(2, *run)
    kinds[3] = 0  # of the training split
    lengths[3] = max(lengths[3], 2)
    write_corpus(tmp_path / "text", lengths, kinds)
    train(2, *run, "--train-iters", "1")
