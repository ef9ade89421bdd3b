"""How fast ranks are beside each other: what a fair share of the pairs is, and how far from it ranks are.

    rank_speeds = (1, 1, .5, 1)      rank i takes seconds(pairs_i) / speed_i; fair are speed_i / 3.5 of all pairs
    head groups of two: (1, .5)      members share heads equally, so the slowest decides

Tokens stay equal: a slow rank computes less, it does not own less.
"""

import numpy as np

from megatron_cp.config import CPConfig
from megatron_cp.plan.hardware.topology import get_topology
from megatron_cp.plan.schema import FloatArray


def known_speeds(config: CPConfig) -> tuple[float, ...] | None:
    """Returns the speeds that the config or its topology has, one per context rank; None where all are alike."""
    if config.rank_speeds is not None:
        return config.rank_speeds
    return get_topology(config.topology).rank_speeds


def is_uneven(config: CPConfig, num_units: int) -> bool:
    """Returns whether some of the ranks, or head groups, are faster than others."""
    speeds = rank_speeds(config, num_units)
    return bool((speeds != speeds[0]).any())


def rank_speeds(config: CPConfig, num_units: int) -> FloatArray:
    """Returns the speed of each rank, or of each of so many head groups: of its slowest rank. float64 `[num_units]`."""
    speeds = known_speeds(config)
    if speeds is None:
        return np.ones(num_units)
    slowest: FloatArray = np.array(speeds).reshape(num_units, -1).min(axis=1)
    return slowest


def total_speed(config: CPConfig, cp_size: int) -> float:
    """Returns the sum of the ranks' speeds: over how many ranks of speed 1 the pairs divide."""
    speeds = known_speeds(config)
    return cp_size if speeds is None else sum(speeds)


def check_rank_speeds(config: CPConfig, cp_size: int) -> None:
    """Raises ValueError unless there is one speed for each of `cp_size` ranks."""
    speeds = known_speeds(config)
    if speeds is not None and len(speeds) != cp_size:
        raise ValueError(
            f"rank_speeds={speeds} are {len(speeds)} for cp_size={cp_size}; there must be one per context rank: give "
            f"{cp_size} numbers, or leave them out where all ranks are equal"
        )


def read_rank_speeds(word: str | None) -> tuple[float, ...] | None:
    """Returns a word of a command line, as 1,1,.5,1, for `CPConfig.rank_speeds`; ValueError for what is no number."""
    if word is None:
        return None
    try:
        return tuple(map(float, word.split(",")))
    except ValueError:
        raise ValueError(
            f"--cp-rank-speeds {word!r} must be numbers with commas between them, one per context rank; give them as "
            "1,1,0.5,1"
        ) from None


def imbalance(areas: FloatArray, speeds: FloatArray) -> float:
    """Returns the largest time of the units over the fair one, 1 for none; `areas` `[units]`: their pairs."""
    fair = areas.sum() / speeds.sum()
    return float((areas / speeds).max() / fair) if areas.any() else 1.0
