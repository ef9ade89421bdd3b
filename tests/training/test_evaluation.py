"""Which steps are taken, and when and in which batches a model is evaluated: Megatron-LM's flags."""

import re
from contextlib import nullcontext

import numpy as np
import pytest

from megatron_cp.training.arguments import parse_arguments
from megatron_cp.training.datasets import check_first_batch, open_data, plan_request
from tests.faults.bad_files import write_corpus
from tests.training.commands import MODEL, SMALL_RUN, metrics, train
from tests.training.verdicts import parse, refusal

STILL = [*SMALL_RUN, "--lr", "0", "--eval-interval", "1", "--eval-global-batch-size", "4"]


def test_skipped_steps_and_late_evaluations_leave_the_others_what_they_were(tmp_path):
    """With a learning rate of 0 a loss says which packs it is of."""
    every, some = tmp_path / "every", tmp_path / "some"
    train(1, *STILL, "--run-dir", str(every))
    flags = ["--iterations-to-skip", "2", "9", "--start-eval-at-iter", "3"]
    output = train(2, *STILL, *flags, "--eval-micro-batch-size", "2",
                   "--context-parallel-size", "2", "--run-dir", str(some))  # fmt: skip
    assert "iteration 2 is left out (--iterations-to-skip): 2 packs are consumed" in output
    assert "consumed samples:            8" in output
    wanted, losses = metrics(every), metrics(some)
    assert len(set(wanted.values())) == len(wanted) == 4
    assert losses == pytest.approx({n: wanted[n] for n in (1, 3, 4)}, rel=2e-6)
    wanted, losses = (metrics(run, "lm loss validation") for run in (every, some))
    assert set(wanted) == {1, 2, 3, 4}
    assert losses == pytest.approx({n: wanted[n] for n in (3, 4)}, rel=2e-6)


