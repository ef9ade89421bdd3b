"""Taking a pass over one stream of queries and keys apart again: each side's rows counted by themselves.

    rows of a rank in one stream    [ own queries | own keys | received ]
    rows of side "q"                [ own queries |            received ]
    rows of side "k"                [               own keys | received ]

A cast brings rows of one side only, so what is received stands in the same order.
"""

from dataclasses import replace

import numpy as np

from megatron_cp.mask import AttentionMask
from megatron_cp.mask.interval import IntArray
from megatron_cp.mask.slice import K_END, K_START, Q_END, Q_START, shift_rows
from megatron_cp.plan.schema import (
    START,
    STOP,
    Hop,
    OwnRows,
    Pass,
    Side,
    Stage,
    Transfer,
)


def take_apart(one_stream: Pass, own: OwnRows) -> Pass:
    """Returns the pass with each side's rows by themselves; `own`: rows of one rank, without a head split."""
    held = own.times(one_stream.head_degree)
    stages = tuple(_stage(stage, held) for stage in one_stream.stages)
    return replace(one_stream, stages=stages)
