"""Models that Megatron-Core could not train, or would train as another, are one line each; their neighbours run."""

import pytest

from megatron_cp.training.arguments import judge_arguments, parse_arguments
from megatron_cp.training.arguments.machine import GPU_MACHINE
from tests.training.commands import MODEL, SMALL_RUN, STEPS
from tests.training.verdicts import parse, refusal

EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 48"
PREDICTION = "--mtp-num-layers 1 --untie-embeddings-and-output-weights"
STAGES, TENSOR = "--pipeline-model-parallel-size 2", "--tensor-model-parallel-size 2"
LATENT, YARN = "--multi-latent-attention", "--position-embedding-type yarn"
LEARNED = "--position-embedding-type learned_absolute"
SELECTIVE = "--recompute-granularity selective --recompute-modules mlp"
UNIFORM = "--recompute-granularity full --recompute-method uniform"

# flags, ranks, what the line says, flags that are accepted instead
REFUSED = [
    (f"{PREDICTION} {LEARNED} {STAGES}", 2, "two tables of positions", f"{PREDICTION} {STAGES}"),
    (f"{PREDICTION} {LEARNED} {STAGES}", 2, "-size 2 is not served", f"{PREDICTION} {LEARNED}"),
    (
        f"{PREDICTION} {STAGES} --pipeline-model-parallel-layout Ettm|L",
        2,
        "must have m and L on the last stage",
        f"{PREDICTION} {STAGES} --pipeline-model-parallel-layout Et|tmL",
    ),
    (
        f"{EXPERTS} {TENSOR} --sequence-parallel --moe-expert-capacity-factor 1",
        2,
        "moe_expert_capacity_factor=1.0 with tensor_model_parallel_size=2",
        f"{EXPERTS} --moe-expert-capacity-factor 1",
    ),
    (
        f"{EXPERTS} {TENSOR}",
        2,
        "needs --sequence-parallel",
        f"{EXPERTS} {TENSOR} --sequence-parallel",
    ),
    (
        f"{EXPERTS} {TENSOR} --skip-train --moe-token-dispatcher-type alltoall --expert-tensor-parallel-size 1 "
        "--expert-model-parallel-size 2",
        2,
        "needs --sequence-parallel",
        f"{EXPERTS} {TENSOR} --skip-train",
    ),
    (
        f"{EXPERTS} {TENSOR} --sequence-parallel --expert-tensor-parallel-size 1",
        2,
        "over the wrong ranks",
        f"{EXPERTS} {TENSOR} --sequence-parallel --expert-tensor-parallel-size 1 --expert-model-parallel-size 2",
    ),
    (
        f"{EXPERTS} --expert-tensor-parallel-size 2 --global-batch-size 4",
        4,
        "over the wrong ranks",
        f"{EXPERTS} --expert-tensor-parallel-size 2 --expert-model-parallel-size 2 --global-batch-size 4",
    ),
    (f"--qk-clip {TENSOR}", 2, "by the sizes of all ranks", f"--log-max-attention-logit {TENSOR}"),
    ("--qk-clip --attention-output-gate", 1, "those of the gate", "--attention-output-gate"),
    ("--qk-clip --qk-layernorm", 1, "--qk-clip with --qk-layernorm is", "--qk-layernorm"),
    ("--qk-clip --qk-l2-norm", 1, "--qk-clip with --qk-l2-norm is", "--qk-clip"),
    (
        f"--attention-output-gate --num-query-groups 1 {TENSOR}",
        2,
        "--num-query-groups 1 and tensor size 2",
        f"--attention-output-gate {TENSOR}",
    ),
    (f"{PREDICTION} {UNIFORM}", 1, "give --recompute-method block", UNIFORM),
    (
        f"{PREDICTION} {UNIFORM} --recompute-num-layers 2",
        1,
        "give --recompute-method block",
        f"{PREDICTION} --recompute-granularity full --recompute-method block --recompute-num-layers 2",
    ),
    (
        f"--num-layers 4 {UNIFORM} --recompute-num-layers 3",
        1,
        "must divide the layers of every stage, and one has 4",
        f"--num-layers 4 {UNIFORM} --recompute-num-layers 2",
    ),
    (
        f"--num-layers 6 {STAGES} --decoder-first-pipeline-num-layers 2 {UNIFORM} --recompute-num-layers 4",
        2,
        "must divide the layers of every stage, and one has 2",
        f"--num-layers 6 {STAGES} --decoder-first-pipeline-num-layers 2 {UNIFORM} --recompute-num-layers 2",
    ),
    (
        f"--num-layers 3 {STAGES} --pipeline-model-parallel-layout Ett|tL {UNIFORM} --recompute-num-layers 2",
        2,
        "must divide the layers of every stage, and one has 1",
        f"--num-layers 3 {STAGES} --pipeline-model-parallel-layout Ett|tL {UNIFORM}",
    ),
    (f"{PREDICTION} --no-rope-freq 2", 1, "--no-rope-freq 2 with --mtp", "--no-rope-freq 2"),
    (
        f"{PREDICTION} --window-size 16,0 --window-attn-skip-freq [1,0]",
        1,
        "--window-attn-skip-freq [1, 0] with --mtp",
        f"{PREDICTION} --window-size 16,0 --window-attn-skip-freq 2",
    ),
    (
        f"{PREDICTION} --window-size 16,0 --window-attn-skip-freq 3",
        1,
        "is number 3 with Megatron-Core 0.16 and 1 since",
        f"{PREDICTION} --window-size 16,0 --window-attn-skip-freq 4",
    ),
    ("--no-rope-freq 2 --num-layers 3", 1, "--no-rope-freq 2 must divide", "--no-rope-freq [0,1]"),
    (
        f"{EXPERTS} --moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff .01",
        1,
        "no auxiliary loss",
        f"{EXPERTS} --moe-router-load-balancing-type sinkhorn",
    ),
    (
        f"{EXPERTS} --moe-router-load-balancing-type aux_loss sinkhorn --moe-aux-loss-coeff .01 0",
        1,
        "would drop it",
        f"{EXPERTS} --moe-router-load-balancing-type aux_loss none --moe-aux-loss-coeff .01 0",
    ),
    (
        f"{EXPERTS} --moe-aux-loss-coeff .01 .02",
        1,
        "1 kinds, --moe-aux-loss-coeff 2 values",
        f"{EXPERTS} --moe-aux-loss-coeff .01",
    ),
    (
        f"{EXPERTS} --moe-router-num-groups 4 --moe-router-group-topk 1",
        1,
        "--moe-router-topk 2 must be at most --moe-router-group-topk 1 x 1",
        f"{EXPERTS} --moe-router-num-groups 2 --moe-router-group-topk 1",
    ),
    (
        f"{EXPERTS} --moe-router-num-groups 4 --moe-router-group-topk 3",
        1,
        "of at most 2",
        f"{EXPERTS} --moe-router-num-groups 4 --moe-router-group-topk 2",
    ),
    (
        f"{EXPERTS} --moe-apply-probs-on-input",
        1,
        "--moe-router-topk 2",
        f"{EXPERTS} --moe-apply-probs-on-input --moe-router-topk 1 --moe-router-pre-softmax",
    ),
    (f"{YARN} --rotary-interleaved", 1, "rotates halves alone", "--rotary-interleaved"),
    (f"{YARN} --rotary-percent 0.5", 1, "--rotary-percent 0.5 with", "--rotary-percent 0.5"),
    (f"{YARN} --use-rope-scaling", 1, "--use-rope-scaling with", "--use-rope-scaling"),
    (
        f"{YARN} --rotary-seq-len-interpolation-factor 2",
        1,
        "--rotary-seq-len-interpolation-factor 2 with",
        f"{YARN} --yarn-original-max-position-embeddings 66",
    ),
    (
        "--softmax-type learnable --init-method-xavier-uniform",
        1,
        "sinks are vectors",
        "--softmax-type off-by-one --init-method-xavier-uniform",
    ),
    ("--apply-residual-connection-post-layernorm", 1, "reads it nowhere", ""),
    ("--hidden-size 16", 1, "is 0; give it", "--hidden-size 16 --ffn-hidden-size 32"),
    (
        f"--decoder-last-pipeline-num-layers 2 {STAGES}",
        2,
        "must leave what 2 pipeline stages of 2 layers can hold",
        f"--decoder-last-pipeline-num-layers 1 {STAGES}",
    ),
]


