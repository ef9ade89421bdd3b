"""Bytes that a plan sends from rank to rank, gradients and partial results in fp32 as they travel.

`stats.traffic` counts elements, whatever their width; this counts what goes over the wire.
"""

import numpy as np

from megatron_cp.plan.attention_plan import AttentionPlan
from megatron_cp.plan.hardware.rows import head_split_bytes, row_size
from megatron_cp.plan.schema import DST, SRC, START, STOP, FloatArray, PassName


def sent_bytes(plan: AttentionPlan, pass_name: PassName) -> FloatArray:
    """Returns the bytes of one layer and pass: float64 `[src, dst]`, results on their way back included."""
    pass_ = plan.get_pass(pass_name)
    moved = np.zeros((plan.cp_size, plan.cp_size))
    for side, transfer in pass_.transfers():
        size = row_size(plan.config, pass_name, side, pass_.head_degree)
        for hop in transfer.hops:
            src, dst = hop.messages[:, SRC], hop.messages[:, DST]
            rows = hop.messages[:, STOP] - hop.messages[:, START]
            np.add.at(moved, (src, dst), rows * size.there)
            np.add.at(moved, (dst, src), rows * size.back)
    split = pass_.head_split
    if split is not None and split.degree > 1:
        per_rank = head_split_bytes(plan.own_rows, split.degree, plan.config, pass_name)
        for group in split.groups:
            # a rank sends each other member of its group as much
            moved[np.ix_(group, group)] += per_rank / (split.degree - 1)
    np.fill_diagonal(moved, 0.0)
    return moved
