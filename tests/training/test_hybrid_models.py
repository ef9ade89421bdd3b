"""Hybrid models: Mamba-2, attention, MLPs and experts by a pattern; one checkpoint, the same losses at every layout."""

import shlex
from pathlib import Path

import pytest

from megatron_cp.training.arguments import parse_arguments
from megatron_cp.training.datasets import plan_request
from tests.training.commands import (
    DATA,
    EVALUATED,
    STEPS,
    THREE_STEPS,
    TWO_STEPS,
    check_goes_on,
    metrics,
    train,
    train_and_save_first,
)
from tests.training.verdicts import parse, refusals

# Weights are drawn so large that every layer's share of gradients and losses is far above rounding.
MODEL = shlex.split(
    "--hidden-size 64 --num-attention-heads 4 --group-query-attention --num-query-groups 2 --normalization RMSNorm "
    "--disable-bias-linear --position-embedding-type none --attention-dropout 0.0 --hidden-dropout 0.0 --squared-relu "
    "--untie-embeddings-and-output-weights --hybrid-layer-pattern M-M*ME*- --mamba-head-dim 8 --mamba-num-groups 2 "
    "--mamba-state-dim 16 --mamba-num-heads 8 --calculate-per-token-loss --init-method-std 0.2"
)
RUN = [*MODEL, *DATA, *STEPS, *THREE_STEPS, "--no-wandb"]
EXPERTS = shlex.split(
    "--num-experts 4 --moe-ffn-hidden-size 32 --moe-aux-loss-coeff 1e-2 --moe-latent-size 24 "
    "--moe-shared-expert-intermediate-size 32"
)
LAYOUTS = {  # ranks, flags
    "context": (2, "--context-parallel-size 2 --cp-planner auto"),
    "three context ranks": (3, "--context-parallel-size 3"),
    "tensor, sequence and context": (
        4,
        "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2",
    ),
    "marked stages": (
        4,
        "--pipeline-model-parallel-size 2 --context-parallel-size 2 --hybrid-layer-pattern M-M|*ME*- --eval-iters 1",
    ),
    "three stages": (3, "--pipeline-model-parallel-size 3 --hybrid-layer-pattern M|-M*|ME*-"),
    "experts, recomputed": (
        2,
        "--expert-model-parallel-size 2 --recompute-granularity selective --recompute-modules core_attn layernorm",
    ),
    "all recomputed": (
        2,
        "--context-parallel-size 2 --recompute-granularity full --recompute-method uniform --recompute-num-layers 3",
    ),
    "stages, some layers recomputed": (
        2,
        "--pipeline-model-parallel-size 2 --hybrid-layer-pattern M-M|*ME*- --recompute-granularity full "
        "--recompute-method block --recompute-num-layers 2",
    ),
    "replicas": (4, "--context-parallel-size 2"),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "alone"
    train_and_save_first(1, folder, *RUN, *EVALUATED, *EXPERTS, "--seq-length", "120")
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_go_on_as_on_one_rank(alone: Path, tmp_path: Path, layout: str):
    world_size, flags = LAYOUTS[layout]
    resumed = ["--load", str(alone), "--ckpt-step", "1", "--run-dir", str(tmp_path / "run")]
    train(world_size, *RUN, *EXPERTS, "--seq-length", "120", *resumed, *flags.split())
    keys = ("lm loss", "grad-norm", "load_balancing_loss")
    check_goes_on(tmp_path / "run", alone, keys=keys, rel=3e-6)


BESIDE = {
    "rotated, in windows": "--hybrid-layer-pattern M*M* --position-embedding-type rope --window-size 16,0 "
    "--window-attn-skip-freq [0,1,0,0]",
    "no attention": "--hybrid-layer-pattern MM-",
    "no Mamba": "--hybrid-layer-pattern *-*-",
    "fp16 scales": "--hybrid-layer-pattern M-* --fp16 --loss-scale 64",
}


@pytest.mark.parametrize("other", BESIDE)
def test_two_context_ranks_are_one_beside_other_layers(tmp_path: Path, other: str):
    for ranks in (1, 2):
        more = ["--context-parallel-size", str(ranks), "--run-dir", str(tmp_path / str(ranks))]
        train(ranks, *RUN, *TWO_STEPS, *BESIDE[other].split(), *more)
    near = 3e-3 if "--fp16" in BESIDE[other] else 3e-6
    for key in ("lm loss", "grad-norm"):
        one, two = (metrics(tmp_path / str(ranks), key) for ranks in (1, 2))
        assert sorted(one) == [1, 2], key
        assert two == pytest.approx(one, rel=near), key


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--hybrid-layer-pattern M-G*", "'G' is a gated delta net"),
        ("--hybrid-layer-pattern M-x", "'x' is none of M, *, -, E, | and /"),
        ("--hybrid-override-pattern MM", "the older name of --hybrid-layer-pattern, and they differ"),
        ("--hybrid-layer-pattern M-|M*", "has 2 stages; --pipeline-model-parallel-size is 1"),
        ("", "has layers of experts (E); give --num-experts"),
        ("--hybrid-layer-pattern M* --num-experts 4", "without E has no layer"),
        ("--hybrid-layer-pattern M* --mamba-num-groups 3", "a multiple of mamba_num_groups=3"),
        ("--hybrid-layer-pattern M* --mamba-state-dim 0", "--mamba-state-dim 0 must be positive"),
        ("--num-experts 4 --moe-latent-size 0", "--moe-latent-size 0 must be positive"),
        ("--num-experts 4 --moe-latent-size 8 --moe-shared-expert-overlap "
         "--moe-shared-expert-intermediate-size 8",
         "--moe-shared-expert-overlap with --moe-latent-size"),
        ("--hybrid-layer-pattern M* --mamba-num-heads 0", "--mamba-num-heads 0 must be positive"),
        ("--hybrid-layer-pattern M* --mamba-num-heads -8", "--mamba-num-heads -8 must be positive"),
        ("--hybrid-layer-pattern M* --optimizer muon", "--optimizer muon with --hybrid-layer"),
        ("--hybrid-layer-pattern M* --use-rope-scaling --position-embedding-type rope",
         "--use-rope-scaling with --hybrid-layer-pattern"),
        ("--hybrid-layer-pattern M* --experimental-attention-variant gated_delta_net "
         "--linear-attention-freq 2 --swiglu", "with hybrid_layer_pattern is not served"),
    ],
)  # fmt: skip
def test_what_cannot_be_built_is_one_line(capsys, flags: str, said: str):
    assert said in "\n".join(refusals(capsys, *RUN, *flags.split()))


