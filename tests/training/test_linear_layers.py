"""Layers of linear attention between those of softmax attention: one checkpoint, the same losses at every layout."""

import shlex
from pathlib import Path

import pytest

from megatron_cp.training.arguments import parse_arguments
from megatron_cp.training.datasets import plan_request
from tests.training.commands import (
    EVALUATED,
    SMALL_RUN,
    THREE_STEPS,
    TWO_STEPS,
    check_goes_on,
    metrics,
    train,
    train_and_save_first,
)
from tests.training.verdicts import refusals

LINEAR = shlex.split(
    "--num-layers 4 --experimental-attention-variant gated_delta_net --linear-attention-freq [1,0,1,1] "
    "--linear-key-head-dim 16 --linear-value-head-dim 8 --linear-num-key-heads 2 --linear-num-value-heads 4"
)
MODEL = [
    *LINEAR,
    *shlex.split(
        "--num-experts 4 --moe-ffn-hidden-size 48 --moe-layer-freq [0,1,1,0] --moe-aux-loss-coeff 1e-2 "
        "--untie-embeddings-and-output-weights --mtp-num-layers 1 --calculate-per-token-loss"
    ),
]
LAYOUTS = {  # ranks, flags
    "context": (2, "--context-parallel-size 2 --cp-planner auto"),
    "a stage of linear layers alone": (
        4,
        "--pipeline-model-parallel-size 2 --context-parallel-size 2 --eval-iters 1",
    ),
    "tensor, sequence and context": (
        4,
        "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2",
    ),
    "tensor and recomputed": (
        2,
        "--tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity full --recompute-method block "
        "--recompute-num-layers 1",
    ),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "alone"
    train_and_save_first(1, folder, *SMALL_RUN, *THREE_STEPS, *EVALUATED, *MODEL)
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_go_on_as_on_one_rank(alone: Path, tmp_path: Path, layout: str):
    world_size, flags = LAYOUTS[layout]
    resumed = ["--load", str(alone), "--ckpt-step", "1", "--run-dir", str(tmp_path / "run")]
    train(world_size, *SMALL_RUN, *THREE_STEPS, *MODEL, *resumed, *flags.split())
    keys = ("lm loss", "grad-norm", "load_balancing_loss", "mtp_1 loss")
    check_goes_on(tmp_path / "run", alone, keys=keys, rel=3e-6)


KIMI = shlex.split(
    "--num-layers 4 --experimental-attention-variant kda --linear-attention-freq [1,0,1,1] --linear-key-head-dim 16 "
    "--linear-value-head-dim 8 --linear-num-key-heads 4 --linear-num-value-heads 4 --calculate-per-token-loss "
    "--untie-embeddings-and-output-weights --init-method-std 0.1"
)


@pytest.fixture(scope="module")
def kimi_alone(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "alone"
    train_and_save_first(1, folder, *SMALL_RUN, *THREE_STEPS, *EVALUATED, *KIMI)
    return folder


@pytest.mark.parametrize(
    "layout",
    ["a stage of linear layers alone", "tensor, sequence and context", "tensor and recomputed"],
)
def test_kimi_delta_attention_goes_on_as_on_one_rank(kimi_alone: Path, tmp_path: Path, layout: str):
    world_size, flags = LAYOUTS[layout]
    resumed = ["--load", str(kimi_alone), "--ckpt-step", "1", "--run-dir", str(tmp_path / "run")]
    train(world_size, *SMALL_RUN, *THREE_STEPS, *KIMI, *resumed, *flags.split())
    check_goes_on(tmp_path / "run", kimi_alone, keys=("lm loss", "grad-norm"), rel=3e-6)


def test_a_checkpoint_of_another_delta_rule_is_refused(kimi_alone: Path):
    other = [*KIMI, "--experimental-attention-variant", "gated_delta_net"]
    with pytest.raises(
        AssertionError, match="--experimental-attention-variant kimi_delta_attention"
    ):
        train(1, *SMALL_RUN, *other, "--load", str(kimi_alone))


BESIDE = {
    "windows": "--window-size 16,0 --window-attn-skip-freq [1,0,1,1]",
    "latent": "--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16",
    "latent, Kimi's": "--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 "
    "--v-head-dim 16 --rope-type none --experimental-attention-variant kda --linear-num-key-heads 4",
    "linear alone": "--linear-attention-freq [1,1,1,1] --mtp-num-layers 1",
}


@pytest.mark.parametrize("other", BESIDE)
def test_two_context_ranks_are_one_beside_other_layers(tmp_path: Path, other: str):
    flags = [*SMALL_RUN, *TWO_STEPS, *LINEAR, *BESIDE[other].split()]
    if other.startswith("latent"):
        place = flags.index("--group-query-attention")
        del flags[place : place + 3]
    for ranks in (1, 2):
        more = ["--context-parallel-size", str(ranks), "--run-dir", str(tmp_path / str(ranks))]
        train(ranks, *flags, *more)
    for key in ("lm loss", "grad-norm"):
        one, two = (metrics(tmp_path / str(ranks), key) for ranks in (1, 2))
        assert sorted(one) == [1, 2], key
        assert two == pytest.approx(one, rel=3e-6), key


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            "--linear-attention-freq 2",
            "--linear-attention-freq 2 without --experimental-attention-variant",
        ),
        ("--experimental-attention-variant mhc", "mhc is not served"),
        (
            "--experimental-attention-variant gdn",
            "--linear-attention-freq is missing; it has no default",
        ),
        (
            "--experimental-attention-variant gdn --linear-attention-freq [1,0,1]",
            "--linear-attention-freq [1, 0, 1] must hold one 0 (softmax) or 1 (linear) for each of",
        ),
        (
            "--experimental-attention-variant gdn --linear-attention-freq 2 --linear-num-key-heads 3",
            "linear_num_value_heads=32 must be a multiple of linear_num_key_heads=3",
        ),
        (
            "--experimental-attention-variant kda --linear-attention-freq 2",
            "linear_num_key_heads=16 and linear_num_value_heads=32 must be equal in Kimi delta",
        ),
        (
            "--experimental-attention-variant gdn --linear-attention-freq 2 --linear-key-head-dim 0",
            "--linear-key-head-dim 0 must be positive",
        ),
    ],
)
def test_what_cannot_be_built_is_one_line(capsys, flags: str, said: str):
    (line,) = refusals(capsys, *SMALL_RUN, *flags.split())
    assert said in line


