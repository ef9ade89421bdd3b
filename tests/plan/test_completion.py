"""Which quadrant completes a rank's own results, against the order of events of a pass."""

import numpy as np
import pytest

import megatron_cp as mcp
from megatron_cp.plan import PLANNERS
from megatron_cp.plan.completion import completing_quadrants
from megatron_cp.plan.schema import SIDES
from tests.plan.cases import config

MASKS = {
    "documents": lambda: mcp.mask.documents([375, 137, 222, 1, 256, 33], within="causal"),
    "a window": lambda: mcp.mask.sliding_window(1024, 90),
    "queries without keys": lambda: mcp.mask.from_slices(
        1024, 1024, [(500, 1024, 300, 1024, None, 0)]
    ),
    "fewer keys": lambda: mcp.mask.documents([600, 424]).crop(k=(500, 1024)),
}
CASES = [(planner, name) for name in list(MASKS)[:3] for planner in sorted(PLANNERS)]
CASES += [(planner, "fewer keys") for planner in ("auto", "contiguous")]


def _last_event(pass_, own, side, rank):
    """The last of what joins own rows: (stage, quadrant), or "home"; None for nothing."""
    last, coming = None, False
    for index, stage in enumerate(pass_.stages):
        seen = stage.work[rank].to_dense()
        parts = [part for rows in np.split(seen, [own.q]) for part in np.split(rows, [own.k], 1)]
        for quadrant, pairs in enumerate(parts):
            if quadrant in {"q": (0, 1), "k": (0, 2)}[side] and pairs.any():
                last = index, quadrant
        if coming:  # sent after the stage before
            last = "home"
        ends = index + 1 == len(pass_.stages) or not pass_.stages[index + 1].keeps(side)
        begin = index
        while pass_.stages[begin].keeps(side) and begin:
            begin -= 1
        casts = [pass_.stages[i].cast(side) for i in range(begin, index + 1)]
        coming = ends and any(len(hop.messages) for cast in casts if cast for hop in cast.hops)
    return "home" if coming else last


@pytest.mark.parametrize(("planner", "name"), CASES)
def test_the_last_event_of_own_rows_is_the_quadrant_or_there_is_none(planner, name):
    found = set()
    for num_ranks in (1, 4):
        plan = mcp.make_plan(MASKS[name](), num_ranks, config(planner=planner))
        for pass_name in ("forward", "backward"):
            pass_ = plan.get_pass(pass_name)
            own = plan.own_rows.times(pass_.head_degree)
            for side in SIDES[: 1 if pass_name == "forward" else 2]:
                ends = completing_quadrants(pass_, own, side, range(num_ranks))
                for rank, end in enumerate(ends):
                    event = _last_event(pass_, own, side, rank)
                    assert end == (None if event == "home" else event), (num_ranks, rank, side)
                    found.add(type(end))
    assert found