@pytest.mark.parametrize(("flags", "world_size", "named", "accepted"), REFUSED)
def test_a_model_that_would_not_train_is_one_line(capsys, flags, world_size, named, accepted):
    assert named in refusal(capsys, *SMALL_RUN, *flags.split(), world_size=world_size)
    parse(*SMALL_RUN, *accepted.split(), world_size=world_size)


WITH_BIASES = [word for word in SMALL_RUN if word != "--disable-bias-linear"]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (SELECTIVE, "would not end"),
        (f"{SELECTIVE} {EXPERTS} --moe-layer-freq 2", "would not end"),
        (f"{EXPERTS} --moe-shared-expert-intermediate-size 32", "-size 32 with biases"),
        (f"{EXPERTS} {TENSOR} --sequence-parallel", "--expert-tensor-parallel-size 2 with biases"),
        (f"{EXPERTS} --init-method-xavier-uniform", "draws matrices alone"),
    ],
)
def test_biases_that_megatron_core_cannot_train_are_one_line(capsys, flags: str, named: str):
    assert named in refusal(capsys, *WITH_BIASES, *flags.split(), world_size=2)
    parse(*SMALL_RUN, *flags.split(), world_size=2)


def test_modules_of_experts_are_recomputed_with_biases():
    """Without a dense layer there is no MLP to recompute."""
    parse(*WITH_BIASES, *SELECTIVE.split(), *EXPERTS.split())
    parse(*WITH_BIASES, *EXPERTS.split(), "--recompute-modules", "mlp")


