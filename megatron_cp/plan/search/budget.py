"""Every number that steers planner "auto": how much it tries, what it skips, and when it stops.

Beside each stands what half and double of it do to predicted times: the geometric mean over those of today's value,
then the worst cell, on 15 cells of 4 to 48 ranks (benchmarks/bench_search.py --every 3, 2026-11-23, every line of it in
benchmarks/results/search_epyc_2026-11-23.md). "Nothing": not one cell moved. Some limits matter on more ranks only.
"""

from dataclasses import dataclass

from megatron_cp.plan.placement.candidates import PlacementLimits
from megatron_cp.plan.price.pairs_move import StagingLimits


@dataclass(frozen=True)
class SearchBudget:
    """The numbers of one search. Seconds and loads are compared as factors."""

    perfect: float = 1.005
    """Times what a degree may still reach: what is faster by less is not looked for. 1.005, 1.02: nothing on 15 cells;
    on 45 1.005: 1.000, best .996; 1.02: 1.000, worst 1.005."""
    far: float = 1.3
    """Times the load bound: links limit, and moving compute among many is worth it. 1.15, 1.6: nothing."""
    hopeless: float = 1.03
    """Times the fastest strategy, whose price may be an estimate: not priced. 1.015, 1.06: nothing."""
    loose_load: float = 1.08
    """Load of a rank by one document, times the fair share. 1.04, 1.16: nothing."""
    tight_load: float = 1.0
    """Half, double: nothing on 15 cells. Never: 1.002 on 45, worst 1.07 (causal_document W2, 48 ranks)."""
    wide_load: float = 2.0
    """Never: 1.004 on 115 cells, worst 1.32 (causal_document W4, 80 ranks)."""
    always_moved: int = 8
    """Head groups among which compute is always moved, or the fewest there can be. Half: 1.008, worst 1.13
    (causal_blockwise W2, 6 ranks); double: nothing."""
    most_moved: int = 32
    """Head groups among which compute is moved where links limit: a limit of time. Half, double: nothing."""
    most_groups: int = 256
    """Head groups; with more of them only tokens in order are looked at, if heads can be exchanged: a limit of time."""
    near: float = 1.00125
    """Predictions cannot tell such passes, or plans, apart: balance, then bytes decide. 1.0006, 1.0025: 1.000."""
    good_imbalance: float = 1.02
    """Below, balance does not decide. 1.01, 1.04: nothing."""
    most_measured: int = 12
    """Plans built to price them with measured kernel rates: a limit of time, without them nothing."""
    placements: PlacementLimits = PlacementLimits(  # noqa: RUF009  it is frozen
        imbalance=0.01,  # half: .999; double: 1.002, worst 1.015
        chunks=128,  # half: .998, worst 1.014; double: 1.002, worst 1.015
        least_chunks=4,  # nothing up to 48 ranks; it counts from 65 head groups on
        most_parts=1 << 13,  # half, double: nothing
        most_parts_per_rank=48,  # nothing up to 48 ranks; it counts from 86 ranks on
    )
    stagings: StagingLimits = StagingLimits(  # noqa: RUF009  it is frozen
        counts=(
            1,
            2,
            4,
            8,
        ),  # without 8: nothing up to 48 ranks; 1.004 on 40 to 128, worst 1.038 (causal, 96 ranks)
        few=2,  # 1: 1.001, worst 1.008; 4: .999
        most_exact=3,  # 1: 1.001, worst 1.013; 6: nothing
        uneven=1.005,  # 1.0025: nothing; 1.01: 1.000, worst 1.003
        as_even=1.005,  # 1.0025, 1.01: nothing
        stage_penalty=2e-4,  # nothing: it breaks ties for fewer sends
        order_penalty=1e-3,  # nothing: it breaks ties for fewer slices
        hub=2.0,  # never a tree: 1.16 on 32 masks of 16 to 256 ranks, worst 3.5 (2048 global tokens, 256 ranks)
    )


BUDGET = SearchBudget()
