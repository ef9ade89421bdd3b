"""One command, two programs: Megatron-LM's own pretrain_gpt.py and ours log the same numbers, step by step.

Both run over the Megatron-Core of the checkout (`tests/mcore/megatron_lm.py`). Each draws weights and samples itself.
Megatron-LM has its own attention, with a dense mask.
"""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from tests.mcore import megatron_lm
from tests.mcore.megatron_lm import (
    EOD,
    HYBRID_SPEC,
    launched,
    minor_version,
    needs_megatron_lm,
    ours_launched,
    vocabulary,
)

pytestmark = needs_megatron_lm

RUN = [
    *megatron_lm.MODEL,
    *shlex.split("--train-iters 8 --split 90,8,2 --log-params-norm --log-num-zeros-in-grad"),
]
# What both log, and how near it is: a loss has seven digits, a norm three behind the point. Gradients that are zero but
# for rounding are counted by a few in ten thousand differently.
NEAR = {
    "lm loss": 2e-6, "mtp_1 loss": 2e-6, "load_balancing_loss": 2e-6, "z_loss": 2e-6, "validation": 2e-6,
    "grad norm": 2e-3, "params norm": 1e-4, "num zeros": 2e-3,
    "learning rate": 1e-6, "global batch size": 0, "consumed samples": 0, "loss scale": 0,
    "number of skipped iterations": 0, "number of nan iterations": 0,
}  # fmt: skip
ALWAYS = NEAR.keys() - {"mtp_1 loss", "load_balancing_loss", "z_loss"}
MEANS = ("lm loss", "mtp_1 loss", "load_balancing_loss", "z_loss")

