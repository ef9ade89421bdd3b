"""Schemes that move keys once: exactly those that a rank needs (group-cast), or all of them (all-gather)."""

from megatron_cp.config import CPConfig
from megatron_cp.mask import AttentionMask
from megatron_cp.plan.placement.placement import contiguous, zigzag
from megatron_cp.plan.placement.two_sided import KnownSides, TwoSidedPlacement
from megatron_cp.plan.schema import SIDES, Pass, PlanData, Side
from megatron_cp.plan.transfer.pass_builder import PlacedMask
from megatron_cp.plan.transfer.passes import allgather_pass, needed_keys_pass
from megatron_cp.plan.transfer.two_sided import cross_plan


def plan_contiguous(mask: AttentionMask, cp_size: int, config: CPConfig) -> PlanData:
    """Returns the stream cut in order; each rank receives exactly the keys that it needs, then computes.

    Volume per rank: 2 rho times the needed remote keys; imbalance (2P-1)/P on one causal document.
    """
    placed = PlacedMask(mask, contiguous(mask.num_queries, cp_size, config))
    return one_pass_plan(placed, config, "contiguous", needed_keys_pass(placed))


def plan_contiguous_cross(
    mask: AttentionMask, cp_size: int, config: CPConfig, known: KnownSides
) -> PlanData:
    """Returns the same for cross attention: queries and keys in order, but for sides that are placed already."""
    counts: dict[Side, int] = {"q": mask.num_queries, "k": mask.num_keys}
    queries, keys = (
        known[side] if side in known else contiguous(counts[side], cp_size, config)
        for side in SIDES
    )
    sides = TwoSidedPlacement.of(queries, keys)
    both = needed_keys_pass(PlacedMask(sides.one_stream(mask), sides))
    return cross_plan(mask, config, "contiguous", sides, both, both)


def plan_allgather(mask: AttentionMask, cp_size: int, config: CPConfig) -> PlanData:
    """Returns zigzag tokens and all keys on every rank, in one stage.

    Volume per rank: 2 rho (P-1) rows of queries, whatever the mask. Source: Llama 3 (arXiv 2407.21783).
    """
    placed = PlacedMask(mask, zigzag(mask.num_queries, cp_size, config))
    return one_pass_plan(placed, config, "allgather", allgather_pass(placed))


def one_pass_plan(placed: PlacedMask, config: CPConfig, planner: str, both: Pass) -> PlanData:
    """Returns the plan whose backward pass moves and computes as its forward pass does."""
    return PlanData(placed.mask, config, planner, placed.placement, both, both)
