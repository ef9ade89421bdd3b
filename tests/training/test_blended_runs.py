"""Runs of pretrain_gpt.py on blends and on Megatron's own samples, resumed exactly."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_cp.data.indexed_writer import IndexedWriter
from megatron_cp.training.arguments import parse_arguments
from megatron_cp.training.datasets import build_loader, open_data, plan_request, resume_loader
from tests.training.commands import MODEL, STEPS, metrics, train
from tests.training.test_pretrain import cut_to

SIZES = [
    "--vocab-size",
    "512",
    "--seq-length",
    "128",
    "--num-workers",
    "0",
    "--eval-iters",
    "1",
    "--split",
    "80,10,10",
]
MASKS = ["--reset-attention-mask", "--reset-position-ids"]


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("corpora")
    generator = np.random.default_rng(1)
    for name, count in (("a", 60), ("b", 40)):
        with IndexedWriter(folder / name, dtype=np.uint16) as writer:
            for length in generator.integers(1, 200, count):
                writer.add_document(generator.integers(1, 512, length))
            writer.finish()
    return [str(folder / "a"), str(folder / "b")]


def source_flags(kind: str, prefixes: list[str], folder: Path) -> list[str]:
    a, b = prefixes
    words = ["0.7", a, "0.3", b]
    if kind == "--data-path":
        return [kind, *words]
    file = folder / "words"
    if kind == "--data-args-path":
        file.write_text("\n".join(words))
    else:
        file.write_text(json.dumps({"train": words, "valid": a, "test": None}))
    return [kind, str(file)]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("kind", "packing", "context_size"),
    [
        ("--data-path", "split", "1"),
        ("--data-args-path", "megatron", "1"),
        ("--per-split-data-args-path", "keep", "2"),
    ],
)
def test_a_run_on_a_blend_is_resumed_exactly(prefixes, tmp_path, kind, packing, context_size):
    flags = [*MODEL, *SIZES, *MASKS, *STEPS, *source_flags(kind, prefixes, tmp_path)]
    flags += ["--packing", packing, "--context-parallel-size", context_size, "--no-wandb"]
    whole = tmp_path / "whole"
    train(2, *flags, "--save", str(whole), "--save-interval", "2")
    half = cut_to(whole, tmp_path / "half", 2)
    train(2, *flags, "--load", str(half), "--run-dir", str(tmp_path / "rest"))
    for key in ("lm loss", "grad-norm", "data/cursor", "lm loss validation"):
        expected, resumed = metrics(whole, key), metrics(tmp_path / "rest", key)
        assert resumed, key
        assert resumed == {i: expected[i] for i in resumed}, key
    assert sorted(metrics(tmp_path / "rest")) == [3, 4]
    assert metrics(whole, "data/cursor")[4] > 0


def loader_of(*flags, split="train"):
    config, data = open_data(parse_arguments([*MODEL, *SIZES, *STEPS, *flags], {}))
    request = plan_request(config, on_cuda=False)
    return config, build_loader(config, data, request, split=split, dp_rank=0, dp_size=1), data


def at(config, consumed_samples, **foreign_arguments):
    """Where a checkpoint of Megatron-LM stands."""
    state = {"data": {}, "consumed_samples": consumed_samples}
    return SimpleNamespace(config=config, foreign_arguments=foreign_arguments, **state)


def test_splits_have_blends_of_their_own(prefixes, tmp_path):
    flags = source_flags("--per-split-data-args-path", prefixes, tmp_path)
    _, data = open_data(parse_arguments([*MODEL, *SIZES, *STEPS, *flags], {}))
    assert len(data.splits["train"]) == 100
    assert len(data.splits["valid"]) == 60
    assert data.splits["test"] is None


@pytest.mark.parametrize("packing", ["megatron", "split"])
def test_a_checkpoint_of_megatron_says_where_its_samples_go_on(prefixes, packing, capsys):
    flags = ["--data-path", *prefixes, "--packing", packing]
    config, loader, data = loader_of(*flags)
    batches = [next(loader).batch.tokens.tolist() for _ in range(8)]
    _, other, _ = loader_of(*flags)
    resume_loader(other, data, at(config, 4))
    assert [next(other).batch.tokens.tolist() for _ in range(4)] == batches[4:]
    assert other.consumed_samples == 8
    assert ("the first 4 packs are skipped" in capsys.readouterr().out) == (packing == "split")


SAVED = {
    "seed": 1234,
    "split": "80,10,10",
    "seq_length": 128,
    "train_iters": 4,
    "global_batch_size": 2,
}


@pytest.mark.parametrize(
    ("flags", "saved", "said"),
    [
        ("", {}, None),
        ("", {"seed": 99}, "--seed was 99, and is 1234"),
        ("", {"split": "100,0,0"}, "--split was 100,0,0, and is 80,10,10"),
        ("", {"seq_length": 64}, "--seq-length was 64, and is 128"),
        ("", {"train_iters": 40}, "--train-iters was 40, and is 4"),
        ("", {"train_iters": 2, "global_batch_size": 4}, None),  # as many samples
        ("", {"mid_level_dataset_surplus": 0.004}, None),  # no epoch more of a corpus
        (
            "",
            {"mid_level_dataset_surplus": 9.0},
            "--mid-level-dataset-surplus was 9.0, and is 0.005",
        ),
        ("", {"data_path": ["/moved/a", "/moved/b"]}, None),
        ("", {"data_path": ["a"]}, r"--data-path was \['.*a'\], and is \["),
        ("--finetune", {"seed": 99}, None),
    ],
)
def test_a_checkpoint_of_megatron_with_another_order_of_samples_is_refused(
    prefixes, flags, saved, said
):
    a, b = prefixes
    words = ["--data-path", "0.7", a, "0.3", b, "--packing", "megatron", *flags.split()]
    config, loader, data = loader_of(*words)
    saved = {**SAVED, "data_path": ["0.7", a, "0.3", b], **saved}
    saved["data_path"] = [{"a": a}.get(word, word) for word in saved["data_path"]]
    resumed = at(config, 0 if flags else 2, **saved)
    if said is None:
        resume_loader(loader, data, resumed)
        return
    with pytest.raises(ValueError, match=f"other samples than Megatron-LM: {said}"):
        resume_loader(loader, data, resumed)


@pytest.mark.parametrize(
    "saved", [{"dataloader_type": "cyclic"}, {"fim_data": True, "sft": False}, {"sft": True}]
)
def test_samples_that_megatron_drew_or_made_otherwise_are_refused(prefixes, saved):
    flags = ["--data-path", *prefixes]
    config, loader, data = loader_of(*flags, "--packing", "megatron")
    name, value = next(iter(saved.items()))
    message = f"Megatron-LM's run had --{name.replace('_', '-')} {value}; give another --packing"
    with pytest.raises(ValueError, match=message):
        resume_loader(loader, data, at(config, 2, **SAVED, **saved))
    config, loader, data = loader_of(*flags, "--packing", "split")  # what it advises
    resume_loader(loader, data, at(config, 2, **SAVED, **saved))
    assert loader.consumed_samples == 2
    config, loader, data = loader_of(*flags, "--packing", "megatron")
    named = {**SAVED, "data_path": prefixes, "dataloader_type": "single", "fim_data": False}
    resume_loader(loader, data, at(config, 2, **named))
    assert loader.consumed_samples == 2


def test_megatron_s_indices_are_kept_in_the_cache_folder_only(prefixes, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    flags = ["--data-path", *prefixes, "--packing", "megatron"]
    loader_of(*flags)
    assert not any(tmp_path.iterdir())
    loader_of(*flags, "--data-cache-path", str(tmp_path / "cache"))
    assert len(list((tmp_path / "cache").iterdir())) == 2 * 3 * 4  # corpora, splits, files


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--data-path 0.5 a b", "--data-path: word 3, 'b', stands where a weight is expected"),
        ("--train-data-path -1 a 2 b", "--train-data-path: weight -1.0 of 'a' must be finite"),
        ("--data-path 0 a 0 b", "--data-path: the weights add to 0"),
        ("--data-path a --sft", "--sft needs a tokenizer"),
        ("--data-path a --sft --packing split", "--sft with --packing split would cut"),
        ("--data-path a --sft --sft-tokenizer-prompt-format llama3", "llama3 is not served; give"),
    ],
)
def test_words_of_a_blend_are_judged_with_the_flags(capsys, flags, message):
    with pytest.raises(SystemExit):
        parse_arguments([*MODEL, *SIZES, *STEPS, *flags.split()], {})
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data-args-path", "/nowhere"], "--data-args-path '/nowhere' does not exist"),
        (["--per-split-data-args-path", "/nowhere"], "'/nowhere' does not exist"),
    ],
)
def test_files_of_words_that_are_not_there_are_named(flags, message):
    with pytest.raises(FileNotFoundError, match=message):
        open_data(parse_arguments([*MODEL, *SIZES, *STEPS, *flags], {}))


@pytest.fixture(scope="module")
def chats(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("chats")
    for name, count in (("a", 30), ("b", 20)):
        talks = [
            {
                "messages": [
                    {"role": "user", "content": f"What comes after {number}?"},
                    {
                        "role": "assistant",
                        "content": f"{number + 1}, of course." * (1 + number % 9),
                    },
                ]
            }
            for number in range(count)
        ]
        (folder / name).write_text("\n".join(map(json.dumps, talks)))
    return ["0.5", str(folder / "a"), "0.5", str(folder / "b")]


CHATS = [*["--sft", "--sft-tokenizer-prompt-format", "chatml", "--tokenizer-type", "ByteLevel"]]


@pytest.mark.timeout(1800)
def test_fine_tuning_on_chats_is_resumed_exactly(chats, tmp_path):
    flags = [*MODEL, *SIZES, *STEPS, *CHATS, "--data-path", *chats, "--context-parallel-size", "2"]
    flags += ["--data-cache-path", str(tmp_path / "cache"), "--no-wandb"]
    whole = tmp_path / "whole"
    output = train(2, *flags, "--save", str(whole), "--save-interval", "2")
    assert "conversations are longer than --seq-length 128 and lose their end" in output
    half = cut_to(whole, tmp_path / "half", 2)
    train(2, *flags, "--load", str(half), "--run-dir", str(tmp_path / "rest"))
    for key in ("lm loss", "grad-norm", "loss/valid_tokens"):
        expected = metrics(whole, key)
        assert metrics(tmp_path / "rest", key) == {3: expected[3], 4: expected[4]}


def test_conversations_stay_whole_and_see_themselves_only(chats, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    _, loader, _ = loader_of(*CHATS, "--data-path", *chats)
    for _ in range(6):
        batch = next(loader).batch
        starts = np.flatnonzero(batch.position_ids[: sum(batch.document_lengths)] == 0)
        assert np.diff([*starts, sum(batch.document_lengths)]).tolist() == list(
            batch.document_lengths
        )
        assert 0 < batch.loss_mask.sum() < sum(batch.document_lengths)
        triangles = sum(n * (n + 1) // 2 for n in batch.document_lengths)
        assert batch.mask.area() == triangles
