"""What would my data do on 8 to 4096 GPUs, and against which rival: all planners at several rank counts.

Nothing here is measured: plans are made for real, their times come from the cost model and the event
simulation of a hardware row.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_cp.config import CPConfig
from megatron_cp.data.document_set import open_documents, split_documents
from megatron_cp.data.packing import document_order
from megatron_cp.mask import AttentionMask
from megatron_cp.plan import PLANNERS
from megatron_cp.plan.compare import Outcome, best_other, compare
from megatron_cp.plan.topology import get_topology
from megatron_cp.plan.workloads import (
    MASKS,
    MAX_TOKENS,
    WORKLOADS,
    document_lengths,
    fitted,
    named_mask,
)
from megatron_cp.report.draw.table import text_table

IntArray = NDArray[np.int64]
CHARACTERS_PER_TOKEN = 3.3  # of a 32K byte-level BPE on mixed text and code
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".json", ".html", ".c", ".h", ".cpp", ".tex")
HEADER = (
    "  planner", "simulated ms", "predicted ms", "x bound", "imbalance", "volume mean", "max", "planning ms",
)  # fmt: skip


@dataclass(frozen=True)
class Source:
    """Where document lengths come from: a workload by name, or the lengths themselves."""

    words: str
    workload: str = "longca"
    lengths: IntArray | None = None

    def documents(self, num_tokens: int, seed: int) -> IntArray:
        """Returns the document lengths of one pack."""
        if self.lengths is not None:
            return fitted(self.lengths, num_tokens)
        return document_lengths(self.workload, num_tokens, seed)


@dataclass(frozen=True)
class Step:
    """All planners at one number of ranks."""

    cp_size: int
    mask: AttentionMask
    lengths: IntArray
    outcomes: tuple[Outcome, ...]

    @property
    def ours(self) -> Outcome:
        """Returns the outcome of planner "auto", or of the first planner where it was not asked for."""
        return next((one for one in self.outcomes if one.planner == "auto"), self.outcomes[0])

    @property
    def rival(self) -> Outcome | None:
        """Returns the fastest other planner."""
        return best_other(self.outcomes, self.ours.planner)


@dataclass(frozen=True)
class Study:
    """The answer: a step per number of ranks."""

    source: Source
    mask_name: str
    config: CPConfig
    seed: int
    steps: tuple[Step, ...]


# ---------------------------------------------------------------------- where lengths come from


def source_of_workload(name: str) -> Source:
    """Returns a workload by name; ValueError names the nearest."""
    document_lengths(name, 1)
    return Source(f"workload {name}: {WORKLOADS[name].why}", workload=name)


def source_of_corpus(prefix: str, split: str, seed: int) -> Source:
    """Returns the training documents of a .bin/.idx pair, in the order of the loader's first epoch."""
    lengths = split_documents(open_documents(prefix), split)[0].lengths
    order = document_order(len(lengths), seed=seed, epoch=0)
    words = f"{prefix}: {len(lengths):,} documents, split {split}, seed {seed}"
    return Source(words, lengths=np.asarray(lengths, dtype=np.int64)[order])


def source_of_path(path: Path) -> Source:
    """Returns the lengths in a file, or those of the texts in a folder (by size, in tokens, about).

    A file holds a JSON list, one number per line, or an .npy array. Raises ValueError for anything else.
    """
    if path.is_dir():
        sizes = [
            file.stat().st_size
            for file in sorted(path.rglob("*"))
            if file.suffix in TEXT_SUFFIXES and file.is_file()
        ]
        lengths = np.array(sizes, dtype=np.float64) / CHARACTERS_PER_TOKEN
        words = f"{path}: {len(sizes):,} text files, sizes over {CHARACTERS_PER_TOKEN} characters a token"
        return Source(words, lengths=_checked(np.floor(lengths).astype(np.int64), path))
    numbers = _numbers_in(path)
    if (
        numbers.ndim != 1
        or not np.isfinite(numbers).all()
        or (numbers % 1).any()
        or (abs(numbers) > MAX_TOKENS).any()
    ):
        raise ValueError(
            f"{path} must hold whole numbers up to {MAX_TOKENS}, one document length per line, a JSON list or "
            "a flat .npy array"
        )
    counts = _checked(numbers.astype(np.int64), path)
    return Source(f"{path}: {len(counts):,} documents", lengths=counts)


def _numbers_in(path: Path) -> NDArray[np.float64]:
    """Returns the numbers of a file, and one that is no number for a file of anything else."""
    try:
        if path.suffix == ".npy":
            content = np.load(path, allow_pickle=False)
            if content.dtype.kind in "iuf":
                return np.asarray(content, dtype=np.float64)
        else:
            text = path.read_text().strip()
            return np.array(json.loads(text) if text.startswith("[") else text.split(), float)
    except (ValueError, TypeError, OverflowError, EOFError, AttributeError, RecursionError):
        pass  # whatever it holds, it is no list of numbers
    return np.array([np.nan])