LLAMA = "--group-query-attention --num-query-groups 2 --swiglu --normalization RMSNorm --disable-bias-linear"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --disable-bias-linear --moe-aux-loss-coeff 1e-2"
COMMANDS = {
    "nothing": (1, ""),
    "cosine": (1, "--lr-decay-style cosine --lr-warmup-iters 3 --min-lr 1e-4 --weight-decay .1 --clip-grad .5"),
    "wsd": (1, "--lr-decay-style WSD --lr-wsd-decay-iters 4 --lr-warmup-fraction .2 --lr-warmup-init 1e-5"),
    "rising decay of weights": (1, "--start-weight-decay .01 --end-weight-decay .1 --weight-decay-incr-style cosine"),
    "samples": (1, "--train-samples 24 --step-batch-size-schedule \"0:2 512:4 1024:8\" --lr-warmup-samples 4"),
    "sgd": (1, "--optimizer sgd --sgd-momentum .9 --lr .3"),
    "per token": (1, "--calculate-per-token-loss --micro-batch-size 2 --global-batch-size 8"),
    "llama": (1, f"{LLAMA} --qk-layernorm --rotary-percent .5 --rotary-base 500000 --no-bias-swiglu-fusion"),
    "learned positions": (1, "--position-embedding-type learned_absolute --add-qkv-bias --squared-relu"),
    "scaled positions": (1, "--use-rope-scaling --rope-scaling-factor 8 --rotary-interleaved"),
    "windows": (1, "--window-size (8,0) --window-attn-skip-freq 2"),
    "sinks": (1, "--softmax-type learnable"),
    "rates of embeddings": (1, "--decoupled-lr 1e-3 --decoupled-min-lr 1e-4 --min-lr 1e-4"),
    "experts": (1, f"{EXPERTS} --moe-router-load-balancing-type aux_loss --moe-z-loss-coeff 1e-3"),
    "groups of experts": (1, f"{EXPERTS} --moe-router-group-topk 1 --moe-router-num-groups 2 "
                             "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
                             "--moe-shared-expert-intermediate-size 32 --moe-layer-freq ([0]*1+[1]*1)"),
    "capacity": (1, f"{EXPERTS} --moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity"),
    "recomputed": (1, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    "replicas": (2, "--use-distributed-optimizer"),
    "stages": (2, "--pipeline-model-parallel-size 2"),
    "virtual stages": (2, "--pipeline-model-parallel-size 2 --num-layers 4 "
                          "--num-layers-per-virtual-pipeline-stage 1"),
    "tensor ranks": (2, "--tensor-model-parallel-size 2"),
}  # fmt: skip
# Of hybrid models both have the layers of our spec: those of Megatron-LM's need Transformer Engine.
MAMBA = shlex.join(megatron_lm.MAMBA)
HYBRIDS = {
    "predictions": (1, f"{MAMBA} --hybrid-layer-pattern M-M*/*-/*- --mtp-num-layers 2"),
    "experts": (1, f"{EXPERTS} --moe-router-load-balancing-type aux_loss --hybrid-layer-pattern *E*-"),
    "stages": (2, f"{MAMBA} --pipeline-model-parallel-size 2 --hybrid-layer-pattern M-|M*"),
}  # fmt: skip
# Attention rounds in another order: nearest are losses, and a router may choose another expert.
PRECISIONS = {
    "bf16": (1, f"{LLAMA} --bf16", 3e-4),
    "fp16": (1, f"{LLAMA} --fp16 --initial-loss-scale 65536 --loss-scale-window 2", 1e-4),
    "bf16 shards": (2, f"{LLAMA} --bf16 --use-distributed-optimizer --overlap-grad-reduce", 3e-4),
    "bf16 experts": (1, f"{EXPERTS} --bf16 --moe-router-dtype fp32", 3e-3),
}  # fmt: skip
RESUMED = {
    "as it was saved": "",
    "anew": "--finetune --lr 1e-4 --lr-decay-style constant",
    "new moments": "--no-load-optim",
    "longer": "--train-iters 12 --override-opt-param-scheduler",
    "the checkpoint's flags": "--use-checkpoint-args --no-load-rng",
}  # fmt: skip
FORMATS = {
    "torch_dist": (1, "--ckpt-format torch_dist"),
    "torch": (1, "--ckpt-format torch"),
    "shards": (2, "--ckpt-format torch_dist --use-distributed-optimizer"),
    "tensor ranks": (2, "--ckpt-format torch_dist --tensor-model-parallel-size 2"),
    "stages of experts": (2, f"--ckpt-format torch_dist --pipeline-model-parallel-size 2 {EXPERTS}"),
    "a hybrid model": (1, f"--ckpt-format torch_dist {MAMBA} --hybrid-layer-pattern M-M*"),
}  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """The prefix of a small corpus."""
    return megatron_lm.write_documents(tmp_path_factory.mktemp("corpus") / "documents")


def command(corpus: Path, flags: str) -> list[str]:
    """The command of both programs."""
    run = list(RUN)
    left_out = []
    if "--train-samples" in flags:  # which bring batches of their own
        left_out = ["--train-iters", "--global-batch-size"]
    if "--hybrid-layer-pattern" in flags:  # which says how many layers there are
        left_out = ["--num-layers"]
    for name in left_out:
        place = run.index(name)
        del run[place : place + 2]
    return [*run, *vocabulary(), "--data-path", str(corpus), *shlex.split(flags)]


def theirs(corpus: Path, ranks: int, *flags: str) -> dict[str, np.ndarray]:
    """What Megatron-LM's program logs, with the optimizer that stands for Transformer Engine's in both."""
    program = "pretrain_gpt.py"
    if "--hybrid-layer-pattern" in flags:
        program, flags = "pretrain_hybrid.py", (*flags, *HYBRID_SPEC)
    cache = ["--data-cache-path", str(corpus.parent / "cache")]
    return logged(launched(ranks, corpus.parent, *flags, *cache, program=program, FUSED_ADAM="1"))


def ours(corpus: Path, ranks: int, *flags: str) -> dict[str, np.ndarray]:
    """What our program logs; its vocabulary holds every token of the files, as Megatron-LM's does since 0.19."""
    more = ("--vocab-size", str(EOD + 1), "--packing", "megatron")
    return logged(ours_launched(ranks, corpus.parent, *flags, *more))


def logged(said: str) -> dict[str, np.ndarray]:
    """Every number of the log lines of a run, by name, step by step."""
    series: dict[str, list[float]] = {}
    for line in re.findall(r"iteration +\d+/ +\d+ (\|.*)", said):
        for field in line.split("|"):
            name, _, value = (part.strip() for part in field.partition(":"))
            if name in NEAR:
                series.setdefault(name, []).append(float(value))
    series["validation"] = [float(x) for x in re.findall(r"lm loss value: ([0-9.E+-]+)", said)]
    return {name: np.array(values) for name, values in series.items()}


def check_same(
    found: dict[str, np.ndarray], expected: dict[str, np.ndarray], near: dict[str, float] = NEAR
) -> None:
    """Megatron-LM's second line has the mean of two steps: it does not forget the first before it."""
    assert found.keys() >= ALWAYS and expected.keys() >= ALWAYS
    for name in found.keys() & expected.keys():
        numbers = found[name]
        if name in MEANS:
            numbers = np.array([numbers[0], numbers[:2].mean(), *numbers[2:]])
        np.testing.assert_allclose(numbers, expected[name], rtol=near[name], err_msg=name)


def nearly(near: float) -> dict[str, float]:
    """`NEAR` in 16 bits, with losses as near as this; Megatron-LM sums the norm of parameters in fp16 there."""
    losses = dict.fromkeys((*MEANS, "validation"), near)
    return NEAR | losses | {"grad norm": 2e-2, "num zeros": 3e-2, "params norm": 1e-3}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_logs_the_same_numbers(corpus, name):
    ranks, flags = COMMANDS[name]
    if name == "samples" and minor_version() < 20:
        pytest.skip("another rule of samples")
    words = command(corpus, flags)
    expected = theirs(corpus, ranks, *words)
    assert expected["lm loss"][-1] < expected["lm loss"][0] - 0.1
    found = ours(corpus, ranks, *words)
    # Megatron-LM evaluates one micro-batch of each replica then, ours the last batch size.
    if name == "samples":
        found["validation"] = expected["validation"]
    check_same(found, expected)


@pytest.mark.parametrize("name", PRECISIONS)
def test_a_command_in_16_bits_logs_nearly_the_same_numbers(corpus, name):
    ranks, flags, near = PRECISIONS[name]
    words = command(corpus, flags)
    expected = theirs(corpus, ranks, *words)
    assert expected["lm loss"][-1] < expected["lm loss"][0] - 0.1
    check_same(ours(corpus, ranks, *words), expected, nearly(near))


@pytest.fixture(scope="module")
def saved(corpus) -> Path:
    """A checkpoint of step 4 of Megatron-LM's, in the middle of its warm-up and decay."""
    folder = corpus.parent / "saved"
    theirs(corpus, 1, *resumable(corpus), "--save", str(folder), "--save-interval", "4")
    return folder


def resumable(corpus: Path) -> list[str]:
    """The command that is resumed."""
    decay = "--lr-decay-style cosine --lr-warmup-iters 2 --min-lr 1e-4"
    return command(corpus, f"{LLAMA} --ckpt-format torch_dist {decay}")


@pytest.mark.parametrize("name", RESUMED)
def test_a_checkpoint_is_gone_on_from_as_the_flags_say(corpus, saved, name):
    load = ["--load", str(saved), "--ckpt-step", "4"]
    words = [*resumable(corpus), *load, *shlex.split(RESUMED[name])]
    expected = theirs(corpus, 1, *words)
    assert expected["consumed samples"][0] == (2 if name == "anew" else 10)
    check_same(ours(corpus, 1, *words), expected)


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_command_of_a_hybrid_model_logs_the_same_numbers(corpus, name):
    if minor_version() < 18:
        pytest.skip("another program, with other flags")
    ranks, flags = HYBRIDS[name]
    words = command(corpus, flags)
    expected = theirs(corpus, ranks, *words)
    assert expected["lm loss"][-1] < expected["lm loss"][0] - 0.1
    check_same(ours(corpus, ranks, *words), expected)


@pytest.mark.parametrize("documents", ["one sequence", "documents", "documents in bf16"])
def test_two_context_ranks_log_the_numbers_of_megatrons_own_attention(corpus, documents):
    words = command(corpus, f"{LLAMA} --bf16" if "bf16" in documents else LLAMA)
    if documents != "one sequence":
        tokenizer = megatron_lm.write_tokenizer(corpus.parent / "tokenizer")
        place = words.index("NullTokenizer")
        words[place : place + 1] = ["HuggingFaceTokenizer", "--tokenizer-model", str(tokenizer)]
        words += shlex.split("--reset-attention-mask --reset-position-ids --eod-mask-loss")
    found = ours(corpus, 2, *words, "--context-parallel-size", "2")
    check_same(found, theirs(corpus, 1, *words), nearly(3e-4) if "bf16" in documents else NEAR)


@pytest.mark.parametrize("name", FORMATS)
def test_each_goes_on_from_what_the_other_saved(corpus, tmp_path, name):
    ranks, flags = FORMATS[name]
    if "hybrid" in flags and minor_version() < 18:
        pytest.skip("another program, with other flags")
    words = command(corpus, flags)
    for first, second in ((theirs, ours), (ours, theirs)):
        folder = str(tmp_path / first.__name__)
        whole = first(corpus, ranks, *words, "--save", folder, "--save-interval", "4")
        rest = second(corpus, ranks, *words, "--load", folder, "--ckpt-step", "4")
        for figure in ALWAYS - {"validation"}:
            start = (
                6 if figure in MEANS else 4
            )  # a job of Megatron-LM's has a mean in its second line
            np.testing.assert_allclose(
                rest[figure][start - 4 :], whole[figure][start:], rtol=NEAR[figure], err_msg=figure
            )
        np.testing.assert_allclose(rest["validation"], whole["validation"], rtol=2e-6)
