"""Flags that save memory: the same losses from one checkpoint, at every layout; and what they do not go with."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_cp.training.arguments.machine import GPU_MACHINE
from megatron_cp.training.arguments.parse import judge_arguments, parse_arguments
from megatron_cp.training.logits_memory import with_note_of_logits
from tests.training import test_hybrid_models, test_layouts
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
from tests.training.verdicts import parse

pytestmark = pytest.mark.timeout(1800)

SAVING = shlex.split(
    "--loss-chunk-size 24 --mlp-chunks-for-training 5 --recompute-granularity full --recompute-method block "
    "--recompute-num-layers 1 --offload-recompute-inputs"
)
STEPS = (*THREE_STEPS, *EVALUATED)
RUNS = {
    "tied embeddings": [*SMALL_RUN, "--cross-entropy-loss-fusion", "--calculate-per-token-loss"],
    "predictions and experts": [*SMALL_RUN, *test_layouts.MODEL],
    "hybrid": [*test_hybrid_models.RUN, *test_hybrid_models.EXPERTS],
}
STAGES = {"hybrid": "--hybrid-layer-pattern M-M|*ME*-"}
SPLIT = "--tensor-model-parallel-size 2 --sequence-parallel --moe-token-dispatcher-type allgather"


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The folder of a run on one rank, without these flags, made when it is first asked for."""
    folders: dict[str, Path] = {}

    def run(model: str) -> Path:
        if model not in folders:
            folders[model] = folder = tmp_path_factory.mktemp("runs") / "alone"
            train_and_save_first(1, folder, *RUNS[model], *STEPS)
        return folders[model]

    return run


@pytest.mark.parametrize("model", RUNS)
@pytest.mark.parametrize("layout", ["--context-parallel-size 2", SPLIT, "stages"])
def test_losses_go_on_as_without_them(alone, tmp_path: Path, model: str, layout: str):
    if layout == "stages":
        layout = f"--pipeline-model-parallel-size 2 {STAGES.get(model, '')}"
    folder = alone(model)
    resumed = ["--load", str(folder), "--ckpt-step", "1", "--run-dir", str(tmp_path / "run")]
    train(2, *RUNS[model], *STEPS, *resumed, *layout.split(), *SAVING)
    predicted = ["mtp_1 loss"] if model == "predictions and experts" else []
    keys = ("lm loss", "grad-norm", *predicted)
    check_goes_on(tmp_path / "run", folder, keys=keys, rel=5e-6)


@pytest.mark.parametrize(
    "flags, reason",
    [
        ("--loss-chunk-size 0", "--loss-chunk-size 0 must be positive and finite"),
        ("--mlp-chunks-for-training 0", "--mlp-chunks-for-training 0 must be positive and finite"),
        (
            "--fp8-format hybrid --mlp-chunks-for-training 2",
            "--mlp-chunks-for-training 2 with --fp8-format is not served",
        ),
        (
            "--fp8-format hybrid --recompute-activations --offload-recompute-inputs",
            "--offload-recompute-inputs with --fp8-format is not served",
        ),
    ],
)
def test_what_they_do_not_go_with_is_refused(flags: str, reason: str):
    machine = replace(GPU_MACHINE, has_transformer_engine=True)
    words = [*SMALL_RUN, "--bf16", *flags.split()]
    _, reasons = judge_arguments(words, {}, machine)
    assert [line.startswith(reason) for line in reasons] == [True], reasons


@pytest.mark.parametrize(
    "flags, note",
    [
        ("--recompute-activations --offload-recompute-inputs", "nothing on CPU ranks"),
        ("--offload-recompute-inputs", "it needs --recompute-granularity"),
        (
            f"--mlp-chunks-for-training 2 {test_layouts.EXPERTS}",
            "no layer has an MLP without experts",
        ),
    ],
)
def test_a_flag_that_does_nothing_is_a_note(flags: str, note: str):
    said = parse(*SMALL_RUN, *flags.split()).notes
    assert any(note in line for line in said), said


@pytest.mark.parametrize(
    "ranks, flags, said",
    [
        (2, "--vocab-size 1000000 --context-parallel-size 2", "4.3 GB on a rank"),
        (1, "--vocab-size 1000000 --micro-batch-size 2", "17.2 GB on a rank"),
        (
            1,
            "--vocab-size 1000000",
            "--loss-chunk-size 256 holds 256 of 2150 rows at once, 1.0 GB",
        ),
        (4, "--vocab-size 1000000 --tensor-model-parallel-size 4", ""),
        (2, "--vocab-size 1000000 --context-parallel-size 2 --bf16", ""),
        (1, "--vocab-size 1000000 --loss-chunk-size 64", ""),
        (1, "--vocab-size 100000", ""),
    ],
)
def test_large_logits_are_told_with_what_holds_fewer(ranks: int, flags: str, said: str):
    words = [*SMALL_RUN, "--seq-length", "2150", *flags.split()]
    config = parse_arguments(words, {"WORLD_SIZE": str(ranks), "RANK": "0"})
    config = config.with_arguments(padded_vocab_size=config.data.vocab_size)
    notes = [note for note in with_note_of_logits(config).notes if "--loss-chunk-size" in note]
    assert bool(notes) == bool(said)
    assert all(said in note for note in notes), notes


def test_what_other_flags_recompute_goes_with_chunks(tmp_path: Path):
    recomputes = "--recompute-granularity selective --recompute-modules layernorm mlp core_attn"
    chunks = "--loss-chunk-size 24 --mlp-chunks-for-training 5"
    for name, flags in (("plain", ""), ("chunks", f"{recomputes} {chunks}")):
        train(1, *SMALL_RUN, *TWO_STEPS, *flags.split(), "--run-dir", str(tmp_path / name))
    for key in ("lm loss", "grad-norm"):
        expected = metrics(tmp_path / "plain", key)
        assert metrics(tmp_path / "chunks", key) == pytest.approx(expected, rel=5e-6)


def test_modules_whose_inputs_stay_on_the_gpu_are_a_note():
    flags = (
        "--bf16 --recompute-activations --offload-recompute-inputs --recompute-modules layernorm"
    )
    notes = []
    for more in ("", " core_attn"):
        args, reasons = judge_arguments([*SMALL_RUN, *shlex.split(flags + more)], {}, GPU_MACHINE)
        notes.append([line for line in args.notes if "offload-recompute" in line])
        assert not reasons
    assert notes == [
        [
            "--offload-recompute-inputs changes nothing beside --recompute-modules layernorm: it serves core_attn, "
            "mlp, moe, shared_experts, and --recompute-granularity full"
        ],
        [],
    ]
