"""A loss or gradient that is not finite: the document is named, all ranks decide alike, nothing is updated."""

import json
import math

import numpy as np
import pytest

from megatron_cp.data.indexed_writer import IndexedWriter
from megatron_cp.training.bad_steps.attempt import Ceiling
from tests.faults.plants import POISON
from tests.faults.program import Launch, run_program
from tests.training.commands import MODEL, error_lines, metrics

pytestmark = pytest.mark.timeout(1800)

NUM_DOCUMENTS, BAD_DOCUMENT = 60, 17
RUN = (
    *MODEL, "--untie-embeddings-and-output-weights", "--tokenizer-type", "NullTokenizer", "--vocab-size", "1000",
    "--seq-length", "128", "--reset-attention-mask", "--reset-position-ids", "--num-workers", "0", "--split", "1",
    "--micro-batch-size", "2", "--train-iters", "4", "--lr", "1e-3", "--log-interval", "1", "--eval-iters", "0",
    "--no-wandb", "--cp-planner", "zigzag",  # planned in a twentieth of the time; documents are named alike by any plan
)  # fmt: skip
LOGITS = "--log-max-attention-logit"
CP2 = ("--context-parallel-size", "2", "--global-batch-size", "8")
LAYOUTS = {
    "two context ranks": (2, CP2),
    "two stages": (2, ("--pipeline-model-parallel-size", "2", "--global-batch-size", "8")),
    "two replicas": (2, ("--global-batch-size", "8")),
    "two replicas, optimizer in shards": (
        2,
        ("--global-batch-size", "8", "--use-distributed-optimizer", "--overlap-grad-reduce",
         "--overlap-param-gather"),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Documents of 20 to 80 tokens below the poison, one of which holds it once."""
    prefix = tmp_path_factory.mktemp("corpus") / "text_document"
    draw = np.random.default_rng(7)
    with IndexedWriter(prefix, dtype=np.int32) as writer:
        for document in range(NUM_DOCUMENTS):
            tokens = draw.integers(1, POISON, size=draw.integers(20, 80))
            if document == BAD_DOCUMENT:
                tokens[5] = POISON
            writer.add_document(tokens)
        writer.finish()
    return prefix


def launch(corpus, folder, plant: str, *more: str, layout="two context ranks") -> Launch:
    world_size, flags = LAYOUTS[layout]
    command = (*RUN, *flags, "--data-path", str(corpus), "--run-dir", str(folder), *more)
    return Launch(command, world_size, plant=f"tests.faults.plants.{plant}" if plant else "")


@pytest.mark.parametrize("plant", ["nan_embedding", "infinite_gradient"])
def test_the_document_with_a_planted_number_is_named_on_all_ranks(tmp_path, corpus, plant: str):
    folders = {name: tmp_path / name for name in LAYOUTS}
    outcomes = run_program([launch(corpus, folders[name], plant, layout=name) for name in LAYOUTS])
    for name, ranks in zip(LAYOUTS, outcomes, strict=True):
        lines = [error_lines(rank.stderr) for rank in ranks]
        assert [rank.code for rank in ranks] == [17] * len(ranks), (name, ranks[0].stderr[-3000:])
        assert [len(found) for found in lines] == [1] * len(ranks)
        assert len({found[0] for found in lines}) == 1
        line = lines[0][0]
        assert f"caused by document {BAD_DOCUMENT} of {corpus}, tokens 0 to" in line, (name, line)
        assert "computed again it is the same" in line
        if plant == "nan_embedding":
            assert "begins in embedding.word_embeddings" in line, line
            assert "pipeline stage 0" in line
        else:
            assert "the gradient is not finite" in line, line
            assert "begins in the gradient of embedding.word_embeddings.weight" in line
        (record,) = folders[name].glob("bad_steps/*.json")
        assert json.loads(record.read_text())["line"] in line
        (kept,) = folders[name].glob("bad_steps/*.npz")
        assert POISON in np.load(kept)["tokens"]


def test_bad_steps_are_left_out_and_only_they(tmp_path, corpus):
    """The oracle is a run whose weights never meet the poison: its steps before the bad one are the same."""
    outcomes = run_program(
        [
            launch(corpus, tmp_path / "bad", "nan_embedding", "--on-bad-step", "skip", LOGITS),
            launch(corpus, tmp_path / "good", "", LOGITS),
            launch(
                corpus, tmp_path / "row", "nan_embedding", "--on-bad-step", "skip",
                "--bad-steps-in-a-row", "1",
            ),
        ]
    )  # fmt: skip
    bad, good, row = outcomes
    assert [rank.code for rank in (*bad, *good)] == [0] * 4, bad[0].stderr[-3000:]
    skipped = metrics(tmp_path / "bad", "grad/skipped")
    left_out = [step for step, value in skipped.items() if value]
    losses, others = metrics(tmp_path / "bad"), metrics(tmp_path / "good")
    assert len(left_out) == 1
    assert losses[left_out[0]] is None
    assert all(losses[step] == others[step] for step in losses if step < left_out[0])
    assert all(losses[step] is not None for step in losses if step not in left_out)
    assert bad[0].stdout.count("the step is left out") == 1
    # What the bad step saw is forgotten: QK-Clip would scale the weights of the next step by it.
    logits, expected = (metrics(tmp_path / run, "max_attention_logit") for run in ("bad", "good"))
    assert left_out[0] not in logits and max(left_out) < max(logits)
    for step, value in logits.items():
        assert value == pytest.approx(expected[step], rel=0.3)
    assert [rank.code for rank in row] == [17, 17]
    assert "--bad-steps-in-a-row allows fewer" in error_lines(row[1].stderr)[0]


def test_a_fault_that_does_not_come_again_points_at_the_machine(tmp_path, corpus):
    (ranks,) = run_program([launch(corpus, tmp_path / "run", "transient_nan")])
    assert [rank.code for rank in ranks] == [17, 17], ranks[0].stderr[-3000:]
    line = error_lines(ranks[0].stderr)[0]
    assert "computed again it differs on ranks [" in line
    assert "each micro-batch is good when it is computed alone" in line


def test_steps_computed_twice_are_reported_and_change_nothing(tmp_path, corpus):
    two, report = ("--train-iters", "2"), ("--rerun-mode", "report_stats")
    twice, once, dropout = run_program(
        [
            launch(corpus, tmp_path / "twice", "", *two, *report),
            launch(corpus, tmp_path / "once", "", *two, "--rerun-mode", "disabled"),
            launch(corpus, tmp_path / "dropout", "", *two, *report, "--hidden-dropout", "0.1"),
        ]
    )
    assert [rank.code for rank in (*twice, *once, *dropout)] == [0] * 6, twice[0].stderr[-3000:]
    assert metrics(tmp_path / "twice") == metrics(tmp_path / "once")
    for ranks in (twice, dropout):
        assert "steps computed twice: 2 | with the same bits: 2 |" in ranks[0].stdout


def test_the_hundred_values_that_set_the_ceiling_are_finite_ones():
    ceiling = Ceiling()
    for value in (math.inf, math.nan, *[1.0] * 99, -math.inf, 2.0):
        assert not ceiling.is_reached_by(value)
    assert not ceiling.is_reached_by(19.9)
    assert ceiling.is_reached_by(20.0) and ceiling.is_reached_by(-20.0)
    assert not ceiling.is_reached_by(math.inf)  # a bad step, which is told as such
