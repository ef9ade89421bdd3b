"""--hybrid-context-parallel: the losses of fixed groups and of one rank, resumed exactly."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from megatron_cp.data.indexed_writer import IndexedWriter
from tests.faults.plants import POISON
from tests.faults.program import Launch, run_program
from tests.training.commands import (
    AUTO,
    DATA,
    MODEL,
    SMALL_RUN,
    STEPS,
    error_lines,
    even_topology,
    metrics,
    train,
    train_and_save_first,
)

pytestmark = pytest.mark.timeout(1800)

# Whether a step is hybrid is decided by its plans; these are made in a fifth of the time of those of `auto`, with which
# one layout runs, and the data of the bad step.
FAST = ("--cp-planner", "per_document_zigzag")
RUN = [
    *SMALL_RUN,
    *FAST,
    *shlex.split(
        "--calculate-per-token-loss --seq-length 256 --global-batch-size 4 --train-iters 3 "
        "--eval-interval 2"
    ),
]
# The weights that a run begins with, those after an update, and an evaluation of these.
TWO = ("--train-iters", "2")
CP2 = ("--context-parallel-size", "2")
HYBRID = (*CP2, "--hybrid-context-parallel")
LAYOUTS = {
    "packs joined": (*HYBRID, *AUTO, "--micro-batch-size", "2"),
    "tensor ranks": ("--tensor-model-parallel-size", "2", "--hybrid-context-parallel"),
}
MODELS = {
    "windows": ("--window-size", "15,0", "--window-attn-skip-freq", "2"),
    "experts": ("--num-experts", "4", "--moe-ffn-hidden-size", "48"),
    "latent": ("--multi-latent-attention",),
}


@pytest.fixture(scope="module")
def topology(tmp_path_factory) -> tuple[str, str]:
    return "--cp-topology", str(even_topology(tmp_path_factory.mktemp("topology") / "even.json"))


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Path:
    """The plain model on one rank, with a checkpoint."""
    folder = tmp_path_factory.mktemp("runs") / "one"
    train_and_save_first(1, folder, *RUN)
    return folder


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory, topology) -> tuple[Path, str]:
    """The plain model in the hybrid layout, with a checkpoint, and what was printed: one line, behind an evaluation."""
    folder = tmp_path_factory.mktemp("runs") / "hybrid"
    flags = [*HYBRID, "--num-workers", "1", "--log-interval", "3"]
    return folder, train_and_save_first(4, folder, *RUN, *topology, *flags)


def same_losses(found: Path, expected: Path) -> None:
    for key in ("lm loss", "grad-norm", "loss/valid_tokens", "lm loss validation"):
        assert metrics(found, key), key
        assert metrics(found, key) == pytest.approx(metrics(expected, key), rel=2e-6), key


@pytest.mark.parametrize("model", sorted(MODELS))
def test_losses_are_those_of_one_rank(tmp_path: Path, topology, model: str):
    flags = [*RUN, *TWO, *MODELS[model]]
    if model == "latent":
        flags.remove("--group-query-attention")
    train(1, *flags, "--run-dir", str(tmp_path / "one"))
    train(4, *flags, *topology, *HYBRID, "--run-dir", str(tmp_path / "hybrid"))
    assert 1.0 in metrics(tmp_path / "hybrid", "cp/is_hybrid").values()
    same_losses(tmp_path / "hybrid", tmp_path / "one")


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_layouts_beside_it_change_no_loss(tmp_path: Path, topology, one: Path, layout: str):
    train(4, *RUN, *topology, *LAYOUTS[layout], "--run-dir", str(tmp_path / "hybrid"))
    assert 1.0 in metrics(tmp_path / "hybrid", "cp/is_hybrid").values()
    same_losses(tmp_path / "hybrid", one)


def test_a_step_that_spans_replicas_counts_its_tokens_once(one: Path, hybrid: tuple[Path, str]):
    folder, printed = hybrid
    assert 1.0 in metrics(folder, "cp/is_hybrid").values()
    assert f"3 steps, {3 * 4 * 256:,} tokens" in printed
    told = [int(n) for n in re.findall(r"\| hybrid steps: (\d+) \|", printed)]
    assert told == [sum(metrics(folder, "cp/is_hybrid").values())]
    same_losses(folder, one)


def test_stages_go_on_from_a_checkpoint_of_one_rank(tmp_path: Path, topology, one: Path):
    flags = ["--pipeline-model-parallel-size", "2", "--hybrid-context-parallel"]
    resumed = ["--load", str(one), "--ckpt-step", "1", "--run-dir", str(tmp_path / "stages")]
    train(4, *RUN, *topology, *flags, *resumed)
    assert 1.0 in metrics(tmp_path / "stages", "cp/is_hybrid").values()
    found, expected = metrics(tmp_path / "stages"), metrics(one)
    assert sorted(found) == [2, 3]
    assert found == pytest.approx({step: expected[step] for step in found}, rel=2e-6)


def test_a_run_is_resumed_exactly_and_goes_on_in_the_other_layout(
    tmp_path: Path, topology, hybrid: tuple[Path, str]
):
    whole, _ = hybrid
    flags = [*RUN, *topology, "--num-workers", "1"]
    resumed = ["--load", str(whole), "--ckpt-step", "1"]
    train(4, *flags, *HYBRID, *resumed, "--run-dir", str(tmp_path / "same"))
    train(4, *flags, *CP2, *resumed, "--run-dir", str(tmp_path / "fixed"))
    assert metrics(tmp_path / "fixed", "cp/is_hybrid") == {}
    for key in ("lm loss", "grad-norm"):
        expected = {step: value for step, value in metrics(whole, key).items() if step > 1}
        assert metrics(tmp_path / "same", key) == expected, key
        assert metrics(tmp_path / "fixed", key) == pytest.approx(expected, rel=2e-6), key


def test_where_links_are_slow_the_run_is_that_of_fixed_groups_bit_by_bit(tmp_path: Path):
    """On the row of this machine short packs are not worth sending."""
    for name, flags in (("fixed", CP2), ("hybrid", HYBRID)):
        train(4, *RUN, *TWO, *flags, "--run-dir", str(tmp_path / name))
    assert set(metrics(tmp_path / "hybrid", "cp/is_hybrid").values()) == {0.0}
    for key in ("lm loss", "grad-norm", "lm loss validation"):
        assert metrics(tmp_path / "hybrid", key) == metrics(tmp_path / "fixed", key)


def test_the_document_of_a_bad_step_is_named(tmp_path: Path, topology):
    prefix, bad = tmp_path / "text_document", 17
    draw = np.random.default_rng(7)
    with IndexedWriter(prefix, dtype=np.int32) as writer:
        for document in range(60):
            tokens = draw.integers(1, POISON, size=draw.integers(20, 80))
            if document == bad:
                tokens[5] = POISON
            writer.add_document(tokens)
        writer.finish()
    flags = [
        *MODEL, *DATA, *AUTO, *STEPS, "--untie-embeddings-and-output-weights", "--tokenizer-type", "NullTokenizer",
        "--vocab-size", "1000", "--split", "1", "--eval-iters", "0", "--no-wandb", "--calculate-per-token-loss",
        "--global-batch-size", "16", "--data-path", str(prefix), "--run-dir", str(tmp_path / "run"),
    ]  # fmt: skip
    flags.remove("--mock-data")
    launch = Launch((*flags, *topology, *HYBRID), 4, plant="tests.faults.plants.nan_embedding")
    (ranks,) = run_program([launch])
    assert [rank.code for rank in ranks] == [17] * 4, ranks[0].stderr[-3000:]
    lines = {line for rank in ranks for line in error_lines(rank.stderr)}
    assert len(lines) == 1
    (line,) = lines
    assert f"caused by document {bad} of {prefix}, tokens 0 to" in line
    assert "of replica 0" in line
    (kept,) = (tmp_path / "run").glob("bad_steps/*.npz")
    assert POISON in np.load(kept)["tokens"]
