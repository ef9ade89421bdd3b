"""What else could have been done with the packs of a step: figures of baselines, in closed form.

    zigzag                every pack cut in 2P pieces, two to a rank; keys go round a ring
    per-document zigzag   every document cut so: Transformer Engine's THD layout; the same ring
    bound                 no plan with equal tokens per rank is predicted faster

Both rings send every key to every rank, whatever the mask. Nothing is planned here: milliseconds of CPU time on any
number of ranks. Times are predicted, of one layer; those of the rings are prices from below, so never unfair to them.
Balance and bytes are counted. No least number of bytes is: a plan may move less and be slower.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_cp.config import CPConfig
from megatron_cp.mask import AttentionMask
from megatron_cp.plan import AttentionPlan
from megatron_cp.plan.bounds.best_cases import best_case_seconds, busiest_area, even_area
from megatron_cp.plan.hardware.cost import load_bound_seconds
from megatron_cp.plan.hardware.rows import row_size
from megatron_cp.plan.hardware.speeds import rank_speeds
from megatron_cp.plan.placement.placement import tokens_per_rank
from megatron_cp.plan.schema import PASSES, PassName
from megatron_cp.plan.stats import sent_bytes
from megatron_cp.training.logging.split_documents import pairs_of_split_documents


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


def pack_figures(plan: AttentionPlan, num_replicas: int = 1) -> PackFigures:
    """Returns the figures of a plan and of what it is compared with, on the same mask and ranks.

    A plan that spans replicas is compared with what they would do with a pack each: the slowest of them counts.
    """
    group = plan.cp_size // num_replicas
    config = replace(plan.config, chunk_size=None)
    packs = _packs(plan, num_replicas)
    stats = [plan.stats(name) for name in PASSES]
    busiest = max(busiest_area(pack, group, config, pieces=2) for pack in packs)
    ours = sum(one["makespan_ms"] for one in stats)

    def at_least_ms(planner: str) -> float:
        if plan.cp_size == 1:
            return ours
        return max(
            1e3 * sum(_at_least_seconds(planner, pack, group, config, name) for name in PASSES)
            for pack in packs
        )

    return PackFigures(
        imbalance=stats[0]["imbalance"],
        zigzag_imbalance=_over_fair(busiest, plan),
        sent_bytes=float(sum(sent_bytes(plan, name).sum() for name in PASSES)),
        ring_bytes=num_replicas * ring_bytes(packs[0], group, config),
        predicted_ms=ours,
        zigzag_ms=at_least_ms("zigzag"),
        per_document_ms=at_least_ms("per_document_zigzag"),
        bound_ms=sum(one["bound_ms"] for one in stats),
    )


def per_document_imbalance(plan: AttentionPlan, num_replicas: int = 1) -> float:
    """Returns largest over fair time, as of `PackFigures.imbalance`, of Transformer Engine's split of the same pack.

    For 1,024 documents on 128 ranks it takes under a millisecond on one core (AMD EPYC, 2026-11-25).
    """
    group = plan.cp_size // num_replicas
    speeds = rank_speeds(plan.config, group)
    slowest = max(
        float((pairs_of_split_documents(pack, group) / speeds).max())
        for pack in _packs(plan, num_replicas)
    )
    return _over_fair(slowest, plan)


def _packs(plan: AttentionPlan, num_replicas: int) -> list[AttentionMask]:
    """Returns the mask of each replica's pack."""
    if num_replicas == 1:
        return [plan.mask]
    size = plan.mask.num_queries // num_replicas
    ranges = [(start, start + size) for start in range(0, num_replicas * size, size)]
    return [plan.mask.crop(one, one) for one in ranges]


def _over_fair(area: float, plan: AttentionPlan) -> float:
    fair = even_area(plan.mask, plan.cp_size, replace(plan.config, chunk_size=None))
    return area / fair if fair and plan.cp_size > 1 else 1.0


def _at_least_seconds(
    planner: str, mask: AttentionMask, cp_size: int, config: CPConfig, pass_name: PassName
) -> float:
    if cp_size == 1:
        return load_bound_seconds(mask, 1, config, pass_name)
    return best_case_seconds(planner, mask, cp_size, config, pass_name)


def ring_bytes(mask: AttentionMask, cp_size: int, config: CPConfig) -> float:
    """Returns the bytes that all ranks of a zigzag ring send in one layer, forward and backward.

    Every row of keys and values goes to all other ranks; backward their gradients, in fp32, come back.
    """
    rows = tokens_per_rank(mask.num_queries, cp_size, config, pieces=2)
    sizes = (row_size(config, name, "k") for name in PASSES)
    return float(sum(size.there + size.back for size in sizes)) * rows * cp_size * (cp_size - 1)
