"""Runs of pretrain_gpt.py with --fim-data: refusals, every context size, resumed exactly."""

import pytest

from megatron_cp.data.indexed_writer import IndexedWriter
from megatron_cp.data.tokenizer import train_byte_level_bpe
from megatron_cp.training.arguments import parse_arguments
from megatron_cp.training.datasets import build_loader, digests, open_data, plan_request
from tests.training.commands import DATA, MODEL, ROOT, STEPS, metrics, train
from tests.training.test_pretrain import cut_to
from tests.training.verdicts import parse, refusal

MARKS = ["<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>"]
BYTES = ["--tokenizer-type", "ByteLevel"]
# Adam lets two roundings of one run drift apart by that much, measured over 20 steps (tests/mcore/test_parity.py).
DRIFT = {"lm loss": 2e-6, "grad-norm": 2e-5, "lm loss validation": 2e-6, "loss/valid_tokens": 0}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> list[str]:
    """The flags of a corpus of Python files, and of its tokenizer."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = [file.read_text() for file in sorted((ROOT / "megatron_cp" / "data").glob("*.py"))]
    path = folder / "tokenizer.json"
    tokenizer = train_byte_level_bpe(texts, vocab_size=500, path=path, special_tokens=MARKS)
    with IndexedWriter(folder / "c", dtype="uint16") as writer:
        for part in filter(None, "\n\n".join(texts).split("\n\n")):
            writer.add_document([*tokenizer.tokenize(part), tokenizer.eod])
        writer.finish()
    names = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(path)]
    return [*MODEL, *STEPS, *names, "--data-path", str(folder / "c"), "--seq-length", "128"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data-path", "a"], "--fim-data with --tokenizer-type None is not served"),
        (["--data-path", "a", "--tokenizer-type", "NullTokenizer"], "NullTokenizer is not served"),
        (["--mock-data", *BYTES], "--fim-data with --mock-data is not served"),
        (["--data-path", "a", *BYTES, "--sft", "--sft-tokenizer-prompt-format", "chatml"], "--sft"),
        (["--data-path", "a", *BYTES, "--packing", "megatron"], "in no checkpoint"),
        (["--data-path", "a", *BYTES, "--fim-rate", "1.01"], r"--fim-rate 1.01 must lie in [0, 1]"),
        (["--data-path", "a", *BYTES, "--fim-spm-rate", "-1"], "--fim-spm-rate -1.0 must lie"),
        (["--data-path", "a", *BYTES, "--fim-fragment-rate", "nan"], "--fim-fragment-rate nan"),
        (["--data-path", "a", *BYTES, "--fim-split-sample", "<f>"], "needs --fim-fragment-rate"),
    ],
)
def test_what_fill_in_the_middle_needs_is_one_line(capsys, flags, message):
    command = [*MODEL, *STEPS, "--seq-length", "128", "--vocab-size", "512", "--fim-data", *flags]
    assert message in refusal(capsys, *command)


def test_settings_that_change_nothing_are_noted():
    notes = parse(*MODEL, *STEPS, *DATA, "--fim-rate", "0.9", "--fim-eod-token", "</s>").notes
    for flag in ("--fim-rate=0.9", "--fim-eod-token=</s>"):
        assert f"{flag} changes nothing without --fim-data" in notes
    assert not any("--fim" in note for note in parse(*MODEL, *STEPS, *DATA).notes)


def test_another_end_than_the_tokenizers_is_noted(corpus):
    for flags, count in (([], 0), (["--fim-eod-token", "<|pad|>"], 1)):
        config, _ = open_data(parse_arguments([*corpus, "--fim-data", *flags], {}))
        said = [note for note in config.notes if note.startswith("--fim-eod-token <|pad|> is not")]
        assert len(said) == count


def test_a_token_that_the_tokenizer_lacks_is_named_before_there_are_ranks(corpus):
    config = parse_arguments([*corpus, "--fim-data", "--fim-pad-token", "<none>"], {})
    message = "--fim-pad-token '<none>' is not in the vocabulary of HuggingFaceTokenizer"
    with pytest.raises(ValueError, match=message):
        open_data(config)


def test_evaluation_too_is_rearranged_and_ranks_compare_their_tokenizers(corpus):
    config, data = open_data(parse_arguments([*corpus, "--fim-data", "--fim-rate", "1"], {}))
    request = plan_request(config, on_cuda=False)
    first = data.fim.tokenizer.token_id("<fim_prefix>")
    for split in ("train", "valid"):
        loader = build_loader(config, data, request, split=split, dp_rank=0, dp_size=1)
        with loader:
            assert next(loader).batch.tokens[0] == first
    assert digests(data)["the tokenizer"] == data.fim.tokenizer.unique_identifiers


FIM = [
    "--fim-data", "--fim-rate", "0.7", "--eval-iters", "1", "--split", "90,10,0", "--no-wandb",
    "--cp-planner", "zigzag",
]  # fmt: skip


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("masks", [["--dataloader-inter-document-masking"], []])
def test_losses_are_those_of_one_rank_at_every_context_size(corpus, tmp_path, masks):
    found = {}
    for cp_size in (1, 2, 3):
        flags = [*corpus, *FIM, *masks, "--context-parallel-size", str(cp_size)]
        train(cp_size, *flags, "--run-dir", str(tmp_path / str(cp_size)))
        found[cp_size] = {
            key: list(metrics(tmp_path / str(cp_size), key).values()) for key in DRIFT
        }
    assert [len(found[1][key]) >= 4 for key in DRIFT] == [True, True, False, True]
    assert found[1]["lm loss validation"]
    for cp_size in (2, 3):
        for key, drift in DRIFT.items():
            assert found[cp_size][key] == pytest.approx(found[1][key], rel=drift), key


@pytest.mark.timeout(1800)
def test_a_run_that_fills_in_the_middle_is_resumed_exactly(corpus, tmp_path):
    flags = [*corpus, *FIM, "--packing", "keep", "--dataloader-inter-document-masking"]
    flags += ["--context-parallel-size", "2", "--num-workers", "1"]
    whole = tmp_path / "whole"
    train(2, *flags, "--save", str(whole), "--save-interval", "2")
    half = cut_to(whole, tmp_path / "half", 2)
    train(2, *flags, "--load", str(half), "--run-dir", str(tmp_path / "rest"))
    for key in ("lm loss", "grad-norm", "loss/valid_tokens"):
        expected = metrics(whole, key)
        assert metrics(tmp_path / "rest", key) == {3: expected[3], 4: expected[4]}
