"""Schemes that move keys once: contiguous and per-document group-cast, and all-gather KV."""

from megatron_cp.config import CPConfig
from megatron_cp.mask import AttentionMask, interval
from megatron_cp.mask.interval import IntArray
from megatron_cp.plan.placement import contiguous, zigzag
from megatron_cp.plan.routing import Owners, key_stage, local_stage, remote_keys
from megatron_cp.plan.schema import AttentionPlan, Pass


def plan_contiguous(mask: AttentionMask, cp_size: int, config: CPConfig) -> AttentionPlan:
    """Returns the stream cut in order; each rank receives exactly the keys that it needs, then computes.

    Volume per rank: 2 rho times the needed remote keys; imbalance (2P-1)/P on one causal document.
    """
    placement = contiguous(mask.num_queries, cp_size, config)
    return with_needed_keys(mask, placement, config, "contiguous")


def plan_allgather(mask: AttentionMask, cp_size: int, config: CPConfig) -> AttentionPlan:
    """Returns zigzag tokens and all keys on every rank, in one stage.

    Volume per rank: 2 rho (P-1) rows of queries, whatever the mask. Source: Llama 3 (arXiv 2407.21783).
    """
    placement = zigzag(mask.num_queries, cp_size, config)
    owners = Owners(placement)
    everything = interval.as_intervals([(0, placement.size)])
    wanted = [interval.subtract(everything, interval.normalise(runs)) for runs in owners.runs]
    stages = (key_stage(mask, owners, wanted, include_own=True),)
    return one_pass_plan(mask, config, "allgather", placement, Pass(stages))


def with_needed_keys(
    mask: AttentionMask, placement: IntArray, config: CPConfig, planner: str
) -> AttentionPlan:
    """Returns the two-stage plan of a placement: own keys while the needed remote keys travel."""
    owners = Owners(placement)
    wanted = remote_keys(mask, owners)
    stages = [local_stage(mask, owners)]
    if any(len(intervals) for intervals in wanted):
        stages.append(key_stage(mask, owners, wanted))
    return one_pass_plan(mask, config, planner, placement, Pass(tuple(stages)))


def one_pass_plan(
    mask: AttentionMask, config: CPConfig, planner: str, placement: IntArray, both: Pass
) -> AttentionPlan:
    """Returns the plan whose backward pass moves and computes as its forward pass does."""
    return AttentionPlan(mask, config, planner, placement, both, both)
