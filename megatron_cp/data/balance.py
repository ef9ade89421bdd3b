"""Which rank computes which pack: equal counts, attention costs as equal as they can be.

All packs hold equally many tokens, yet one long document costs far more attention than many short
ones. So the packs of a global batch are shared out to ranks and micro-batches by cost, the predicted
time of their attention (`pack_cost.py`). Which packs a global batch holds, and which of them share a micro-batch,
never depends on the number of ranks: a loss that is a mean of micro-batches is the same on any. Nor does the
order of a replica's micro-batches depend on its context ranks: a loss that is a running mean is the same on any.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def deal_by_cost(costs: Sequence[int | float], num_groups: int) -> list[list[int]]:
    """Returns the indices of `costs` in `num_groups` groups of equal size and nearly equal cost.

    The dearest item goes first, each item to the cheapest group that is not full; ties go to the
    lower index and the lower group. Each group lists its dearest item first. O(n log n).

    Raises:
        ValueError: the groups cannot be of equal size.

    Source: Graham 1969, longest processing time, with a limit on the size of each group.
    """
    if num_groups < 1 or len(costs) % num_groups:
        raise ValueError(
            f"num_groups={num_groups} must divide the {len(costs)} packs of a batch; change "
            "global_batch_size or micro_batch_size"
        )
    quota = len(costs) // num_groups
    groups: list[list[int]] = [[] for _ in range(num_groups)]
    open_groups: list[tuple[int | float, int]] = [(0, group) for group in range(num_groups)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, group = heapq.heappop(open_groups)
        groups[group].append(index)
        if len(groups[group]) < quota:
            heapq.heappush(open_groups, (load + costs[index], group))
    return groups


def assign_packs(
    costs: Sequence[int | float],
    *,
    dp_size: int,
    micro_batch_size: int,
    areas: Sequence[int] | None = None,
) -> list[list[list[int]]]:
    """Returns pack indices `[dp_size][num_microbatches][micro_batch_size]`, each exactly once.

    Packs meet in micro-batches by `areas`, which know nothing of ranks (None: `costs` do not either).
    Micro-batches are dealt to ranks by cost, and those of each rank come largest first, so those that
    are computed at the same time cost about the same.

    Raises:
        ValueError: the number of packs is no multiple of `dp_size * micro_batch_size`.
    """
    if micro_batch_size < 1 or dp_size < 1 or len(costs) % (dp_size * micro_batch_size):
        raise ValueError(
            f"global_batch_size={len(costs)} must be a multiple of dp_size * micro_batch_size = {dp_size} * "
            f"{micro_batch_size}; change --global-batch-size or --micro-batch-size"
        )
    sizes = costs if areas is None else areas
    together = deal_by_cost(sizes, len(costs) // micro_batch_size)
    micro_batches = sorted(sorted(packs) for packs in together)
    micro_batches.sort(key=lambda packs: -sum(sizes[i] for i in packs))
    sums = [sum(costs[i] for i in packs) for packs in micro_batches]
    return [[micro_batches[k] for k in sorted(mine)] for mine in deal_by_cost(sums, dp_size)]


def assign_in_order(
    num_packs: int, *, dp_size: int, micro_batch_size: int
) -> list[list[list[int]]]:
    """Returns pack indices `[dp_size][num_microbatches][micro_batch_size]` as Megatron deals them.

    Each micro-batch of all ranks together takes the next `dp_size * micro_batch_size` packs, each
    rank its consecutive ones. `num_packs` is a multiple of that.

    Source: Megatron-LM's `MegatronPretrainingSampler`.
    """
    rows = range(0, num_packs, dp_size * micro_batch_size)
    return [
        [
            list(range(row + rank * micro_batch_size, row + (rank + 1) * micro_batch_size))
            for row in rows
        ]
        for rank in range(dp_size)
    ]