def test_a_resumed_run_leaves_out_the_same_step(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run = [*SMALL_RUN, "--eval-iters", "0", "--iterations-to-skip", "3"]
    train(1, *run, "--run-dir", str(whole))
    save = ["--save", str(broken), "--load", str(broken)]
    train(1, *run, *save, "--exit-interval", "2")
    train(1, *run, *save)
    assert set(metrics(whole)) == {1, 2, 4}
    assert metrics(whole) == metrics(broken)
    rates = metrics(whole, "learning-rate")
    assert rates[4] == pytest.approx(rates[2] - (rates[1] - rates[2]))  # no step, no decay


def test_batches_of_an_evaluation_are_dealt_by_their_own_sizes(capsys):
    run = [*SMALL_RUN, "--global-batch-size", "4"]
    args = parse(*run, "--eval-micro-batch-size", "2", world_size=2)
    assert (args.eval_global_batch_size, args.eval_micro_batch_size) == (4, 2)
    assert parse(*run).eval_micro_batch_size == 1
    line = refusal(capsys, *run, "--eval-micro-batch-size", "3")
    assert line == (
        "--eval-global-batch-size 4 must be a multiple of eval micro-batch size x data-parallel size = 3 x 1 = 3"
    )
    for flag in ("--eval-micro-batch-size", "--iterations-to-skip"):
        assert refusal(capsys, *SMALL_RUN, flag, "0").startswith(f"{flag} 0 must be positive")


SIZE = 32
ONE = [SIZE]  # one document, as long as a pack
MANY = [5, 60, 17, 32, 1, 44, 33]  # 192 tokens


@pytest.fixture(scope="module")
def corpora(tmp_path_factory) -> dict[str, str]:
    folder, draw = tmp_path_factory.mktemp("held_out"), np.random.default_rng(3)
    texts = {"one": ONE, "many": MANY, "empty": [0]}
    return {
        name: str(write_corpus(folder / name, [draw.integers(0, 512, n).tolist() for n in lengths]))
        for name, lengths in texts.items()
    }


def held_out_run(corpora, *words: str, packing: str = "split") -> list[str]:
    """A run that learns nothing; `words` are corpora of validation."""
    named = [corpora.get(word, word) for word in words]
    data = ["--train-data-path", corpora["one"], "--valid-data-path", *named]
    sizes = ["--vocab-size", "512", "--seq-length", str(SIZE), "--num-workers", "0"]
    once = ["--micro-batch-size", "1", "--train-iters", "1", "--lr", "0", "--log-interval", "1"]
    masks = ["--reset-attention-mask", "--reset-position-ids", "--packing", packing, "--no-wandb"]
    return [*MODEL, *data, *sizes, *once, *masks, "--cp-planner", "zigzag", "--eval-iters", "0"]


def loss_of(folder, name: str) -> float:
    (loss,) = metrics(folder, f"lm loss {name}").values()
    return loss


def test_sets_of_validation_are_evaluated_whole_and_by_their_names(corpora, tmp_path):
    """The loss of one document is that of the step that sees it; those of both sets give that of all tokens."""
    sets, both = tmp_path / "sets", tmp_path / "both"
    names = [
        "--full-validation",
        "--multiple-validation-sets",
        "--validation-set-names",
        "wiki",
        "code",
    ]
    output = train(1, *held_out_run(corpora, "one", "many"), *names, "--run-dir", str(sets))
    assert "validation-wiki loss at iteration 1" in output
    assert "held-out loss-code" in output
    whole = ["--full-validation", "--run-dir", str(both)]
    # Two ranks and batches of four packs: the last of seven is filled up.
    flags = ["--context-parallel-size", "2", "--eval-global-batch-size", "4"]
    train(2, *held_out_run(corpora, "one", "many"), *whole, *flags)
    replicas = ["--eval-global-batch-size", "6", "--run-dir", str(tmp_path / "replicas")]
    train(2, *held_out_run(corpora, "one", "many"), "--full-validation", *replicas)
    wiki, code = (loss_of(sets, f"validation-{name}") for name in ("wiki", "code"))
    assert wiki == pytest.approx(metrics(sets)[1], rel=1e-6)
    of_one, of_many = SIZE - 1, sum(length - 1 for length in MANY)
    mean = (wiki * of_one + code * of_many) / (of_one + of_many)
    for run in (both, tmp_path / "replicas"):
        assert loss_of(run, "validation") == pytest.approx(mean, rel=2e-6)


def test_what_micro_batches_of_an_evaluation_do_not_allow_is_said_at_the_start(corpora):
    """Two packs of 34 tokens fill the ranks' rows, one does not: the router would count what fills up."""
    experts = ["--num-experts", "4", "--moe-router-topk", "2", "--moe-aux-loss-coeff", "0.01"]
    sizes = ["--seq-length", "34", "--micro-batch-size", "2", "--global-batch-size", "2"]
    run = [*held_out_run(corpora, "many"), *sizes, *experts, "--context-parallel-size", "2"]
    run += ["--eval-iters", "1"]
    for flags, is_refused in (([], False), (["--eval-micro-batch-size", "1"], True)):
        config, data = open_data(parse_arguments([*run, *flags], {"WORLD_SIZE": "2"}))
        refused = pytest.raises(NotImplementedError, match="34 tokens on 36 rows")
        with refused if is_refused else nullcontext():
            check_first_batch(config, data, plan_request(config, on_cuda=False))


@pytest.mark.parametrize("packing", ["keep", "split", "megatron"])
def test_all_of_validation_is_what_as_many_batches_of_one_pack_are(corpora, tmp_path, packing):
    """Of 192 tokens: as many packs as documents fit into, or six; of samples with one token more five."""
    count = {"keep": 7, "split": 6, "megatron": 5}[packing]
    run = held_out_run(corpora, "many", packing=packing)
    counted, whole = tmp_path / "counted", tmp_path / "whole"
    train(1, *run, "--eval-iters", str(count), "--eval-global-batch-size", "1",
          "--run-dir", str(counted))  # fmt: skip
    twice = ["--train-iters", "2", "--eval-interval", "1"]
    train(2, *run, "--full-validation", "--eval-global-batch-size", "4", "--run-dir", str(whole),
          "--eval-micro-batch-size", "2", "--context-parallel-size", "2", *twice)  # fmt: skip
    wanted = loss_of(counted, "validation")
    assert metrics(whole, "lm loss validation") == pytest.approx({1: wanted, 2: wanted}, rel=2e-6)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--multiple-validation-sets", "--multiple-validation-sets needs --full-validation, as in"),
        ("--validation-set-names a", "--validation-set-names needs --multiple-validation-sets"),
        (
            "--full-validation --multiple-validation-sets --validation-set-names a a",
            "--validation-set-names a a must differ",
        ),
    ],
)
def test_wishes_that_miss_another_flag_are_refused(corpora, capsys, flags, reason):
    assert refusal(capsys, *held_out_run(corpora, "one"), *flags.split()).startswith(reason)


@pytest.mark.parametrize(
    ("words", "flags", "reason"),
    [
        ("1 one 2 many", "", "--full-validation with weights of the corpora of validation is not"),
        ("one many", "--validation-set-names a", "--validation-set-names a are 1 names for 2 corp"),
        ("one empty", "", "1 of 2 corpora of validation have no token to evaluate; leave them out"),
    ],
)
@pytest.mark.parametrize("packing", ["split", "megatron"])
def test_corpora_that_cannot_be_sets_are_refused(corpora, capsys, words, flags, reason, packing):
    run = held_out_run(corpora, *words.split(), packing=packing)
    config = parse_arguments(
        [*run, "--full-validation", "--multiple-validation-sets", *flags.split()], {}
    )
    if packing == "megatron" and "empty" in words:
        reason = "has no token; give it documents or leave it out"
    with pytest.raises(ValueError, match=re.escape(reason)):
        open_data(config)


def test_sets_need_corpora_of_their_own(capsys):
    line = refusal(capsys, *SMALL_RUN, "--full-validation", "--multiple-validation-sets")
    assert line.startswith(
        "--multiple-validation-sets needs corpora of validation alone; give --val"
    )
