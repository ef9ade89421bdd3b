"""Sizes that schemes share: even nodes, as many ranks in each and none across a real edge, and how many slices."""

import math

from megatron_cp.config import CPConfig
from megatron_cp.plan.hardware.topology import get_topology

MOST_PIECES = 1 << 23  # slices of a plan: hundreds of megabytes


def ranks_per_node(cp_size: int, config: CPConfig) -> int:
    """Returns the largest group size that divides ranks and nodes; all ranks if one node holds them."""
    node_size = get_topology(config.topology).node_size
    return cp_size if cp_size <= node_size else math.gcd(cp_size, node_size)


def check_pieces(planner: str, num_pieces: int, cp_size: int) -> None:
    """Raises NotImplementedError for a scheme that would cut a mask into more slices than anybody can hold."""
    if num_pieces > MOST_PIECES:
        raise NotImplementedError(
            f"planner={planner!r} would cut this mask into about {num_pieces} slices on cp_size={cp_size} ranks; at "
            f"most {MOST_PIECES} are served: use fewer ranks, or planner='auto'"
        )
