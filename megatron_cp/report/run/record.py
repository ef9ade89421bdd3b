"""What a training run left in its folder, read and checked: run.json, metrics.jsonl, plan.json, text_samples.jsonl.

Schema: docs/training.md. Nothing here is trusted; a record that cannot be read is one ValueError
that names the file and what is wrong with it.
"""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from megatron_cp.config import CPConfig
from megatron_cp.data.prompts import TextSample
from megatron_cp.mask import AttentionMask, from_slices
from megatron_cp.mask.interval import IntArray, to_indices
from megatron_cp.mcore.settings.arguments import cp_config_from_arguments
from megatron_cp.plan.hardware.speeds import rank_speeds
from megatron_cp.report.figures.view import FloatArray, PackView, PlanView, kv_bytes
from megatron_cp.report.run.texts import read_texts

SCHEMA = 1
LOSS = "lm loss"
HELD_OUT_LOSS = "lm loss validation"
_T = TypeVar("_T")


@dataclass(frozen=True)
class Run:
    """One run: its description, the rows it logged, the packs it kept, the texts it wrote."""

    folder: Path
    description: Mapping[str, Any]
    rows: tuple[Mapping[str, Any], ...]
    packs: tuple[PackView, ...]
    texts: tuple[TextSample, ...] = ()

    @property
    def name(self) -> str:
        """Returns the run's name."""
        return str(self.description.get("name") or self.folder.name)

    def argument(self, name: str, default: Any = None) -> Any:
        """Returns one of the run's arguments."""
        return self.section("arguments").get(name, default)

    def section(self, name: str) -> Mapping[str, Any]:
        """Returns a part of run.json, empty where it is missing."""
        part = self.description.get(name)
        return part if isinstance(part, Mapping) else {}

    @property
    def held_out_loss(self) -> str:
        """Returns the key of the loss on held-out documents; of several sets that of the first."""
        keys = (key for row in self.rows for key in row if key.startswith(f"{HELD_OUT_LOSS}-"))
        return next((key for key in keys if not key.endswith(" ppl")), HELD_OUT_LOSS)

    @property
    def interval(self) -> int:
        """Returns the steps that a row of metrics tells of: its own and those since the row before."""
        steps = self.argument("tensorboard_log_interval")
        return steps if isinstance(steps, int) and steps > 0 else 1

    @property
    def num_steps(self) -> int:
        """Returns the steps that the run has taken: as it said at its end, else up to the last row."""
        end = self.section("finished").get("iteration")
        if isinstance(end, int):
            return end
        return int(self.rows[-1]["iteration"]) if self.rows else 0

    def column(self, key: str) -> tuple[list[float], list[float]]:
        """Returns iterations and values of the rows that have a finite number under `key`."""
        pairs = [(x, y) for x, y in zip(*self.logged(key), strict=True) if math.isfinite(y)]
        return [x for x, _ in pairs], [y for _, y in pairs]

    def logged(self, key: str) -> tuple[list[float], list[float]]:
        """Returns iterations and values of the rows that have `key`; NaN for what was not finite, which is null."""
        rows = [row for row in self.rows if key in row]
        values = [float(row[key]) if _is_finite(row[key]) else math.nan for row in rows]
        return [float(row["iteration"]) for row in rows], values


def read_run(folder: Path) -> Run:
    """Returns the run in `folder`. Raises ValueError, one line, for files missing or damaged."""
    if not folder.is_dir():
        raise ValueError(f"run folder {str(folder)!r} does not exist; give what --run-dir named")
    description = _read_json(folder / "run.json")
    _check_schema(description, folder / "run.json")
    rows = _read_rows(folder / "metrics.jsonl")
    record_path = folder / "plan.json"
    samples: Sequence[Mapping[str, Any]] = ()
    if record_path.is_file():
        record = _read_json(record_path)
        _check_schema(record, record_path)
        samples = _checked(record_path, lambda: list(record["samples"]))
    run = Run(folder, description, tuple(rows), ())
    packs = _checked(record_path, lambda: tuple(pack_view(sample, run) for sample in samples))
    return Run(folder, description, tuple(rows), packs, read_texts(folder / "text_samples.jsonl"))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path} does not exist; give the folder of a training run (--run-dir)")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"{path} is not JSON ({problem}); was the run stopped in it?") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, want an object; write it again")
    return value


def _check_schema(record: Mapping[str, Any], path: Path) -> None:
    if record.get("schema") != SCHEMA:
        raise ValueError(
            f"{path}: schema={record.get('schema')!r} must be {SCHEMA}; report with the version of "
            "megatron_cp that trained"
        )


