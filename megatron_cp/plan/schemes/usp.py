"""USP, or 2D attention: head groups of h ranks, and a zigzag ring over the P/h groups.

    P = 8, h = 2        [0 1] [2 3] [4 5] [6 7]      members exchange tokens against heads
                          0 ->  2 ->  4 ->  6         the first heads go round ranks 0 2 4 6,
                          1 ->  3 ->  5 ->  7         the others round ranks 1 3 5 7

Key/value heads are replicated where h exceeds them. Volume per rank, with rho' = max(G, h) / N:
2 (1 + rho') (h-1)/h for the exchange and 2 rho' (P/h - 1) for the ring; balanced on one causal document.
Sources: USP (arXiv 2405.07719), LoongTrain (2406.18485).
"""

from megatron_cp.config import CPConfig
from megatron_cp.mask import AttentionMask
from megatron_cp.plan.hardware.topology import get_topology
from megatron_cp.plan.placement.placement import zigzag
from megatron_cp.plan.schema import PlanData
from megatron_cp.plan.schemes.gather import one_pass_plan
from megatron_cp.plan.transfer.head_split import (
    config_of_groups,
    head_degrees,
    split_heads,
)
from megatron_cp.plan.transfer.pass_builder import PlacedMask
from megatron_cp.plan.transfer.passes import ring_pass


def plan_usp(mask: AttentionMask, cp_size: int, config: CPConfig) -> PlanData:
    """Returns head groups of `config.head_degree` ranks around a zigzag ring.

    Left out, the degree is the largest legal one whose groups lie inside nodes. Raises ValueError for a
    degree that does not divide the ranks or the heads.
    """
    degree = choose_head_degree(cp_size, config)
    groups = zigzag(mask.num_queries, cp_size // degree, config_of_groups(config, degree))
    both = split_heads(ring_pass(PlacedMask(mask, groups)), degree)
    return one_pass_plan(PlacedMask(mask, groups.regrouped(cp_size)), config, "usp", both)


def choose_head_degree(cp_size: int, config: CPConfig) -> int:
    """Returns the head degree that the config asks for, or the largest legal one inside a node."""
    legal = head_degrees(cp_size, config)
    chosen = config.head_degree
    if chosen is None:
        node_size = get_topology(config.topology).node_size
        return max(h for h in legal if node_size % h == 0 or cp_size <= node_size)
    if chosen not in legal:
        nearest = min(legal, key=lambda other: (abs(other - chosen), other))
        raise ValueError(
            f"head_degree={chosen} must divide cp_size={cp_size} and split num_heads={config.num_heads} with "
            f"num_kv_heads={config.num_kv_heads}; legal degrees are {legal}: use {nearest} (the nearest), or "
            "leave it out"
        )
    return chosen