@pytest.mark.parametrize("norm", ["--qk-layernorm", "--qk-l2-norm"])
def test_a_note_says_which_norms_megatrons_own_stack_lacks(norm: str):
    (note,) = parse(*RUN, "--hybrid-layer-pattern", "M*", norm).notes
    assert note.startswith(f"{norm} with --hybrid-layer-pattern is heeded here")


def test_stages_that_layers_do_not_fill_evenly_are_answered_by_the_pattern(capsys):
    flags = ["--hybrid-layer-pattern", "M-*", "--pipeline-model-parallel-size", "2"]
    (line,) = refusals(capsys, *RUN, *flags, world_size=2)
    assert line == (
        "--hybrid-layer-pattern M-*, of 3 layers, must be a multiple of --pipeline-model-parallel-size 2; mark where "
        "its stages begin by |"
    )
    flags[1] = "M-|*"  # what it says
    assert parse(*RUN, *flags, world_size=2).decoder_first_pipeline_num_layers == 2


def test_is_hybrid_model_alone_says_too_little(capsys):
    place = RUN.index("--hybrid-layer-pattern")
    plain = [*RUN[:place], *RUN[place + 2 :], "--num-layers", "2", "--is-hybrid-model"]
    assert "needs --hybrid-layer-pattern" in "\n".join(refusals(capsys, *plain))


def test_what_the_flags_of_older_and_newer_scripts_mean():
    """Megatron-LM 0.16 has the override pattern and says that the model is a hybrid, 0.20 takes it from the pattern."""
    place = RUN.index("--hybrid-layer-pattern")
    plain = [*RUN[:place], *RUN[place + 2 :]]
    newer = ["--hybrid-layer-pattern", "M-M*"]
    newer += ["--spec", "megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"]
    older = ["--hybrid-override-pattern", "M-M*", "--is-hybrid-model", "--num-layers", "4"]
    older += ["--spec", "megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"]
    one, other = (parse_arguments([*plain, *flags], {}) for flags in (newer, older))
    for config in (one, other):
        assert config.model.num_layers == 4
        assert config.model.spec is None
        assert config.arguments["is_hybrid_model"]
        assert config.model.layers_by_mask() == {"full": 1, "window": 0}
    states = plan_request(one, on_cuda=False).config.linear_state_bytes
    assert states == 2 * 8 * 16 * (8 + 1) * 4


def test_the_pattern_wins_over_a_number_of_layers():
    config = parse_arguments([*RUN, "--hybrid-layer-pattern", "M-*", "--num-layers", "5"], {})
    assert config.model.num_layers == 3
    assert any("--num-layers 5 changes nothing here" in note for note in config.notes)


def test_a_checkpoint_of_another_pattern_is_refused(alone: Path):
    other = [*EXPERTS, "--seq-length", "120", "--hybrid-layer-pattern", "MM-*ME*-"]
    with pytest.raises(AssertionError, match=r"--hybrid-layer-pattern M-M\*ME\*-, this run has MM"):
        train(1, *RUN, *other, "--load", str(alone))
