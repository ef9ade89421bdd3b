"""A dry run on the user's own data: packs, their plans, all planners side by side. No GPU, no torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_cp import mask as masks
from megatron_cp.config import CPConfig
from megatron_cp.data.batch import BatchConfig, build_batch
from megatron_cp.data.document_set import open_documents, split_documents
from megatron_cp.data.packing import Packer, PackingConfig, PackingPolicy
from megatron_cp.mask import AttentionMask
from megatron_cp.plan import PLANNERS, AttentionPlan, make_plan
from megatron_cp.report.draw.table import text_table

WHOLE_MASKS = ("causal", "full")
MASKS = ("documents", *WHOLE_MASKS)
HEADER = (
    "  planner", "balance", "volume", "max", "fwd ms", "bwd ms", "x bound", "planning ms",
)  # fmt: skip


@dataclass(frozen=True)
class DrawnPack:
    """A pack before it has a plan."""

    mask: AttentionMask
    document_lengths: tuple[int, ...]
    document_kinds: tuple[str, ...]


@dataclass(frozen=True)
class Corpus:
    """The packs to plan, and the lengths of all documents that they come from."""

    packs: tuple[DrawnPack, ...]
    document_lengths: NDArray[np.int64]
    source: str


@dataclass(frozen=True)
class PlannerRow:
    """One planner over all packs: means, or why it cannot serve them. Times are predicted."""

    planner: str
    refusal: str = ""
    balance: float = 0.0
    volume_mean: float = 0.0
    volume_max: float = 0.0
    forward_ms: float = 0.0
    backward_ms: float = 0.0
    gap: float = 0.0
    plan_ms: float = 0.0


@dataclass(frozen=True)
class DryRun:
    """Everything that the plan command found out."""

    corpus: Corpus
    config: CPConfig
    plans: tuple[AttentionPlan, ...]
    zigzag: tuple[AttentionPlan, ...]
    planners: tuple[PlannerRow, ...]


def corpus_of_files(
    prefix: str, *, split: str, config: PackingConfig, mask: str, num_packs: int
) -> Corpus:
    """Returns the first training packs of a .bin/.idx pair, drawn by the loader's own packer.

    Raises ValueError or OSError, as the reader does.
    """
    documents = split_documents(open_documents(prefix), split)[0]
    packer = Packer(documents.lengths, config)
    rules = BatchConfig(seq_length=config.seq_length, reset_attention_mask=mask == "documents")
    drawn = []
    for pack in itertools.islice(packer, num_packs):
        batch = build_batch(documents, [pack], rules)
        whole = masks.full(config.seq_length) if mask == "full" else batch.mask
        drawn.append(DrawnPack(whole, batch.document_lengths, batch.document_kinds))
    return Corpus(tuple(drawn), documents.lengths, f"{prefix}, split {split}, seed {config.seed}")


def corpus_of_lengths(
    lengths: Sequence[int], *, seq_length: int | None, mask: str, num_packs: int
) -> Corpus:
    """Returns documents of these lengths, in order, as one pack or cut into packs of `seq_length`."""
    if not lengths or min(lengths) < 0 or sum(lengths) == 0:
        raise ValueError(
            f"lengths={list(lengths)[:8]} must be document lengths, none negative and not all 0; "
            "write --lengths 137,2041,89"
        )
    counts = np.array(lengths, dtype=np.int64)
    policy: PackingPolicy = "split"
    size = int(counts.sum()) if seq_length is None else seq_length
    config = PackingConfig(seq_length=size, policy=policy, shuffle=False)
    num_packs = min(num_packs, max(1, int(counts.sum()) // size))
    drawn = []
    for pack in itertools.islice(Packer(counts, config), num_packs):
        parts = tuple(piece.length for piece in pack.pieces)
        drawn.append(DrawnPack(_mask(mask, parts), parts, ("causal",) * len(parts)))
    return Corpus(tuple(drawn), counts, f"{len(counts)} documents of given lengths")


def corpus_of_mask(mask: str, seq_length: int) -> Corpus:
    """Returns one pack that is one document."""
    drawn = DrawnPack(_mask(mask, (seq_length,)), (seq_length,), ("causal",))
    return Corpus((drawn,), np.array([seq_length]), f"one {mask} mask of {seq_length} tokens")


def _mask(name: str, lengths: tuple[int, ...]) -> AttentionMask:
    if name == "documents":
        return masks.documents(list(lengths))
    return masks.full(sum(lengths)) if name == "full" else masks.causal(sum(lengths))


def with_window(corpus: Corpus, window: tuple[int, int]) -> Corpus:
    """Returns the packs with each query's view cut to `window` = (keys before, keys after)."""
    packs = tuple(
        replace(
            pack, mask=pack.mask & masks.sliding_window(pack.mask.num_queries, window[0], window[1])
        )
        for pack in corpus.packs
    )
    return replace(corpus, packs=packs)


