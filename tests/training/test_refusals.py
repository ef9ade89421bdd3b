"""Bad command lines: one line for each fault, and none that only follows from another."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_cp.training.arguments import judge_arguments
from megatron_cp.training.arguments.machine import GPU_MACHINE
from tests.training.commands import DATA, MODEL, SMALL_RUN, STEPS
from tests.training.verdicts import parse, refusal, refusals

HYBRID = ["--hybrid-context-parallel", "--calculate-per-token-loss"]
EXPERTS = ["--num-experts", "4"]
OVERLAPPED = "--moe-shared-expert-intermediate-size 64 --moe-shared-expert-overlap"
BAD = [
    (["--attention-dropout", "1.0"], "--attention-dropout"),
    (["--hidden-dropout", "1.5"], "--hidden-dropout"),
    (["--num-attention-heads", "5"], "--kv-channels"),
    (["--num-query-groups", "3"], "--num-query-groups"),
    (["--global-batch-size", "3", "--micro-batch-size", "2"], "--global-batch-size"),
    (["--train-samples", "10"], "exactly one"),
    (["--train-iters", "0"], "--train-iters"),
    (["--lr-warmup-iters", "4"], "warm-up"),
    (["--lr-warmup-samples", "1"], "--lr-warmup-samples"),
    (["--lr-decay-style", "WSD"], "--lr-wsd-decay-iters"),
    (["--min-lr", "1"], "--min-lr"),
    (["--decoupled-lr", "1e-4", "--min-lr", "2e-4"], "--min-lr 0.0002 is above --decoupled-lr"),
    (["--decoupled-lr", "1e-4", "--decoupled-min-lr", "1"], "--decoupled-min-lr 1.0 is above"),
    (["--decoupled-lr", "1e-4", "--lr-warmup-init", "2e-4"], "--lr-warmup-init 0.0002 is above"),
    (["--lr", "nothing"], "--lr"),
    (["--clip-grad", "-1"], "--clip-grad"),
    (["--weight-decay-incr-style", "linear"], "--start-weight-decay"),
    (
        [
            "--weight-decay-incr-style",
            "linear",
            "--start-weight-decay",
            ".2",
            "--end-weight-decay",
            ".1",
        ],
        "--start-weight-decay 0.2 must be at most --end-weight-decay 0.1",
    ),
    (["--max-position-embeddings", "16"], "--max-position-embeddings"),
    (["--overlap-param-gather"], "--use-distributed-optimizer"),
    (["--recompute-granularity", "full"], "--recompute-method"),
    (["--ckpt-step", "2"], "--load"),
    (["--fp16", "--bf16"], "--fp16 and --bf16"),
    (["--num-experts", "3", "--expert-model-parallel-size", "2"], "--num-experts 3"),
    (["--num-experts", "2", "--moe-router-topk", "3"], "--moe-router-topk 3"),
    (["--num-experts", "4", "--moe-layer-freq", "[1]"], "--moe-layer-freq [1]"),
    (["--num-experts", "4", "--moe-router-load-balancing-type", "luck"], "luck"),
    (["--num-experts", "4", "--moe-router-num-groups", "2"], "--moe-router-group-topk"),
    (["--num-experts", "4", "--moe-router-enable-expert-bias"], "sigmoid"),
    (["--num-experts", "4", "--moe-token-dispatcher-type", "flex"], "alltoall"),
    (["--moe-ffn-hidden-size", "64"], "--num-experts"),
    (["--expert-model-parallel-size", "2"], "--num-experts"),
    (["--multi-latent-attention"], "--group-query-attention"),
    (["--q-lora-rank", "8"], "--multi-latent-attention"),
    (["--mtp-num-layers", "-1"], "--mtp-num-layers -1"),
    (["--mtp-num-layers", "1", "--spec", "os", "path", "--allow-custom-spec"], "--spec os path"),
    (["--pipeline-model-parallel-layout", "Ett|L"], "2 stages"),
    (["--pipeline-model-parallel-layout", "EtL"], "1 t"),
    (["--pipeline-model-parallel-layout", "EttmL"], "1 m"),
    (["--pipeline-model-parallel-layout", "ttEL"], "one E"),
    (["--pipeline-model-parallel-layout", "Ett?L"], "'?'"),
    (
        ["--pipeline-model-parallel-layout", "EttL", "--account-for-loss-in-pipeline-split"],
        "leave out",
    ),
    (["--exp-avg-dtype", "bf16"], "--use-precision-aware-optimizer"),
    (["--optimizer", "sgd", "--use-distributed-optimizer"], "state of Adam alone"),
    (
        [
            "--num-experts",
            "4",
            "--moe-router-load-balancing-type",
            "seq_aux_loss",
            "--micro-batch-size",
            "2",
        ],
        "give --micro-batch-size 1 and the same --global-batch-size",
    ),
    (["--hybrid-context-parallel"], "give --calculate-per-token-loss"),
    ([*HYBRID, "--mtp-num-layers", "1"], "with --mtp-num-layers 1"),
    ([*HYBRID, "--cp-rank-speeds", "1,1"], "with --cp-rank-speeds, or a --cp-topology profile"),
    ([*HYBRID, *EXPERTS, "--moe-aux-loss-coeff", "1e-2"], "and --moe-aux-loss-coeff is not"),
    ([*HYBRID, *EXPERTS, "--moe-z-loss-coeff", "1e-3"], "and --moe-z-loss-coeff 0.001 is not"),
    (
        [
            *HYBRID,
            *EXPERTS,
            "--moe-router-load-balancing-type",
            "sinkhorn",
            "--moe-router-topk",
            "1",
        ],
        "and --moe-router-load-balancing-type sinkhorn is not",
    ),
    (
        [*HYBRID, *EXPERTS, "--moe-expert-capacity-factor", "1"],
        "and --moe-expert-capacity-factor 1.0 is not",
    ),
    *(
        (f"{' '.join(EXPERTS)} {OVERLAPPED} {activation}".split(), f"overlap with {activation}")
        for activation in ("--glu-linear-offset 1.0", "--activation-func-clamp-value 7.0")
    ),
    (["--no-rope-freq", "[1]"], "--no-rope-freq [1]"),
    (["--swiglu", "--quick-geglu"], "exclude each other"),
    (["--wandb-exp-name", ""], "--wandb-exp-name"),
    (["--spec", "os", "system"], "--allow-custom-spec"),
    (["--spec", "os"], "--spec"),
    (["--data-path", "a", "b"], "sources"),
    (["--data-args-path", "f"], "2 sources"),
    (["--sft", "--tokenizer-type", "ByteLevel"], "--sft with --mock-data"),
    (["--packing", "megatron"], "--packing megatron needs token files"),
    (["--packing", "first-fit"], "--packing"),
    (["--dataloader-type", "external"], "--dataloader-type external"),
    (["--result-rejected-tracker-filename", "f"], "leaves out the steps that such a file names"),
    (["--num-layers", "0"], "--num-layers"),
    (["--eval-interval", "0"], "--eval-interval"),
    (["--ckpt-format", "zarr"], "--ckpt-format"),
    (["--ckpt-format", "torch", "--async-save"], "--async-save"),
    (["--exit-signal", "SIGKILL"], "--exit-signal"),
    (["--timing-log-level", "3"], "--timing-log-level"),
    (["--straggler-minmax-count", "0"], "--straggler-minmax-count"),
    (["--profile"], "--run-dir"),
    (["--profile", "--run-dir", "x", "--profile-step-end", "10"], "--profile-step-end"),
    (["--profile", "--run-dir", "x", "--profile-ranks", "0", "1"], "--profile-ranks 1"),
    (["--dist-ckpt-strictness", "none"], "choose one of assume_ok_unexpected"),
    (["stray"], "stray"),
    (["--cp-backend", "magic"], "--cp-backend"),
    (["--grad-reduce-in-bf16"], "--bf16"),
    (["--vocab-file=v.json"], "--merge-file"),
    *(
        (
            ["--tokenizer-type", kind, "--tokenizer-special-tokens", "<a>", "<b>"],
            f"--tokenizer-special-tokens <a> <b> with --tokenizer-type {kind} is not",
        )
        for kind in ("HuggingFaceTokenizer", "Llama2Tokenizer", "ByteLevel")
    ),
    (["--tokenizer-type", "GPT2BPETokenizer"], "--vocab-file and --merge-file"),
    (
        ["--merge-file", "m", "--tokenizer-type", "HuggingFaceTokenizer"],
        "--tokenizer-type GPT2BPETokenizer",
    ),
    (["--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "te"], "impl native"),
    (["--fp8-format", "hybrid"], "fp8='hybrid' computes linear layers in Transformer Engine"),
    *(
        ([flag, value], f"{flag} {value}")
        for flag, values in {
            "--seq-length": ["1"],
            "--ffn-hidden-size": ["0", "-64"],
            "--kv-channels": ["0", "15"],
            "--norm-epsilon": ["0.0", "nan"],
            "--init-method-std": ["0.0", "nan", "inf"],
            "--rotary-base": ["0"],
            "--rotary-percent": ["0.0", "1.5", "nan"],
            "--rope-scaling-factor": ["0.0"],
            "--moe-input-jitter-eps": ["0.0", "nan"],
            "--ddp-bucket-size": ["0", "-1"],
            "--plan-batches": ["0"],
            "--seed": ["-1"],
            "--lr": ["inf", "nan", "-1.0"],
            "--lr-decay-iters": ["0"],
            "--weight-decay": ["nan", "-0.1", "inf"],
            "--clip-grad": ["nan", "-1.0"],
            "--adam-eps": ["0.0", "-1.0", "nan"],
            "--sgd-momentum": ["1.0"],
            "--window-attn-skip-freq": ["0", "[1]", "[1, 2]"],
            "--recompute-modules": ["everything"],
            "--recompute-num-layers": ["0", "3"],
        }.items()
        for value in values
    ),
]


@pytest.mark.parametrize(("flags", "named"), BAD, ids=lambda value: " ".join(value)[:40])
def test_bad_input_is_one_line_that_names_the_flag(capsys, flags: list[str], named: str):
    assert named in refusal(capsys, *SMALL_RUN, *flags)


@pytest.mark.parametrize(
    ("flags", "world_size", "named"),
    [
        (["--context-parallel-size", "2", "--moe-expert-capacity-factor", "1"], 2, "=1.0 with"),
        (
            [
                "--expert-tensor-parallel-size",
                "2",
                "--moe-token-dispatcher-type",
                "alltoall",
                "--tensor-model-parallel-size",
                "2",
                "--sequence-parallel",
            ],
            2,
            "give --moe-token-dispatcher-type allgather",
        ),
        (
            [
                "--use-tp-pp-dp-mapping",
                "--pipeline-model-parallel-size",
                "2",
                "--context-parallel-size",
                "2",
            ],
            4,
            "tensor x context size = 1 x 2; it is 1",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_experts_that_ranks_cannot_serve_are_one_line(capsys, flags, world_size: int, named: str):
    flags = [*SMALL_RUN, "--num-experts", "4", *flags]
    assert named in refusal(capsys, *flags, world_size=world_size)


def test_replicas_that_are_no_neighbours_in_a_node_are_not_planned_together(capsys):
    flags = [*HYBRID, "--use-tp-pp-dp-mapping", "--pipeline-model-parallel-size", "2"]
    assert "drop --use-tp-pp-dp-mapping" in refusal(capsys, *SMALL_RUN, *flags, world_size=4)


def test_megatrons_samples_are_drawn_in_no_other_order_than_said(capsys):
    samples = [*MODEL, *STEPS, "--data-path", "x", "--seq-length", "64", "--packing", "megatron"]
    cyclic = ["--dataloader-type", "cyclic"]
    assert "cyclic with --packing megatron is not served" in refusal(capsys, *samples, *cyclic)
    assert not parse(*samples, "--dataloader-type", "single").notes
    (note,) = parse(*SMALL_RUN, *cyclic).notes
    assert note.startswith("--dataloader-type cyclic changes nothing here")


def test_a_note_says_where_one_replica_has_nothing_to_share():
    told = "--hybrid-context-parallel changes nothing here: there is one replica"
    assert told in parse(*SMALL_RUN, *HYBRID).notes
    assert told not in parse(*SMALL_RUN, *HYBRID, world_size=2).notes


def test_latent_attention_on_tensor_ranks_is_one_line(capsys):
    flags = [word for word in SMALL_RUN if word != "--group-query-attention"]
    flags += ["--multi-latent-attention", "--tensor-model-parallel-size", "2"]
    assert "lose part of a gradient" in refusal(capsys, *flags, world_size=2)


def test_a_note_says_where_experts_start_from_other_weights():
    flags = [
        "--num-experts",
        "4",
        "--moe-ffn-hidden-size",
        "32",
        "--expert-model-parallel-size",
        "2",
    ]
    told = "another --expert-model-parallel-size starts from other weights"
    assert any(told in note for note in parse(*SMALL_RUN, *flags, world_size=2).notes)
    assert not any(told in note for note in parse(*SMALL_RUN, *flags[:-2], world_size=2).notes)


def test_the_format_torch_has_no_place_for_experts_of_other_ranks(capsys, tmp_path):
    """One file for a tensor rank would hold the experts of the first rank alone."""
    flags = [*SMALL_RUN, *EXPERTS, "--moe-ffn-hidden-size", "32", "--ckpt-format", "torch"]
    flags += ["--save", str(tmp_path)]
    dealt = ["--expert-model-parallel-size", "2"]
    line = refusal(capsys, *flags, *dealt, world_size=2)
    assert "--ckpt-format torch with --expert-model-parallel-size 2" in line
    parse(*flags, world_size=2)
    parse(*flags, *dealt, "--ckpt-format", "torch_dist", world_size=2)


def test_instances_of_the_optimizer_need_einops():
    flags = ["--num-distributed-optimizer-instances", "2", "--use-distributed-optimizer"]
    for has_einops in (True, False):
        machine = replace(GPU_MACHINE, has_einops=has_einops)
        _, reasons = judge_arguments([*SMALL_RUN, *flags], {"WORLD_SIZE": "2"}, machine)
        assert ["pip install einops" in reason for reason in reasons] == [True] * (not has_einops)


# Faults that do not follow from one another, and what the line about each begins with.
FAULTS = {
    ("--use-mup",): "--use-mup is an argument of Megatron-LM",
    (
        "--moe-expert-rank-capacity-factor",
        "8",
    ): "--moe-expert-rank-capacity-factor is an argument of Megatron-LM",
    ("--context-paralel-size", "2"): "--context-paralel-size is unknown",
    ("--lr", "nothing"): "argument --lr: invalid float value: 'nothing'",
    ("--cp-backend", "magic"): "argument --cp-backend: invalid choice: 'magic'",
    ("--attention-dropout", "-0.1"): "--attention-dropout -0.1 must lie in [0, 1)",
    ("--clip-grad", "-1"): "--clip-grad -1.0 must be finite",
    ("--num-query-groups", "3"): "--num-attention-heads 4 must be a multiple of --num-query-groups",
    ("--max-position-embeddings", "16"): "--max-position-embeddings 16 must be at least",
    ("--recompute-modules", "all"): "--recompute-modules all must be one of",
    ("--train-samples", "10"): "give exactly one of --train-iters",
    ("--ckpt-step", "2"): "--ckpt-step needs --load",
    ("--spec", "os"): "--spec os must be",
    ("--weight-decay-incr-style", "linear"): "--weight-decay-incr-style linear needs",
    ("--wandb-exp-name", ""): "--wandb-exp-name is given an empty word",
    ("--tensorboard-dir", ""): "--tensorboard-dir is given an empty word",
    ("--tokenizer-model=",): "--tokenizer-model is given an empty word",
}


@pytest.mark.parametrize("flag", ["--load", "--save", "--data-cache-path", "--tokenizer-type"])
def test_an_unset_variable_of_the_shell_is_no_value(flag):
    """``--load "$CHECKPOINT"`` would begin from nothing, without a word."""
    for words in ([flag, ""], [f"{flag}="]):
        _, reasons = judge_arguments([*SMALL_RUN, *words], {})
        assert any(reason.startswith(f"{flag} is given an empty word") for reason in reasons)


@settings(max_examples=60, deadline=None)
@given(st.sets(st.sampled_from(sorted(FAULTS)), min_size=1))
def test_every_reason_is_one_line_and_none_hides_another(chosen):
    words = [word for flags in chosen for word in flags]
    _, reasons = judge_arguments([*SMALL_RUN, *words], {})
    assert reasons == sorted(reasons)
    assert len(reasons) == len(chosen)
    for flags in chosen:
        assert sum(reason.startswith(FAULTS[flags]) for reason in reasons) == 1


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--num-layers", "x", "--window-attn-skip-freq", "[1]"], "--num-layers"),
        (["--hidden-size", "-8"], "--hidden-size"),
        (["--tensor-model-parallel-size", "0"], "--tensor-model-parallel-size"),
        (["--micro-batch-size", "x"], "--micro-batch-size"),
        (["--seq-length", "1", "--max-position-embeddings", "1"], "--seq-length"),
        (["--optimizer", "lion"], "--optimizer"),
        (["--pipeline-model-parallel-layout", "EttL", "--num-layers", "3"], "-layout"),
    ],
)
def test_what_only_follows_from_a_reason_is_left_out(capsys, flags: list[str], named: str):
    assert named in refusal(capsys, *SMALL_RUN, *flags)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ([], "--micro-batch-size is missing"),
        (["--micro-batch-size", "x"], "argument --micro-batch-size: invalid int value: 'x'"),
        (["--micro-batch-size", "1", "--rampup-batch-size", "[2", "1", "4"], "--rampup-batch-size"),
    ],
)
def test_samples_that_no_batch_size_counts_are_left_out_too(capsys, flags: list[str], named: str):
    run = [*MODEL, *DATA, "--lr", "1e-3", "--train-samples", "8"]
    assert named in refusal(capsys, *run, *flags)


def test_a_misspelt_flag_is_not_reported_as_missing_too(capsys):
    flags = [*MODEL, *DATA, *STEPS]
    flags[flags.index("--lr")] = "--lrr"
    assert "--lrr is unknown" in refusal(capsys, *flags)


def test_an_empty_command_line_names_everything_that_has_no_default(capsys):
    lines = refusals(capsys)
    for flag in ("--num-layers", "--hidden-size", "--seq-length", "--micro-batch-size", "--lr"):
        assert f"{flag} is missing; it has no default" in lines


def test_all_reasons_are_printed_in_one_write(monkeypatch):
    writes = []
    monkeypatch.setattr("sys.stderr.write", writes.append)
    with pytest.raises(SystemExit):
        parse(*SMALL_RUN, "--use-mup", "--optimizer", "lion", "--lr", "-1")
    assert [text.count("\n") for text in writes] == [3]


def test_predictions_that_could_not_be_saved_are_refused(capsys):
    flags = [*SMALL_RUN, "--mtp-num-layers", "1", "--pipeline-model-parallel-size", "2"]
    assert "cannot be saved" in refusal(capsys, *flags, world_size=2)
    parse(*flags, "--untie-embeddings-and-output-weights", world_size=2)


def test_gradients_are_kept_in_the_type_that_was_asked_for():
    flags = ["--bf16", "--use-distributed-optimizer", "--use-precision-aware-optimizer"]
    for kept, is_wide in (("fp32", True), ("bf16", False)):
        wanted = [*SMALL_RUN, *flags, "--main-grads-dtype", kept]
        draft, reasons = judge_arguments(wanted, {}, GPU_MACHINE)
        assert not reasons
        assert draft.accumulate_allreduce_grads_in_fp32 is is_wide
    both = [*wanted, "--accumulate-allreduce-grads-in-fp32"]
    (reason,) = judge_arguments(both, {}, GPU_MACHINE)[1]
    assert reason.startswith("--main-grads-dtype bf16 and --accumulate-allreduce-grads-in-fp32 ex")
