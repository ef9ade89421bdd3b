"""Schemes that move keys once: exactly those that a rank needs (group-cast), or all of them (all-gather)."""

from megatron_cp.config import CPConfig
from megatron_cp.mask import AttentionMask
from megatron_cp.mask.interval import IntArray
from megatron_cp.plan.placement.placement import contiguous, zigzag
from megatron_cp.plan.schema import AttentionPlan, Pass
from megatron_cp.plan.transfer.pass_builder import PassBuilder, PlacedMask
from megatron_cp.plan.transfer.routing import split_evenly


def plan_contiguous(mask: AttentionMask, cp_size: int, config: CPConfig) -> AttentionPlan:
    """Returns the stream cut in order; each rank receives exactly the keys that it needs, then computes.

    Volume per rank: 2 rho times the needed remote keys; imbalance (2P-1)/P on one causal document.
    """
    placement = contiguous(mask.num_queries, cp_size, config)
    return one_pass_plan(
        mask, config, "contiguous", placement, needed_keys_pass(PlacedMask(mask, placement))
    )


def plan_allgather(mask: AttentionMask, cp_size: int, config: CPConfig) -> AttentionPlan:
    """Returns zigzag tokens and all keys on every rank, in one stage.

    Volume per rank: 2 rho (P-1) rows of queries, whatever the mask. Source: Llama 3 (arXiv 2407.21783).
    """
    placement = zigzag(mask.num_queries, cp_size, config)
    return one_pass_plan(
        mask, config, "allgather", placement, allgather_pass(PlacedMask(mask, placement))
    )


def needed_keys_pass(placed: PlacedMask, num_stages: int = 1) -> Pass:
    """Returns own keys first while the needed remote keys travel, then those in `num_stages` equal parts."""
    builder = PassBuilder(placed)
    builder.add_own()
    if len(placed.remote_keys):
        for requests in split_evenly(placed.remote_keys, num_stages):
            builder.add(*placed.parts_on_keys(requests))
    return builder.build()


def allgather_pass(placed: PlacedMask) -> Pass:
    """Returns the one stage in which every rank receives all keys that it does not own."""
    builder = PassBuilder(placed)
    everything = placed.owners.blocks(range(1, placed.num_ranks))
    builder.add(placed.parts, placed.q_owner, all_keys=everything)
    return builder.build()


def one_pass_plan(
    mask: AttentionMask, config: CPConfig, planner: str, placement: IntArray, both: Pass
) -> AttentionPlan:
    """Returns the plan whose backward pass moves and computes as its forward pass does."""
    return AttentionPlan(mask, config, planner, placement, both, both)
