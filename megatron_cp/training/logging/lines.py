"""What a run prints: Megatron-LM's lines, word for word, so that tools which read its logs read ours.

Rank 0 tells what is being set up, the last rank (which holds the loss under pipeline parallelism)
prints the training lines.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import torch.distributed as dist

from megatron_cp.loggable_text import without_controls

_CLEAR_LINE = "\r\x1b[K"


def print_rank_0(message: str) -> None:
    """Prints on rank 0 alone (or without a process group)."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        _print(message)


def print_rank_last(message: str) -> None:
    """Prints on the last rank alone (or without a process group)."""
    if not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1:
        _print(message)


def _print(message: str) -> None:
    """Prints in the place of the bar, which another rank may have drawn, where both are on a terminal."""
    is_behind_bar = ProgressBar.is_shown and sys.stdout.isatty()
    message = without_controls(message)
    print(f"{_CLEAR_LINE}{message}" if is_behind_bar else message, flush=True)


def warn(text: str) -> None:
    """Writes a warning of one line: of what is only looked at, and ends no run."""
    sys.stderr.write(f"WARNING: {' '.join(text.split())}\n")


@contextmanager
def told_if_refused(what: str) -> Iterator[None]:
    """Turns what a disk or a folder refuses inside into a warning: nothing that is only looked at ends a run."""
    try:
        yield
    except OSError as problem:
        warn(f"{what} could not be written: {problem}; training goes on")


def print_datetime(event: str) -> None:
    """`[event] datetime: ...` on rank 0."""
    print_rank_0(f"[{event}] datetime: {datetime.now():%Y-%m-%d %H:%M:%S} ")


def arguments_block(arguments: Mapping[str, Any], defaults: Mapping[str, Any], where: str) -> str:
    """Returns the dotted block of the arguments that differ from `defaults`, sorted, and how many others there are.

    `where` says where those are. An argument without a default differs if it has a value.
    """
    shown = {k: v for k, v in sorted(arguments.items()) if v != defaults.get(k)}
    title = "arguments"
    return "\n".join(
        [
            f"------------------------ {title} ------------------------",
            *(f"  {k} {'.' * (48 - len(k))} {v}" for k, v in shown.items()),
            f"-------------------- end of {title} ---------------------",
            f"{len(arguments) - len(shown)} others are at their defaults: {where}",
        ]
    )


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one log line says; a mean over the steps since the last line where that makes sense."""

    iteration: int
    train_iters: int
    consumed_samples: int
    elapsed_ms: float
    learning_rate: float
    global_batch_size: int
    losses: dict[str, float]
    grad_norm: float | None
    loss_scale: float = 1.0
    skipped_iterations: int = 0
    nan_iterations: int = 0
    tflops: float | None = None
    num_zeros: float | None = None
    params_norm: float | None = None
    speed: str = ""
    """Fields of our own behind Megatron-LM's, which readers of its logs pass over."""


def training_line(report: StepReport, now: datetime | None = None) -> str:
    """Returns Megatron-LM's line of one step, and what we add to it.

    Source: the format strings of Megatron-LM core_v0.19.0, training_log.
    """
    parts = [
        f" [{now or datetime.now():%Y-%m-%d %H:%M:%S.%f}] iteration "
        f"{report.iteration:8d}/{report.train_iters:8d}",
        f" consumed samples: {report.consumed_samples:12d}",
        f" elapsed time per iteration (ms): {report.elapsed_ms:.1f}",
    ]
    if report.tflops is not None:
        parts.append(f" throughput per GPU (TFLOP/s/GPU): {_throughput(report.tflops)}")
    parts.append(f" learning rate: {report.learning_rate:.6E}")
    parts.append(f" global batch size: {report.global_batch_size:5d}")
    parts += [f" {name}: {value:.6E}" for name, value in report.losses.items()]
    parts.append(f" loss scale: {report.loss_scale:.1f}")
    for name, value in (
        ("grad norm", report.grad_norm),
        ("num zeros", report.num_zeros),
        ("params norm", report.params_norm),
    ):
        if value is not None:
            parts.append(
                f" {name}: {value:.1f}" if name == "num zeros" else f" {name}: {value:.3f}"
            )
    parts.append(f" number of skipped iterations: {report.skipped_iterations:3d}")
    parts.append(f" number of nan iterations: {report.nan_iterations:3d}")
    return " |".join(parts) + " |" + report.speed


def _throughput(tflops: float) -> str:
    """Returns Megatron-LM's digits; three that count below 1, where it would print 0.0 for small models."""
    decimals = 2 - math.floor(math.log10(tflops)) if 0 < tflops < 1 else 1
    return f"{tflops:.{decimals}f}"


def progress_line(world_size: int, iteration: int, flops: int) -> str:
    """Returns what `--log-progress` appends for a checkpoint."""
    return (
        f"{datetime.now():%Y-%m-%d %H:%M:%S}\t# GPUs: {world_size}\tSaved checkpoint\t"
        f"Iteration: {iteration}\tFloating-point operations: {flops:.2e}\n"
    )


def evaluation_lines(
    where: str, split: str, losses: dict[str, float], perplexities: dict[str, float]
) -> str:
    """Returns Megatron-LM's three lines of an evaluation: the values between two rules.

    A set of several has its name behind that of its split: `validation-wiki`.
    """
    split, dash, name = split.partition("-")
    line = f" validation{dash}{name} loss at {where} on {split} set | "
    for name, value in losses.items():
        line += f"{name} value: {value:.6E} | {name} PPL: {perplexities[name]:.6E} | "
    rule = "-" * (len(line) + 1)
    return "\n".join((rule, line, rule))


class ProgressBar:
    """A bar on rank 0 where standard error is a terminal; nothing anywhere else."""

    is_shown = False
    """Whether a bar is being drawn, by this rank or another: all ranks of a machine have one terminal."""

    def __init__(self, *, total: int, done: int) -> None:
        """A bar of `total` steps of which `done` lie behind (a resumed run)."""
        self._bar: Any = None
        ProgressBar.is_shown = sys.stderr.isatty()
        is_first = not dist.is_initialized() or dist.get_rank() == 0
        if is_first and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, initial=done, unit="it", desc="train", dynamic_ncols=True)

    def step(self, tokens_per_s: float) -> None:
        """One step is done, at this speed."""
        if self._bar is not None:
            self._bar.set_postfix_str(f"{tokens_per_s:,.0f} tokens/s", refresh=False)
            self._bar.update(1)

    def close(self) -> None:
        """Leaves the finished bar on its line."""
        ProgressBar.is_shown = False
        if self._bar is not None:
            self._bar.close()
