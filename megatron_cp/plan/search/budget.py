"""Every number that steers planner "auto": how much it tries, what it skips, and when it stops.

Beside each stands what half and double of it do to predicted times: the geometric mean over those of today's value,
then the worst cell, on 45 cells of 4 to 48 ranks; "large": on 26 of 40 to 256 ranks (benchmarks/bench_search.py,
2026-11-26, every line in benchmarks/results/search_xeon_2026-11-26.md and search_large_xeon_2026-11-26.md).
"Nothing": not one cell moved.
"""

from dataclasses import dataclass

from megatron_cp.plan.placement.candidates import PlacementLimits
from megatron_cp.plan.price.pairs_move import StagingLimits


@dataclass(frozen=True)
class SearchBudget:
    """The numbers of one search. Seconds and loads are compared as factors."""

    perfect: float = 1.005
    """Times what a degree may still reach: what is faster by less is not looked for. 1.0025, 1.01: nothing. 1.03 takes
    a tenth less to plan, and leaves four cells of bench_plan.py's grid to others (8 ranks, by up to 2.1 %)."""
    far: float = 1.15
    """Times the load bound: links limit, and moving compute among many is worth it, and a local search among few.
    1.075, 1.3: 1.000, worst 1.007. Large: 1.000, worst 1.029."""
    hopeless: float = 1.01
    """Times the fastest strategy, whose price may be an estimate: not priced. 1.005, 1.02: nothing."""
    loose_load: float = 1.08
    """Load of a rank by one document, times the fair share. 1.04, 1.16: 1.000, worst 1.013. Large: 1.001, worst 1.042
    (causal_document W1, 96 ranks)."""
    tight_load: float = 1.0
    """Half, double: 1.003, worst 1.07 (causal_document W2, 48 ranks). Large: 1.002, worst 1.041."""
    wide_load: float = 2.0
    """Half: 1.000, worst 1.008; double: nothing. Large, half: 1.007, worst 1.21 (causal_document W4, 80 ranks)."""
    moved_starts: int = 4
    """Placements, with a head degree each, on which compute is moved. Half: 1.007, worst 1.37 (causal_blockwise
    W2, 6 ranks); large: 1.010, worst 1.14. Double: nothing. 0: 1.001, worst 1.022; large: 1.122, worst 2.2 (2048 global
    tokens, 256 ranks)."""
    near_starts: int = 2
    """Placements, with a head degree each, near whose assignments is searched. Half: 1.001, worst 1.022
    (causal_blockwise W2, 6 ranks). Double: nothing. 0: 1.006, worst 1.17; large: 1.001, worst 1.031."""
    most_near_groups: int = 32
    """Local searches run, up to two on a placement, while these are no more in all. Half: 1.001, worst 1.022; by hand,
    200 documents under a window on 32 ranks, 1.14. Double: 1.000."""
    most_near: int = 1 << 14
    """Slices of a mask, cut by owners, times head groups, near whose assignments is searched: a limit of time. Half,
    without it: nothing."""
    most_parts: int = 1 << 17
    """Slices into which a mask is cut by the owners of its rows, beyond twice its own and what cuts one slice: a limit
    of time. Masks of thousands of diagonals have more: a dilated window whose tokens a chosen chunk size keeps in
    order."""
    most_parts_published: int = 1 << 20
    """The same for what others publish, whose stages are given: a limit of memory."""
    most_moved: int = 32
    """Head groups among which compute is moved where links limit: a limit of time. Half, double: 1.000; large:
    1.000, best .994."""
    most_moved_ranks: int = 256
    """The same where groups cannot be few: ranks do not divide into nodes, or nodes are single ranks, or heads do not
    divide; and where ranks' speeds differ, as a group is as slow as its slowest rank. A limit of time. With 32 in its
    place: causal, 77 ranks: 1.90; packed documents, 83 ranks: 1.71; a window of 4,096 tokens on 256 ranks, one at half
    speed: 1.33. From 257 ranks on it earned nothing."""
    most_groups: int = 256
    """Head groups; with more of them only tokens in order are looked at, if heads can be exchanged: a limit of time."""
    near: float = 1.00125
    """Predictions cannot tell such passes, or plans, apart: balance, then bytes decide. 1.0006: nothing; 1.0025:
    1.000, best .997."""
    good_imbalance: float = 1.02
    """Below, balance does not decide. 1.01: 1.000, best .997; 1.04: 1.000, worst 1.001."""
    most_played: int = 4
    """Plans built and played, the fastest of which is taken: a limit of time. 12, on the grid of bench_plan.py:
    nothing."""
    placements: PlacementLimits = PlacementLimits(  # noqa: RUF009  it is frozen
        imbalance=0.01,  # half: .999; double: 1.001, worst 1.017
        chunks=128,  # half: 1.000, worst 1.026; double: 1.001, worst 1.015; large: .992, worst 1.038
        least_chunks=4,  # half, double: nothing; large, double: 1.004, worst 1.128
        coarse_chunks=2,  # 1: 1.000, worst 1.037; 4: 1.000; none, by hand, 407 masks: 1.001, worst 1.17
        most_parts=1 << 13,  # half: 1.002, worst 1.063; double: nothing
        most_parts_per_rank=48,  # nothing up to 48 ranks; it counts from 171 ranks on
    )
    stagings: StagingLimits = StagingLimits(  # noqa: RUF009  it is frozen
        counts=(1, 2, 4, 8),  # without 8: 1.000; large: 1.003, worst 1.051 (streaming, 128)
        most_apart=(0.5, 0.25),  # none: up to 1.12 in simulation (share_question W1, 64 ranks)
        few=2,  # 1: 1.001, worst 1.015; 4: 1.000, best .984; large, 4: .999, worst 1.009
        most_exact=3,  # 1: 1.001, worst 1.026; large: 1.008, worst 1.20; 6: nothing
        uneven=1.005,  # 1.0025: 1.000, best .997; 1.01: 1.001, worst 1.008
        as_even=1.005,  # 1.0025, 1.01: 1.000; large, 1.0025: 1.002, worst 1.045
        stage_penalty=2e-4,  # nothing: it breaks ties for fewer sends
        order_penalty=1e-3,  # 1.000, one cell moves: it breaks ties for fewer slices
        hub=2.0,  # 1, 4: 1.000; large, never a tree: 1.19, worst 3.2 (2048 global tokens, 256)
        straight=4e-3,  # half, double: 1.000; never: 1.000, worst 1.004; by hand, 60 packs, 1.005, worst 1.21
    )


BUDGET = SearchBudget()
