"""How much memory received rows take on a rank while a pass runs."""

import numpy as np

from megatron_cp.plan.hardware.rows import row_size
from megatron_cp.plan.schema import SIDES, FloatArray, PassName, PlanData


def received_bytes(plan: PlanData, pass_name: PassName) -> FloatArray:
    """Returns the most bytes of received rows that each rank holds at once in a pass: `[P]`.

    Counted: the rows of a stage and of the chain before it, what is computed for them, and the rows of the next
    stage that arrive meanwhile. A rank's own rows, and those that it exchanges for heads, are not received.
    """
    pass_ = plan.get_pass(pass_name)
    degree = pass_.head_degree
    none, nobody = np.zeros(plan.cp_size), np.zeros(plan.cp_size, dtype=np.int64)
    held, arriving = [], []
    for index in range(len(pass_.stages)):
        stage_held, stage_arriving = none, none
        for side in SIDES:
            size = row_size(plan.config, pass_name, side, degree)
            casts = [pass_.stages[i].cast(side) for i in pass_.chain(index, side)]
            rows = [none if cast is None else cast.rows_held(nobody) for cast in casts]
            stage_held = stage_held + sum(rows, none) * (size.there + size.back)
            stage_arriving = stage_arriving + rows[-1] * size.there
        held.append(stage_held)
        arriving.append(stage_arriving)
    peaks = [now + after for now, after in zip(held, [*arriving[1:], none], strict=True)]
    return np.max([none, *peaks], axis=0)
