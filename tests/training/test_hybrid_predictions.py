"""Hybrid models that predict further tokens: one checkpoint, the same losses at every layout."""

import shlex
from pathlib import Path

import pytest

from megatron_cp.training.arguments import judge_arguments, parse_arguments
from megatron_cp.training.arguments.machine import GPU_MACHINE
from tests.training.commands import (
    EVALUATED,
    SMALL_RUN,
    TWO_STEPS,
    check_goes_on,
    metrics,
    train,
    train_and_save_first,
)
from tests.training.test_hybrid_models import EXPERTS
from tests.training.test_hybrid_models import RUN as PLAIN
from tests.training.verdicts import parse, refusals

PATTERN = "M-M*/M*E/M*E"
# Predictions weigh as much as the next token: a wrong gradient of theirs is far above rounding.
OWN = shlex.split(f"--hybrid-layer-pattern {PATTERN} --mtp-loss-scaling-factor 1.0")
RUN = [*PLAIN, *EXPERTS, *OWN, "--seq-length", "120"]
MODELS = {
    "own weights": [],
    "the same weights": [
        "--mtp-use-repeated-layer",
        "--moe-router-load-balancing-type",
        "aux_loss",
    ],
}
PER_TOKEN = "--calculate-per-token-loss"
KEYS = ("lm loss", "grad-norm", "load_balancing_loss", "mtp_1 loss", "mtp_2 loss")
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2"
RECOMPUTED = "--recompute-granularity selective --recompute-modules core_attn layernorm"
LAYOUTS = [  # model, ranks, flags
    ("own weights", 3, "--context-parallel-size 3 --cp-planner auto"),
    ("own weights", 4, "--pipeline-model-parallel-size 2 --context-parallel-size 2"),
    (
        "own weights",
        2,
        f"--pipeline-model-parallel-size 2 --hybrid-layer-pattern M|-M*{PATTERN[4:]}",
    ),
    ("own weights", 2, "--expert-model-parallel-size 2 --recompute-granularity selective"),
    ("own weights", 4, "--context-parallel-size 2"),
    ("the same weights", 4, TENSOR),
    ("the same weights", 2, "--pipeline-model-parallel-size 2 --eval-iters 1"),
    ("the same weights", 2, f"--context-parallel-size 2 {RECOMPUTED}"),
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """One rank's run of a model, with a checkpoint of its first step; each is made once."""
    made: dict[str, Path] = {}

    def run(model: str) -> Path:
        if model not in made:
            folder = tmp_path_factory.mktemp("runs") / "alone"
            train_and_save_first(1, folder, *RUN, *EVALUATED, *MODELS[model])
            made[model] = folder
        return made[model]

    return run


@pytest.mark.parametrize(("model", "ranks", "flags"), LAYOUTS)
def test_losses_go_on_as_on_one_rank(alone, tmp_path: Path, model: str, ranks: int, flags: str):
    before = alone(model)
    resumed = ["--load", str(before), "--ckpt-step", "1", "--run-dir", str(tmp_path / "run")]
    train(ranks, *RUN, *MODELS[model], *resumed, *flags.split())
    check_goes_on(tmp_path / "run", before, keys=KEYS, rel=3e-6)


def test_predictions_are_means_of_micro_batches_without_per_token_loss(tmp_path: Path):
    flags = [*(flag for flag in RUN if flag != PER_TOKEN), *TWO_STEPS]
    for ranks in (1, 2):
        more = ["--context-parallel-size", str(ranks), "--run-dir", str(tmp_path / str(ranks))]
        train(ranks, *flags, *more)
    for key in KEYS:
        one, two = (metrics(tmp_path / str(ranks), key) for ranks in (1, 2))
        assert sorted(one) == [1, 2]
        assert two == pytest.approx(one, rel=3e-6), key


def test_a_checkpoint_of_stages_and_context_ranks_goes_on_on_one_rank(tmp_path: Path):
    stages = ["--pipeline-model-parallel-size", "2", "--context-parallel-size", "2"]
    train_and_save_first(4, tmp_path / "four", *RUN, *EVALUATED, *stages)
    resumed = ["--load", str(tmp_path / "four"), "--ckpt-step", "1"]
    train(1, *RUN, *EVALUATED, *resumed, "--run-dir", str(tmp_path / "one"))
    check_goes_on(tmp_path / "one", tmp_path / "four", keys=KEYS, rel=3e-6)


BESIDE = {
    "rotated, in a window": "--hybrid-layer-pattern M*/* --position-embedding-type rope --window-size 16,0",
    "no attention in the decoder": "--hybrid-layer-pattern M-/M*",
    "experts in the prediction alone": "--hybrid-layer-pattern M-*/-EE --num-experts 4 --moe-ffn-hidden-size 32 "
    "--moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3 --moe-per-layer-logging",
    "one embedding, learned positions": "--hybrid-layer-pattern M-*/M --position-embedding-type learned_absolute",
    "fp16 scales": "--hybrid-layer-pattern M-*/M- --fp16 --loss-scale 64",
}


@pytest.mark.parametrize("other", BESIDE)
def test_two_context_ranks_are_one_beside_other_layers(tmp_path: Path, other: str):
    flags = [*PLAIN, *TWO_STEPS]
    if other.startswith("one embedding"):
        flags.remove("--untie-embeddings-and-output-weights")
    for ranks in (1, 2):
        more = ["--context-parallel-size", str(ranks), "--run-dir", str(tmp_path / str(ranks))]
        train(ranks, *flags, *BESIDE[other].split(), *more)
    near = 3e-3 if "--fp16" in BESIDE[other] else 3e-6
    keys = ["lm loss", "grad-norm", "mtp_1 loss"]
    if "--num-experts" in BESIDE[other]:
        keys += ["load_balancing_loss", "z_loss", "moe/load_balancing_loss_layer_3"]
    for key in keys:
        one, two = (metrics(tmp_path / str(ranks), key) for ranks in (1, 2))
        assert sorted(one) == [1, 2], key
        assert two == pytest.approx(one, rel=near), key


def test_the_number_of_predictions_follows_from_the_pattern():
    for flags in ([], ["--mtp-num-layers", "2"]):
        assert parse(*RUN, *flags).mtp_num_layers == 2
    layers = parse_arguments([*RUN], {}).model.layers_by_mask()
    assert layers == {"full": 3, "window": 0}  # one of the decoder, one of each prediction
    assert parse(*PLAIN, *EXPERTS).mtp_num_layers is None


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--mtp-num-layers 1", "M-M*/M*E/M*E, which has the layers of 2 predictions"),
        ("--hybrid-layer-pattern M*E --mtp-num-layers 1", "which has the layers of 0 predictions"),
        ("--hybrid-layer-pattern M*E/", "a / has no layer of a prediction behind it"),
        ("--hybrid-layer-pattern M*E/*/E", "its predictions are "),
        ("--hybrid-layer-pattern M*E/M|*", "a | stands behind a /"),
        ("--hybrid-layer-pattern M*E/G", "'G' is a gated delta net"),
        ("--hybrid-layer-pattern /M*E", "it has no layer"),
        ("--mtp-use-repeated-layer --moe-z-loss-coeff 1e-3", "--moe-z-loss-coeff 0.001 with --mtp-use-repeated-layer"),
        ("--window-size 16,0 --window-attn-skip-freq 2", "window_attn_skip_freq=2 with attention in the predictions"),
        ("--hybrid-layer-pattern M-E/M --mamba-num-groups 3", "a multiple of mamba_num_groups=3"),
        ("--hybrid-layer-pattern *E/M --mamba-num-groups 3", "a multiple of mamba_num_groups=3"),
    ],
)  # fmt: skip
def test_what_cannot_be_predicted_is_one_line(capsys, flags: str, said: str):
    (line,) = refusals(capsys, *RUN, *flags.split())
    assert said in line


