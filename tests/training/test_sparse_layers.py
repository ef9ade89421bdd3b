"""Sparse attention in the training loop: one checkpoint, the same losses at every layout; what is said of its flags."""

import shlex
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

from megatron_cp import mask as masks
from megatron_cp.training.arguments import parse_arguments
from megatron_cp.training.logging.flops import gpt_flops
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

SPARSE = shlex.split(
    "--multi-latent-attention --qk-layernorm --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 8 "
    "--qk-pos-emb-head-dim 8 --v-head-dim 12 --rope-type rope --experimental-attention-variant dsa "
    "--dsa-indexer-n-heads 8 --dsa-indexer-head-dim 16 --dsa-indexer-topk 12 --dsa-indexer-loss-coeff 0.5"
)
MODEL = [
    *SPARSE,
    *shlex.split(
        "--untie-embeddings-and-output-weights --mtp-num-layers 1 --calculate-per-token-loss --init-method-std 0.2"
    ),
]
LAYOUTS = {  # ranks, flags
    "context": (3, "--context-parallel-size 3"),
    "stages and replicas": (4, "--pipeline-model-parallel-size 2 --eval-iters 1"),
    "tensor and context": (4, "--tensor-model-parallel-size 2 --context-parallel-size 2"),
    "tensor, sequence, recomputed": (
        2,
        "--tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity full --recompute-method block "
        "--recompute-num-layers 1",
    ),
}


def small_run() -> list[str]:
    flags = [*SMALL_RUN, *THREE_STEPS]
    place = flags.index("--group-query-attention")
    del flags[place : place + 3]
    return flags


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "alone"
    train_and_save_first(1, folder, *small_run(), *EVALUATED, *MODEL)
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_go_on_as_on_one_rank(alone: Path, tmp_path: Path, layout: str):
    world_size, flags = LAYOUTS[layout]
    resumed = ["--load", str(alone), "--ckpt-step", "1", "--run-dir", str(tmp_path / "run")]
    train(world_size, *small_run(), *MODEL, *resumed, *flags.split())
    keys = ("lm loss", "grad-norm", "indexer loss", "mtp_1 loss")
    check_goes_on(tmp_path / "run", alone, keys=keys, rel=1e-5)


SHARED = "--num-layers 4 --dsa-indexer-topk-freq 2 --dsa-indexer-skip-topk-offset 1"
LAYOUTS_OF_SHARED = {
    "context, recomputed": (
        2,
        "--context-parallel-size 2 --recompute-granularity full --recompute-method block "
        "--recompute-num-layers 3",
    ),
    "stages and tensors": (
        4,
        "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel --eval-iters 1",
    ),
    "stages, recomputed": (
        2,
        "--pipeline-model-parallel-size 2 --recompute-granularity full --recompute-method block "
        "--recompute-num-layers 2",
    ),
}


@pytest.fixture(scope="module")
def alone_and_shared(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "alone"
    train_and_save_first(1, folder, *small_run(), *EVALUATED, *MODEL, *SHARED.split())
    return folder


@pytest.mark.parametrize("layout", LAYOUTS_OF_SHARED)
def test_layers_that_share_what_is_picked_train_alike(
    alone_and_shared: Path, tmp_path: Path, layout: str
):
    world_size, flags = LAYOUTS_OF_SHARED[layout]
    resumed = ["--load", str(alone_and_shared), "--ckpt-step", "1"]
    resumed += ["--run-dir", str(tmp_path / "run"), *SHARED.split(), *flags.split()]
    train(world_size, *small_run(), *MODEL, *resumed)
    keys = ("lm loss", "grad-norm", "indexer loss")
    check_goes_on(tmp_path / "run", alone_and_shared, keys=keys, rel=1e-5)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--dsa-indexer-topk 0", "dsa_indexer_topk=0 must be positive"),
        ("--dsa-indexer-head-dim 4", "dsa_indexer_head_dim=4 must be at least"),
        ("--window-size 16,0", "window_size=(16, 0) with experimental_attention_variant='dsa'"),
        ("--softmax-type learnable", "softmax_type='learnable'"),
        ("--linear-attention-freq 2", "makes no layer linear"),
        (
            "--cp-max-received-mb 1",
            "--cp-max-received-mb 1 with --experimental-attention-variant dsa",
        ),
        ("--dsa-indexer-topk-freq 0", "dsa_indexer_topk_freq=0 must be at least 1"),
        ("--dsa-indexer-topk-freq 2 --mtp-num-layers 2", "mtp_num_layers=2 with"),
    ],
)
def test_what_sparse_attention_does_not_have_is_refused(capsys, flags: str, said: str):
    lines = refusals(capsys, *small_run(), *SPARSE, *flags.split())
    assert any(said in line for line in lines), lines


