"""Ring attention: in step s every rank attends to all keys of the rank s places before it.

The published ring forwards blocks from neighbour to neighbour; here the owner sends to the reader
directly: the same rows per step and rank, without holding up the ring when one rank is late.
Volume per rank: 2 rho (P-1), masked out or not. Sources: Ring Attention (arXiv 2310.01889) for order,
ring-flash-attention and Megatron-Core for zigzag.
"""

from megatron_cp.config import CPConfig
from megatron_cp.mask import AttentionMask
from megatron_cp.plan.placement.placement import contiguous, zigzag
from megatron_cp.plan.schema import PlanData
from megatron_cp.plan.schemes.gather import one_pass_plan
from megatron_cp.plan.transfer.pass_builder import PlacedMask
from megatron_cp.plan.transfer.passes import ring_pass


def plan_ring(mask: AttentionMask, cp_size: int, config: CPConfig) -> PlanData:
    """Returns the ring over the stream cut in order; imbalance (2P-1)/P on one causal document."""
    placed = PlacedMask(mask, contiguous(mask.num_queries, cp_size, config))
    return one_pass_plan(placed, config, "ring", ring_pass(placed))


def plan_zigzag(mask: AttentionMask, cp_size: int, config: CPConfig) -> PlanData:
    """Returns the ring over zigzag tokens; balanced in every step on one causal document."""
    placed = PlacedMask(mask, zigzag(mask.num_queries, cp_size, config))
    return one_pass_plan(placed, config, "zigzag", ring_pass(placed))