def _read_rows(path: Path) -> list[Mapping[str, Any]]:
    """Returns rows by iteration; a line cut short by a killed run is left out."""
    if not path.is_file():
        raise ValueError(f"{path} does not exist; give the folder of a training run (--run-dir)")
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and _is_finite(row.get("iteration")):
            rows.append(row)
    return sorted(rows, key=lambda row: float(row["iteration"]))


def _is_finite(value: object) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and math.isfinite(value)  # type: ignore[arg-type]


def _checked(path: Path, read: Callable[[], _T]) -> _T:
    """Runs `read`; whatever a wrong record makes it raise becomes one ValueError with the file."""
    try:
        return read()
    except (KeyError, TypeError, IndexError, OverflowError, AttributeError) as problem:
        kind = f"{type(problem).__name__}: {problem}"
        raise ValueError(f"{path} is not a record of plans ({kind}); write it again") from None
    except ValueError as problem:
        raise ValueError(f"{path}: {problem}") from None


# ---------------------------------------------------------------------- plan.json


def pack_view(sample: Mapping[str, Any], run: Run) -> PackView:
    """Returns a pack of plan.json; ValueError or a look-up error where it is not one."""
    num_tokens, cp_size = int(sample["num_tokens"]), int(sample["cp_size"])
    rows = np.asarray(sample["mask"], dtype=np.int64).reshape(-1, 6)
    mask = from_slices(num_tokens, num_tokens, rows)
    if mask.area() != int(sample["mask_area"]):
        raise ValueError(
            f"mask has {mask.area()} pairs, mask_area={sample['mask_area']} must be the same; "
            "write the record again"
        )
    plans, config = sample["plans"], config_of(run)
    return PackView(
        mask=mask,
        document_lengths=tuple(int(n) for n in sample["document_lengths"]),
        document_kinds=tuple(str(kind) for kind in sample["document_kinds"]),
        ours=_plan_view(plans["ours"], mask, rank_speeds(config, cp_size)),
        digest=str(plans["ours"].get("digest", "")),
        others=(),  # what it is compared with is planned anew: run/kept_packs.py
        kv_row_bytes=kv_bytes(config),
    )


def config_of(run: Run) -> CPConfig:
    """Returns the planner's settings that the run's arguments mean."""
    on_cuda = run.section("machine").get("device", "cpu") != "cpu"
    return cp_config_from_arguments(Namespace(**run.section("arguments")), on_cuda=on_cuda)


def _plan_view(record: Mapping[str, Any], mask: AttentionMask, speeds: FloatArray) -> PlanView:
    cp_size = len(speeds)
    tokens = _placement(record["token_runs"], cp_size, mask.num_queries)
    forward, backward = (
        np.asarray(record["comm_bytes"][name], dtype=np.float64).reshape(cp_size, cp_size)
        for name in ("forward", "backward")
    )
    area = np.asarray(record["area_per_rank"], dtype=np.float64).reshape(cp_size)
    stats = {name: dict(record["stats"][name]) for name in ("forward", "backward")}
    return PlanView(
        planner=str(record["planner"]),
        tokens=tokens,
        area=area,
        sent_bytes=forward,
        all_bytes=float(forward.sum() + backward.sum()),
        stats=stats,
        speeds=speeds,
    )


def _placement(runs: Sequence[Any], cp_size: int, num_tokens: int) -> IntArray:
    """int64 `[cp_size, T]`; ValueError unless every id appears once and all ranks own as many."""
    spans = [np.asarray(one, dtype=np.int64).reshape(-1, 2) for one in runs]
    sizes = {int((span[:, 1] - span[:, 0]).sum()) for span in spans}
    in_range = all(
        (span[:, 0] >= 0).all() and (span[:, 0] < span[:, 1]).all() for span in spans
    ) and all(span.max(initial=0) <= num_tokens * 2 + 4096 * cp_size for span in spans)
    if len(spans) == cp_size and len(sizes) == 1 and in_range:
        tokens = np.stack([to_indices(span) for span in spans])
        if tokens.size >= num_tokens and np.array_equal(
            np.sort(tokens, axis=None), np.arange(tokens.size)
        ):
            return tokens
    raise ValueError(
        f"token_runs of {len(spans)} ranks must give each of {cp_size} ranks as many tokens, every "
        f"id from 0 once and at least {num_tokens} of them; write the record again"
    )
