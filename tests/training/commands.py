"""Command lines of small runs, and how to start them."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

MODEL = shlex.split(
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --swiglu --normalization RMSNorm --disable-bias-linear "
    "--position-embedding-type rope --attention-dropout 0.0 --hidden-dropout 0.0"
)
DATA = shlex.split(
    "--mock-data --vocab-size 512 --seq-length 128 --reset-attention-mask --reset-position-ids "
    "--num-workers 0"
)
STEPS = shlex.split(
    "--micro-batch-size 1 --global-batch-size 2 --train-iters 4 --lr 1e-3 --log-interval 1"
)
SMALL_RUN = [*MODEL, *DATA, *STEPS, "--eval-iters", "1"]


def launch(
    world_size: int, *flags: str, timeout: float = 240.0
) -> subprocess.CompletedProcess[str]:
    """Runs pretrain_gpt.py on this many ranks and returns what it printed."""
    environment = {name: v for name, v in os.environ.items() if not name.startswith("WANDB_")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "WANDB_MODE": "offline"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.run(
        [*launcher, "--nproc-per-node", str(world_size), str(ROOT / "pretrain_gpt.py"), *flags],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
        check=False,
    )


def train(world_size: int, *flags: str) -> str:
    """The output of a run that must succeed."""
    done = launch(world_size, *flags)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


def metrics(folder: Path, key: str = "lm loss") -> dict[int, float]:
    """One metric per iteration, as the run recorded it."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["iteration"]: row[key] for row in rows if key in row}


def error_lines(text: str) -> list[str]:
    """The one-line refusals in what a run printed."""
    return re.findall(r"^pretrain_gpt\.py: error: .*$", text, flags=re.MULTILINE)
