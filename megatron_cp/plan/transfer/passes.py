"""Passes in which queries stay with their owners and keys travel: what several schemes and their prices share."""

import itertools

import numpy as np

from megatron_cp.plan.schema import Pass
from megatron_cp.plan.transfer.pass_builder import PassBuilder, PlacedMask
from megatron_cp.plan.transfer.routing import Route, direct, split_evenly


def needed_keys_pass(placed: PlacedMask, num_stages: int = 1, route: Route = direct) -> Pass:
    """Returns own keys first while the needed remote keys travel, then those in `num_stages` equal parts."""
    builder = PassBuilder(placed, route)
    builder.add_own()
    if len(placed.remote_keys):
        for requests in split_evenly(placed.remote_keys, num_stages):
            builder.add(*placed.parts_on_keys(requests))
    return builder.build()


def allgather_pass(placed: PlacedMask) -> Pass:
    """Returns the one stage in which every rank receives all keys that it does not own."""
    builder = PassBuilder(placed)
    everything = placed.owners.blocks(range(1, placed.num_ranks))
    builder.add(placed.parts, placed.q_owner, all_keys=everything)
    return builder.build()


def ring_pass(placed: PlacedMask) -> Pass:
    """Returns P stages: own keys, then those of the rank one place before, two places before, ..."""
    builder = PassBuilder(placed)
    builder.add_own()
    distance = (placed.q_owner - placed.k_owner) % placed.num_ranks
    by_distance = np.argsort(distance, kind="stable")
    ends = np.searchsorted(distance[by_distance], np.arange(1, placed.num_ranks + 1))
    for step, (begin, end) in enumerate(itertools.pairwise(ends.tolist()), start=1):
        now = by_distance[begin:end]
        blocks = placed.owners.blocks([step])
        builder.add(placed.parts[now], placed.q_owner[now], all_keys=blocks)
    return builder.build()