def test_packs_whose_labels_cross_documents_are_balanced_one_by_one(capsys, tmp_path):
    """Under Megatron-LM's samples all positions count in the loss, whatever sees whom."""
    data = ["--data-path", str(tmp_path / "x"), "--vocab-size", "512", "--seq-length", "128"]
    words = [*MODEL, *data, *STEPS, *EXPERTS.split(), "--reset-attention-mask"]
    words += ["--moe-router-load-balancing-type", "seq_aux_loss", "--micro-batch-size", "2"]
    parse(*words, "--packing", "megatron")
    for packing in (["--packing", "split"], ["--packing", "megatron", "--eod-mask-loss"]):
        assert "give --micro-batch-size 1" in refusal(capsys, *words, *packing)


@pytest.mark.parametrize("other", ["aux_loss", "global_aux_loss"])
def test_two_losses_that_balance_other_tokens_are_not_made_to_balance_the_same(capsys, other: str):
    """Packs one by one are right for seq_aux_loss, and another loss than that of a micro-batch for these."""
    words = [*SMALL_RUN, *EXPERTS.split(), "--calculate-per-token-loss", "--moe-aux-loss-coeff"]
    words += ["0.1", "0.2", "--moe-router-load-balancing-type", other, "seq_aux_loss"]
    assert f"by itself, {other} the 2 of" in refusal(capsys, *words, "--micro-batch-size", "2")
    assert parse(*words).micro_batch_size == 1
    alone = [*words[:-5], "0.2", "--moe-router-load-balancing-type", "seq_aux_loss"]
    assert parse(*alone, "--micro-batch-size", "2").micro_batch_size == 1


OF_LATENT = [word for word in SMALL_RUN if word != "--group-query-attention"]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (YARN, "--rope-type yarn, the default"),
        ("--position-embedding-type none", "would rotate all the same"),
        ("--no-rope-freq 2", "--no-rope-freq 2 with --multi-latent-attention"),
        ("--use-rope-scaling", "--use-rope-scaling with --multi-latent-attention"),
        ("--rotary-seq-len-interpolation-factor 2", "-factor 2 with --multi-latent-attention"),
        ("--rotary-percent 0.5", "--rotary-percent 0.5 with --multi-latent-attention"),
        ("--yarn-beta-fast 8", "--yarn-beta-fast 8.0 with --multi-latent-attention"),
        ("--llama-4-scaling-beta .1", "--llama-4-scaling-beta 0.1 with --multi-latent-attention"),
    ],
)
def test_positions_that_latent_attention_does_not_heed_are_one_line(capsys, flags, named):
    assert named in refusal(capsys, *OF_LATENT, LATENT, *flags.split())


