"""x"""

from dataclasses import dataclass

from megatron_cp.plan.placement.candidates import PlacementLimits
from megatron_cp.plan.price.pairs_move import StagingLimits


@dataclass(frozen=True)
class SearchBudget:
    """The numbers that steer the search."""

    effort: float = 13.0
    effort_per_rank: float = 0.06
    by_area_effort: float = 1.5
    by_area_effort_per_rank: float = 0.004
    hopeless_effort: float = 0.3
    patience: float = 1.02
    perfect: float = 1.002
    good: float = 1.05
    far: float = 2.0
    promising: float = 1.5
    hopeless: float = 1.1
    loose_load: float = 1.08
    tight_load: float = 1.0
    by_area_at_once: int = 16
    always_moved: int = 8
    most_moved: int = 64
    most_groups: int = 256
    near: float = 1.00125
    good_imbalance: float = 1.02
    most_measured: int = 12
    placements: PlacementLimits = PlacementLimits(  # noqa: RUF009  frozen
        imbalance=0.01, chunks=256, least_chunks=4, most_parts=1 << 12, most_parts_per_rank=48
    )
    stagings: StagingLimits = StagingLimits(  # noqa: RUF009  frozen
        counts=(1, 2, 4, 8), estimated_counts=(1, 4), few=2, most_exact=3, exact_prices=576,
        as_even=1.005, stage_penalty=2e-4, order_penalty=1e-3, hub=2.0,
    )  # fmt: skip


BUDGET = SearchBudget()
