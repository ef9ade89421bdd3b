"""Command lines of small runs, and how to start them."""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.faults.program import Launch, run_program
from tests.processes import HANG_SECONDS, check_nothing_stays_in

ROOT = Path(__file__).resolve().parents[2]

MODEL = shlex.split(
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --swiglu --normalization RMSNorm --disable-bias-linear "
    "--position-embedding-type rope --attention-dropout 0.0 --hidden-dropout 0.0"
)
# `zigzag` is planned in a twentieth of the time of `auto`: with that one, runs would mostly plan. Where the plan is the
# subject, and in a run of each layout, a later `--cp-planner auto` asks for it.
DATA = shlex.split(
    "--mock-data --vocab-size 512 --seq-length 128 --reset-attention-mask --reset-position-ids "
    "--num-workers 0 --cp-planner zigzag"
)
AUTO = ("--cp-planner", "auto")
STEPS = shlex.split(
    "--micro-batch-size 1 --global-batch-size 2 --train-iters 4 --lr 1e-3 --log-interval 1"
)
RUN_WITH_WANDB = [*MODEL, *DATA, *STEPS, "--eval-iters", "1"]
# With wandb a small run mostly draws pictures of its plans and reads which packages are installed. What goes wrong with
# it is a warning, so only runs whose test looks at it have it.
SMALL_RUN = [*RUN_WITH_WANDB, "--no-wandb"]
# Where layouts are compared, one of these follows: the first step has the losses of the weights, the second those after
# an update. A run that goes on from step 1 takes two as well: with weights and an optimizer that it read, and updated.
TWO_STEPS = shlex.split("--train-iters 2 --eval-iters 0")
THREE_STEPS = shlex.split("--train-iters 3 --eval-iters 0")
EVALUATED = ("--eval-iters", "1")


def launch(
    world_size: int, *flags: str, timeout: float = HANG_SECONDS
) -> subprocess.CompletedProcess[str]:
    """Runs pretrain_gpt.py on this many ranks and returns what it printed; it leaves no temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            command_line(world_size, *flags),
            capture_output=True,
            text=True,
            timeout=timeout,
            env=environment(folder),
            check=False,
        )
        check_nothing_stays_in(Path(folder))
    return done


def command_line(world_size: int, *flags: str) -> list[str]:
    """How torchrun starts pretrain_gpt.py on this many ranks, on a port that it finds free."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, "--nproc-per-node", str(world_size), str(ROOT / "pretrain_gpt.py"), *flags]


def environment(folder: str) -> dict[str, str]:
    """The variables of a run: nothing of the user's wandb; caches and temporary files in ``folder``."""
    kept = {name: v for name, v in os.environ.items() if not name.startswith("WANDB_")}
    ours = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "WANDB_MODE": "offline"}
    return {**kept, **ours, "TMPDIR": folder, "HOME": folder}


def train(world_size: int, *flags: str, plant: str = "") -> str:
    """The output of a run that must succeed, rank by rank; its ranks are forks of a warm process, without torchrun."""
    wanted = Launch(flags, world_size, environment={"WANDB_MODE": "offline"}, plant=plant)
    (ranks,) = run_program([wanted])
    for rank in ranks:
        assert rank.code == 0, rank.stdout[-3000:] + rank.stderr[-6000:]
    return "".join(rank.stdout for rank in ranks)


def train_and_save_first(world_size: int, folder: Path, *flags: str) -> str:
    """As `train`, and the only checkpoint is that of step 1: others go on from it, and are held against later steps."""
    saves = ("--save", str(folder), "--save-interval", "1")
    return train(world_size, *flags, *saves, plant="tests.faults.plants.save_once")


def stopped(world_size: int, *flags: str, code: int = 2) -> str:
    """The line with which every rank of a run ends, the same and without a traceback; ranks are as those of `train`."""
    (ranks,) = run_program([Launch(flags, world_size)])
    said = "".join(rank.stderr for rank in ranks)
    assert all(rank.code == code for rank in ranks), said[-6000:]
    assert "Traceback" not in said, said[-6000:]
    (line,) = set(error_lines(said))
    return line


def even_topology(path: Path) -> Path:
    """A machine on which computing is slow and links are free, so that every uneven step joins packs."""
    links = {"node_size": 2, "inner_gbytes_per_s": 1000, "outer_gbytes_per_s": 500}
    kernel = [{"rows": 1, "keys": 1, "forward_tflops": 1e-4, "backward_tflops": 1e-4}]
    path.write_text(
        json.dumps({"name": "even", **links, "latency_us": 0, "contention": 0, "kernel": kernel})
    )
    return path


def metrics(folder: Path, key: str = "lm loss") -> dict[int, float]:
    """One metric per iteration, as the run recorded it."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["iteration"]: row[key] for row in rows if key in row}


def check_goes_on(found: Path, expected: Path, *, keys: tuple[str, ...], rel: float) -> None:
    """Steps 2 and 3 of a run that goes on from step 1 of another are as there, and so is what it evaluated."""
    for key in keys:
        ours, wanted = metrics(found, key), metrics(expected, key)
        assert sorted(ours) == [2, 3], key
        for iteration, value in ours.items():
            assert value == pytest.approx(wanted[iteration], rel=rel), (key, iteration)
    held_out, wanted = (metrics(run, "lm loss validation") for run in (found, expected))
    evaluates = json.loads((found / "run.json").read_text())["arguments"]["eval_iters"]
    assert bool(held_out) == bool(evaluates)
    assert held_out == pytest.approx({step: wanted[step] for step in held_out}, rel=rel)


def error_lines(text: str) -> list[str]:
    """The one-line refusals in what a run printed."""
    return re.findall(r"^pretrain_gpt\.py: error: .*$", text, flags=re.MULTILINE)