def test_queries_are_scaled_by_their_position_beside_yarn_and_in_their_document(capsys):
    scaled = ("--llama-4-scaling-beta", "0.1")
    assert "--llama-4-scaling-beta 0.1 needs --position-em" in refusal(capsys, *SMALL_RUN, *scaled)
    run = [word for word in SMALL_RUN if word != "--reset-position-ids"]
    assert "needs --reset-position-ids" in refusal(capsys, *run, *YARN.split(), *scaled)
    parse(*SMALL_RUN, *YARN.split(), *scaled)
    whole = [word for word in run if word != "--reset-attention-mask"]
    parse(*whole, *YARN.split(), *scaled)


def test_latent_attention_without_yarn_heeds_its_scales_together_or_not_at_all():
    plain = [*OF_LATENT, LATENT, "--rope-type", "rope", "--rotary-scaling-factor", "4"]
    for flags, unheeded in {
        "--mscale 2": {"--rotary-scaling-factor", "--mscale"},
        "--mscale-all-dim .7": set(),
    }.items():
        told = {note.split()[0] for note in parse(*plain, *flags.split()).notes}
        assert told - {"--num-query-groups"} == unheeded


def test_latent_attention_without_yarn_may_rotate_a_share():
    parse(*OF_LATENT, LATENT, "--rope-type", "rope", "--rotary-percent", "0.5")


@pytest.mark.parametrize(
    ("flags", "noted"),
    [
        ("--use-rope-scaling --rope-scaling-factor 32", "--rope-scaling-factor 32.0 is heeded"),
        ("--rotary-seq-len-interpolation-factor 4", "--rotary-seq-len-interpolation-factor 4 is"),
        ("--use-rope-scaling", None),
    ],
)
def test_a_note_says_which_positions_megatrons_program_does_not_stretch(flags, noted):
    notes = parse(*SMALL_RUN, *flags.split()).notes
    assert [note.startswith(noted) for note in notes] == ([] if noted is None else [True])


def test_a_backend_is_asked_for_the_heads_of_latent_attention():
    from megatron_cp.training.pretrain import check_backend  # after the stand-ins of conftest.py

    run = [*OF_LATENT, LATENT, "--bf16", "--cp-backend", "emulated", "--v-head-dim", "128"]
    check_backend(parse_arguments([*run, "--kv-channels", "300"], {}))  # 192 and 128 are built
    wide = parse_arguments([*run, "--kv-channels", "128", "--qk-head-dim", "256"], {})
    with pytest.raises(NotImplementedError, match="no forward kernel for head_dim=320"):
        check_backend(wide)


def test_latent_attention_has_qk_clip_on_tensor_ranks():
    """Norms of its latent vectors lie before the weights that are scaled."""
    for attention, num_reasons in ((LATENT, 0), ("--group-query-attention", 2)):
        words = [*OF_LATENT, attention, *TENSOR.split(), "--qk-clip", "--qk-layernorm"]
        _, reasons = judge_arguments(words, {"WORLD_SIZE": "2"}, GPU_MACHINE)
        assert len(reasons) == num_reasons


