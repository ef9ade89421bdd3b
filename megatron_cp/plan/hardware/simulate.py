"""A plan's pass as a script, played on a topology (`play.py`)."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_cp.config import Topology
from megatron_cp.plan.hardware.cost import compute_seconds, head_split_seconds
from megatron_cp.plan.hardware.links import Links
from megatron_cp.plan.hardware.makespan import weighted_areas
from megatron_cp.plan.hardware.play import Script, Sends, Simulation, play
from megatron_cp.plan.hardware.rows import FP32_BYTES, row_size
from megatron_cp.plan.hardware.speeds import check_rank_speeds, rank_speeds
from megatron_cp.plan.hardware.topology import get_topology
from megatron_cp.plan.schema import SIDES, Hop, PassName, PlanData, Side

NAMES: dict[Side, str] = {"q": "query rows", "k": "key rows"}


def simulate_pass(
    plan: PlanData,
    pass_name: PassName,
    *,
    topology: Topology | str | None = None,
    overlap: bool = True,
    num_traced: int = 0,
    gradient_bytes: int = FP32_BYTES,
) -> Simulation:
    """Returns how one pass of one layer goes; a timeline for the first `num_traced` ranks.

    `topology`: where to run it, by default that of the plan's config. `gradient_bytes`: see `row_size`.
    O(messages + stages x ranks).
    """
    machine = get_topology(plan.config.topology if topology is None else topology)
    config = replace(plan.config, topology=machine)
    check_rank_speeds(config, plan.cp_size)
    pass_, links = plan.get_pass(pass_name), Links.of(machine)
    seconds = compute_seconds(weighted_areas(plan, pass_name, machine), config, pass_name)
    casts: list[list[Sends]] = [[] for _ in pass_.stages]
    returns: list[list[Sends]] = [[] for _ in pass_.stages]
    for side in SIDES:
        size = row_size(config, pass_name, side, pass_.head_degree, gradient_bytes)
        moved = [_sends(stage.hops(side), plan.cp_size, links) for stage in pass_.stages]
        for index, hops in enumerate(moved):
            what = f"{NAMES[side]} of stage {index}"
            casts[index] += [
                hop.there(size.there, what + (f", hop {number}" if number else ""))
                for number, hop in hops.items()
            ]
            if size.back and pass_.ends_chain(index, side):
                what = f"{NAMES[side]} results of stage {index}"
                chain = [hop for i in pass_.chain(index, side) for hop in moved[i].values()]
                returns[index] += [hop.back(size.back, what) for hop in reversed(chain)]
    split = pass_.head_split
    script = Script(
        seconds / rank_speeds(config, plan.cp_size),
        casts,
        returns,
        head_split_seconds(split, plan.own_rows, config, pass_name),
        None if split is None else np.array(split.groups),
    )
    return play(script, links, machine.contention, overlap=overlap, num_traced=num_traced)


def _sends(hops: Sequence[Hop], num_ranks: int, links: Links) -> dict[int, Sends]:
    """Returns what the hops of a transfer send, in rows, by their number; none in which nothing moves."""
    found = {}
    for number, hop in enumerate(hops):
        one_stage = np.zeros(len(hop.messages), dtype=np.int64)
        (sends,) = Sends.of_stages(hop.messages, one_stage, 1, num_ranks, links)
        if sends is not None:
            found[number] = sends
    return found