def _checked(lengths: IntArray, path: Path) -> IntArray:
    if not len(lengths) or lengths.min() < 0 or not lengths.any():
        raise ValueError(
            f"{path} holds {len(lengths)} document lengths, the least {lengths.min(initial=0)}; there must be "
            "one that is not 0, and none negative"
        )
    return lengths


# ---------------------------------------------------------------------- the study


def run_study(
    source: Source,
    mask_name: str,
    sizes: Sequence[tuple[int, int]],
    config: CPConfig,
    planners: Sequence[str],
    seed: int = 0,
) -> Study:
    """Returns every planner at each (ranks, tokens) of `sizes`; plans are kept of the fewest ranks.

    Raises ValueError for unknown names and for more ranks than tokens.
    """
    for name in planners:
        _check_planner(name)
    steps = []
    smallest = min(cp_size for cp_size, _ in sizes)  # pictures are drawn of it alone
    for cp_size, num_tokens in sizes:
        lengths = source.documents(num_tokens, seed)
        if mask_name in MASKS and not MASKS[mask_name].has_documents:
            lengths = np.array([num_tokens], dtype=np.int64)
        mask = named_mask(mask_name, num_tokens, lengths=lengths, seed=seed)
        outcomes = compare(mask, cp_size, config, planners)
        if cp_size != smallest:
            outcomes = [replace(one, plan=None) for one in outcomes]
        steps.append(Step(cp_size, mask, lengths, tuple(outcomes)))
    return Study(source, mask_name, config, seed, tuple(steps))


def _check_planner(name: str) -> None:
    if name not in PLANNERS:
        near = difflib.get_close_matches(name, PLANNERS, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"planner={name!r} is unknown; choose from {', '.join(sorted(PLANNERS))} (nearest: {near})"
        )


def study_text(study: Study) -> str:
    """Returns what the command prints: a table per number of ranks, fastest planner first."""
    config, topology = study.config, get_topology(study.config.topology)
    lines = [
        f"SIMULATED, not measured: one layer, forward + backward, {config.num_heads} query and "
        f"{config.num_kv_heads} key heads of {config.head_dim}, on {topology.name} "
        f"({topology.forward_tflops:g} TFLOP/s, {topology.node_size} ranks per node, "
        f"{topology.inner_gbytes_per_s:g} and {topology.outer_gbytes_per_s:g} GB/s inside and between nodes)",
        f"data: {study.source.words}; mask {study.mask_name}",
    ]
    for step in study.steps:
        lines += ["", *_step_lines(step)]
    return "\n".join(lines)


def _step_lines(step: Step) -> list[str]:
    mask, served = step.mask, [one for one in step.outcomes if not one.refusal]
    lines = [
        f"{step.cp_size} ranks, {mask.num_queries:,} tokens in {len(step.lengths):,} documents, "
        f"{mask.area():.4g} pairs (density {mask.density():.2g})"
    ]
    lines[0] += f"; no plan is faster than {served[0].bound_ms:.4g} ms" if served else ""
    lines += text_table(
        HEADER,
        [
            _figures(one, "* " if one is step.ours else "  ")
            for one in sorted(served, key=lambda one: one.predicted_ms)
        ],
        [(f"  {one.planner}", one.refusal) for one in step.outcomes if one.refusal],
    )
    rival = step.rival
    if rival is not None and not step.ours.refusal:
        ratio = rival.predicted_ms / step.ours.predicted_ms
        least = "at least " if rival.is_best_case else ""
        words = "faster than" if ratio >= 1 else "the time of"
        lines.append(f"  {step.ours.planner} is {least}{ratio:.2f} x {words} {rival.planner}")
    if any(one.is_best_case for one in step.outcomes):
        lines.append(
            "  >= : priced from below, the best that a scheme with a stage per rank can do"
        )
    return lines


def _figures(one: Outcome, mark: str) -> list[str]:
    least = ">=" if one.is_best_case else ""
    return [
        f"{mark}{one.planner}",
        f"{least}{one.simulated_ms:.4g}",
        f"{least}{one.predicted_ms:.4g}",
        _number(one.gap, 2),
        _number(one.imbalance, 3),
        _number(one.volume_mean, 2),
        _number(one.volume_max, 2),
        _number(one.plan_ms, 1),
    ]


def _number(value: float, digits: int) -> str:
    return "" if value != value else f"{value:.{digits}f}"


def study_values(study: Study) -> dict[str, object]:
    """Returns the study as JSON values: figures alone, no plans."""
    steps = []
    for step in study.steps:
        outcomes = []
        for one in step.outcomes:
            values = {name: value for name, value in vars(one).items() if name != "plan"}
            outcomes.append({k: v for k, v in values.items() if v == v and v != ""})
        facts = {"ranks": step.cp_size, "tokens": step.mask.num_queries, "pairs": step.mask.area()}
        steps.append({**facts, "planners": outcomes})
    return {
        "simulated": "times come from a model; nothing was measured",
        "data": study.source.words,
        "mask": study.mask_name,
        "seed": study.seed,
        "topology": asdict(get_topology(study.config.topology)),
        "heads": [study.config.num_heads, study.config.num_kv_heads, study.config.head_dim],
        "steps": steps,
    }
