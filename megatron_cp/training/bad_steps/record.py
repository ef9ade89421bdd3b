"""What is told and kept of a bad step: one line, a JSON record, and the micro-batch for study.

<run-dir>/bad_steps/iteration_0000012.json     what each rank saw, and what was found
<run-dir>/bad_steps/iteration_0000012.npz      tokens, labels, loss mask, positions, documents
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_cp.comm.groups import agreement_group
from megatron_cp.data.batch import PackedBatch
from megatron_cp.training.bad_steps.attempt import Attempt
from megatron_cp.training.bad_steps.probe import Culprit
from megatron_cp.training.setup import own_place
from megatron_cp.training.together import gather
from megatron_cp.training.whole_files import write_atomically

_MOST_NAMED = 3


@dataclass(frozen=True)
class RankView:
    """What one rank saw of a step."""

    rank: int
    pipeline_stage: int
    place: str
    losses: list[float]
    """Mean over this rank's tokens of each micro-batch; empty before the last stage."""
    grad_norm: float
    differs: bool | None = None
    """Whether the step came out otherwise when it was computed again; None where it was not."""
    module: tuple[int, str] | None = None
    parameter: str | None = None
    documents: tuple[str, ...] = ()
    kept: str | None = None


def view_of(attempt: Attempt, **found: Any) -> RankView:
    """Returns what this rank saw."""
    sums = [] if attempt.sums is None else attempt.sums.tolist()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    losses = [loss / max(count, 1.0) for loss, count in sums]
    return RankView(dist.get_rank(), stage, own_place(), losses, attempt.grad_norm, **found)


def gathered(own: RankView) -> list[RankView]:
    """Returns the views of all ranks. Collective over the whole job."""
    assert dist.group.WORLD is not None
    return gather(own, agreement_group(dist.group.WORLD))


@dataclass(frozen=True)
class Finding:
    """What is known of a bad step, equal on all ranks."""

    iteration: int
    what: str
    views: list[RankView]
    culprit: Culprit | None

    def line(self) -> str:
        """Returns one line: what is bad, where it begins, which documents, where they are kept."""
        parts = [f"step {self.iteration}: {self.what} not finite"]
        origin = self._origin()
        if origin is not None:
            assert origin.module is not None
            parts.append(f"it begins in {origin.module[1]} on {origin.place}")
        elif parameters := [view for view in self.views if view.parameter]:
            last = max(parameters, key=lambda view: view.pipeline_stage)
            parts.append(f"it begins in the gradient of {last.parameter} on {last.place}")
        else:
            bad = [view for view in self.views if not _is_finite(view)]
            parts += [f"seen by {bad[0].place}" + _more(len(bad) - 1, "ranks")] if bad else []
        parts += [self._about_documents(), *self._about_repetition()]
        kept = next((view.kept for view in self.views if view.kept), None)
        return "; ".join(parts if kept is None else [*parts, f"its micro-batch is in {kept}"])

    def _origin(self) -> RankView | None:
        makers = [view for view in self.views if view.module]
        return min(makers, key=lambda view: (view.pipeline_stage, view.module), default=None)

    def _about_documents(self) -> str:
        if self.culprit is None:
            return "each micro-batch is good when it is computed alone"
        names = next((view.documents for view in self.views if view.documents), ())
        where = f"micro-batch {self.culprit.micro_batch} of replica {self.culprit.replica}"
        if len(names) == 1:
            return f"caused by {names[0]} ({where})"
        shown = " and ".join(names[:_MOST_NAMED]) + _more(len(names) - _MOST_NAMED, "documents")
        return f"caused by {shown} together, none of them alone ({where})"

    def _about_repetition(self) -> list[str]:
        if any(view.differs is None for view in self.views):
            return []
        ranks = [view.rank for view in self.views if view.differs]
        if ranks:
            return [
                f"computed again it differs on ranks {ranks}: look at their machines before you trust them"
            ]
        return ["computed again it is the same"]

    def write(self, run_dir: Path) -> None:
        """Writes the record into the run's folder."""
        record = {
            "iteration": self.iteration,
            "what": self.what,
            "line": self.line(),
            "culprit": None if self.culprit is None else dataclasses.asdict(self.culprit),
            "ranks": [_plain(dataclasses.asdict(view)) for view in self.views],
        }
        path = _path(run_dir, self.iteration, "json")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(record, indent=1))


def keep(run_dir: Path, iteration: int, batch: PackedBatch) -> str:
    """Writes the arrays of a micro-batch; returns the file, which `numpy.load` reads."""
    path = _path(run_dir, iteration, "npz")
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        path,
        tokens=batch.tokens,
        labels=batch.labels,
        loss_mask=batch.loss_mask,
        position_ids=batch.position_ids,
        mask=batch.mask.array,
        document_starts=batch.document_starts,
        document_lengths=batch.document_lengths,
        document_names=batch.document_names,
    )
    return str(path)


def _path(run_dir: Path, iteration: int, kind: str) -> Path:
    return run_dir / "bad_steps" / f"iteration_{iteration:07d}.{kind}"


def _more(number: int, what: str) -> str:
    return f" and {number} more {what}" if number > 0 else ""


def _is_finite(view: RankView) -> bool:
    return all(map(math.isfinite, [*view.losses, view.grad_norm]))


def _plain(record: dict[str, Any]) -> dict[str, Any]:
    """Returns the record with words for what JSON has no numbers for."""
    losses = [loss if math.isfinite(loss) else str(loss) for loss in record["losses"]]
    norm = record["grad_norm"]
    return {**record, "losses": losses, "grad_norm": norm if math.isfinite(norm) else str(norm)}
