"""The box at the end of a run: what came out, where it is, how to look at it, what to run next."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from megatron_cp.training.config import TrainConfig

_BALANCE, _ZIGZAG = "cp/area_max_over_mean", "cp/zigzag_area_max_over_mean"
_PER_DOCUMENT = "cp/per_document_area_max_over_mean"
_SENT, _RING = "cp/comm_bytes_sent", "cp/ring_bytes_sent"
_KEYS = (_BALANCE, _ZIGZAG, _PER_DOCUMENT, _SENT, _RING)
MOST_EVALUATIONS = 4  # that are listed, the last ones


@dataclass
class Summary:
    """Counts along while a run goes on; means are over every row that was tracked."""

    losses: list[float] = field(default_factory=list)
    held_out: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    """Steps and losses of each set of validation."""
    num_steps: int = 0
    num_tokens: int = 0
    started: float = field(default_factory=time.perf_counter)
    _sums: dict[str, float] = field(default_factory=dict)
    _num_rows: int = 0
    _rows_with: dict[str, int] = field(default_factory=dict)
    """Rows that hold a figure: a mean over fewer than all of them would not be comparable."""

    def step(self, loss: float | None, num_tokens: int) -> None:
        """Counts one step."""
        if loss is not None:
            self.losses.append(loss)
        self.num_steps += 1
        self.num_tokens += num_tokens

    def evaluated(self, name: str, step: int, loss: float) -> None:
        """Counts one evaluation of a set of validation."""
        self.held_out.setdefault(name, []).append((step, loss))

    def row(self, row: Mapping[str, Any]) -> None:
        """Counts one tracked row."""
        self._num_rows += 1
        for key in _KEYS:
            self._sums[key] = self._sums.get(key, 0.0) + float(row.get(key, 0.0))
            self._rows_with[key] = self._rows_with.get(key, 0) + (key in row)

    def mean(self, key: str) -> float:
        """Returns the mean over all rows."""
        return self._sums.get(key, 0.0) / max(1, self._num_rows)

    def facts(self) -> list[tuple[str, str]]:
        """Returns name and words of each line on what came out; nothing for a run without a step."""
        facts = []
        if self.losses:
            count = max(1, len(self.losses) // 10)
            first, last = self.losses[:count], self.losses[-count:]
            of = f"mean of the first and last {count} steps" if count > 1 else "first and last step"
            words = f"{sum(first) / count:.4f} -> {sum(last) / count:.4f}, {of}"
            facts.append(("training loss", words))
        for name, losses in self.held_out.items():
            words = ", ".join(f"{loss:.4f} at step {n}" for n, loss in losses[-MOST_EVALUATIONS:])
            facts.append((f"held-out loss{name.removeprefix('validation')}", words))
        if self._num_rows and self.mean(_RING):
            over = f"mean of {self._num_rows} steps"
            others = f"zigzag {self.mean(_ZIGZAG):.3f}"
            if self._rows_with.get(_PER_DOCUMENT) == self._num_rows:
                others += f", Transformer Engine (THD) {self.mean(_PER_DOCUMENT):.3f}"
            balance = f"{self.mean(_BALANCE):.3f} max / mean area, {others} ({over})"
            sent, ring = self.mean(_SENT), self.mean(_RING)
            volume = (
                f"{sent / 1e6:,.4g} MB a step, {sent / ring:.1%} of what zigzag or Transformer Engine (THD) sends "
                f"({over})"
            )
            facts += [("balance", balance), ("bytes sent", volume)]
        return facts


def next_lines(
    run_dir: str | None,
    save: str | None,
    wandb_folder: str | None,
    more: str | None = None,
    wandb_run_id: str | None = None,
) -> list[tuple[str, str]]:
    """Returns where the records are, and the commands that show, upload and go on with them.

    `more` is the flag that a longer run gives anew; None where the run left before its last step.
    """
    found = []
    if run_dir is not None:
        folder = shlex.quote(run_dir)
        page = shlex.quote(str(Path(run_dir) / "report.html"))
        found.append(("records", f"{folder}/run.json, metrics.jsonl, plan.json"))
        found.append(("report", f"python -m megatron_cp report {folder}, then open {page}"))
    if wandb_folder is not None:
        found.append(("upload", f"wandb sync {shlex.quote(wandb_folder)}"))
    if save is not None:
        same = f"the same command with --load {shlex.quote(save)}"
        longer = "" if more is None else f", more {more} and --override-opt-param-scheduler"
        found.append(("go on", f"{same}{longer}"))
        if wandb_run_id is not None:
            found.append(
                ("wandb run", f"{wandb_run_id}; --wandb-run-id {wandb_run_id} goes on with it")
            )
    return found


def flag_of_more(config: TrainConfig, steps: int) -> str | None:
    """Returns the flag that says how long a run is; None where `steps` are not all that this one was to take."""
    if steps < config.steps.train_iters:
        return None
    return "--train-iters" if config.steps.train_samples is None else "--train-samples"


def closing_box(
    summary: Summary, steps: int, lines: Sequence[tuple[str, str]], now: float | None = None
) -> str:
    """Returns the box of a run that has taken `steps`, some perhaps before; `now` is the clock of `summary.started`."""
    seconds = (time.perf_counter() if now is None else now) - summary.started
    of_all = "" if steps == summary.num_steps else f" (the run has {steps})"
    title = f"{summary.num_steps} steps{of_all}, {summary.num_tokens:,} tokens, {timedelta(seconds=round(seconds))}"
    rows = [*summary.facts(), *lines]
    width = max((len(name) for name, _ in rows), default=0)
    rule = "-" * 80
    body = [f"  {name:{width}}  {words}" for name, words in rows]
    return "\n".join([rule, f"  done: {title}", *body, rule])