@pytest.mark.parametrize(
    ("flags", "ranks", "layer"),
    [
        ("--pipeline-model-parallel-size 4", 4, 2),
        ("--pipeline-model-parallel-size 2 --dsa-indexer-skip-topk-offset 2", 2, 3),
        ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1", 2, 2),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ettt|tmL", 2, 4),
        ("--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1", 2, 2),
    ],
)
def test_stages_that_begin_with_the_picks_of_others_are_refused(
    capsys, flags: str, ranks: int, layer: int
):
    lines = refusals(
        capsys, *small_run(), *MODEL, *SHARED.split(), *flags.split(), world_size=ranks
    )
    assert any(f"a pipeline stage begins with layer {layer}, which" in line for line in lines), (
        lines
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--dsa-kernel-backend tilelang", "--dsa-kernel-backend changes nothing here"),
        ("--attention-dropout 0.1", "--attention-dropout 0.1 changes nothing here: sparse"),
        ("--recompute-granularity selective", "recomputing core_attn changes nothing here"),
        ("--no-dsa-indexer-rotate-activation", "never turned by a Hadamard matrix"),
    ],
)
def test_what_changes_nothing_is_noted(flags: str, said: str):
    config = parse_arguments([*small_run(), *SPARSE, *flags.split()], {})
    assert any(said in note for note in config.notes), config.notes


def test_operations_count_what_the_index_looks_at_and_what_is_picked():
    dense = dict(
        Namespace(
            num_layers=1, hidden_size=32, ffn_hidden_size=64, num_attention_heads=2, swiglu=True,
            multi_latent_attention=True, q_lora_rank=8, kv_lora_rank=16, qk_head_dim=4, qk_pos_emb_head_dim=4,
            v_head_dim=6, experimental_attention_variant=None, linear_attention_freq=None,
        ).__dict__
    )  # fmt: skip
    index = {"dsa_indexer_n_heads": 3, "dsa_indexer_head_dim": 5, "dsa_indexer_topk": 2}
    sparse = {**dense, **index, "experimental_attention_variant": "dsa"}
    one, other = (
        gpt_flops(arguments, num_layers={"full": 1}, vocab_size=50) for arguments in (dense, sparse)
    )
    assert other.matrix_parameters - one.matrix_parameters == 8 * 3 * 5 + 32 * (3 + 5)
    # Ten tokens that see 55 pairs: the index all of them, attention two a token, over 2 x 16 + 4 columns of 2 heads.
    expected = 6 * (10 * other.matrix_parameters + 55 * 15 + 20 * 2 * 36)
    assert other.of_step(10, {"full": 55}, {"full": 20}) == expected
    shared = {**sparse, "num_layers": 3, "dsa_indexer_topk_freq": 2}
    assert gpt_flops(shared, num_layers={"full": 3}, vocab_size=50).index_width == 2 * 15


@pytest.mark.parametrize("most", [1, 3, 7, 1000])
def test_a_query_reads_no_more_keys_than_it_sees(most: int):
    from megatron_cp.training.logging.metrics import area_read

    for mask in (
        masks.documents([5, 1, 0, 40], within="causal"),
        masks.sliding_window(60, 9, 0, num_sink=2),
        masks.prefix_lm(31, 7),
        masks.dilated(40, 12, 3, 3),
        masks.full(6),
        masks.from_slices(30, 40, [(0, 9, 3, 30, None, 4), (9, 30, 0, 40, 2, 9), (12, 13, 0, 2, None, None)]),
        masks.from_slices(3, 3, []),
    ):  # fmt: skip
        expected = np.minimum(mask.to_dense().sum(axis=1), most).sum()
        assert area_read(mask, most) == expected, mask
        assert area_read(mask, None) == mask.area()


def test_every_weight_may_be_gathered_alone(alone: Path, tmp_path: Path):
    """Also those that are read and not called."""
    flags = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 1"
    train(2, *small_run(), *MODEL, *flags.split(), "--run-dir", str(tmp_path / "run"))
    for key in ("lm loss", "grad-norm", "indexer loss"):
        assert metrics(tmp_path / "run", key) == pytest.approx(metrics(alone, key), rel=1e-5), key


def test_packs_weigh_the_same_in_micro_batches_and_on_replicas(tmp_path: Path):
    """Without per-token loss the loss of the index is a mean, of which each micro-batch has a part."""
    flags = [
        *small_run(),
        *TWO_STEPS,
        *SPARSE,
        "--init-method-std",
        "0.2",
        "--dsa-indexer-loss-coeff",
        "5",
    ]
    for ranks in (1, 2):
        train(ranks, *flags, "--run-dir", str(tmp_path / str(ranks)))
    for key in ("lm loss", "grad-norm", "indexer loss"):
        one, two = (metrics(tmp_path / str(ranks), key) for ranks in (1, 2))
        assert sorted(one) == [1, 2], key
        assert two == pytest.approx(one, rel=1e-5), key