def test_flags_of_published_commands_that_change_no_result_are_noted():
    """Those of Nemotron 3 Super and Lightning."""
    flags = {
        "--data-parallel-sharding-strategy": ["optim_grads_params"],
        "--moe-flex-dispatcher-num-sms": ["16"],
        "--moe-hybridep-num-sms": ["32"],
        "--reuse-grad-buf-for-mxfp8-param-ag": [],
        "--ckpt-drop-redundant-extra-state": [],
        "--ckpt-fully-parallel-load-per-rank-objects": [],
        "--no-ckpt-load-validate-sharding-integrity": [],
    }
    notes = "\n".join(
        parse(*RUN, *(w for flag, more in flags.items() for w in (flag, *more))).notes
    )
    for flag in flags:
        assert f"{flag} changes nothing here" in notes


def test_fsdp_itself_is_still_refused(capsys):
    said = refusals(
        capsys, *RUN, "--use-megatron-fsdp", "--data-parallel-sharding-strategy", "optim"
    )
    assert said[0].startswith(
        "--use-megatron-fsdp is an argument of Megatron-LM that is not served"
    )


@pytest.mark.parametrize(("recipe", "kept"), [("mxfp8", False), ("delayed", True)])
def test_weights_in_mxfp8_are_kept_in_their_own_format(recipe: str, kept: bool):
    """Gathered weights in mxfp8 need the step of another loop."""
    fp8 = f"--bf16 --fp8-format e4m3 --fp8-recipe {recipe} --fp8-param-gather --use-distributed-optimizer"
    args, reasons = judge_arguments([*RUN, *fp8.split()], {}, GPU_MACHINE)
    assert not reasons
    assert args.fp8_param_gather == kept
    assert any("--fp8-param-gather" in note for note in args.notes) != kept


def test_weights_of_a_gpt_are_not_shared_by_its_predictions(capsys):
    gpt = [*SMALL_RUN, "--mtp-num-layers", "2", "--mtp-use-repeated-layer"]
    (line,) = refusals(capsys, *gpt)
    assert line.startswith("--mtp-use-repeated-layer without --hybrid-layer-pattern is not served")
