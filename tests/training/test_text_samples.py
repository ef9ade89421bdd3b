"""Samples of text: the right tokens from the right rows, alike at every size, and training does not notice them."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_cp.data.indexed_writer import IndexedWriter
from megatron_cp.data.prompts import NEW_TOKENS, choose_prompts, draw, text_behind
from megatron_cp.data.tokenizer import ByteLevelTokenizer
from megatron_cp.training.arguments import parse_arguments
from tests.faults.program import Launch, run_program
from tests.training.commands import AUTO, MODEL, ROOT, STEPS, metrics
from tests.training.verdicts import parse, refusal

BYTES = ["--tokenizer-type", "ByteLevel"]
END = 256


def step(token: int) -> int:
    """What the planted model writes behind a token: one token, always; the end behind 10."""
    return END if token == 10 else (3 * token + 7) % 251


def plant_a_table(rank: int) -> None:
    """The logits of a token are those of a table, whatever the model holds."""
    from megatron.core import parallel_state

    from megatron_cp.training import gpt

    def logits_step(batch, model, device):
        del model
        group = parallel_state.get_context_parallel_group()
        rows = np.asarray(batch.plans["full"].global_from_local)[group.rank()]
        tokens = batch.batch.tokens[np.minimum(rows, len(batch.batch.tokens) - 1)]
        logits = torch.full((len(tokens), 384), -1e4, device=device)
        logits[torch.arange(len(tokens)), [step(int(token)) for token in tokens]] = 0.0
        return logits

    gpt.logits_step = logits_step


def plant_a_comparison(rank: int) -> None:
    """Logits must score tokens as the losses of training do: else the run ends."""
    from megatron.core import parallel_state

    from megatron_cp.training import gpt

    write_few(rank)
    own = gpt.logits_step

    def logits_step(batch, model, device):
        logits = own(batch, model, device)
        labels = np.arange(len(batch.batch.tokens)) % 256
        batch = replace(batch, batch=replace(batch.batch, labels=labels))
        losses, _ = gpt.forward_step(model.module.config_of_run, batch, model, device)
        rows = np.asarray(batch.plans["full"].global_from_local)[
            parallel_state.get_context_parallel_rank()
        ]
        wanted = torch.nn.functional.cross_entropy(
            logits.double(), torch.from_numpy(labels[rows]), reduction="none"
        )
        torch.testing.assert_close(losses[0].double(), wanted, rtol=0, atol=4e-6)  # 8 ulp
        return logits

    from megatron_cp.training import pretrain

    build = pretrain.build_model

    def built(config, provider, device):
        model = build(config, provider, device)
        model[0].module.config_of_run = config
        return model

    pretrain.build_model = built
    gpt.logits_step = logits_step


def write_few(rank: int) -> None:
    """An eighth of the tokens: each is a forward of the whole model, and layouts are compared at every one."""
    from megatron_cp.data import prompts
    from megatron_cp.training import text_samples

    prompts.NEW_TOKENS = text_samples.NEW_TOKENS = NEW_TOKENS // 8


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> list[str]:
    """The flags of texts as bytes, some of two bytes a character; the held-out ones are long."""
    folder = tmp_path_factory.mktemp("corpus")
    text = (ROOT / "docs" / "plan.md").read_text() + "äöü \N{SNOWMAN} <b>&" * 40
    with IndexedWriter(folder / "c", dtype="uint16") as writer:
        for start in range(0, 9000, 300):
            writer.add_document([*text[start : start + 300].encode(), END])
        writer.finish()
    flags = [*MODEL, *STEPS, *BYTES, "--data-path", str(folder / "c"), "--split", "80,20,0"]
    flags += ["--seq-length", "256", "--reset-attention-mask", "--reset-position-ids"]
    return [*flags, "--cp-planner", "zigzag"]


@pytest.fixture(scope="module")
def runs(corpus, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    base = [
        *corpus,
        "--num-workers",
        "0",
        "--no-wandb",
        "--eval-interval",
        "2",
        "--eval-iters",
        "1",
    ]
    dropout = ["--hidden-dropout", "0.1"]
    two = ["--context-parallel-size", "2"]
    # The same padded vocabulary, so the same initial weights.
    tensor = ["--tensor-model-parallel-size", "2", "--make-vocab-size-divisible-by", "64"]
    here = f"{__name__}."
    few = f"{here}write_few"
    wanted = {
        "without": ([*two, *dropout], 2, ""),
        "with": ([*two, *dropout, "--log-text-samples", "3"], 2, few),
        "two ranks": ([*two, *AUTO, "--log-text-samples", "3"], 2, few),
        "one rank": (["--log-text-samples", "3"], 1, few),
        "table": ([*two, "--log-text-samples", "3"], 2, f"{here}plant_a_table"),
        "compared": ([*two, "--log-text-samples", "2"], 2, f"{here}plant_a_comparison"),
        "replicas": (["--log-text-samples", "3"], 2, few),
        "tensor": ([*tensor, "--log-text-samples", "3"], 2, few),
        "stages": (["--log-text-samples", "3", "--pipeline-model-parallel-size", "2"], 2, ""),
    }
    launches = [
        Launch((*base, *flags, "--run-dir", str(root / name)), size, plant=plant)
        for name, (flags, size, plant) in wanted.items()
    ]
    for name, ranks in zip(wanted, run_program(launches), strict=True):
        assert [rank.code for rank in ranks] == [0] * len(ranks), name + ranks[0].stderr[-3000:]
    return root


def texts_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "text_samples.jsonl").read_text().splitlines()]


@pytest.mark.timeout(900)
def test_a_planted_model_is_written_on_token_by_token(runs: Path):
    samples = texts_of(runs / "table")
    assert [one["iteration"] for one in samples] == [2, 2, 2, 4, 4, 4]
    for one in samples:
        last, expected = one["prompt"].encode()[-1], []
        while len(expected) < NEW_TOKENS and END not in expected:
            last = step(last)
            expected.append(last)
        assert one["ended"] == (END in expected)
        told = bytes(i for i in expected if i != END).decode(errors="replace")
        assert one["continuation"] == told


@pytest.mark.timeout(900)
@pytest.mark.parametrize("key", ["lm loss", "grad-norm", "lm loss validation"])
def test_training_is_bit_for_bit_the_same_with_and_without_samples(runs: Path, key: str):
    found = metrics(runs / "with", key)
    assert found and found == metrics(runs / "without", key)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("other", ["one rank", "replicas", "tensor"])
def test_every_layout_writes_the_same_texts_of_the_same_model(runs: Path, other: str):
    """Weights differ by rounding, so one draw in a hundred thousand may differ, and its text from there on."""
    ours, theirs = texts_of(runs / "two ranks"), texts_of(runs / other)
    assert len(ours) == len(theirs) == 6
    assert sum(a == b for a, b in zip(ours, theirs, strict=True)) >= 5


@pytest.mark.timeout(900)
def test_logits_score_tokens_as_the_losses_of_training_do(runs: Path):
    assert len(texts_of(runs / "compared")) == 4  # the planted comparison let them pass


@pytest.mark.timeout(900)
def test_pipeline_stages_have_no_samples_and_the_page_says_why(runs: Path):
    from megatron_cp.report.run.page import run_page
    from megatron_cp.report.run.record import read_run

    assert not (runs / "stages" / "text_samples.jsonl").exists()
    said = json.loads((runs / "stages" / "run.json").read_text())["text_samples"]
    assert "2 pipeline stages" in said["refused"]
    assert f"No samples of text: {said['refused']}." in run_page(read_run(runs / "stages"))


def test_draws_have_the_frequencies_of_the_softmax():
    logits = np.log([0.5, 0.3, 0.15, 0.05]) + 3.0
    noise, count = np.random.default_rng(0), 20_000
    found = np.bincount([draw(logits, noise) for _ in range(count)], minlength=4) / count
    spread = np.sqrt(np.array([0.5, 0.3, 0.15, 0.05]) * [0.5, 0.7, 0.85, 0.95] / count)
    assert (abs(found - [0.5, 0.3, 0.15, 0.05]) < 4 * spread).all()


def test_a_character_cut_in_two_is_shown_in_pieces_and_no_other_is_lost():
    tokenizer, ids = ByteLevelTokenizer(), [*"aä☃b".encode()]
    for cut in range(1, len(ids)):
        shown = text_behind(tokenizer, ids[:cut], ids[cut:])
        assert shown == bytes(ids[cut:]).decode(errors="replace")
    assert text_behind(tokenizer, ids, [120, END]) == "x"


class Lengths:
    """Documents of these lengths, whose tokens count from 0."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = np.array(lengths)

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        return np.arange(start, min(stop, self.lengths[document]))


