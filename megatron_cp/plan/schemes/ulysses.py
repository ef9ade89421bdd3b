"""DeepSpeed-Ulysses: all ranks exchange tokens against heads, then each attends over the whole context."""

from megatron_cp.config import CPConfig
from megatron_cp.mask import AttentionMask
from megatron_cp.plan.placement.placement import contiguous
from megatron_cp.plan.schema import HeadSplit, Pass, PlanData, Stage
from megatron_cp.plan.schemes.gather import one_pass_plan
from megatron_cp.plan.transfer.head_split import fits_heads
from megatron_cp.plan.transfer.pass_builder import PlacedMask


def plan_ulysses(mask: AttentionMask, cp_size: int, config: CPConfig) -> PlanData:
    """Returns one head split over all ranks; perfectly balanced under any mask.

    Volume per rank: 2 (1 + max(G, P)/N) (P-1)/P; key/value heads are replicated where P exceeds them.
    Source: arXiv 2309.14509. Raises ValueError when the heads do not divide.
    """
    check_head_degree(cp_size, config)
    placed = PlacedMask(mask, contiguous(mask.num_queries, cp_size, config))
    both = ulysses_pass(mask, cp_size, cp_size * placed.own_rows)
    return one_pass_plan(placed, config, "ulysses", both)


def ulysses_pass(mask: AttentionMask, cp_size: int, num_rows: int) -> Pass:
    """Returns the head split over all ranks, for tokens that lie in order."""
    work = mask.shift(num_queries=num_rows, num_keys=num_rows).merged()
    return Pass((Stage(work=(work,) * cp_size),), full_split(cp_size))


def full_split(cp_size: int) -> HeadSplit | None:
    """Returns the head split over all ranks; None for a single rank."""
    return HeadSplit((tuple(range(cp_size)),)) if cp_size > 1 else None


def check_head_degree(degree: int, config: CPConfig) -> None:
    """Raises ValueError, with the legal degrees, unless `fits_heads`."""
    if fits_heads(degree, config):
        return
    heads, kv_heads = config.num_heads, config.num_kv_heads
    legal = [other for other in range(1, heads + 1) if fits_heads(other, config)]
    nearest = min(legal, key=lambda other: (abs(other - degree), other))
    raise ValueError(
        f"head degree {degree} does not divide num_heads={heads} with num_kv_heads={kv_heads}; "
        f"legal degrees are {legal}, the nearest is {nearest}: change cp_size or use planner='auto', "
        "which has no head limit"
    )