def plan_corpus(corpus: Corpus, cp_size: int, config: CPConfig) -> DryRun:
    """Returns plans of every pack by the chosen planner, and how all planners compare."""
    plans = tuple(make_plan(pack.mask, cp_size, config) for pack in corpus.packs)
    other = replace(config, planner="zigzag", chunk_size=None)
    zigzag = tuple(make_plan(pack.mask, cp_size, other) for pack in corpus.packs)
    known = {config.planner: plans, "zigzag": zigzag}
    rows = []
    for name in PLANNERS:
        try:
            made = known.get(name) or tuple(
                make_plan(pack.mask, cp_size, replace(config, planner=name, chunk_size=None))
                for pack in corpus.packs
            )
        except (ValueError, NotImplementedError) as problem:
            rows.append(PlannerRow(name, refusal=" ".join(str(problem).split())))
            continue
        rows.append(_planner_row(name, made))
    served = sorted(
        (row for row in rows if not row.refusal), key=lambda row: row.forward_ms + row.backward_ms
    )
    return DryRun(corpus, config, plans, zigzag, (*served, *(row for row in rows if row.refusal)))


def _planner_row(name: str, plans: Sequence[AttentionPlan]) -> PlannerRow:
    forward = [plan.stats("forward") for plan in plans]
    backward = [plan.stats("backward") for plan in plans]

    def mean(stats: list[dict[str, float]], key: str) -> float:
        return float(np.mean([one[key] for one in stats]))

    spent = mean(forward, "makespan_ms") + mean(backward, "makespan_ms")
    bound = mean(forward, "bound_ms") + mean(backward, "bound_ms")
    return PlannerRow(
        planner=name,
        balance=mean(forward, "imbalance"),
        volume_mean=mean(forward, "volume_mean") + mean(backward, "volume_mean"),
        volume_max=mean(forward, "volume_max") + mean(backward, "volume_max"),
        forward_ms=mean(forward, "makespan_ms"),
        backward_ms=mean(backward, "makespan_ms"),
        gap=spent / bound if bound else 1.0,
        plan_ms=mean(forward, "plan_ms"),
    )


def dry_run_text(run: DryRun) -> str:
    """Returns what the command prints: the plan of each pack, then the planners side by side."""
    lines = []
    for number, (pack, plan) in enumerate(zip(run.corpus.packs, run.plans, strict=True)):
        lengths = pack.document_lengths
        lines += [
            f"pack {number}: {len(lengths)} documents of {min(lengths)} to {max(lengths)} tokens",
            plan.explain(),
            "",
        ]
    lines += [
        f"planners, mean over {len(run.plans)} packs; one layer; times are predicted for "
        f"{_topology(run.config)}, volumes in units of a rank's query rows, forward + backward",
    ]
    served = [row for row in run.planners if not row.refusal]
    refused = [row for row in run.planners if row.refusal]
    lines += text_table(
        HEADER,
        [_figures(row, run.config.planner) for row in served],
        [(_marked(row, run.config.planner), row.refusal) for row in refused],
    )
    return "\n".join(lines)


def _figures(row: PlannerRow, chosen: str) -> list[str]:
    return [
        _marked(row, chosen),
        f"{row.balance:.3f}",
        f"{row.volume_mean:.2f}",
        f"{row.volume_max:.2f}",
        f"{row.forward_ms:.3f}",
        f"{row.backward_ms:.3f}",
        f"{row.gap:.4g}",
        f"{row.plan_ms:.1f}",
    ]


def _marked(row: PlannerRow, chosen: str) -> str:
    return f"{'*' if row.planner == chosen else ' '} {row.planner}"


def _topology(config: CPConfig) -> str:
    return config.topology if isinstance(config.topology, str) else config.topology.name


def write_dry_run_report(run: DryRun, output: Path, command: str) -> Path:
    """Writes the pictures of a dry run and returns where."""
    from megatron_cp.report.draw.html import write_page
    from megatron_cp.report.dry_run.page import dry_run_page

    write_page(output, dry_run_page(run, command))
    return output