@pytest.mark.parametrize(
    ("lengths", "count", "chosen"),
    [
        ((500, 3, 400, 300, 0, 200), 2, [0, 5]),
        ((500, 3, 400, 300, 0, 200), 4, [0, 2, 3, 5]),
        ((5, 1, 0, 9), 3, [0, 3]),
        ((2,), 9, [0]),
    ],
)
def test_prompts_are_the_beginnings_of_long_documents_else_of_the_longest(lengths, count, chosen):
    prompts = choose_prompts(Lengths(*lengths), count, 4096)
    assert [one.document for one in prompts] == chosen
    for one in prompts:
        whole = np.concatenate([one.ids, one.follows])
        assert len(one.ids) and len(one.follows) <= NEW_TOKENS
        assert np.array_equal(whole, np.arange(min(lengths[one.document], 80)))


def test_a_short_context_is_not_exceeded():
    (prompt,) = choose_prompts(Lengths(900), 1, 20)
    assert len(prompt.ids) + len(prompt.follows) == 20


def test_documents_with_prefixes_have_no_samples(corpus):
    """Training lets a prefix see both ways; samples would be written under a causal mask."""
    from megatron_cp.training.text_samples import why_no_samples

    options = [*corpus, "--log-text-samples", "1", "--run-dir", "x"]
    config = parse_arguments(options, {"WORLD_SIZE": "1"})
    documents = Lengths(90, 80)
    for prefixes, refused in (([0, 0], False), ([0, 7], True), ([-1, 0], True)):
        documents.prefix_lengths = np.array(prefixes)
        why = why_no_samples(config, documents, 1 << 16)
        assert (why is not None and "another mask" in why) == refused


