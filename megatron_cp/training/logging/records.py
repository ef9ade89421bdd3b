"""The files that a run leaves for the report.

`run.json`, `metrics.jsonl`, `plan.json` and, where it is asked for, `text_samples.jsonl` (schema: docs/training.md).

Plain JSON of what may be written down (loggable.py), by one rank; a run that dies leaves every line up to its
last step. Samples of text hold the documents' own words.
"""

from __future__ import annotations

import json
import math
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from megatron_cp.mask import AttentionMask
from megatron_cp.plan import AttentionPlan
from megatron_cp.plan.hardware.makespan import stage_areas
from megatron_cp.plan.stats import sent_bytes
from megatron_cp.training.logging.lines import print_rank_last
from megatron_cp.training.logging.loggable import loggable, loggable_arguments, loggable_command
from megatron_cp.training.whole_files import append_whole, free_name, write_atomically

SCHEMA = 1
TEXTS = "text_samples.jsonl"
_NUM_PLAN_SAMPLES = 4


class RunFiles:
    """Writes the records of one run into a folder; a resumed run goes on in the same files."""

    def __init__(self, folder: Path, description: dict[str, Any]) -> None:
        """Creates the folder and `run.json`; rows of `metrics.jsonl` are appended.

        A run from the beginning moves what an earlier run left there aside, and says where.
        """
        folder.mkdir(parents=True, exist_ok=True)
        if not description["iteration"]:
            _move_aside(folder)
        self.folder = folder
        arguments = loggable_arguments(description["arguments"])
        told = loggable({**description, "arguments": arguments, "command": None})
        # In words: `--flag=value` is one.
        told["command"] = loggable_command(description.get("command", ()))
        self._run = {"schema": SCHEMA, **told, "finished": None}
        self._samples = _read_samples(folder, description)
        # A finished run that is started again evaluates its last iteration as before.
        self._newest = _keep_rows_until(folder / "metrics.jsonl", description["iteration"])
        if (folder / TEXTS).exists():
            self._newest += _keep_rows_until(folder / TEXTS, description["iteration"])
        self._write_run()

    def log(self, row: dict[str, Any]) -> None:
        """Appends one row that is not there already; values that are not finite become null, as JSON has none."""
        row = _finite(row)
        if row not in self._newest:
            line = json.dumps({"time": time.time(), **row})
            append_whole(self.folder / "metrics.jsonl", f"{line}\n")

    @property
    def num_wanted_plan_samples(self) -> int:
        """How many more packs are kept."""
        return max(0, _NUM_PLAN_SAMPLES - len(self._samples))

    def add_plan_sample(self, sample: dict[str, Any]) -> None:
        """Adds one pack to `plan.json`."""
        self._samples.append(sample)
        write_atomically(
            self.folder / "plan.json", json.dumps({"schema": SCHEMA, "samples": self._samples})
        )

    def add_texts(self, rows: list[dict[str, Any]]) -> None:
        """Appends samples of text that are not there already."""
        new = [row for row in rows if row not in self._newest]
        append_whole(self.folder / TEXTS, "".join(json.dumps(row) + "\n" for row in new))

    def finish(self, summary: dict[str, Any]) -> None:
        """Writes how the run ended into `run.json`."""
        self._run["finished"] = {"time": time.time(), **_finite(summary)}
        self._write_run()

    def _write_run(self) -> None:
        write_atomically(self.folder / "run.json", json.dumps(self._run, indent=1, default=str))


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    """Returns the row with null for NaN and infinities."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


def _read_samples(folder: Path, description: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the samples of the steps behind which the run goes on; none of another layout, whose plans it left."""
    try:
        told, record = (
            json.loads((folder / name).read_text(encoding="utf-8"))
            for name in ("run.json", "plan.json")
        )
        samples = [one for one in record["samples"] if one["iteration"] <= description["iteration"]]
        return samples if told.get("layout") == description.get("layout") else []
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []  # pictures of an earlier part; the run goes on without them


def _move_aside(folder: Path) -> None:
    """Moves the records of an earlier run, if they have rows, into a folder of their own beside the new ones."""
    rows = folder / "metrics.jsonl"
    if not rows.is_file() or not rows.stat().st_size:
        return
    aside = free_name(folder)
    aside.mkdir()
    for name in ("run.json", "metrics.jsonl", "plan.json", TEXTS):
        with suppress(FileNotFoundError):
            (folder / name).rename(aside / name)
    print_rank_last(f" note: {folder} held the records of an earlier run; they are in {aside}")


def _keep_rows_until(path: Path, iteration: int) -> list[dict[str, Any]]:
    """Removes the rows after `iteration`: a resumed run writes those again. Returns those of it, without times."""
    kept, newest = [], []
    if iteration and path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
                if row["iteration"] <= iteration:
                    kept.append(line + "\n")
                if row["iteration"] == iteration:
                    newest.append({key: row[key] for key in row if key != "time"})
            except (ValueError, KeyError, TypeError, RecursionError):
                continue  # the last line of a run that was killed while it wrote
    write_atomically(path, "".join(kept))
    return newest


def plan_sample(
    iteration: int,
    mask: AttentionMask,
    plan: AttentionPlan,
    lengths: tuple[int, ...],
    kinds: tuple[str, ...],
) -> dict[str, Any]:
    """Returns one pack as the report draws it: its mask and its plan; what it is compared with is planned there."""
    return {
        "iteration": iteration,
        "num_tokens": plan.num_tokens,
        "cp_size": plan.cp_size,
        "document_lengths": list(lengths),
        "document_kinds": list(kinds),
        "mask": mask.array.tolist(),
        "mask_area": int(mask.area()),
        "plans": {"ours": _plan_record(plan)},
    }


def _plan_record(plan: AttentionPlan) -> dict[str, Any]:
    """Returns one plan: who owns which tokens, the area and the rows of each rank, predicted figures."""
    return {
        "planner": plan.planner,
        "digest": plan.digest(),
        "token_runs": [_runs(ids) for ids in plan.global_from_local],
        "area_per_rank": stage_areas(plan, "forward").sum(axis=0).astype(int).tolist(),
        "comm_bytes": {
            name: sent_bytes(plan, name).round().astype(int).tolist()
            for name in ("forward", "backward")
        },
        "stats": {"forward": plan.stats("forward"), "backward": plan.stats("backward")},
    }


def _runs(ids: np.ndarray[Any, np.dtype[np.int64]]) -> list[list[int]]:
    """Token ids of a rank, in local order, as half-open runs `[start, stop]`.

    Local order is the order of the runs.
    """
    breaks = np.flatnonzero(np.diff(ids) != 1) + 1
    starts, stops = np.concatenate(([0], breaks)), np.concatenate((breaks, [len(ids)]))
    return [[int(ids[a]), int(ids[b - 1]) + 1] for a, b in zip(starts, stops, strict=True)]
