"""The training loop loads what was converted, and what it saves converts back."""

import shlex
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.models.hugging_face import in_ranks
from tests.models.hugging_face.tiny_models import PREDICTING, Predicting, save_tiny
from tests.ranks import run_on_ranks
from tests.training.commands import train

pytestmark = pytest.mark.timeout(400)

# So small a step changes no weight in fp32: what comes back must be what went in.
RUN = shlex.split(
    "--mock-data --vocab-size 131 --seq-length 64 --num-workers 0 --micro-batch-size 1 "
    "--global-batch-size 2 --train-iters 1 --lr 1e-30 --weight-decay 0.0 --eval-iters 0 "
    "--log-interval 1 --finetune --cp-planner zigzag --no-wandb"
)
LAYOUTS = {
    "llama3": (2, ["--tensor-model-parallel-size", "2"]),
    "qwen2": (1, []),
    "ministral3": (
        2,
        ["--context-parallel-size", "2", "--reset-attention-mask", "--reset-position-ids"],
    ),
    "phi3_long": (2, ["--context-parallel-size", "2", "--reset-attention-mask"]),
    "qwen2_moe": (2, ["--context-parallel-size", "2", "--reset-attention-mask"]),
    "qwen3_5": (2, ["--tensor-model-parallel-size", "2"]),
    "qwen3_next": (2, ["--context-parallel-size", "2", "--reset-attention-mask"]),
    "nemotron_h": (2, ["--tensor-model-parallel-size", "2"]),
    "nemotron_h_moe": (
        2,
        [
            "--context-parallel-size",
            "2",
            "--reset-attention-mask",
            "--moe-router-bias-update-rate",
            "0",
        ],
    ),
    "nemotron_h_latent": (
        2,
        [
            *("--tensor-model-parallel-size", "2", "--sequence-parallel"),
            *("--moe-router-bias-update-rate", "0"),
        ],
    ),
    "kimi_linear": (
        2,
        [
            *("--context-parallel-size", "2", "--reset-attention-mask"),
            *("--moe-router-bias-update-rate", "0"),
        ],
    ),
    "kimi_k2": (
        2,
        [
            *("--context-parallel-size", "2", "--reset-attention-mask"),
            *("--moe-router-bias-update-rate", "0"),
        ],
    ),
    "glm4_moe_lite": (
        2,
        [
            *("--context-parallel-size", "2", "--reset-attention-mask"),
            *("--moe-router-bias-update-rate", "0"),
        ],
    ),
    "glm4_moe": (2, ["--context-parallel-size", "2", "--moe-router-bias-update-rate", "0"]),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_of_training_without_effect_gives_back_the_model(tmp_path: Path, name: str):
    save = Predicting(name).save if name in PREDICTING else partial(save_tiny, name)
    source = save(tmp_path / "source")
    run_on_ranks(1, in_ranks.convert, "megatron", source, tmp_path / "megatron", {})
    (flags,) = run_on_ranks(1, in_ranks.flags, source)
    assert ("--mtp-num-layers=1" in flags) == (name in PREDICTING)
    world_size, layout = LAYOUTS[name]
    folders = ["--load", str(tmp_path / "megatron"), "--save", str(tmp_path / "trained")]
    output = train(world_size, *flags, *layout, *RUN, *folders, "--save-interval", "1")
    assert "successfully loaded checkpoint" in output

    options = {"hf_folder": source}
    (report,) = run_on_ranks(
        1, in_ranks.convert, "hf", tmp_path / "trained", tmp_path / "back", options
    )
    assert any(line.startswith("optimizer.*") for line in report["left"])
    before, after = (
        load_file(folder / "model.safetensors") for folder in (source, tmp_path / "back")
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_a_run_with_further_predictions_converts_back_without_them(tmp_path: Path):
    """Their layers have no place there; the model that transformers computes is the same without them."""
    source, root = save_tiny("qwen3_tied", tmp_path / "source"), tmp_path / "megatron"
    run_on_ranks(1, in_ranks.convert, "megatron", source, root, {})
    (flags,) = run_on_ranks(1, in_ranks.flags, source)
    added = ["--mtp-num-layers", "1", "--dist-ckpt-strictness", "log_all"]
    saves = ["--load", str(root), "--save", str(tmp_path / "trained"), "--save-interval", "1"]
    train(1, *flags, *added, *RUN, *saves)
    wanted = ("hf", tmp_path / "trained", tmp_path / "back")
    (reasons,) = run_on_ranks(1, in_ranks.refusal, *wanted, {"hf_folder": source})
    assert reasons
    assert all("--leave-out 'mtp." in reason for reason in reasons)
    options = {"hf_folder": source, "leave_out": ("mtp.*",)}
    (report,) = run_on_ranks(1, in_ranks.convert, *wanted, options)
    assert any(line.startswith("mtp.layers.0.") for line in report["left"])
    before, after = (load_file(f / "model.safetensors") for f in (source, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