def test_wishes_that_cannot_be_are_one_line(capsys, corpus):
    assert "--log-text-samples -1 must not be negative" in refusal(
        capsys, *corpus, "--log-text-samples", "-1", "--run-dir", "x"
    )
    assert "--log-text-samples needs a folder" in refusal(
        capsys, *corpus, "--log-text-samples", "2"
    )
    assert parse(*corpus).log_text_samples == 0


@pytest.mark.parametrize(("cp_size", "multiple"), [(1, 1), (2, 1), (3, 2), (8, 4)])
@pytest.mark.parametrize("room", [1, 7, 80])
def test_a_pack_of_samples_fills_the_rows_of_all_ranks(cp_size, multiple, room):
    """Experts may refuse rows without a token; each text sees itself alone, from its beginning."""
    from megatron_cp.config import CPConfig
    from megatron_cp.data.batch import PlanRequest
    from megatron_cp.training.text_samples import _empty_pack

    config = CPConfig(planner="zigzag", chunk_size=16, token_multiple=multiple)
    planned = _empty_pack(3, room, PlanRequest(cp_size=cp_size, config=config))
    plan, dense = planned.plans["full"], planned.batch.mask.to_dense()
    assert plan.tokens_per_rank * cp_size == plan.num_tokens == len(dense)
    assert plan.tokens_per_rank % multiple == 0
    for text in range(3):
        rows = slice(text * room, (text + 1) * room)
        assert np.array_equal(dense[rows, rows], np.tri(room, dtype=bool))
        assert dense[rows].sum() == np.tri(room).sum()
        assert np.array_equal(planned.batch.position_ids[rows], np.arange(room))
