"""Experts, further predictions and stages: the same losses from one checkpoint at every layout."""

import shlex
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_cp.training.checkpoint.optimizer_parts import in_parts_of
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

pytestmark = pytest.mark.timeout(1800)

LOSSES = ("lm loss", "grad-norm")
RUN = [*SMALL_RUN, *THREE_STEPS]
MODEL = shlex.split(
    "--num-layers 4 --untie-embeddings-and-output-weights --mtp-num-layers 1 "
    "--num-experts 4 --moe-ffn-hidden-size 48 --moe-aux-loss-coeff 1e-2 --moe-layer-freq ([0]*1+[1]*3) "
    "--moe-token-dispatcher-type alltoall --moe-shared-expert-intermediate-size 32 "
    "--calculate-per-token-loss"
)
LAYOUTS = {
    "context": "--context-parallel-size 2 --cp-planner auto",
    "stages": "--pipeline-model-parallel-size 2",
    "written-out stages": "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ett|t|t|mL",
    "uneven stages": "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1 --eval-iters 1",
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "alone"
    train_and_save_first(1, folder, *RUN, *EVALUATED, *MODEL)
    return folder


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_losses_go_on_as_on_one_rank(alone: Path, tmp_path: Path, layout: str):
    resumed = ["--load", str(alone), "--ckpt-step", "1", "--run-dir", str(tmp_path / "run")]
    train(2, *RUN, *MODEL, *resumed, *LAYOUTS[layout].split())
    keys = (*LOSSES, "load_balancing_loss", "mtp_1 loss")
    check_goes_on(tmp_path / "run", alone, keys=keys, rel=2e-6)


SPLIT_TENSORS = "--tensor-model-parallel-size 2"
DROPPED_ALIKE = {  # ranks, layout
    "context": (2, "--context-parallel-size 2 --cp-planner auto"),
    "split heads": (2, "--context-parallel-size 2 --cp-planner ulysses"),
    "tensor": (2, SPLIT_TENSORS),
    "sequence and context": (4, f"{SPLIT_TENSORS} --sequence-parallel --context-parallel-size 2"),
    "recomputed": (2, "--context-parallel-size 2 --recompute-granularity full --recompute-method uniform "
                      "--recompute-num-layers 1"),
}  # fmt: skip
DROPOUT = [
    "--attention-dropout",
    "0.3",
    "--window-size",
    "40,0",
    "--window-attn-skip-freq",
    "2",
]


@pytest.fixture(scope="module")
def with_dropout(tmp_path_factory) -> dict[str, dict[int, float]]:
    folder = tmp_path_factory.mktemp("runs") / "dropout"
    train(1, *RUN, *TWO_STEPS, *DROPOUT, "--run-dir", str(folder))
    return {key: metrics(folder, key) for key in LOSSES}


@pytest.mark.parametrize("layout", DROPPED_ALIKE)
def test_attention_drops_the_same_pairs_at_every_layout(with_dropout, tmp_path: Path, layout: str):
    world_size, flags = DROPPED_ALIKE[layout]
    train(
        world_size, *RUN, *TWO_STEPS, *DROPOUT, *flags.split(), "--run-dir", str(tmp_path / "run")
    )
    for key, expected in with_dropout.items():
        assert metrics(tmp_path / "run", key) == pytest.approx(expected, rel=5e-6), key


EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 48 --untie-embeddings-and-output-weights"
LOGGED = {  # flags, of the other layout, ranks, key
    "all parameters, not a stale part": (
        "--use-distributed-optimizer --log-params-norm",
        "--context-parallel-size 2 --overlap-grad-reduce --overlap-param-gather",
        2,
        "params-norm",
    ),
    "the whole loss, from a stage without experts": (
        f"{EXPERTS} --moe-layer-freq 2 --moe-aux-loss-coeff 0.01",
        "--pipeline-model-parallel-size 2 --context-parallel-size 2",
        4,
        "load_balancing_loss",
    ),
}


def runs(
    folder: Path, flags: str, first: tuple[int, str], second: tuple[int, str], keys: tuple[str, ...]
) -> Iterator[tuple[dict[int, float], dict[int, float]]]:
    """Yields what a run goes on with at another layout (ranks, flags) from step 1, and what it had; for each key."""
    run = [*RUN, *shlex.split(flags)]
    train_and_save_first(first[0], folder / "one", *run, *first[1].split())
    resumes = f"--load {folder}/one --ckpt-step 1 --run-dir {folder}/on"
    train(second[0], *run, *second[1].split(), *resumes.split())
    for key in keys:
        expected = metrics(folder / "one", key)
        yield metrics(folder / "on", key), {step: expected[step] for step in (2, 3)}


def test_the_copy_of_the_embedding_that_predictions_read_learns_at_the_same_rate(tmp_path: Path):
    """Both stages hold one, and Megatron-Core calls the first alone an embedding."""
    flags = f"{shlex.join(MODEL)} --decoupled-lr 1e-4 --lr 1e-2"
    stages = (2, "--pipeline-model-parallel-size 2")
    for found, expected in runs(tmp_path, flags, (1, ""), stages, ("lm loss", "mtp_1 loss")):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("predicted", ["", "--mtp-num-layers 1"])
def test_losses_of_layers_are_kept_where_they_are_asked_for(tmp_path: Path, predicted: str):
    """The last layer is dense here, and that of predictions is like it."""
    balanced = "--moe-layer-freq 2 --moe-aux-loss-coeff 0.01 --moe-per-layer-logging --moe-z-loss-coeff 0.1"
    train(
        1, *RUN, *TWO_STEPS, *shlex.split(f"{EXPERTS} {balanced} {predicted} --run-dir {tmp_path}")
    )
    for name in ("load_balancing_loss", "z_loss"):
        assert metrics(tmp_path, f"moe/{name}_layer_0") == metrics(tmp_path, name)
        assert not metrics(tmp_path, f"moe/{name}_layer_1")


def test_a_model_that_has_experts_in_no_layer_is_a_dense_one(tmp_path: Path):
    """A converted DeepSeek of dense layers alone is such a model."""
    none = "--num-experts 4 --moe-layer-freq ([0]*2) --moe-aux-loss-coeff 0.01"
    for name, flags in (("none", none), ("dense", "")):
        train(1, *RUN, *TWO_STEPS, *EVALUATED, *flags.split(), "--run-dir", str(tmp_path / name))
    for key in (*LOSSES, "lm loss validation"):
        assert metrics(tmp_path / "none", key) == metrics(tmp_path / "dense", key)
    assert len(metrics(tmp_path / "none", "lm loss validation")) == 1


@pytest.mark.parametrize("what", LOGGED)
def test_a_figure_of_the_log_is_that_of_one_rank(tmp_path: Path, what: str):
    flags, layout, world_size, key = LOGGED[what]
    for found, expected in runs(tmp_path, flags, (1, ""), (world_size, layout), (key,)):
        assert found == pytest.approx(expected, rel=1e-6)


RESUMED = {
    "rates of their own": "--decoupled-lr 1e-4",
    "rates of their own, sharded": "--decoupled-lr 1e-4 --use-distributed-optimizer",
    "sharded, by parameter, buckets with padded ends": "--use-distributed-optimizer --overlap-grad-reduce "
    "--ddp-bucket-size 5000 --dist-ckpt-optim-fully-reshardable",
    "momentum": "--optimizer sgd",
    "no momentum": "--optimizer sgd --sgd-momentum 0",
}


@pytest.mark.parametrize("optimizer", RESUMED)
def test_a_resumed_optimizer_goes_on_bit_by_bit(tmp_path: Path, optimizer: str):
    flags = f"{RESUMED[optimizer]} --lr 2e-2"
    for found, expected in runs(tmp_path, flags, (1, ""), (1, ""), LOSSES):
        assert found == expected


DEALT = "--expert-model-parallel-size 2"
SHARDED = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"
DEALT_OTHERWISE = {  # how the optimizer is kept, layout of the first run, of the second
    "dealt": ("", "", DEALT),
    "gathered": ("", DEALT, ""),
    "dealt, sharded": (SHARDED, "", DEALT),
    "gathered, sharded": (SHARDED, DEALT, ""),
}


@pytest.mark.parametrize("change", DEALT_OTHERWISE)
def test_a_resumed_optimizer_goes_on_where_experts_are_dealt_otherwise(tmp_path: Path, change: str):
    optimizer, before, after = DEALT_OTHERWISE[change]
    flags = f"{EXPERTS} {optimizer} --lr 2e-2"
    for found, expected in runs(tmp_path, flags, (2, before), (2, after), LOSSES):
        assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("layers", ["--moe-layer-freq [1,0]", "--moe-layer-freq [0,1] --bf16"])
def test_a_resumed_optimizer_goes_on_where_a_stage_has_no_experts(tmp_path: Path, layers: str):
    """Its part of the optimizer for those of other stages is empty; the first rank says the settings of all."""
    stages = (4, f"--pipeline-model-parallel-size 2 {DEALT}")
    for found, expected in runs(tmp_path, f"{EXPERTS} {layers}", stages, stages, LOSSES):
        assert found == expected


def test_settings_of_other_groups_are_named_where_experts_are_dealt_otherwise():
    saved = {"param_groups": [{"wd_mult": 1.0, "lr_mult": 1.0, "is_decoupled_lr": False}]}
    group = {"wd_mult": 1.0, "lr_mult": 1.0, "is_decoupled_lr": True, "is_expert_parallel": False}
    part = SimpleNamespace(optimizer=SimpleNamespace(param_groups=[group]))
    several = SimpleNamespace(chained_optimizers=[part, part])
    with pytest.raises(ValueError, match=r"no group of parameters with .*is_decoupled_lr=True"):
        in_parts_of(several, saved, saved, "folder")


ROUTING = {
    "a running mean": "--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.3 "
    "--global-batch-size 8 --micro-batch-size 2 --window-size 50,0",
    "sinkhorn": "--moe-router-load-balancing-type sinkhorn --moe-router-topk 1",
    "each pack by itself": "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.3 "
    "--micro-batch-size 2",
}


@pytest.mark.parametrize("routing", sorted(ROUTING))
def test_routing_does_not_depend_on_the_dispatch_of_tokens(tmp_path: Path, routing: str):
    experts = "--num-experts 4 --moe-ffn-hidden-size 48 --calculate-per-token-loss"
    flags = [*RUN, *experts.split(), *ROUTING[routing].split(), *TWO_STEPS]
    train(1, *flags, "--run-dir", str(tmp_path / "one"))
    many = 4 if routing == "a running mean" else 2  # its order differs from 4 on
    train(many, *flags, "--context-parallel-size", str(many), "--run-dir", str(tmp_path / "many"))
    for key in ("lm loss", "grad-norm"):
        found, expected = metrics(tmp_path / "many", key), metrics(tmp_path / "one", key)
        assert found == pytest.approx(expected, rel=2e-6), key
