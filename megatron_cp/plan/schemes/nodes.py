"""The even nodes that schemes of two levels see: as many ranks in each, none across a real node's edge."""

import math

from megatron_cp.config import CPConfig
from megatron_cp.plan.topology import get_topology


def ranks_per_node(cp_size: int, config: CPConfig) -> int:
    """Returns the largest group size that divides ranks and nodes; all ranks if one node holds them."""
    node_size = get_topology(config.topology).node_size
    return cp_size if cp_size <= node_size else math.gcd(cp_size, node_size)
