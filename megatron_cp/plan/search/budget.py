"""Every number that steers planner "auto": how much it tries, what it skips, and when it stops.

Beside each stands what plans do at half and at double its value: the geometric mean of predicted times over those of
today's value, and the worst cell, as benchmarks/bench_search.py measured it on 2026-11-22 (52 cells of 4 to 48 ranks,
18 where "small" stands; benchmarks/results/search_epyc_2026-11-22.md). "No change" means that not one cell moved.
"""

from dataclasses import dataclass

from megatron_cp.plan.placement.candidates import PlacementLimits
from megatron_cp.plan.price.pairs_move import StagingLimits


@dataclass(frozen=True)
class SearchBudget:
    """The numbers of one search. Seconds and loads are compared as factors, effort is about milliseconds."""

    effort: float = 13.0
    """For each mask. Half: .998, worst 1.021, at .7 of the processor time; double: .993 at 1.2 of it."""
    effort_per_rank: float = 0.06
    """Half: 1.0005, worst 1.021; double: .997."""
    by_area_effort: float = 1.5
    """Of one placement by area. 1.25: .997; 2: 1.0005, worst 1.021."""
    patience: float = 1.02
    """Times slower, for every step taken, and another head degree has its turn. Small: 1.01: .998; 1.04: 1.0001."""
    perfect: float = 1.002
    """Times the load bound: nothing found later could be told from it. Small: no change."""
    good: float = 1.05
    """Times the load bound: moving compute on the best placement would not pay. Never moving it there: 1.007, worst
    1.27
    (variable block sparse, 32 ranks). Small: 1.025: .9997; 1.1: no change."""
    far: float = 2.0
    """Times the load bound: links limit, and moving compute is worth its time. Small: no change."""
    promising: float = 1.5
    """Times the fastest strategy, without overlap: more stages may win. Small: no change."""
    hopeless: float = 1.1
    """Times the fastest strategy, whose price may be an estimate: not priced. Small: no change; it saves time."""
    loose_load: float = 1.08
    """Load of a rank by one document, times the fair share. The tight load alone: 1.007, worst 1.24
    (window_document)."""
    tight_load: float = 1.0
    """The loose load alone: 1.003, worst 1.07 (causal_document W2, 48 ranks)."""
    by_area_at_once: int = 16
    """Head groups up to which a placement by area is priced first. Small: no change."""
    always_moved: int = 8
    """Head groups among which moving compute is quick, and always tried: or the fewest there can be. Small: no
    change."""
    most_moved: int = 64
    """Head groups among which compute is moved although the effort is spent. Small: no change."""
    most_groups: int = 256
    """Head groups; where heads can be exchanged, more are looked at for tokens in order only. A limit of time."""
    near: float = 1.00125
    """Predictions cannot tell such passes, or plans, apart: balance, then bytes decide. Small: no change."""
    good_imbalance: float = 1.02
    """Below, balance does not decide. Small: no change."""
    most_measured: int = 12
    """Plans built to price them with measured kernel rates. A limit of time."""
    placements: PlacementLimits = PlacementLimits(  # noqa: RUF009  it is frozen
        imbalance=0.01,  # small: .005: .999; .02: .994, but the worst cell 1.010
        chunks=256,  # small: 128: .998 at .8 of the processor time; 512: 1.0007 at 1.6 of it
        least_chunks=4,  # small: no change
        most_parts=1 << 12,  # a limit of time; small: no change
        most_parts_per_rank=48,  # the same
    )
    stagings: StagingLimits = StagingLimits(  # noqa: RUF009  it is frozen
        counts=(
            1,
            2,
            4,
            8,
        ),  # without 8: 1.000 up to 48 ranks, 1.004 on 40 to 128, worst 1.038 (causal, 96 ranks)
        estimated_counts=(1, 4),  # small: 1 alone: 1.023, worst 1.22 (star); with 8: no change
        few=2,  # none: 1.002, worst 1.039 (window_document)
        most_exact=3,
        exact_prices=576,  # a limit of time
        as_even=1.005,
        stage_penalty=2e-4,
        order_penalty=1e-3,
        hub=2.0,  # never a tree: 1.16 on 32 masks of 16 to 256 ranks, worst 3.46 (2048 global tokens, 256 ranks)
    )


BUDGET = SearchBudget()
