"""A dry run on the user's own data: packs, their plans, planners side by side. No GPU, no torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megatron_cp.config import CPConfig
from megatron_cp.data.batch import BatchConfig, build_batch
from megatron_cp.data.document_set import open_documents, split_documents
from megatron_cp.data.packing import Packer, PackingConfig
from megatron_cp.mask import AttentionMask
from megatron_cp.plan import AttentionPlan, make_plan
from megatron_cp.plan.study.compare import Outcome, best_other, measured, outcome_of
from megatron_cp.report.figures.planners import (
    LEGEND,
    machine_words,
    mean_outcome,
    outcome_values,
    planner_lines,
)
from megatron_cp.report.figures.view import USUAL
from megatron_cp.report.sources import MaskChoice, Source, Tell, check_ranks, quiet

CAUSAL_DOCUMENTS = MaskChoice()


@dataclass(frozen=True)
class DrawnPack:
    """A pack before it has a plan."""

    mask: AttentionMask
    document_lengths: tuple[int, ...]
    document_kinds: tuple[str, ...]
    """How each document looks at itself, where that is known: "causal", "prefix" or "bidirectional"."""


@dataclass(frozen=True)
class Corpus:
    """The packs to plan, and the lengths of all documents that they come from."""

    packs: tuple[DrawnPack, ...]
    document_lengths: NDArray[np.int64]
    source: str


@dataclass(frozen=True)
class DryRun:
    """Everything that the plan command found out; the first planner that was asked for is ours."""

    corpus: Corpus
    config: CPConfig
    outcomes: tuple[Outcome, ...]
    """Each planner: means over all packs."""
    plans: dict[str, tuple[AttentionPlan, ...]]
    """Plans of each pack, ours first, of ours and of the baselines that are drawn."""

    @property
    def ours(self) -> Outcome:
        """Returns the outcome of the first planner that was asked for."""
        return self.outcomes[0]


def corpus_of_files(
    prefix: str, *, split: str, config: PackingConfig, choice: MaskChoice, num_packs: int
) -> Corpus:
    """Returns the first training packs of a .bin/.idx pair, drawn by the loader's own packer.

    Raises ValueError or OSError, as the reader does.
    """
    documents = split_documents(open_documents(prefix), split)[0]
    packer = Packer(documents.lengths, config)
    rules = BatchConfig(seq_length=config.seq_length, reset_attention_mask=True)
    drawn = []
    for pack in itertools.islice(packer, num_packs):
        batch = build_batch(documents, [pack], rules)
        lengths, kinds = batch.document_lengths, batch.document_kinds
        one = _drawn(choice, lengths, config.seq_length, config.seed)
        if choice == CAUSAL_DOCUMENTS:  # as the loader has it, prefixes and padding included
            one = DrawnPack(batch.mask, lengths, kinds)
        drawn.append(one)
    words = f"{prefix}, split {split}, seed {config.seed}"
    return Corpus(tuple(drawn), documents.lengths, words)


def corpus_of_source(
    source: Source, choice: MaskChoice, *, seq_length: int, num_packs: int, seed: int
) -> Corpus:
    """Returns documents of these lengths, in order, cut into packs of `seq_length`.

    Lengths that were given fill as many packs as they can, and one at least; a workload is drawn.
    """
    if not choice.has_documents:  # every pack would be the same
        counts, num_packs = np.array([seq_length], dtype=np.int64), 1
    elif source.lengths is None:
        counts = source.documents(seq_length * num_packs, seed)
    else:
        counts = source.lengths
        num_packs = min(num_packs, max(1, int(counts.sum()) // seq_length))
    config = PackingConfig(seq_length=seq_length, policy="split", shuffle=False)
    drawn = [
        _drawn(choice, tuple(piece.length for piece in pack.pieces), seq_length, seed)
        for pack in itertools.islice(Packer(counts, config), num_packs)
    ]
    words = (
        source.words if choice.has_documents else f"one {choice.words} mask of {seq_length} tokens"
    )
    return Corpus(tuple(drawn), counts, words)


def _drawn(choice: MaskChoice, lengths: Sequence[int], num_tokens: int, seed: int) -> DrawnPack:
    """Returns a pack of these documents under a mask by name; what they leave is a document of its own."""
    rest = num_tokens - sum(lengths)
    counts = np.array([*lengths, rest] if rest else lengths, dtype=np.int64)
    told = choice.documents(num_tokens, counts)
    kinds = ("causal",) * len(told) if choice.name in ("causal", "causal_document") else ()
    return DrawnPack(choice.build(num_tokens, counts, seed), tuple(told.tolist()), kinds)


def plan_corpus(
    corpus: Corpus,
    cp_size: int,
    config: CPConfig,
    planners: Sequence[str],
    tell: Tell = quiet,
) -> DryRun:
    """Returns every pack planned by each of `planners`, and how they compare; the first is ours.

    Raises ValueError or NotImplementedError where the first cannot serve.
    """
    for pack in corpus.packs:
        check_ranks(cp_size, pack.mask.num_queries)
    made: dict[str, list[Outcome]] = {}
    for number, name in enumerate(planners, 1):
        tell(f"planner {number} of {len(planners)}: {name}")
        wanted = replace(config, planner=name)
        if number > 1:  # the chunks are ours
            wanted = replace(wanted, chunk_size=None)
        made[name] = [measured(pack.mask, cp_size, wanted) for pack in corpus.packs]
        if number == 1 and any(one.plan is None for one in made[name]):
            # built whatever it costs: its plan is what was asked for, or the reason why there is none
            plans = [make_plan(pack.mask, cp_size, wanted) for pack in corpus.packs]
            made[name] = [outcome_of(plan, plan.plan_ms) for plan in plans]
    outcomes = tuple(mean_outcome(one) for one in made.values())
    best = best_other(outcomes, planners[0])
    drawn = dict.fromkeys([planners[0], USUAL, best.planner if best else USUAL])
    kept = {name: _plans_of(made[name]) for name in drawn if name in made}
    return DryRun(corpus, config, outcomes, {name: made for name, made in kept.items() if made})


def _plans_of(outcomes: Sequence[Outcome]) -> tuple[AttentionPlan, ...]:
    """Returns the plans of all packs; none where one was refused, or priced and not built."""
    plans = tuple(one.plan for one in outcomes if one.plan is not None)
    return plans if len(plans) == len(outcomes) else ()


def dry_run_text(run: DryRun) -> str:
    """Returns what the command prints: the plan of each pack, then the planners side by side."""
    lines = []
    plans = run.plans.get(run.ours.planner, ())
    for number, (pack, plan) in enumerate(zip(run.corpus.packs, plans, strict=False)):
        lengths = pack.document_lengths
        lines += [
            f"pack {number}: {len(lengths)} documents of {min(lengths)} to {max(lengths)} tokens",
            plan.explain(),
            "",
        ]
    lines += [
        f"planners, mean over {len(run.corpus.packs)} packs; times are PREDICTED and simulated, not measured: "
        f"{machine_words(run.config)}",
        LEGEND,
        *planner_lines(run.ours, run.outcomes),
    ]
    return "\n".join(lines)


def dry_run_values(run: DryRun) -> dict[str, object]:
    """Returns the figures as JSON values, without plans."""
    digests = [plan.digest() for plan in run.plans.get(run.ours.planner, ())]
    packs = [
        {
            "tokens": pack.mask.num_queries,
            "documents": len(pack.document_lengths),
            "pairs": pack.mask.area(),
        }
        for pack in run.corpus.packs
    ]
    return {
        "predicted": "times come from a model; nothing was measured",
        "data": run.corpus.source,
        "machine": machine_words(run.config),
        "packs": packs,
        "plan_digests": digests,
        "planners": [outcome_values(one) for one in run.outcomes],
    }
