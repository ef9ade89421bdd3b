"""Runs the programs of a Megatron-LM checkout, named by the variable MEGATRON_LM, on CPU ranks.

Their imports need six, einops, omegaconf, ... beside what our tests need.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_cp.data.indexed_writer import IndexedWriter

ROOT = Path(__file__).resolve().parents[2]
CHECKOUT = os.environ.get("MEGATRON_LM")
EOD = 127

needs_megatron_lm = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not CHECKOUT, reason="MEGATRON_LM names no checkout of Megatron-LM"),
]

MODEL = shlex.split("""
    --num-layers 2 --hidden-size 64 --num-attention-heads 4
    --seq-length 64 --max-position-embeddings 64 --position-embedding-type rope --attention-dropout 0
    --hidden-dropout 0 --untie-embeddings-and-output-weights --transformer-impl local --micro-batch-size 1
    --global-batch-size 2 --lr 3e-3 --tokenizer-type NullTokenizer
    --distributed-backend gloo --use-cpu-initialization --log-interval 1
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion --no-rope-fusion
    --no-bias-dropout-fusion --no-persist-layer-norm --eval-interval 1000 --eval-iters 1 --num-workers 0
""")

MAMBA = shlex.split("""
    --normalization RMSNorm --disable-bias-linear --mamba-head-dim 8 --mamba-num-groups 2 --mamba-state-dim 16
    --mamba-num-heads 8 --position-embedding-type none
""")
HYBRID_SPEC = ["--spec", "megatron_cp.mcore.hybrid", "hybrid_stack_spec"]


def write_documents(prefix: Path) -> Path:
    """Counting documents of 4 to 70 tokens, each closed by the end token; longer ones than a sample too."""
    random = np.random.default_rng(0)
    with IndexedWriter(prefix, dtype=np.uint16) as writer:
        for _ in range(300):
            length, start, step = (
                random.integers(3, 70),
                random.integers(100),
                random.integers(1, 4),
            )
            writer.add_document(np.append((start + step * np.arange(length)) % 100, EOD))
        writer.finish()
    return prefix


def minor_version() -> int:
    """The version of the checkout: 16 for 0.16.1."""
    text = Path(CHECKOUT, "megatron/core/package_info.py").read_text()
    return int(re.search(r"MINOR = (\d+)", text)[1])


def vocabulary() -> list[str]:
    """The tokens of `write_documents`; since 0.19 its NullTokenizer counts the end token in the vocabulary."""
    return ["--vocab-size", str(EOD + (minor_version() >= 19))]


def write_tokenizer(folder: Path) -> Path:
    """A Hugging Face tokenizer of the vocabulary of `write_documents`."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(EOD)} | {"<eos>": EOD}
    plain = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<eos>").save_pretrained(folder)
    return folder


def launched(
    ranks: int, folder: Path, *flags: str, program: str = "pretrain_gpt.py", **more
) -> str:
    """What Megatron-LM's own program prints on this many ranks; ``more`` are variables of the environment."""
    script = ROOT / "tests/mcore/megatron_lm_on_cpu.py"
    return _printed(ranks, folder, script, flags, {"MEGATRON_LM_PROGRAM": program, **more})


def ours_launched(ranks: int, folder: Path, *flags: str) -> str:
    """What our pretrain_gpt.py prints on this many ranks, over the Megatron-Core of the checkout."""
    return _printed(ranks, folder, ROOT / "pretrain_gpt.py", flags, {})


def _printed(
    ranks: int, folder: Path, script: Path, flags: tuple[str, ...], more: dict[str, str]
) -> str:
    environment = os.environ | {
        "TMPDIR": str(folder),  # torchrun's folders stay behind Megatron-LM's program
        "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "TORCH_COMPILE_DISABLE": "1",
        "PYTHONPATH": os.pathsep.join([CHECKOUT, str(ROOT), os.environ.get("PYTHONPATH", "")]),
        **more,
    }  # fmt: skip
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    done = subprocess.run(
        [*launcher, str(ranks), str(script), *flags],
        capture_output=True, text=True, env=environment, cwd=folder, check=False,
    )  # fmt: skip
    problems = [line for line in done.stderr.splitlines() if line.startswith("[rank0]:")]
    assert done.returncode == 0, "\n".join(problems) or done.stderr[-3000:]
    return done.stdout
