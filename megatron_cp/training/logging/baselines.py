"""What else could have been done with the packs of a step: figures of baselines, in closed form.

    zigzag                every pack cut in 2P pieces, two to a rank; keys go round a ring
    per-document zigzag   every document cut so: Transformer Engine's THD layout; the same ring
    bound                 no plan with equal tokens per rank is predicted faster, or moves fewer rows

Both rings send every key to every rank, whatever the mask. Nothing is planned here: milliseconds of CPU time on any
number of ranks. Times are predicted, of one layer; those of the rings are prices from below, so never unfair to them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_cp.plan import AttentionPlan
from megatron_cp.plan.bounds.best_cases import best_case_seconds, busiest_area, even_area
from megatron_cp.plan.hardware.rows import row_size
from megatron_cp.plan.placement.placement import tokens_per_rank
from megatron_cp.plan.schema import PASSES
from megatron_cp.plan.sent_bytes import sent_bytes


@dataclass(frozen=True)
class PackFigures:
    """One pack, one layer, forward + backward; bytes of all context ranks."""

    imbalance: float
    """Largest time of a rank's pairs over the fair one, forward; equal speeds: largest over mean pairs."""
    zigzag_imbalance: float
    sent_bytes: float
    ring_bytes: float
    """What a ring sends, zigzag or per document alike."""
    predicted_ms: float
    zigzag_ms: float
    """At least."""
    per_document_ms: float
    """At least."""
    bound_ms: float


def pack_figures(plan: AttentionPlan) -> PackFigures:
    """Returns the figures of a plan and of what it is compared with, on the same mask and ranks."""
    mask, cp_size = plan.mask, plan.cp_size
    config = replace(plan.config, chunk_size=None)
    stats = [plan.stats(name) for name in PASSES]
    fair = even_area(mask, cp_size, config)
    busiest = busiest_area(mask, cp_size, config, pieces=2)

    def at_least_ms(planner: str) -> float:
        return 1e3 * sum(best_case_seconds(planner, mask, cp_size, config, p) for p in PASSES)

    ours = sum(one["makespan_ms"] for one in stats)
    alone = cp_size == 1
    return PackFigures(
        imbalance=stats[0]["imbalance"],
        zigzag_imbalance=busiest / fair if fair and not alone else 1.0,
        sent_bytes=float(sum(sent_bytes(plan, name).sum() for name in PASSES)),
        ring_bytes=ring_bytes(plan),
        predicted_ms=ours,
        zigzag_ms=ours if alone else at_least_ms("zigzag"),
        per_document_ms=ours if alone else at_least_ms("per_document_zigzag"),
        bound_ms=sum(one["bound_ms"] for one in stats),
    )


def ring_bytes(plan: AttentionPlan) -> float:
    """Returns the bytes that all ranks of a zigzag ring send in one layer, forward and backward.

    Every row of keys and values goes to all other ranks; backward their gradients, in fp32, come back.
    """
    cp_size, config = plan.cp_size, replace(plan.config, chunk_size=None)
    rows = tokens_per_rank(plan.mask.num_queries, cp_size, config, pieces=2)
    sizes = (row_size(config, name, "k") for name in PASSES)
    return float(sum(size.there + size.back for size in sizes)) * rows * cp_size * (cp_size - 1)
