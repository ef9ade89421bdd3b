"""Samples that a run takes: those that --train-samples leaves, and those that --packing megatron has."""

import numpy as np
import pytest

from megatron_cp.data.indexed_writer import IndexedWriter
from megatron_cp.training.arguments import parse_arguments
from megatron_cp.training.datasets import open_data
from tests.training.commands import DATA, MODEL, metrics, train

RUN = [*MODEL, *DATA, "--micro-batch-size", "1", "--train-samples", "16", "--lr", "1e-3"]
RUN += ["--lr-decay-style", "constant", "--log-interval", "1", "--eval-iters", "0"]


@pytest.mark.parametrize(("size", "last"), [(8, 3), (2, 6)])
def test_another_batch_size_takes_the_samples_that_are_left(tmp_path, size, last):
    first, then = (["--run-dir", str(tmp_path / name)] for name in ("first", "then"))
    save = ["--save", str(tmp_path / "ckpt"), "--save-interval", "2"]
    train(1, *RUN, "--global-batch-size", "4", *save, *first, "--exit-interval", "2")
    load = ["--load", str(tmp_path / "ckpt"), "--override-opt-param-scheduler"]
    output = train(1, *RUN, "--global-batch-size", str(size), *load, *then)
    assert f"8 of --train-samples 16 were taken in 2 steps; the last step is now {last}" in output
    assert list(metrics(tmp_path / "then")) == list(range(3, last + 1))


@pytest.fixture
def corpora(tmp_path):
    for name, length in (("a", 20), ("b", 30)):
        with IndexedWriter(tmp_path / name, dtype=np.int32) as writer:
            for document in range(10):
                writer.add_document(np.full(length, document + 1))
            writer.finish()
    return str(tmp_path / "a"), str(tmp_path / "b")


def opened(*flags):
    """Opens the samples of a run of packs of 64 tokens, two a step."""
    numbers = ["--vocab-size", "512", "--seq-length", "64", "--lr", "1e-3", "--packing", "megatron"]
    sizes = ["--micro-batch-size", "1", "--global-batch-size", "2"]
    return open_data(parse_arguments([*MODEL, *numbers, *sizes, *flags], {}))


def test_samples_that_end_before_the_run_are_told_before_it(corpora):
    """Without weights Megatron reads each corpus once, whatever was asked for: seven samples of 64 tokens."""
    a, b = corpora
    whole = ["--split", "100,0,0", "--eval-iters", "0"]
    opened("--data-path", a, b, *whole, "--train-iters", "3")
    with pytest.raises(
        ValueError, match=r"the train split has 7 samples, this run takes 12; .* give weights"
    ):
        opened("--data-path", a, b, *whole, "--train-iters", "6")
    opened("--data-path", "1", a, "1", b, *whole, "--train-iters", "6")


def test_evaluations_that_would_run_out_of_samples_are_told_before_the_run(corpora):
    halves = ["--data-path", *corpora, "--split", "50,50,0", "--train-iters", "1"]
    evaluated = ["--eval-interval", "1", "--eval-iters"]
    opened(*halves, *evaluated, "1")
    with pytest.raises(ValueError, match=r"the valid split has \d samples, this run takes 8;"):
        opened(*halves, *evaluated, "4")


def test_split_beside_documents_of_each_split_is_a_note(corpora):
    a, b = corpora
    paths = ["--train-data-path", a, "--valid-data-path", b, "--train-iters", "1"]
    sizes = ["--vocab-size", "512", "--seq-length", "64", "--lr", "1e-3", "--micro-batch-size", "1"]
    flags = [*MODEL, *sizes, "--global-batch-size", "2", *paths]
    said = "--split 50,50,0 is not heeded: each split has documents of its own"
    assert said in parse_arguments([*flags, "--split", "50,50,0"], {}).notes
    assert not any("--split" in note for note in parse_arguments(flags, {}).notes)