NOTED = {
    "--moe-aux-loss-coeff 0.01": "--num-experts",
    "--moe-layer-freq 2": "--num-experts",
    "--moe-shared-expert-gate": "--num-experts",
    "--window-attn-skip-freq 2": "--window-size",
    "--apply-wd-to-qk-layernorm": "--qk-layernorm",
    "--decoupled-min-lr 1e-5": "--decoupled-lr",
    "--mtp-loss-scaling-factor 0.3": "--mtp-num-layers",
    "--qk-clip-threshold 50": "--qk-clip",
    "--loss-scale-window 100": "--fp16, and no --loss-scale",
    "--fp8-margin 1": "--fp8-format",
    "--recompute-modules mlp": "--recompute-granularity",
    "--muon-momentum 0.8": "--optimizer muon",
    "--sgd-momentum 0.8": "--optimizer sgd",
    "--kv-lora-rank 16": "--multi-latent-attention",
    "--rope-type yarn": "--multi-latent-attention",
    "--yarn-beta-fast 8": f"--position-embedding-type yarn, or --rope-type yarn with {LATENT}",
    "--beta-fast 1": "--multi-latent-attention with --rope-type yarn",
    "--mscale 0.5": f"--position-embedding-type yarn, or --rope-type yarn with {LATENT}",
    "--rope-scaling-factor=4": "--use-rope-scaling",
    "--finetune": "--load",
    "--no-load-optim": "--load",
    "--dist-ckpt-strictness log_all": "--load",
    "--override-opt_param-scheduler": "--load",
    "--async-save": "--save",
    "--save-retain-interval 4": "--save",
    "--lr-wsd-decay-iters 2": "--lr-decay-style WSD",
    "--lr-warmup-init 1e-5": "a warm-up, as --lr-warmup-iters gives",
    "--optimizer-offload-fraction .5": "--optimizer-cpu-offload",
    "--recompute-num-layers 1": "--recompute-granularity full",
    "--sft-tokenizer-prompt-format chatml": "--sft",
    "--mid-level-dataset-surplus .1": "--packing megatron",
    "--tiktoken-pattern v1": "--tokenizer-type TikTokenizer",
    "--eval-interval 2 --eval-iters 0": "--eval-iters above 0",
    "--exit-signal SIGUSR1": "--exit-signal-handler",
    "--bad-steps-in-a-row 3": "--on-bad-step skip",
    "--manual-gc-interval 5": "--manual-gc",
    "--profile-ranks 0 1": "--profile",
    "--memory-snapshot-path here.pickle": "--record-memory-history",
    "--straggler-minmax-count 2": "--log-straggler",
    "--log-timers-to-tensorboard": "--timing-log-level 1 or 2",
    "--plan-batches 2": "--plan-only",
}


@pytest.mark.parametrize(("flags", "needed"), NOTED.items())
def test_a_flag_without_what_it_belongs_to_is_a_note(flags: str, needed: str):
    flag = flags.replace("=", " ").split()[0]
    expected = f"{flag} changes nothing here: it needs {needed}"
    assert [n for n in parse(*SMALL_RUN, *flags.split()).notes if "it needs" in n] == [expected]


def test_a_bias_that_latent_attention_has_no_place_for_is_a_note():
    told = [n for n in parse(*OF_LATENT, LATENT, "--add-qkv-bias").notes if "--add-qkv" in n]
    assert len(told) == 1
    assert told[0].startswith("--add-qkv-bias changes nothing here: it needs attention without")
    assert parse(*SMALL_RUN, "--add-qkv-bias").notes == ()


def test_flags_with_what_they_belong_to_are_no_notes():
    belonging = (
        "--num-query-groups 2 --glu-linear-offset 1 --rotary-base 500 --num-experts 4 --moe-layer-freq 2 "
        "--window-size 8,0 --window-attn-skip-freq 2 --decoupled-lr 1e-3 --decoupled-min-lr 1e-4"
    )
    assert parse(*SMALL_RUN, *belonging.split()).notes == ()
    of_a_run = (
        "--load a --finetune --no-load-rng --save b --async-save --save-retain-interval 4 --lr-warmup-fraction .5 "
        "--lr-warmup-init 1e-5 --lr-decay-style WSD --lr-wsd-decay-iters 2 --exit-signal-handler "
        "--exit-signal SIGUSR1 --eval-interval 2 --manual-gc --manual-gc-interval 5"
    )
    assert parse(*SMALL_RUN, *of_a_run.split()).notes == ()
    assert parse(*SMALL_RUN, *YARN.split(), "--yarn-beta-fast", "8", "--mscale", "1").notes == ()
    of_latent = [
        *OF_LATENT,
        LATENT,
        "--beta-slow",
        "0.5",
        "--original-max-position-embeddings",
        "8",
    ]
    notes = parse(*of_latent).notes
    assert [*notes] == [*parse(*OF_LATENT, LATENT).notes]
    assert len(parse(*of_latent, "--rope-type", "rope").notes) == len(notes) + 2


def test_plain_models_tell_what_gates_groups_and_rotation_would_need():
    plain = [word for word in SMALL_RUN if word not in ("--swiglu", "--group-query-attention")]
    flags = ["--glu-linear-offset", "1", "--rotary-base", "500", *LEARNED.split()]
    told = [note.rpartition("needs ")[2] for note in parse(*plain, *flags).notes]
    wanted = [
        "--group-query-attention",
        "--swiglu or --quick-geglu",
        "--position-embedding-type rope",
    ]
    assert told == wanted
