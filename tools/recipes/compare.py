"""One cut recipe at several layouts, from the same weights: do losses and gradients stay the same?

weights   one rank, one step at learning rate 0, saved; every other run loads it
cp1       one rank: what the others are held against
cp2       two context ranks
own       two context ranks with the recipe's tensor, pipeline and expert sizes, where four ranks hold them
megatron  one rank, Megatron-Core's own attention with a dense mask (dense.py)
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

from tools.recipes.command_line import CommandLine
from tools.recipes.cut import Cut
from tools.recipes.layout import Ranks, cut_layout, cut_stages

ROOT = Path(__file__).resolve().parents[2]
_RATES = ("--lr", "--min-lr", "--decoupled-lr", "--decoupled-min-lr", "--lr-warmup-init")
_METRICS = ("lm loss", "grad-norm")


@dataclass(frozen=True)
class Run:
    """What one run came to: a value per step, or why there is none."""

    name: str
    ranks: Ranks
    losses: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()
    reason: str = ""
    is_refused: bool = False
    """Whether it was refused in one line, before any process group."""

    def differs_from(self, other: Run) -> tuple[float, float]:
        """Returns the largest relative difference of the losses, and of the gradient norms."""
        return _largest(self.losses, other.losses), _largest(self.norms, other.norms)


def _largest(found: Sequence[float], expected: Sequence[float]) -> float:
    if not found or len(found) != len(expected):
        return float("inf")
    return max(abs(a - b) / max(abs(b), 1e-30) for a, b in zip(found, expected, strict=True))


def relaid(cut: Cut, most_ranks: int, context: int) -> Cut:
    """Returns the same model and data on fewer ranks."""
    line = CommandLine.of(cut.argv)
    ranks = cut_layout(line, most_ranks, context)
    if ranks.pipeline == 1:
        cut_stages(line, 1, 1)
    return Cut(tuple(line.argv), ranks, tuple(line.changes))


class Starter:
    """The process that imports Megatron once and forks the ranks of each run."""

    def __init__(self) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tools.recipes.start"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
        )

    def __enter__(self) -> Starter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def run(self, name: str, cut: Cut, folder: Path, *more: str, dense: bool = False) -> Run:
        """Returns the values of one run; its records and output go to `folder`."""
        argv = [*cut.argv, "--run-dir", str(folder), *more]
        job = {"argv": argv, "world_size": cut.ranks.world_size, "folder": str(folder)}
        pipe_in, pipe_out = self._process.stdin, self._process.stdout
        assert pipe_in is not None
        assert pipe_out is not None
        code = _ask({**job, "dense": dense}, pipe_in, pipe_out)
        if code:
            outputs = [path.read_text() for path in sorted(folder.glob("rank*.txt"))]
            reasons = [_refusal(text) for text in outputs]
            is_refused = code == 2 and all(reasons)
            found = next(filter(None, reasons), "") or f"exit code {code}: {_last_line(outputs)}"
            return Run(name, cut.ranks, reason=found, is_refused=is_refused)
        losses, norms = (_metric(folder, key) for key in _METRICS)
        return Run(name, cut.ranks, losses, norms)


def _ask(job: dict[str, object], pipe_in: IO[str], pipe_out: IO[str]) -> int:
    pipe_in.write(json.dumps(job) + "\n")
    pipe_in.flush()
    answer = pipe_out.readline()
    if not answer:
        raise RuntimeError("the process that starts the ranks has ended")
    return int(answer)


def _refusal(output: str) -> str:
    """Returns the lines with which a rank refused its arguments before any process group."""
    lines = re.findall(r"^pretrain_gpt\.py: error: (.*)$", output, flags=re.MULTILINE)
    return "" if "initializing torch distributed" in output else "; ".join(lines)


def _last_line(outputs: Sequence[str]) -> str:
    """Returns the line that says most about a failure: the last of the first rank with an error."""
    for text in outputs:
        lines = [
            line for line in text.splitlines() if re.match(r"[\w.]*(Error|Exception|Stop)", line)
        ]
        if lines:
            return lines[-1]
    return "no error was printed"


def _metric(folder: Path, key: str) -> tuple[float, ...]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return tuple(row[key] for row in rows if row.get(key) is not None)


def compare(cut: Cut, folder: Path, starter: Starter, *, oracle: bool = True) -> list[Run]:
    """Returns the runs of a recipe that was cut for two context ranks; the first is one rank's.

    Where the weights cannot be made, that failure alone is returned.
    """
    one, two = relaid(cut, 1, 1), relaid(cut, 2, 2)
    weights = folder / "weights"
    rates = CommandLine.of(one.argv)
    for flag in _RATES:
        if rates.has(flag):
            rates.set(flag, 0)
    rates.set("--train-iters", 1)
    if rates.has("--lr-wsd-decay-iters"):
        rates.set("--lr-wsd-decay-iters", 1)
    still = Cut(tuple(rates.argv), one.ranks, ())
    first = starter.run("weights", still, weights, "--save", str(weights), "--no-save-optim")
    if first.reason:
        return [first]
    load = ("--load", str(weights), "--finetune")
    runs = [starter.run("cp1", one, folder / "cp1", *load)]
    runs.append(starter.run("cp2", two, folder / "cp2", *load))
    if cut.ranks != two.ranks:
        runs.append(starter.run("own", cut, folder / "own", *load))
    if oracle:
        runs.append(starter.run("megatron", one, folder / "megatron", *load, dense=True))
    return runs
