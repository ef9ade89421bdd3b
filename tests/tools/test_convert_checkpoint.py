"""The command line of the conversion: what it prints, its exit codes, and that refusals are lines."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.faults.program import Outcome
from tests.models.hugging_face.tiny_models import expected_logits, logits_of_folder, save_tiny
from tests.programs import python_in_fork
from tools import convert_checkpoint

ROOT = Path(__file__).resolve().parents[2]


TOOL = ROOT / "tools" / "convert_checkpoint.py"


def run_tool(*words: str | Path) -> Outcome:
    return python_in_fork(TOOL, *words)


def test_there_and_back_on_the_command_line(tmp_path: Path):
    """There by a process of its own, as a reader starts it."""
    source = save_tiny("llama3", tmp_path / "source")
    words = ["--from", "hf", "--to", "megatron", "--load", source, "--save", tmp_path / "megatron"]
    there = subprocess.run(
        [sys.executable, *map(str, (TOOL, *words))],
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert there.returncode == 0, there.stderr
    (line,) = [line for line in there.stdout.splitlines() if line.startswith("flags of")]
    flags = shlex.split(line)
    for flag in ("--num-layers=2", "--rotary-base=500000", "--use-rope-scaling", "--swiglu"):
        assert flag in flags
    assert (tmp_path / "megatron" / "hugging_face" / "tokenizer.json").is_file()

    back = run_tool(
        *("--from", "megatron", "--to", "hf"), "--load", tmp_path / "megatron",
        *("--save", tmp_path / "back"),
    )  # fmt: skip
    assert back.code == 0, back.stderr
    assert "left behind: *._extra_state* (8)" in back.stdout
    assert "note:" not in back.stdout
    assert (
        load_file(source / "model.safetensors").keys()
        == load_file(tmp_path / "back" / "model.safetensors").keys()
    )


def test_a_checkpoint_that_says_nothing_of_its_run_is_told(tmp_path: Path):
    """Its tensors fit another epsilon as well, and are that model then."""
    source, root = save_tiny("llama3", tmp_path / "source"), tmp_path / "megatron"
    words = ("--from", "hf", "--to", "megatron", "--load", source, "--save", root)
    assert run_tool(*words).code == 0
    torch.save({"iteration": 0}, root / "iter_0000001" / "common.pt")
    config = root / "hugging_face" / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 0.01'))
    back = run_tool("--from", "megatron", "--to", "hf", "--load", root, "--save", tmp_path / "back")
    assert back.code == 0, back.stderr
    assert "note: the checkpoint holds no arguments of its run: config.json was" in back.stdout
    difference = logits_of_folder(tmp_path / "back") - expected_logits("llama3")
    assert difference.abs().max() > 1e-3


def test_a_refusal_is_one_line_per_reason_with_exit_code_2(tmp_path: Path):
    source = save_tiny("llama3", tmp_path / "source")
    config = (source / "config.json").read_text()
    (source / "config.json").write_text(
        config.replace('"hidden_act": "silu"', '"hidden_act": "gelu", "new": 1')
    )
    done = run_tool(
        *("--from", "hf", "--to", "megatron"), "--load", source, "--save", tmp_path / "megatron"
    )
    assert done.code == 2
    lines = done.stderr.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("convert_checkpoint.py: error: ") for line in lines)
    assert "hidden_act='gelu' in config.json is not served for llama" in lines[0]
    assert "new=1; what is unknown may change the model" in lines[1]
    assert not (tmp_path / "megatron").exists()


@pytest.mark.parametrize("direction", ["megatron", "hf"])
def test_a_full_disk_is_one_line_and_nothing_is_left(tmp_path: Path, direction: str):
    source, target = save_tiny("llama3", tmp_path / "source"), tmp_path / "out"
    if direction == "hf":
        done = run_tool(
            *("--from", "hf", "--to", "megatron"), "--load", source, "--save", tmp_path / "megatron"
        )
        assert done.code == 0, done.stderr
        source = tmp_path / "megatron"
    before = sorted(tmp_path.iterdir())
    origin = "hf" if direction == "megatron" else "megatron"
    words = ("--from", origin, "--to", direction, "--load", source, "--save", target)
    done = python_in_fork(TOOL, *words, environment={"MAX_FILE_BYTES": "40960"})
    assert done.code == 2
    of_torch = re.compile(r"B/s|^W\d{4} ")  # progress; a build for CUDA says that there is no GPU
    (line,) = [line for line in done.stderr.splitlines() if not of_torch.search(line)]
    assert line.startswith(f"convert_checkpoint.py: error: {target}")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--from hf --to hf --load a --save b", "--from hf --to hf must differ"),
        ("--from gguf --to hf --load a --save b", "argument --from: invalid choice: 'gguf'"),
        ("--from hf --to megatron --load a", "required: --save"),
        ("--from hf --to megatron --load a --save b --max-file-gb 0", "--max-file-gb 0.0 must"),
        ("--from hf --to megatron --load a --save b --max-file-gb inf", "--max-file-gb inf must"),
        ("--from hf --to megatron --load a --save b --max-file-gb nan", "--max-file-gb nan must"),
        (
            "--from hf --to megatron --load a --save b --make-vocab-size-divisible-by 0",
            "--make-vocab-size-divisible-by 0 must",
        ),
    ],
)
def test_a_wrong_command_line_is_one_line(words: str, said: str, capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit) as caught:
        convert_checkpoint.parse_arguments(shlex.split(words))
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_many_reasons_are_cut_to_what_can_be_read(capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit):
        convert_checkpoint.refuse([f"reason {i}" for i in range(53)])
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 51
    assert lines[-1].endswith("and 3 more like these")


def test_without_safetensors_the_tool_says_what_to_install(tmp_path: Path):
    (tmp_path / "safetensors.py").write_text("raise ImportError('not here')")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.path.insert(1, {str(ROOT)!r}); "
        "from tools import convert_checkpoint as tool; "
        "tool.main('--from hf --to megatron --load a --save b'.split())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "pip install 'megatron_cp[hugging_face]'" in line