def test_another_activation_is_refused(capsys):
    flags = [flag for flag in (*SMALL_RUN, *LINEAR) if flag != "--swiglu"]
    (line,) = refusals(capsys, *flags)
    assert "give --swiglu" in line


def test_tensor_ranks_divide_the_key_heads(capsys):
    (line,) = refusals(
        capsys, *SMALL_RUN, *LINEAR, *["--tensor-model-parallel-size", "4"], world_size=4
    )
    assert "linear_num_key_heads=2 must be a multiple of tensor_model_parallel_size=4" in line


def test_linear_layers_have_no_mask_and_their_states_a_price():
    windows = ("--window-size", "16,0", "--window-attn-skip-freq", "2")
    config = parse_arguments([*SMALL_RUN, *LINEAR, *windows], {})
    assert config.model.layers_by_mask() == {"full": 1, "window": 0}
    request = plan_request(config, on_cuda=False)
    assert request.config.linear_state_bytes == 3 * 4 * 16 * (8 + 16) * 4
    plain = parse_arguments(SMALL_RUN, {})
    assert plan_request(plain, on_cuda=False).config.linear_state_bytes is None


def test_a_checkpoint_of_the_same_layers_said_otherwise_is_taken(tmp_path: Path):
    """[1,0,1,0] is every second layer; sizes of linear layers say nothing where there are none."""
    for saved, resumed in (
        (
            [*LINEAR, "--linear-attention-freq", "2"],
            [*LINEAR, "--linear-attention-freq", "[1,0,1,0]"],
        ),
        ([], ["--linear-key-head-dim", "64"]),
    ):
        folder = tmp_path / str(len(saved))
        train(
            1, *SMALL_RUN, *saved, "--eval-iters", "0", "--train-iters", "1", "--save", str(folder)
        )
        more = [*TWO_STEPS, "--override-opt-param-scheduler"]
        train(1, *SMALL_RUN, *resumed, *more, "--load", str(folder))


def test_a_checkpoint_of_other_linear_layers_is_refused(alone: Path):
    other = ["--linear-num-key-heads", "4", "--linear-key-head-dim", "8"]
    with pytest.raises(AssertionError, match="--linear-key-head-dim 16, this run has 8"):
        train(1, *SMALL_RUN, *MODEL, *other, "--load", str(alone))
