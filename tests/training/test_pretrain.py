"""Whole runs of pretrain_gpt.py on gloo ranks: resume, layouts, dry run, refusals."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from megatron_cp.data.indexed_writer import IndexedWriter
from megatron_cp.training.arguments import parse_arguments
from megatron_cp.training.checkpoint.files import TRACKER, iteration_folder
from megatron_cp.training.datasets import open_data
from tests.faults.program import Launch, run_program
from tests.training.checkpoints import tensors_of
from tests.training.commands import (
    AUTO,
    ROOT,
    RUN_WITH_WANDB,
    SMALL_RUN,
    error_lines,
    launch,
    metrics,
    train,
)

pytestmark = pytest.mark.timeout(1800)

CP2 = ["--context-parallel-size", "2", *AUTO]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Four steps on two context ranks without interruption, with a checkpoint after steps 2 and 4."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    output = train(2, *RUN_WITH_WANDB, *CP2, "--save", str(folder), "--save-interval", "2")
    (folder / "output.txt").write_text(output)
    return folder


def cut_to(run: Path, folder: Path, iteration: int) -> Path:
    """The run as it was after ``iteration`` steps."""
    name = iteration_folder(run, iteration).name
    shutil.copytree(run / name, folder / name)
    (folder / TRACKER).write_text(str(iteration))
    return folder


@pytest.mark.filterwarnings("ignore")
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(run: Path, tmp_path: Path):
    half = cut_to(run, tmp_path / "half", 2)
    rest = tmp_path / "rest"
    train(2, *SMALL_RUN, *CP2, "--load", str(half), "--save", str(rest), "--save-interval", "2")
    for key in ("lm loss", "grad-norm", "learning-rate", "data/cursor", "lm loss validation"):
        whole = metrics(run, key)
        resumed = metrics(rest, key)
        assert resumed, key
        assert resumed == {i: whole[i] for i in resumed}, key
    assert sorted(metrics(rest)) == [3, 4]
    expected, found = (tensors_of(iteration_folder(folder, 4)) for folder in (run, rest))
    assert expected.keys() == found.keys()
    assert len(expected) > 10
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_a_run_goes_on_with_another_context_parallel_size(run: Path, tmp_path: Path):
    half = cut_to(run, tmp_path / "half", 2)
    train(1, *SMALL_RUN, "--load", str(half), "--run-dir", str(tmp_path / "one"))
    losses, whole = metrics(tmp_path / "one"), metrics(run)
    assert sorted(losses) == [3, 4]
    for iteration, loss in losses.items():
        assert loss == pytest.approx(whole[iteration], rel=1e-6)


def test_an_evaluation_of_an_earlier_checkpoint_leaves_the_records_of_the_run(
    run: Path, tmp_path: Path
):
    copy = shutil.copytree(run, tmp_path / "copy", ignore=shutil.ignore_patterns("wandb"))
    records = {
        name: (copy / name).read_bytes() for name in ("run.json", "metrics.jsonl", "plan.json")
    }
    flags = [
        "--load",
        str(copy),
        "--ckpt-step",
        "2",
        "--skip-train",
        "--save",
        str(copy),
    ]
    assert "validation loss at iteration 2" in train(1, *SMALL_RUN, *flags)
    assert {name: (copy / name).read_bytes() for name in records} == records


def test_what_a_run_prints_and_leaves_is_complete(run: Path):
    output = (run / "output.txt").read_text()
    line = r"iteration +4/ +4 \| consumed samples: +8 \| elapsed time per iteration \(ms\): [\d.]+ \| learning rate: "
    assert len(re.findall(line, output)) == 1
    ours = r"nan iterations:   0 \| tokens per second: \d+ \| tokens per second per device: \d+ \| remaining: "
    assert len(re.findall(ours + r"\d+:\d+:\d+ \|\n", output)) == 4
    assert "throughput per GPU" not in output
    said, others = re.search(
        rf"- arguments -+\n(.*)^-+ end of arguments -+\n(\d+) others are at their defaults: {run}/run.json\n",
        output,
        flags=re.M | re.S,
    ).groups()
    shown = dict(re.findall(r"^  (\w+) \.+ (.*)$", said, flags=re.M))
    assert shown["num_layers"] == "2" and shown["lr"] == "0.001" and "adam_beta1" not in shown
    assert list(shown) == sorted(shown)
    recorded = json.loads((run / "run.json").read_text())["arguments"]
    assert len(shown) + int(others) == len(recorded) and len(shown) < 60
    assert recorded["adam_beta1"] == 0.9
    assert "validation loss at iteration 4 on validation set | lm loss value: " in output
    assert "on test set" in output
    description = json.loads((run / "run.json").read_text())
    assert description["layout"] == {
        "world_size": 2,
        "tensor": 1,
        "pipeline": 1,
        "context": 2,
        "data": 1,
    }
    assert description["finished"]["iteration"] == 4
    assert description["data"]["train"]["tokens"] > 0
    row = next(
        r
        for r in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        if "lm loss" in r
    )
    wanted = {"cp/area_max_over_mean", "cp/tokens_per_rank", "cp/plan_ms", "cp/comm_bytes_sent"}
    wanted |= {"data/doc_len_p50", "data/doc_len_p99", "data/docs_per_pack", "data/cursor"}
    wanted |= {
        "loss/valid_tokens",
        "grad/nonfinite",
        "restart/count",
        "learning-rate",
        "throughput",
    }
    assert wanted <= row.keys()
    assert len(json.loads((run / "plan.json").read_text())["samples"]) == 4
    assert len(list(run.rglob("*.wandb"))) == 1


@pytest.mark.parametrize(
    "layout",
    [
        "--tensor-model-parallel-size 2 --sequence-parallel",
        "--pipeline-model-parallel-size 2 --num-layers 4 --num-layers-per-virtual-pipeline-stage 1",
        "--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    ],
)
def test_other_layouts_learn_and_print_from_the_last_rank(tmp_path: Path, layout: str):
    output = train(2, *SMALL_RUN, *layout.split(), "--run-dir", str(tmp_path / "run"))
    losses = metrics(tmp_path / "run")
    assert sorted(losses) == [1, 2, 3, 4]
    assert 5.5 < losses[4] < losses[1] < 7.0
    assert output.count("iteration        4/       4 |") == 1


def test_the_distributed_optimizer_with_dropout_resumes_bitwise(tmp_path: Path):
    dropout = ["--hidden-dropout", "0.1", "--attention-dropout", "0.2"]
    flags = [*SMALL_RUN, "--use-distributed-optimizer", *dropout]
    whole = tmp_path / "whole"
    train(2, *flags, "--save", str(whole), "--save-interval", "2")
    half = cut_to(whole, tmp_path / "half", 2)
    train(2, *flags, "--load", str(half), "--run-dir", str(tmp_path / "rest"))
    for key in ("lm loss", "grad-norm"):
        expected = metrics(whole, key)
        assert metrics(tmp_path / "rest", key) == {3: expected[3], 4: expected[4]}


def test_plan_only_prints_plans_and_builds_nothing(tmp_path: Path):
    flags = [*SMALL_RUN, "--plan-only", "--plan-batches", "2", "--context-parallel-size", "2"]
    output = train(2, *flags, "--save", str(tmp_path / "none"))
    assert output.count("[full]") == 2
    assert "building GPT model" not in output
    assert not (tmp_path / "none").exists()


def test_a_refusal_reaches_the_user_once_per_rank_and_as_an_exit_code():
    done = launch(3, *SMALL_RUN, "--context-parallel-size", "2")
    assert done.returncode != 0
    lines = error_lines(done.stderr)
    assert lines
    assert len(set(lines)) == 1
    assert "world size 3" in lines[0]
    assert f'File "{ROOT / "megatron_cp"}/' not in done.stderr, "a traceback of ours"


@pytest.mark.parametrize("damage", ["shard", "nan"])
def test_a_bad_checkpoint_is_one_line(run: Path, tmp_path: Path, damage: str):
    half = cut_to(run, tmp_path / "half", 2)
    folder = iteration_folder(half, 2)
    if damage == "shard":
        shard = next(folder.glob("*.distcp"))
        shard.write_bytes(shard.read_bytes()[:-7])
    else:
        poison_one_weight(folder)
    # Weights that are not finite are told also where nobody compares hashes.
    flags = ["--no-verify-checkpoint"] if damage == "nan" else []
    ((rank,),) = run_program([Launch((*SMALL_RUN, "--load", str(half), *flags))])
    assert rank.code not in (0, None)
    (line,) = error_lines(rank.stderr)
    assert str(half) in line
    assert {"shard": "bytes", "nan": "not finite"}[damage] in line


def poison_one_weight(folder: Path) -> None:
    """Overwrites the first numbers of a weight in the checkpoint's file by NaN, sizes unchanged."""
    reader = FileSystemReader(folder)
    metadata = reader.read_metadata()
    name = next(
        n
        for n in metadata.state_dict_metadata
        if n.endswith("linear_fc1.weight") and "optim" not in n
    )
    place = next(place for index, place in metadata.storage_data.items() if index.fqn == name)
    shard = folder / place.relative_path
    content = bytearray(shard.read_bytes())
    start = place.offset + place.length // 2
    content[start : start + 64] = b"\xff" * 64
    shard.write_bytes(content)


