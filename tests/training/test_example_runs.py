"""The example scripts, on small sizes: experts from a preset, and a converted model tuned on conversations."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.processes import HANG_SECONDS
from tests.programs import script_on_forks
from tests.training.commands import ROOT, environment, metrics, train

pytestmark = pytest.mark.timeout(900)

TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }} {{ m['content'] }}</s>{% endfor %}"


def run(script: str, folder: Path, *flags: str, **variables: str) -> str:
    """What a script says; what it starts are forks."""
    words = ["bash", str(ROOT / "examples" / script), "--no-wandb", *flags]
    return said_by(script_on_forks(words, folder, {**environment(str(folder)), **variables}))


def said_by(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def check_picture_and_next(said: str, run_dir: Path) -> None:
    """A script ends with a page that has pictures, and with what to run next, which is there."""
    *_, picture, following = said.strip().splitlines()
    assert picture == f"picture: {run_dir}/report.html"
    page = Path(picture.removeprefix("picture: ")).read_text(encoding="utf-8")
    assert "attention mask of" in page and "training and held-out loss" in page
    assert following.startswith("next: ")
    scripts = [word.rstrip(",") for word in following.split() if word.startswith("examples/")]
    assert scripts and all((ROOT / word).is_file() for word in scripts)


# Half of the tokens and one batch that is held out: neither a script nor what it starts can tell.
SMALL = ("--seq-length", "512", "--eval-iters", "1")
# Plans are no subject of these: experts have the default's.
PLANNED_FAST = (*SMALL, "--cp-planner", "zigzag")


def test_experts_train_on_context_and_expert_parallel_ranks(tmp_path: Path):
    """As a reader starts it: with torchrun, and each command a process of its own."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = {"PATH": path, "STEPS": "4", "RUN_DIR": str(tmp_path / "run")}
    done = subprocess.run(
        ["bash", str(ROOT / "examples" / "pretrain_moe.sh"), "--no-wandb", *SMALL],
        env={**environment(str(tmp_path)), **variables},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    said = said_by(done)
    check_picture_and_next(said, tmp_path / "run")
    losses = metrics(tmp_path / "run")
    assert sorted(losses) == [1, 2, 3, 4]
    assert losses[4] < losses[1]
    assert set(metrics(tmp_path / "run", "load_balancing_loss")) == {1, 2, 3, 4}


def on_one_rank_by_the_script(example: str, folder: Path) -> None:
    said = run(example, folder.parent, *PLANNED_FAST, STEPS="4", CP="1", RUN_DIR=str(folder))
    check_picture_and_next(said, folder)


def on_one_rank_by_its_command(example: str, folder: Path) -> None:
    """What the script gave two ranks, as recorded: beyond its model pretrain_sparse.sh is pretrain_hybrid.sh."""
    flags = json.loads((folder.parent / "2" / "run.json").read_text())["command"][1:]
    train(1, *flags, "--context-parallel-size", "1", "--save", str(folder))


@pytest.mark.parametrize(
    ("example", "run_on_one_rank"),
    [
        ("pretrain_hybrid.sh", on_one_rank_by_the_script),
        ("pretrain_sparse.sh", on_one_rank_by_its_command),
    ],
)
def test_a_model_of_other_layers_trains_on_two_context_ranks_as_on_one(
    tmp_path: Path, example: str, run_on_one_rank: Callable[[str, Path], None]
):
    folders = [tmp_path / "2", tmp_path / "1"]
    said = run(example, tmp_path, *PLANNED_FAST, STEPS="4", CP="2", RUN_DIR=str(folders[0]))
    check_picture_and_next(said, folders[0])
    run_on_one_rank(example, folders[1])
    losses = [metrics(folder) for folder in folders]
    assert losses[0] == pytest.approx(losses[1], rel=3e-6)
    assert losses[0][4] < losses[0][1] - 0.02


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny Llama as Hugging Face saves it, with its tokenizer."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["what is two plus two, four"], trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    wrapped.chat_template = TEMPLATE
    wrapped.save_pretrained(tmp_path / "hf")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(wrapped),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


def test_a_converted_model_is_tuned_on_conversations_and_converted_back(
    model: Path, tmp_path: Path
):
    from safetensors.torch import load_file

    chats = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "four"}]
    chats.write_text("\n".join([json.dumps({"messages": turns})] * 40))
    settings = {"HF": str(model), "CHATS": str(chats), "OUT": str(tmp_path / "out")}
    said = run("finetune_on_chats.sh", tmp_path, **settings, SEQ="64", STEPS="5", LR="3e-3")
    check_picture_and_next(said, tmp_path / "out" / "tuned")
    losses = metrics(tmp_path / "out" / "tuned")
    assert losses[5] < losses[1] - 0.1
    before = load_file(model / "model.safetensors")
    after = load_file(tmp_path / "out" / "tuned-hf" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(after[name].shape == tensor.shape for name, tensor in before.items())
    assert any((after[name] != tensor).any() for name, tensor in before.items())
