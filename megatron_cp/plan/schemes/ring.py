"""Ring attention: in step s every rank attends to all keys of the rank s places before it.

The published ring forwards blocks from neighbour to neighbour; here the owner sends to the reader
directly: the same rows per step and rank, without holding up the ring when one rank is late.
Volume per rank: 2 rho (P-1), masked out or not. Sources: Ring Attention (arXiv 2310.01889) for order,
ring-flash-attention and Megatron-Core for zigzag.
"""

from megatron_cp.config import CPConfig
from megatron_cp.mask import AttentionMask, interval
from megatron_cp.mask.interval import IntArray
from megatron_cp.plan.placement import contiguous, zigzag
from megatron_cp.plan.routing import Owners, key_stage, local_stage
from megatron_cp.plan.schema import AttentionPlan, Pass
from megatron_cp.plan.schemes.gather import one_pass_plan


def plan_ring(mask: AttentionMask, cp_size: int, config: CPConfig) -> AttentionPlan:
    """Returns the ring over the stream cut in order; imbalance (2P-1)/P on one causal document."""
    return _ring(mask, contiguous(mask.num_queries, cp_size, config), config, "ring")


def plan_zigzag(mask: AttentionMask, cp_size: int, config: CPConfig) -> AttentionPlan:
    """Returns the ring over zigzag tokens; balanced in every step on one causal document."""
    return _ring(mask, zigzag(mask.num_queries, cp_size, config), config, "zigzag")


def _ring(
    mask: AttentionMask, placement: IntArray, config: CPConfig, planner: str
) -> AttentionPlan:
    owners = Owners(placement)
    held = [interval.normalise(runs) for runs in owners.runs]
    cp_size = len(held)
    steps = [
        [held[(rank - step) % cp_size] for rank in range(cp_size)] for step in range(1, cp_size)
    ]
    stages = [local_stage(mask, owners)] + [key_stage(mask, owners, wanted) for wanted in steps]
    return one_pass_plan(mask, config, planner, placement, Pass(tuple(stages)))
