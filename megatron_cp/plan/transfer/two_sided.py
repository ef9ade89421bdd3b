"""Taking a pass over one stream of queries and keys apart again: each side's rows counted by themselves.

    rows of a rank in one stream    [ own queries | own keys | received ]
    rows of side "q"                [ own queries |            received ]
    rows of side "k"                [               own keys | received ]

A cast brings rows of one side only, so what is received stands in the same order.
"""

from dataclasses import replace

import numpy as np

from megatron_cp.config import CPConfig
from megatron_cp.mask import AttentionMask
from megatron_cp.mask.interval import IntArray
from megatron_cp.mask.slice import Q_START, shift_rows
from megatron_cp.plan.placement.two_sided import TwoSidedPlacement
from megatron_cp.plan.schema import START, STOP, Hop, OwnRows, Pass, PlanData, Stage, Transfer


def cross_plan(
    mask: AttentionMask,
    config: CPConfig,
    planner: str,
    sides: TwoSidedPlacement,
    forward: Pass,
    backward: Pass,
) -> PlanData:
    """Returns the plan of a mask of queries x keys, given its passes as one stream."""
    first = take_apart(forward, sides.own)
    second = first if backward is forward else take_apart(backward, sides.own)
    tokens = sides.queries.tokens
    return PlanData(mask, config, planner, tokens, first, second, key_tokens=sides.keys.tokens)


def take_apart(one_stream: Pass, own: OwnRows) -> Pass:
    """Returns the pass with the rows of each side by themselves; `own`: rows of one rank."""
    held = own.times(one_stream.head_degree)
    return replace(one_stream, stages=tuple(_stage(stage, held) for stage in one_stream.stages))


def _stage(stage: Stage, own: OwnRows) -> Stage:
    return replace(
        stage,
        work=tuple(_work(mask, own) for mask in stage.work),
        k_cast=_transfer(stage.k_cast, 0, own.q),
        q_cast=_transfer(stage.q_cast, own.q, own.k),
    )


def _work(mask: AttentionMask, own: OwnRows) -> AttentionMask:
    less = np.where(mask.array[:, Q_START] < own.q, 0, own.k)
    rows = shift_rows(mask.array, q=-less, k=-own.q)
    return AttentionMask(mask.num_queries - own.k, mask.num_keys - own.q, rows)


def _transfer(transfer: Transfer | None, first: int, less: int) -> Transfer | None:
    """Returns the transfer whose rows from `first` on count `less`."""

    def moved(messages: IntArray) -> IntArray:
        shift = np.where(messages[:, START] < first, 0, less)
        messages = messages.copy()
        messages[:, START] -= shift
        messages[:, STOP] -= shift
        return messages

    return (
        None if transfer is None else Transfer(tuple(Hop(moved(h.messages)) for h in transfer.hops))
    )
