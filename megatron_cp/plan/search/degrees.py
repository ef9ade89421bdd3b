"""Which head degrees are searched, and among how many head groups compute moves."""

from megatron_cp.config import CPConfig
from megatron_cp.plan.hardware.speeds import is_uneven
from megatron_cp.plan.hardware.topology import get_topology
from megatron_cp.plan.search.budget import SearchBudget
from megatron_cp.plan.transfer.head_split import head_degrees


def searched_degrees(cp_size: int, config: CPConfig) -> list[int]:
    """Returns the head degrees worth a look: those inside a node, and all ranks (Ulysses)."""
    node_size = get_topology(config.topology).node_size
    return [
        degree
        for degree in head_degrees(cp_size, config)
        if degree == cp_size or cp_size <= node_size or node_size % degree == 0
    ]


def most_moved(cp_size: int, degrees: list[int], config: CPConfig, budget: SearchBudget) -> int:
    """Returns among how many head groups compute moves at most: few, unless fewer cannot be had or speeds differ."""
    fewest = min((n for degree in degrees if (n := cp_size // degree) > 1), default=1)
    are_few = fewest <= budget.most_moved or cp_size > budget.most_moved_ranks
    if are_few and not is_uneven(config, cp_size):
        return budget.most_moved
    return budget.most_moved_ranks