def write_corpus(prefix: Path, documents: list[list[int]]) -> None:
    with IndexedWriter(prefix, dtype="uint16") as writer:
        for tokens in documents:
            writer.add_document(tokens)
        writer.finish()


def parsed(*flags: str, world_size: int = 1):
    base = [f for f in SMALL_RUN if f != "--mock-data"]
    return parse_arguments([*base, *flags], {"WORLD_SIZE": str(world_size)})


def test_data_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises((ValueError, OSError), match="nowhere"):
        open_data(parsed("--data-path", str(tmp_path / "nowhere")))


def test_a_corpus_without_tokens_is_refused(tmp_path: Path):
    write_corpus(tmp_path / "empty", [[]])
    with pytest.raises(ValueError, match=r"no token|empty"):
        open_data(parsed("--data-path", str(tmp_path / "empty"), "--split", "1,0,0"))


def test_a_vocabulary_that_nobody_knows_is_refused(tmp_path: Path):
    config = parsed("--data-path", str(tmp_path / "x")).with_arguments(vocab_size=None)
    with pytest.raises(ValueError, match="--tokenizer-type"):
        open_data(config)


@pytest.mark.parametrize(("multiple", "is_told"), [("128", True), ("320", False)])
def test_a_note_says_where_tensor_ranks_pad_the_vocabulary_further(
    tmp_path: Path, multiple: str, is_told: bool
):
    write_corpus(tmp_path / "some", [[1, 2, 3]] * 20)
    flags = ("--data-path", str(tmp_path / "some"), "--vocab-size", "600")
    flags = (*flags, "--make-vocab-size-divisible-by", multiple)
    told = {}
    for tp in (1, 2):
        config = parsed(*flags, "--tensor-model-parallel-size", str(tp), world_size=tp)
        told[tp] = [note for note in open_data(config)[0].notes if "vocabulary" in note]
    assert told[1] == []
    assert len(told[2]) == is_told
    if is_told:
        assert "padded to 768 rows for 2 tensor-parallel ranks" in told[2][0]
        assert "would be to 640 for one" in told[2][0]


@pytest.mark.parametrize(("size", "is_told"), [("258", False), ("300", False), ("512", True)])
def test_a_note_says_where_the_vocabulary_is_larger_than_megatrons(tmp_path: Path, size, is_told):
    write_corpus(tmp_path / "some", [[1, 2, 3]] * 20)
    flags = ("--data-path", str(tmp_path / "some"), "--tokenizer-type", "ByteLevel")
    notes = open_data(parsed(*flags, "--vocab-size", size))[0].notes
    told = [note for note in notes if note.startswith("--vocab-size")]
    assert len(told) == is_told
    assert not told or "makes 512 rows of embeddings; Megatron-LM makes 384" in told[0]


def test_the_vocabulary_is_padded_for_tensor_parallel_ranks(tmp_path: Path):
    write_corpus(tmp_path / "some", [[1, 2, 3]] * 20)
    config, data = open_data(parsed("--data-path", str(tmp_path / "some"), "--vocab-size", "500"))
    assert config.data.padded_vocab_size == 512
    assert [name for name, documents in data.splits.items() if documents is not None] == [
        "train",
        "valid",
    ]
